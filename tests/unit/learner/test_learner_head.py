"""Log-probs straight from hidden states against log_softmax over all logits, and its gradient."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.learner import logprob_head
from services.learner.logprob_head import LogprobHead


def problem(dtype=torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(23, 16, dtype=torch.float64) * 2
    weight = torch.randn(37, 16, dtype=torch.float64)
    targets = torch.randint(0, 37, (23,))
    slopes = torch.randn(23, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), targets, slopes


def expected(hidden, weight, targets, slopes, temperature, *, entropy_slopes=0.0):
    hidden, weight = hidden.double().requires_grad_(True), weight.double().requires_grad_(True)
    normal = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    logprobs = normal.gather(-1, targets[:, None]).squeeze(-1)
    entropy = -(normal.exp() * normal).sum(-1)
    (logprobs * slopes + entropy * entropy_slopes).sum().backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.3])
def test_values_and_gradients(monkeypatch, chunk_tokens, temperature):
    monkeypatch.setattr(logprob_head, "CHUNK_LOGITS", chunk_tokens * 37)
    hidden, weight, targets, slopes = problem()
    want = expected(hidden, weight, targets, slopes, temperature)
    head = LogprobHead(torch.nn.Parameter(weight.clone()))
    hidden.requires_grad_(True)
    logprobs, entropies = head(hidden, targets, temperature)
    (logprobs * slopes.float()).sum().backward()
    for found, value in zip((logprobs, entropies, hidden.grad, head.weight.grad), want, strict=True):
        torch.testing.assert_close(found.detach().double(), value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk_tokens", [5, 100])
@pytest.mark.parametrize("reads_logprobs", [True, False])
def test_entropies_have_a_gradient(monkeypatch, chunk_tokens, reads_logprobs):
    monkeypatch.setattr(logprob_head, "CHUNK_LOGITS", chunk_tokens * 37)
    hidden, weight, targets, slopes = problem()
    slopes = slopes * reads_logprobs
    entropy_slopes = torch.randn(23, dtype=torch.float64)
    want = expected(hidden, weight, targets, slopes, 0.7, entropy_slopes=entropy_slopes)
    head = LogprobHead(torch.nn.Parameter(weight.clone()))
    hidden.requires_grad_(True)
    logprobs, entropies = head(hidden, targets, 0.7)
    loss = (entropies * entropy_slopes.float()).sum()
    if reads_logprobs:
        loss = loss + (logprobs * slopes.float()).sum()
    loss.backward()
    for found, value in zip((logprobs, entropies, hidden.grad, head.weight.grad), want, strict=True):
        torch.testing.assert_close(found.detach().double(), value, rtol=1e-4, atol=1e-3)


def test_temperature_divides_logits_not_log_probs():
    """logits [2, 1, 0] at T = 0.5: log p of the first is −0.143, not −0.408 and not −0.815."""
    head = LogprobHead(torch.nn.Parameter(torch.tensor([[2.0], [1.0], [0.0]])))
    logprobs, _ = head(torch.ones(1, 1), torch.tensor([0]), 0.5)
    assert logprobs.item() == pytest.approx(-0.1429, abs=1e-4)


@pytest.mark.parametrize("hidden_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_weights(hidden_dtype):
    hidden, weight, targets, slopes = problem(torch.bfloat16)
    want = expected(hidden, weight, targets, slopes, 1.0)
    head = LogprobHead(torch.nn.Parameter(weight))
    hidden = hidden.to(hidden_dtype).requires_grad_(True)
    logprobs, _ = head(hidden, targets, 1.0)
    assert logprobs.dtype == torch.float32
    (logprobs * slopes.float()).sum().backward()
    assert head.weight.grad.dtype == torch.bfloat16
    tolerance = 2e-2 if hidden_dtype == torch.bfloat16 else 1e-4
    assert (logprobs.double() - want[0]).abs().mean() < tolerance
    assert (head.weight.grad.double() - want[3]).norm() / want[3].norm() < 2e-2


class Largest(TorchDispatchMode):
    """The largest tensor of floating-point numbers that any operation answers."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        for each in answer if isinstance(answer, tuple | list) else [answer]:
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                self.elements = max(self.elements, each.numel())
        return answer


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tensor_grows_with_tokens_times_vocabulary(monkeypatch, with_entropy):
    """Forward and backward hold the logits of one chunk, however many tokens there are."""
    vocabulary, width, chunk_tokens = 5000, 8, 16
    monkeypatch.setattr(logprob_head, "CHUNK_LOGITS", chunk_tokens * vocabulary)
    for tokens in (100, 3000):
        hidden = torch.randn(tokens, width, requires_grad=True)
        head = LogprobHead(torch.nn.Parameter(torch.randn(vocabulary, width)))
        with Largest() as forward:
            logprobs, entropies = head(hidden, torch.randint(0, vocabulary, (tokens,)), 1.0)
        with Largest() as backward:
            (logprobs.sum() + entropies.sum() if with_entropy else logprobs.sum()).backward()
        for largest in (forward, backward):
            assert chunk_tokens * vocabulary <= largest.elements < 2 * chunk_tokens * vocabulary
