"""Attention over rows that lie one after the other in one line: each token sees what came before it in its own row.

It is registered with transformers under a name of its own, and the model's layers hand it what `row_boundaries` made.
A model class whose layers do not is refused when it is loaded (services/learner/policy_model.py).
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

NAME = "antiphon_varlen"


class Kernel(Protocol):
    """Causal attention inside the rows of one line. `longest` is the longest row's length.

    query [T, H, D]; key, value [T, K, D] with H a multiple of K; boundaries [R + 1] int32 → [T, H, D]. `window` is how
    many tokens a query sees, its own included; None: all before it.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        boundaries: torch.Tensor,
        longest: int,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor: ...


def row_boundaries(boundaries: torch.Tensor, longest: int) -> dict[str, Any]:
    """What a model's forward must be called with, in the words that transformers has for it."""
    return {
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def register(kernel: Kernel | None = None) -> str:
    """Makes the attention known to transformers, and answers its name. `kernel`: torch's own, for NVIDIA GPUs."""
    attend = kernel or torch_kernel

    def attention(  # noqa: PLR0917 (transformers calls it so)
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **words: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, H, T, D], key and value [1, K, T, D] → [1, T, H, D]."""
        boundaries = words.get("cu_seq_lens_q")
        if boundaries is None or attention_mask is not None or query.shape[0] != 1:
            raise ValueError(f"{type(module).__name__} hands no row boundaries to its attention")
        for name in ("softcap", "s_aux"):  # capped logits, attention sinks
            if words.get(name) is not None:
                raise ValueError(f"{type(module).__name__} wants attention with {name}, which is not built in")
        longest, window = words["max_length_q"], words.get("sliding_window")
        output = attend(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            boundaries,
            longest,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=None if window is None or window >= longest else window,
        )
        return output[None], None

    AttentionInterface.register(NAME, attention)
    return NAME


def torch_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """torch's own kernel: bfloat16 on an NVIDIA GPU, heads of at most 256."""
    from torch.nn.attention.varlen import varlen_attn

    known = _parameters_of_varlen_attn()
    options: dict[str, Any] = {}
    if "window_size" in known:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None:
        options["is_causal"] = True
    else:
        raise ValueError(f"attention over a window of {window} tokens: torch {torch.__version__} has none")
    if "scale" in known:
        options["scale"] = scale
    elif abs(scale - query.shape[-1] ** -0.5) > 1e-6:
        query = query * (scale * query.shape[-1] ** 0.5)
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
    output: torch.Tensor = varlen_attn(query, key, value, boundaries, boundaries, longest, longest, **options)
    return output


@cache
def _parameters_of_varlen_attn() -> frozenset[str]:
    """They changed between torch 2.10 and 2.13."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)
