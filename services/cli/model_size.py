"""How large a model is, by its folder alone: the headers of its safetensors files, or config.json where it has none.

Loads no model library and reads no weights.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError

LONGEST_HEADER = 100_000_000  # bytes; what the safetensors library takes, too
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True)
class _Family:
    """What config.json leaves to the model's class."""

    qkv_bias: bool | None
    """None: the key attention_bias says it, of the output projection as well."""
    head_norms: bool = False
    """A norm over each head of queries and of keys."""
    head_size: int | None = None
    """Where config.json does not say it; None: hidden_size / num_attention_heads."""
    expert_width: str | None = None
    """The key of the inner width of an expert, for a mixture of experts."""


# As transformers builds them: models/<family>/modeling_<family>.py.
FAMILIES = {
    "llama": _Family(qkv_bias=None),
    "mistral": _Family(qkv_bias=False),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qkv_bias=None, head_norms=True, head_size=128),
    "mixtral": _Family(qkv_bias=False, expert_width="intermediate_size"),
    "qwen3_moe": _Family(qkv_bias=None, head_norms=True, expert_width="moe_intermediate_size"),
}


@dataclass(frozen=True)
class Experts:
    """Of the layers that are a mixture. Example, Mixtral-8x7B: 32 layers, 8 experts of inner 14336, 2 for a token."""

    layers: int
    count: int
    inner: int
    per_token: int


@dataclass(frozen=True)
class Shape:
    """Widths of a decoder. Example, SmolLM2-135M: hidden 576, layers 30, queries 9 x 64, keys 3 x 64, inner 1536."""

    family: str
    hidden: int
    layers: int
    queries: int
    """Heads times head size."""
    keys: int
    """Key-value heads times head size; values are as wide."""
    head_size: int
    inner: int
    """Of a layer that is no mixture."""
    vocabulary: int
    tied: bool
    attention_bias: bool
    inner_bias: bool
    experts: Experts | None = None

    @property
    def inner_at_work(self) -> int:
        """The widest that a token goes through: of all its experts together, where there are some."""
        return self.inner if self.experts is None else max(self.inner, self.experts.per_token * self.experts.inner)

    def parameters(self) -> int | None:
        """Of the whole model, a tied head counted once; None for a family that is not counted here."""
        family = FAMILIES.get(self.family)
        if family is None:
            return None
        layer = 2 * self.hidden * self.queries + 2 * self.hidden * self.keys  # q and o, k and v
        layer += 2 * self.hidden  # norms
        if family.qkv_bias or (family.qkv_bias is None and self.attention_bias):
            layer += self.queries + 2 * self.keys
        if family.qkv_bias is None and self.attention_bias:
            layer += self.hidden
        if family.head_norms:
            layer += 2 * self.head_size
        tables = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return tables + self.layers * layer + self._multilayer_perceptrons() + self.hidden

    def _multilayer_perceptrons(self) -> int:
        """Of all layers: gate, up, down, with biases; of each expert, and a router, where a layer is a mixture."""
        plain = 3 * self.hidden * self.inner
        if self.inner_bias:
            plain += 2 * self.inner + self.hidden
        if self.experts is None:
            return self.layers * plain
        mixture = self.experts.count * (3 * self.hidden * self.experts.inner + self.hidden)
        return self.experts.layers * mixture + (self.layers - self.experts.layers) * plain

    def largest_tensor(self) -> int:
        """Elements. Of a mixture all experts' gates and ups are one, as transformers holds them."""
        tables = max(self.vocabulary, self.inner, self.queries) * self.hidden
        return (
            tables if self.experts is None else max(tables, self.experts.count * 2 * self.experts.inner * self.hidden)
        )


@dataclass(frozen=True)
class ModelSize:
    """Counts are of elements."""

    parameters: int
    largest_tensor: int
    counted_by: str
    """Where the count is from, for who reads it."""


def read_shape(folder: Path) -> Shape | None:
    """By config.json; None where a width is not said there. Raises ConfigError when it is no JSON object."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model.path: {path}: expected an object, got {type(config).__name__}")
    family = str(config.get("model_type", ""))
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if not all(_is_count(config.get(key)) for key in needed):
        return None
    hidden, layers, heads, inner, vocabulary = (config[key] for key in needed)
    key_heads = config.get("num_key_value_heads")
    if key_heads is None and family == "llama":  # of the others, each class has a number of its own
        key_heads = heads
    head_size = config.get("head_dim") or (FAMILIES[family].head_size if family in FAMILIES else None)
    head_size = head_size or hidden // heads
    if not isinstance(key_heads, int) or not _is_count(key_heads) or not _is_count(head_size):
        return None
    experts = None
    width = FAMILIES[family].expert_width if family in FAMILIES else None
    if width is not None:
        experts = _read_experts(config, width)
        if experts is None:
            return None
    return Shape(
        family=family,
        hidden=hidden,
        layers=layers,
        queries=heads * head_size,
        keys=key_heads * head_size,
        head_size=head_size,
        inner=inner,
        vocabulary=vocabulary,
        tied=bool(config.get("tie_word_embeddings", False)),  # the default of every family above
        attention_bias=bool(config.get("attention_bias", False)),
        inner_bias=bool(config.get("mlp_bias", False)),
        experts=experts,
    )


def _read_experts(config: dict[str, Any], width: str) -> Experts | None:
    """None where a number is not said."""
    count = config.get("num_experts", config.get("num_local_experts"))  # transformers reads and writes both
    inner, per_token = config.get(width), config.get("num_experts_per_tok")
    every, plain = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not all(map(_is_count, (count, inner, per_token, every))) or not isinstance(plain, list):
        return None
    layers = [n for n in range(config["num_hidden_layers"]) if n not in plain and (n + 1) % every == 0]
    return Experts(len(layers), count, inner, per_token)  # type: ignore[arg-type]


def read_size(folder: Path, shape: Shape | None) -> ModelSize | None:
    """By the weights' headers, else by the shape; None where neither says it. Raises ConfigError for broken files."""
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return _by_headers(folder, files, shape)
    parameters = shape.parameters() if shape is not None else None
    if shape is None or parameters is None:
        return None
    return ModelSize(parameters, shape.largest_tensor(), f"config.json ({shape.family}); there are no weights")


def _by_headers(folder: Path, files: list[Path], shape: Shape | None) -> ModelSize:
    _require_all_parts(folder)
    tensors: dict[str, int] = {}
    for file in files:
        tensors |= _elements(file)
    if shape is not None and shape.tied and any(name.endswith(EMBEDDING) for name in tensors):
        tensors.pop(HEAD, None)  # some files hold it all the same
    if not tensors:
        raise ConfigError(f"model.path: {folder}: no tensor in {', '.join(file.name for file in files)}")
    return ModelSize(sum(tensors.values()), max(tensors.values()), f"headers of {len(files)} safetensors file(s)")


def _require_all_parts(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        named = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.path: {index}: expected an object with weight_map: {error!r}") from None
    missing = sorted(name for name in named if not (folder / name).is_file())
    if missing:
        raise ConfigError(
            f"model.path: {folder} lacks {', '.join(missing)}, which {index.name} names; fetch the whole model"
        )


def _elements(file: Path) -> dict[str, int]:
    """Name to elements of each tensor."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > min(LONGEST_HEADER, file.stat().st_size - 8):
                raise ValueError(f"a header of {size} bytes in a file of {file.stat().st_size}")
            header: Any = json.loads(stream.read(size))
        return {name: math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.path: {file}: not a whole safetensors file ({error}); fetch it again") from None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
