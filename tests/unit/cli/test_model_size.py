"""Parameters by config.json and by headers, against counts that were published or added up by hand."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from services.cli.model_size import read_shape, read_size
from services.common.errors import ConfigError


def config(family: str, hidden: int, layers: int, heads: tuple[int, int], inner: int, words: int, **more: Any) -> Any:  # noqa: PLR0917
    return {
        "model_type": family, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "intermediate_size": inner, "vocab_size": words, **more,
    }  # fmt: skip


TIED = {"tie_word_embeddings": True}
# What the models' own pages, or their safetensors indices, say.
PUBLISHED = {
    "SmolLM2-135M": (config("llama", 576, 30, (9, 3), 1536, 49152, **TIED), 134_515_008),
    "Llama-3-8B": (config("llama", 4096, 32, (32, 8), 14336, 128256), 8_030_261_248),
    "Mistral-7B": (config("mistral", 4096, 32, (32, 8), 14336, 32000), 7_241_732_096),
    "Qwen2-0.5B": (config("qwen2", 896, 24, (14, 2), 4864, 151936, **TIED), 494_032_768),
    "Qwen2-7B": (config("qwen2", 3584, 28, (28, 4), 18944, 152064), 7_615_616_512),
    "Mixtral-8x7B": (
        config("mixtral", 4096, 32, (32, 8), 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        config(
            "qwen3_moe",
            2048,
            48,
            (32, 4),
            6144,
            151936,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            mlp_only_layers=[],
            decoder_sparse_step=1,
        ),
        30_532_122_624,
    ),
    "Qwen3-0.6B": (config("qwen3", 1024, 28, (16, 8), 3072, 151936, head_dim=128, **TIED), 596_049_920),
}


def write_config(folder: Path, tree: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


def write_headers(path: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file that is all header: its data would follow."""
    header = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_json_gives_the_published_count(name: str, tmp_path: Path) -> None:
    tree, parameters = PUBLISHED[name]
    size = read_size(tmp_path, read_shape(write_config(tmp_path, tree)))
    assert size is not None and size.parameters == parameters


def test_a_small_model_added_up_by_hand(tmp_path: Path) -> None:
    """Hidden 4, two heads of 2, one key-value head, inner 6, 10 words, 1 layer, every bias, own head."""
    biased = {"attention_bias": True, "mlp_bias": True}
    tree = config("llama", 4, 1, (2, 1), 6, 10, **biased)
    projections = (16 + 4) + (8 + 2) + (8 + 2) + (16 + 4)  # q, k, v, o with their biases
    gated = (24 + 6) + (24 + 6) + (24 + 4)  # gate, up, down
    size = read_size(tmp_path, read_shape(write_config(tmp_path, tree)))
    assert size is not None and size.parameters == 40 + 40 + projections + gated + 4 + 4 + 4
    assert size.largest_tensor == 40


def test_layers_of_a_mixture_and_others(tmp_path: Path) -> None:
    """Hidden 4, two heads of 2, one key-value head, 10 words; of four layers the second is a mixture."""
    tree = config("qwen3_moe", 4, 4, (2, 1), 6, 10, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=5,
                  decoder_sparse_step=2, mlp_only_layers=[3], **TIED)  # fmt: skip
    shape = read_shape(write_config(tmp_path, tree))
    size = read_size(tmp_path, shape)
    attention = 16 + 8 + 8 + 16 + 2 + 2  # q, k, v, o, norms of a head
    mixture, plain = 3 * (20 + 20 + 20) + 12, 24 + 24 + 24  # and a router
    assert size is not None and size.parameters == 40 + 4 + 4 * (attention + 8) + mixture + 3 * plain
    assert size.largest_tensor == 3 * 2 * 5 * 4  # gates and ups of all experts
    assert shape is not None and shape.inner_at_work == 10
    del tree["num_experts_per_tok"]
    assert read_shape(write_config(tmp_path, tree)) is None


def test_headers_win_and_a_tied_head_counts_once(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, config("llama", 4, 1, (2, 1), 6, 10, **TIED)))
    write_headers(tmp_path / "model-1.safetensors", {"model.embed_tokens.weight": [10, 4], "lm_head.weight": [10, 4]})
    write_headers(tmp_path / "model-2.safetensors", {"model.norm.weight": [4], "scalar": []})
    size = read_size(tmp_path, shape)
    assert size is not None and (size.parameters, size.largest_tensor) == (45, 40)
    assert "2 safetensors" in size.counted_by


def test_what_is_not_known_is_not_guessed(tmp_path: Path) -> None:
    other = read_shape(write_config(tmp_path, config("mamba", 4, 1, (2, 1), 6, 10)))
    assert other is not None and read_size(tmp_path, other) is None
    for key in ("hidden_size", "vocab_size", "num_key_value_heads"):
        tree = config("qwen2", 4, 1, (2, 1), 6, 10)
        del tree[key]
        assert read_shape(write_config(tmp_path, tree)) is None
    tree = config("llama", 4, 1, (2, 2), 6, 10)
    del tree["num_key_value_heads"]  # there every head has its own
    shape = read_shape(write_config(tmp_path, tree))
    assert shape is not None and shape.keys == 4


@pytest.mark.parametrize(
    "content", [b"", b"weights", struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 2) + b"[]",
                struct.pack("<Q", 8) + b'{"a": 1}']
)  # fmt: skip
def test_a_broken_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a whole safetensors file"):
        read_size(tmp_path, None)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    write_headers(tmp_path / "model-1.safetensors", {"a": [2]})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks model-2\.safetensors"):
        read_size(tmp_path, None)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_config_json_that_is_no_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(tmp_path)
