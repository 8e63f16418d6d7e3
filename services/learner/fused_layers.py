"""Parts of a model's layers in fewer passes over memory, on an NVIDIA GPU.

What a model class writes as a chain of elementwise operations costs a read and a write of the activations for each of
them. Two chains that most models share are replaced: RMSNorm, and SiLU(gate) · up. A module is replaced when it looks
like the one that is meant; that the model is still the same function is seen when it is loaded, by the comparison with
its own forward, which is computed before (services/learner/policy_model.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def fuse_layers(model: torch.nn.Module) -> int:
    """Replaces what it knows in place; answers how many modules. Weights and their names stay."""
    fused = 0
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
