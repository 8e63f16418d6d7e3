"""The exported folder: whole or not there at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from services.common.errors import InvalidRequest
from services.learner import exporting
from services.learner.exporting import write_folder
from tests.tiny.models import make_tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("source"), hidden=64)
    # Not valid together: a library that validates it on the way out would lose the run.
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.5}')
    (folder / "README.md").write_text("about the original")
    return folder


def weights(source: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    return {name: parameter.detach() + 0.5 for name, parameter in model.named_parameters()}


def write(path: Path, source: Path, tensors: dict[str, torch.Tensor], *, of=None, dtype="float32", stop_after=None):
    def one_by_one():
        for number, item in enumerate(tensors.items()):
            if number == stop_after:
                raise OSError(28, "No space left on device")
            yield item

    done: list[int] = []
    shapes = {name: tuple(tensor.shape) for name, tensor in (of or tensors).items()}
    write_folder(path, source=source, tensors=one_by_one(), shapes=shapes, dtype_name=dtype, report=done.append)
    return done


@pytest.mark.parametrize("shard_bytes", [1 << 30, 30_000])
def test_loads_in_plain_transformers_with_the_new_weights(monkeypatch, tmp_path, source, shard_bytes):
    monkeypatch.setattr(exporting, "SHARD_BYTES", shard_bytes)
    tensors = weights(source)
    path = tmp_path / "exported"
    assert write(path, source, tensors)[-1] == len(tensors)
    assert (path / "model.safetensors").exists() == (shard_bytes > 30_000)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, tensors[name]), name
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (path / file).read_bytes() == (source / file).read_bytes()
    assert not (path / "README.md").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["exported"]


def test_config_names_the_dtype_that_was_written(tmp_path, source):
    tensors = {name: tensor.bfloat16() for name, tensor in weights(source).items()}
    write(tmp_path / "half", source, tensors, dtype="bfloat16")
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "half"))
    assert after.pop("dtype") == "bfloat16" and before.pop("dtype") == "float32"
    assert before == after
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16


def test_a_disk_that_is_full_leaves_nothing(tmp_path, source):
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "exported", source, weights(source), stop_after=3)
    assert list(tmp_path.iterdir()) == []


def test_an_emptied_or_missing_tensor_is_noticed(tmp_path, source):
    tensors = weights(source)
    emptied = {**tensors, "model.norm.weight": torch.empty(0)}
    with pytest.raises(RuntimeError, match=r"model.norm.weight: expected \(64,\), written \(0,\)"):
        write(tmp_path / "exported", source, emptied, of=tensors)
    missing = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    with pytest.raises(RuntimeError, match=r"model.norm.weight: expected \(64,\), written None"):
        write(tmp_path / "exported", source, missing, of=tensors)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_nothing_that_exists_is_replaced(tmp_path, source, make):
    make(tmp_path / "exported")
    with pytest.raises(InvalidRequest, match="it exists"):
        write(tmp_path / "exported", source, weights(source))


def test_relative_and_unreachable_paths_are_refused(tmp_path, source):
    with pytest.raises(InvalidRequest, match="expected an absolute path"):
        write(Path("exported"), source, {})
    with pytest.raises(InvalidRequest, match="there is no folder"):
        write(tmp_path / "no" / "exported", source, {})
