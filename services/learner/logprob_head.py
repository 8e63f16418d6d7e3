"""Log-probabilities of chosen tokens straight from hidden states, without a [tokens × vocabulary] tensor.

For the logits z = W h / T of one predicted token y:  log p(y) = z_y − logsumexp(z),  entropy = logsumexp(z) − Σ p z.
Logits come in the dtype of the hidden states, as an engine computes them, and are float32 from there on. They exist for
`CHUNK_LOGITS` elements at a time and are computed again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch

CHUNK_LOGITS = 1 << 25
"""Float32 logits at a time: 128 MiB, and as much again for what is made of them."""


class LogprobHead(torch.nn.Module):
    """Shares the weight of the model's output layer; ZeRO-3 gathers it around `forward` as it would for that layer."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight  # [V, H]

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [T, H], targets [T] → log-probs [T] and, without gradient, entropies [T] in nats; float32."""
        logprobs, entropies = _ChosenLogprobs.apply(hidden, self.weight, targets, temperature)
        return logprobs, entropies


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = hidden.shape[0]
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        normalisers = torch.empty_like(logprobs)
        same = weight.to(hidden.dtype)
        for part in _chunks(count, weight.shape[0]):
            logits = _logits(hidden[part], same, temperature)
            normaliser = torch.logsumexp(logits, dim=-1)
            chosen = logits.gather(-1, targets[part, None]).squeeze(-1)
            logprobs[part] = chosen - normaliser
            normalisers[part] = normaliser
            probabilities = (logits - normaliser[:, None]).exp_()
            entropies[part] = normaliser - torch.linalg.vecdot(probabilities, logits)
        ctx.save_for_backward(hidden, weight, targets, normalisers)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        hidden, weight, targets, normalisers = ctx.saved_tensors
        into_hidden = torch.empty_like(hidden)
        into_weight = torch.zeros(weight.shape, dtype=hidden.dtype, device=weight.device)
        same = weight.to(hidden.dtype)
        for part in _chunks(hidden.shape[0], weight.shape[0]):
            logits = _logits(hidden[part], same, ctx.temperature)
            # d log p(y) / d z = onehot(y) − p, and z = logits / T
            slope = (logits - normalisers[part, None]).exp_().neg_()
            slope.scatter_add_(-1, targets[part, None], torch.ones_like(slope[:, :1]))
            slope *= (gradients[0][part] / ctx.temperature)[:, None]
            slope = slope.to(hidden.dtype)
            into_hidden[part] = slope @ same
            into_weight.addmm_(slope.t(), hidden[part])
        return into_hidden, into_weight.to(weight.dtype), None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.nn.functional.linear(hidden, weight).float().div_(temperature)


def _chunks(count: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_LOGITS // vocabulary)
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]
