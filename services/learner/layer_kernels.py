"""silu(gate) · up and its gradient, each in one pass, in float32 between loads and stores. Needs triton."""

# mypy: disable-error-code="no-untyped-def"
# triton 3.6 compiles the annotations of a kernel with it, and knows none of Python's own.

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _forward(gate, up, product, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    g = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + places, mask=inside, other=0.0)
    # Rounded where the chain of operations rounds: the activation is a tensor of its own there.
    activation = (g / (1.0 + tl.exp(-g))).to(u.dtype).to(tl.float32)
    tl.store(product + places, (activation * u.to(tl.float32)).to(u.dtype), mask=inside)


@triton.jit
def _backward(  # noqa: PLR0917
    gate, up, slope, into_gate, into_up, count, BLOCK: tl.constexpr
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    g = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(slope + places, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-g))
    # silu(g) = g s, silu'(g) = s (1 + g (1 − s))
    tl.store(into_up + places, (d * g * share).to(into_up.dtype.element_ty), mask=inside)
    tl.store(
        into_gate + places, (d * u * share * (1.0 + g * (1.0 - share))).to(into_gate.dtype.element_ty), mask=inside
    )


def silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Both contiguous and of one shape and dtype."""
    product = torch.empty_like(up)
    _forward[_grid(gate)](gate, up, product, gate.numel(), BLOCK=BLOCK)
    return product


def silu_product_backward(
    gate: torch.Tensor, up: torch.Tensor, slope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """d loss / d gate and d loss / d up, given d loss / d product."""
    into_gate, into_up = torch.empty_like(gate), torch.empty_like(up)
    _backward[_grid(gate)](gate, up, slope, into_gate, into_up, gate.numel(), BLOCK=BLOCK)
    return into_gate, into_up


def _grid(tensor: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(tensor.numel(), BLOCK),)
