"""Models with random weights, for benchmarks that need a shape and no knowledge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def random_model(config: Any, dtype_name: str, device: torch.device, seed: int) -> Any:
    """A causal language model of a transformers config, its folder or its shape in a config object, made on `device`.

    The same seed and kind of device give the same weights.
    """
    import torch
    import transformers

    if isinstance(config, str):
        config = transformers.AutoConfig.from_pretrained(config, attn_implementation="eager")
    torch.manual_seed(seed)
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype_name))
