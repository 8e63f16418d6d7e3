"""Parts of a model's layers in fewer passes over memory, on an NVIDIA GPU.

What a model class writes as a chain of elementwise operations costs a read and a write of the activations for each of
them, and a launch. Three chains that most models share are replaced: RMSNorm, SiLU(gate) · up, and the rotation of
queries and keys. A module is replaced when it looks like the one that is meant, the rotation when it gives the same
numbers; that the model is still the same function is seen when it is loaded, by the comparison with its own forward,
which is computed before (services/learner/policy_model.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def fuse_layers(model: torch.nn.Module) -> int:
    """Replaces what it knows in place; answers how many modules. Weights and their names stay.

    Models call the rotation as a function of their Python module: there it is replaced, for all models of this process.
    """
    fused = 0
    for modeling in {sys.modules[type(module).__module__] for module in model.modules()}:
        rotation = getattr(modeling, "apply_rotary_pos_emb", None)
        if rotation is not None and not isinstance(rotation, _Rotation) and rotates_halves(rotation):
            modeling.apply_rotary_pos_emb = _Rotation(rotation)  # type: ignore[attr-defined]
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = _Norm(module)
        elif _is_gated(module):
            module.forward = _Gated(module)
        else:
            continue
        fused += 1
    return fused


def _is_gated(module: Any) -> bool:
    projections = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    activation = getattr(module, "act_fn", None)
    is_silu = isinstance(activation, torch.nn.SiLU) or type(activation).__name__ == "SiLUActivation"
    return is_silu and all(isinstance(projection, torch.nn.Linear) for projection in projections)


class _Norm:
    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self._module.weight
        return F.rms_norm(hidden, weight.shape, weight, self._module.variance_epsilon)


class _Gated:
    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        module = self._module
        product: torch.Tensor = _SiluProduct.apply(module.gate_proj(hidden), module.up_proj(hidden))
        output: torch.Tensor = module.down_proj(product)
        return output


class _SiluProduct(torch.autograd.Function):
    """silu(gate) · up; the product of the two is not kept, and silu(gate) is computed again."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        from services.learner import layer_kernels

        ctx.save_for_backward(gate, up)
        return layer_kernels.silu_product(gate, up)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from services.learner import layer_kernels

        gate, up = ctx.saved_tensors
        return layer_kernels.silu_product_backward(gate, up, gradients[0].contiguous())


def rotates_halves(rotation: Callable[..., Any]) -> bool:
    """Whether it is x · cos + (−second half, first half) · sin; other models turn neighbours, or a part of a head."""
    some = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 5, 8, generator=some), torch.randn(2, 1, 5, 8, generator=some)
    cos, sin = torch.randn(2, 2, 5, 8, generator=some)
    try:
        found = rotation(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    expected = tuple(x * cos[:, None] + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin[:, None] for x in (q, k))
    same = isinstance(found, tuple) and [t.shape for t in found] == [t.shape for t in expected]
    return same and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))


class _Rotation:
    """In place of a modeling module's `apply_rotary_pos_emb`, which still does what the kernel does not know."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **words: Any
    ) -> Any:
        half = q.shape[-1] // 2
        known = q.is_cuda and not rest and not words and cos.dim() == 3 and cos.shape[-1] == q.shape[-1] == 2 * half
        if not known or half & (half - 1):
            return self._original(q, k, cos, sin, *rest, **words)
        return _Rotated.apply(q, k, cos, sin)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from services.learner import layer_kernels

        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return layer_kernels.rotated(_dense(q), _dense(k), cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        from services.learner import layer_kernels

        into_q, into_k = layer_kernels.rotated(*map(_dense, gradients), *ctx.saved_tensors, back=True)
        return into_q, into_k, None, None


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """With the elements of a head side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
