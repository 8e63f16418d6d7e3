"""silu(gate) · up, and the rotation of queries and keys by their positions, with their gradients. Needs triton.

Each is one pass over memory, in float32 between loads and stores.
"""

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


@triton.jit
def _rotate_one(  # noqa: PLR0917
    source, target, cos, sin, of_batch, of_head, of_token, into_batch, into_head, into_token, heads, batch, token,
    HEADS: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (lane < HALF)
    begin = source + batch * of_batch + token * of_token + head * of_head + lane
    first = tl.load(begin, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(begin + HALF, mask=inside, other=0.0).to(tl.float32)
    cos_first, cos_second = tl.load(cos + lane).to(tl.float32), tl.load(cos + HALF + lane).to(tl.float32)
    sin_first, sin_second = tl.load(sin + lane).to(tl.float32), tl.load(sin + HALF + lane).to(tl.float32)
    if BACK:
        turned_first = first * cos_first + second * sin_second
        turned_second = second * cos_second - first * sin_first
    else:
        turned_first = first * cos_first - second * sin_first
        turned_second = second * cos_second + first * sin_second
    into = target + batch * into_batch + token * into_token + head * into_head + lane
    tl.store(into, turned_first.to(target.dtype.element_ty), mask=inside)
    tl.store(into + HALF, turned_second.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(  # noqa: PLR0917
    q, k, into_q, into_k, cos, sin,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    into_q_batch, into_q_head, into_q_token, into_k_batch, into_k_head, into_k_token,
    angle_batch, angle_token, tokens, q_heads, k_heads,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    angles = batch * angle_batch + token * angle_token
    if tl.program_id(1) == 0:
        _rotate_one(
            q, into_q, cos + angles, sin + angles, q_batch, q_head, q_token, into_q_batch, into_q_head, into_q_token,
            q_heads, batch, token, HEADS=Q_HEADS, HALF=HALF, BACK=BACK,
        )  # fmt: skip
    else:
        _rotate_one(
            k, into_k, cos + angles, sin + angles, k_batch, k_head, k_token, into_k_batch, into_k_head, into_k_token,
            k_heads, batch, token, HEADS=K_HEADS, HALF=HALF, BACK=BACK,
        )  # fmt: skip


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


def rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """x · cos + rotate_half(x) · sin for q [B, H, T, D] and k [B, K, T, D]; cos, sin [B or 1, T, D].

    `back`: the same of gradients, by the transposed matrix. D is twice a power of 2; its elements lie side by side.
    """
    batch, q_heads, tokens, size = q.shape
    k_heads = k.shape[1]
    into_q, into_k = torch.empty_like(q), torch.empty_like(k)
    angle_batch = cos.stride(0) if cos.shape[0] > 1 else 0
    _rotate[(batch * tokens, 2)](
        q, k, into_q, into_k, cos, sin,
        *q.stride()[:3], *k.stride()[:3], *into_q.stride()[:3], *into_k.stride()[:3],
        angle_batch, cos.stride(1), tokens, q_heads, k_heads,
        Q_HEADS=triton.next_power_of_2(q_heads), K_HEADS=triton.next_power_of_2(k_heads), HALF=size // 2, BACK=back,
        num_warps=4,
    )  # fmt: skip
    return into_q, into_k


def _grid(tensor: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(tensor.numel(), BLOCK),)
