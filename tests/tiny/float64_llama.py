"""A Llama in numpy and float64, written from its equations: what any engine's log-probabilities are compared with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float64]


def log_softmax(logits: Array) -> Array:
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    table: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return table


class Float64Llama:
    """One row at a time, without a cache. Grouped-query attention, rotary positions, RMS norm, gated SiLU."""

    def __init__(self, folder: Path) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._w: dict[str, Array] = {}
        for path in folder.glob("*.safetensors"):
            self._w |= {name: tensor.astype(np.float64) for name, tensor in load_file(path).items()}

    def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> Array:
        """Natural log-probability of each token but the first under softmax(logits / temperature)."""
        table = log_softmax(self.logits(token_ids)[:-1] / temperature)
        chosen: Array = table[np.arange(len(token_ids) - 1), list(token_ids[1:])]
        return chosen

    def logits(self, token_ids: Sequence[int]) -> Array:
        """[tokens, vocabulary]"""
        c, w = self._config, self._w
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        size = c.get("head_dim") or c["hidden_size"] // heads
        theta = (c.get("rope_parameters") or c)["rope_theta"]
        n = len(token_ids)
        x = w["model.embed_tokens.weight"][list(token_ids)]
        angles = np.arange(n)[:, None] / theta ** (np.arange(0, size, 2) / size)[None, :]
        cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
        future = np.triu(np.full((n, n), -np.inf), 1)

        def turned(v: Array) -> Array:
            left, right = v[..., : size // 2], v[..., size // 2 :]
            return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

        for layer in range(c["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            h = self._normed(x, at + "input_layernorm")
            q = turned((h @ w[at + "self_attn.q_proj.weight"].T).reshape(n, heads, size))
            k = turned((h @ w[at + "self_attn.k_proj.weight"].T).reshape(n, kv_heads, size))
            v = (h @ w[at + "self_attn.v_proj.weight"].T).reshape(n, kv_heads, size)
            seen = []
            for head in range(heads):
                group = head * kv_heads // heads
                scores = q[:, head] @ k[:, group].T / np.sqrt(size) + future
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                seen.append(weights / weights.sum(-1, keepdims=True) @ v[:, group])
            x = x + np.concatenate(seen, -1) @ w[at + "self_attn.o_proj.weight"].T
            h = self._normed(x, at + "post_attention_layernorm")
            gate = h @ w[at + "mlp.gate_proj.weight"].T
            up = h @ w[at + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
        head_weight = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        logits: Array = self._normed(x, "model.norm") @ head_weight.T
        return logits

    def _normed(self, x: Array, name: str) -> Array:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self._config["rms_norm_eps"])
        normed: Array = x / scale * self._w[f"{name}.weight"]
        return normed
