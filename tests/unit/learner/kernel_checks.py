"""Kernels against torch's own operations, on a device; raise AssertionError."""

from __future__ import annotations

import torch

from services.learner import head_kernels, layer_kernels, logprob_head
from services.learner.logprob_head import LogprobHead


def check_head(device: str, *, tokens: int = 23, hidden_size: int = 16, vocabulary: int = 37) -> None:
    """Values and gradients of the head, in chunks, with the kernels and without."""
    kernels_of, limits = logprob_head._kernels, (logprob_head.CHUNK_LOGITS, logprob_head.KERNEL_CHUNK_LOGITS)
    logprob_head.CHUNK_LOGITS = logprob_head.KERNEL_CHUNK_LOGITS = vocabulary * (tokens // 3)
    try:
        for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
            torch.manual_seed(0)
            hidden = torch.randn(tokens, hidden_size, device=device).to(dtype)
            weight = torch.randn(vocabulary, hidden_size, device=device).to(dtype)
            targets = torch.randint(0, vocabulary, (tokens,), device=device)
            slopes = torch.randn(tokens, device=device)
            found = []
            for kernels in (None, head_kernels):
                logprob_head._kernels = lambda tensor, kernels=kernels: kernels
                head = LogprobHead(torch.nn.Parameter(weight.clone()))
                inputs = hidden.clone().requires_grad_(True)
                logprobs, entropies = head(inputs, targets, 0.7)
                (logprobs * slopes).sum().backward()
                found.append((logprobs.detach(), entropies, inputs.grad, head.weight.grad))
            for expected, value in zip(*found, strict=True):
                scale = expected.float().abs().max().item()
                assert (expected.float() - value.float()).abs().max().item() <= tolerance * scale, dtype
    finally:
        logprob_head._kernels = kernels_of
        logprob_head.CHUNK_LOGITS, logprob_head.KERNEL_CHUNK_LOGITS = limits


def check_silu_product(device: str, count: int = 1000) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        torch.manual_seed(0)
        gate, up, slope = (torch.randn(count, device=device).to(dtype) * 3 for _ in range(3))
        inputs = [t.clone().requires_grad_(True) for t in (gate, up)]
        expected = torch.nn.functional.silu(inputs[0]) * inputs[1]
        expected.backward(slope)
        found = layer_kernels.silu_product(gate, up)
        into_gate, into_up = layer_kernels.silu_product_backward(gate, up, slope)
        pairs = ((expected.detach(), found), (inputs[0].grad, into_gate), (inputs[1].grad, into_up))
        for theirs, ours in pairs:
            scale = theirs.float().abs().max().item()
            assert (theirs.float() - ours.float()).abs().max().item() <= tolerance * scale, dtype


def check_rotation(device: str) -> None:
    """Values and gradients; q and k as models hand them over, as views of [batch, token, head, size]."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for angle_batches in (1, 2):
            torch.manual_seed(0)
            q, k = (torch.randn(2, 5, heads, 16, device=device).to(dtype).transpose(1, 2) for heads in (3, 1))
            cos, sin = torch.randn(2, angle_batches, 5, 16, device=device).to(dtype)
            slopes = [torch.randn_like(q), torch.randn_like(k).transpose(1, 2).contiguous().transpose(1, 2)]
            leaves = [t.double().requires_grad_(True) for t in (q, k)]
            plain = [
                x * cos.double()[:, None] + torch.cat((-x[..., 8:], x[..., :8]), dim=-1) * sin.double()[:, None]
                for x in leaves
            ]
            torch.autograd.backward(plain, [slope.double() for slope in slopes])
            found = [
                *layer_kernels.rotated(q, k, cos, sin, back=False),
                *layer_kernels.rotated(*slopes, cos, sin, back=True),
            ]
            for expected, value in zip([*plain, *(leaf.grad for leaf in leaves)], found, strict=True):
                assert value.dtype == dtype and value.shape == expected.shape
                scale = expected.abs().max().item()
                assert (expected - value.double()).abs().max().item() <= tolerance * scale, dtype
