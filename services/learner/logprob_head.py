"""Log-probabilities of chosen tokens straight from hidden states, without a [tokens × vocabulary] tensor.

For the logits z = W h / T of one predicted token y:  log p(y) = z_y − logsumexp(z),  entropy = logsumexp(z) − Σ p z;
their slopes by z_j are  1[j = y] − p_j  and  −p_j (log p_j + entropy).
Logits come in the dtype of the hidden states, as an engine computes them, and are float32 from there on. They exist for
a chunk of tokens at a time and are computed again in the backward pass; the same chunks serve both.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

CHUNK_LOGITS = 1 << 25
"""Float32 logits at a time: 128 MiB, and as much again for what is made of them."""
KERNEL_CHUNK_LOGITS = 1 << 29
"""The same where kernels work on the logits as they are: 1 GiB in bfloat16, and nothing is made of them."""
ROUND_TOKENS = 128
"""Large chunks have a multiple of so many tokens, which matrix units like."""


class LogprobHead(torch.nn.Module):
    """Shares the weight of the model's output layer; ZeRO-3 gathers it around `forward` as it would for that layer."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight  # [V, H]

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [T, H], targets [T] → log-probs [T] and entropies [T] in nats; float32, both with gradient."""
        logprobs, entropies = _ChosenLogprobs.apply(hidden, self.weight, targets, temperature)
        return logprobs, entropies


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = []
        same = weight.to(hidden.dtype)
        for part in _chunks(hidden, weight.shape[0]):
            logits = torch.nn.functional.linear(hidden[part], same)
            parts.append(_statistics(logits, targets[part], temperature))
            del logits  # before the next ones come
        logprobs, normalisers, entropies = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, normalisers, entropies)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # entropies that no loss reads cost nothing
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        hidden, weight, targets, normalisers, entropies = ctx.saved_tensors
        into_hidden = torch.empty_like(hidden)
        into_weight = torch.empty(weight.shape, dtype=hidden.dtype, device=weight.device)
        same = weight.to(hidden.dtype)
        of_logprobs, of_entropies = (None if each is None else each.contiguous() for each in gradients)
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(normalisers)
        for number, part in enumerate(_chunks(hidden, weight.shape[0], plain=of_entropies is not None)):
            logits = torch.nn.functional.linear(hidden[part], same)
            if of_entropies is None:
                slopes = _slopes(logits, targets[part], normalisers[part], of_logprobs[part], ctx.temperature)
            else:
                slopes = _slopes_with_entropy(
                    logits,
                    targets[part],
                    normalisers[part],
                    entropies[part],
                    of_logprobs=of_logprobs[part],
                    of_entropies=of_entropies[part],
                    temperature=ctx.temperature,
                )
            del logits
            torch.mm(slopes, same, out=into_hidden[part])
            if number == 0:
                torch.mm(slopes.t(), hidden[part], out=into_weight)
            else:
                into_weight.addmm_(slopes.t(), hidden[part])
            del slopes
        return into_hidden, into_weight.to(weight.dtype), None, None


def _statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of the targets, normalisers and entropies, [C] each, of logits [C, V] not yet divided by T."""
    if (kernels := _kernels(logits)) is not None:
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = kernels.statistics(logits, targets, temperature)
        return found
    z = logits.float().div_(temperature)
    normalisers = torch.logsumexp(z, dim=-1)
    chosen = z.gather(-1, targets[:, None]).squeeze(-1)
    probabilities = (z - normalisers[:, None]).exp_()
    return chosen - normalisers, normalisers, normalisers - torch.linalg.vecdot(probabilities, z)


def _slopes(
    logits: torch.Tensor, targets: torch.Tensor, normalisers: torch.Tensor, gradients: torch.Tensor, temperature: float
) -> torch.Tensor:
    """d loss / d logits in the dtype of the logits, which may be overwritten: (onehot − p) · gradient / T."""
    if (kernels := _kernels(logits)) is not None:
        found: torch.Tensor = kernels.slopes_in_place(logits, targets, normalisers, gradients, temperature)
        return found
    slopes = logits.float().div_(temperature).sub_(normalisers[:, None]).exp_().neg_()
    slopes.scatter_add_(-1, targets[:, None], torch.ones_like(slopes[:, :1]))
    slopes *= (gradients / temperature)[:, None]
    return slopes.to(logits.dtype)


def _slopes_with_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    normalisers: torch.Tensor,
    entropies: torch.Tensor,
    *,
    of_logprobs: torch.Tensor,
    of_entropies: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """The same with what the loss takes from the entropies, by torch's own operations on every device."""
    log_p = logits.float().div_(temperature).sub_(normalisers[:, None])
    slopes = log_p.exp()
    slopes *= -(log_p.add_(entropies[:, None]).mul_(of_entropies[:, None]).add_(of_logprobs[:, None]))
    slopes.scatter_add_(-1, targets[:, None], of_logprobs[:, None])
    return slopes.div_(temperature).to(logits.dtype)


def _kernels(tensor: torch.Tensor) -> ModuleType | None:
    """What works on logits of that device, in place of torch's own operations; None where nothing does."""
    if tensor.device.type != "cuda":
        return None
    from services.learner import head_kernels

    return head_kernels


def _chunks(hidden: torch.Tensor, vocabulary: int, *, plain: bool = False) -> list[slice]:
    """`plain`: for torch's own operations, whatever the device."""
    large = not plain and _kernels(hidden) is not None
    size = max(1, (KERNEL_CHUNK_LOGITS if large else CHUNK_LOGITS) // vocabulary)
    if size > ROUND_TOKENS:
        size -= size % ROUND_TOKENS
    count = hidden.shape[0]
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]
