"""Whether the parameters of a vLLM model may be written while they stay where they are.

Where loading leaves weights as they came, a publication copies into them: addresses and CUDA graphs stay. Where a layer
makes something else of them (packed on CPU, quantised, permuted for fused experts, absorbed by MLA), writing one of the
two would leave the other old, without an error.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

LEAVE_WEIGHTS_ALONE = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""On CUDA. Exactly these: what derives from them may do more."""


def layers_that_repack(model: torch.nn.Module, device: torch.device) -> list[str]:
    """Why the model cannot be written in place: "name: what it does"; empty when it can."""
    if device.type != "cuda":
        return [f"every layer: vLLM packs weights on {device.type}"]
    found: list[str] = []
    if hasattr(model, "process_weights_after_loading"):
        found.append(f"{type(model).__name__}: works on its weights after they are loaded")
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in LEAVE_WEIGHTS_ALONE:
            found.append(f"{name}: {type(method).__name__}")
        elif module is not model and type(module) is not Attention and hasattr(module, "process_weights_after_loading"):
            found.append(f"{name}: {type(module).__name__} works on its weights after they are loaded")
    return found
