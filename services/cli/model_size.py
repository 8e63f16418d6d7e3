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


# As transformers builds them: models/<family>/modeling_<family>.py.
FAMILIES = {
    "llama": _Family(qkv_bias=None),
    "mistral": _Family(qkv_bias=False),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qkv_bias=None, head_norms=True, head_size=128),
}


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
    vocabulary: int
    tied: bool
    attention_bias: bool
    inner_bias: bool

    def parameters(self) -> int | None:
        """Of the whole model, a tied head counted once; None for a family that is not counted here."""
        family = FAMILIES.get(self.family)
        if family is None:
            return None
        layer = 2 * self.hidden * self.queries + 2 * self.hidden * self.keys  # q and o, k and v
        layer += 3 * self.hidden * self.inner  # gate, up, down
        layer += 2 * self.hidden  # norms
        if family.qkv_bias or (family.qkv_bias is None and self.attention_bias):
            layer += self.queries + 2 * self.keys
        if family.qkv_bias is None and self.attention_bias:
            layer += self.hidden
        if self.inner_bias:
            layer += 2 * self.inner + self.hidden
        if family.head_norms:
            layer += 2 * self.head_size
        tables = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return tables + self.layers * layer + self.hidden


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
    )


def read_size(folder: Path, shape: Shape | None) -> ModelSize | None:
    """By the weights' headers, else by the shape; None where neither says it. Raises ConfigError for broken files."""
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return _by_headers(folder, files, shape)
    parameters = shape.parameters() if shape is not None else None
    if shape is None or parameters is None:
        return None
    largest = max(shape.vocabulary, shape.inner, shape.queries) * shape.hidden
    return ModelSize(parameters, largest, f"config.json ({shape.family}); there are no weights")


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
