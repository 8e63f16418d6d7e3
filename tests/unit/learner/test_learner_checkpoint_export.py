"""A Hugging Face folder out of a checkpoint's slices: the weights of the live policy, or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from antiphon.learner.v1 import checkpoint_pb2

from services.common.errors import AntiphonError
from services.learner import checkpoint, checkpoint_export
from services.learner.checkpoint_slices import write_slices
from tests.tiny.models import CHAT_TEMPLATE, make_tiny_model

MASK = (1 << 64) - 1
OWN = CHAT_TEMPLATE.replace("<assistant>", "<assistant>Think. ")


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("origin") / "model", hidden=64, layers=1)


@pytest.fixture(scope="module")
def masters(origin) -> dict[str, torch.Tensor]:
    """Trained, in float32: as a live model holds them, aliases left out."""
    model = transformers.AutoModelForCausalLM.from_pretrained(origin, dtype=torch.float32)
    return {
        name: parameter.detach() + 0.01 * number for number, (name, parameter) in enumerate(model.named_parameters())
    }


class RankState:
    """What ZeRO-3 gives rank `rank` of `ranks` of each parameter."""

    def __init__(self, masters, rank: int, ranks: int) -> None:
        self.masters, self.rank, self.ranks, self.optimizer_updates = masters, rank, ranks, 1
        self.parameters = dict.fromkeys(masters)

    def extent(self, name: str) -> tuple[int, int]:
        numel = self.masters[name].numel()
        each = -(-numel // self.ranks)
        start = min(self.rank * each, numel)
        return start, min(each, numel - start)

    def slice_of(self, kind: str, name: str) -> torch.Tensor:
        start, count = self.extent(name)
        flat = self.masters[name].flatten() if kind == "master" else torch.full_like(self.masters[name], 7.0).flatten()
        return flat[start : start + count]


def digest(weights: dict[str, torch.Tensor]) -> int:
    """By the formula of docs/design.md §6, in numpy: Σ word · mix64(fnv64(name) ^ i)."""
    total = 0
    for name, tensor in weights.items():
        hashed = 0xCBF29CE484222325
        for byte in name.encode():
            hashed = ((hashed ^ byte) * 0x100000001B3) & MASK
        wide = np.uint16 if tensor.dtype == torch.bfloat16 else np.uint32
        view = tensor.view(torch.int16 if wide is np.uint16 else torch.int32).numpy().view(wide)
        words = view.flatten().astype(np.uint64)
        with np.errstate(over="ignore"):
            z = np.uint64(hashed) ^ np.arange(len(words), dtype=np.uint64)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
            total = (total + int((words * z).sum(dtype=np.uint64))) & MASK
    return total


def write(folder: Path, masters, ranks: int, dtype: str, *, of=None) -> Path:
    folder.mkdir()
    manifest = checkpoint_pb2.CheckpointManifest(role="actor", dtype=dtype, ranks=ranks)
    manifest.position.optimizer_updates = 1
    manifest.policy.version = 12
    kept = {name: tensor.to(checkpoint_export.DTYPES[dtype]) for name, tensor in (of or masters).items()}
    manifest.policy.digest = digest(kept)
    for name, tensor in masters.items():
        manifest.tensors.add(name=name, shape=tensor.shape)
    for rank in range(ranks):
        manifest.files.extend(
            write_slices(
                folder, rank, RankState(masters, rank, ranks), {"rng/cpu": torch.zeros(1)}, lambda done, of: None
            )
        )
    checkpoint.write_manifest(folder, manifest)
    return folder


def run(*arguments: str | Path) -> int:
    return checkpoint_export.main([str(argument) for argument in arguments])


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (3, "bfloat16")])
def test_what_is_written_is_the_live_policy(tmp_path, capsys, origin, masters, *, ranks, dtype):
    kept = write(tmp_path / "step-12", masters, ranks, dtype)
    (tmp_path / "own.jinja").write_text(OWN)
    arguments = ["--checkpoint", kept, "--model", origin, "--to", tmp_path / "out"]
    assert run(*arguments, "--chat-template-file", tmp_path / "own.jinja") == 0
    *progress, told = map(json.loads, capsys.readouterr().out.splitlines())
    assert (told["version"], told["dtype"], told["path"]) == (12, dtype, str(tmp_path / "out"))
    assert {line["phase"] for line in progress} == {"verify", "export"}
    assert progress[-1] == {"phase": "export", "done": len(masters), "of": len(masters)}

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    names = dict(loaded.named_parameters())
    assert names.keys() == masters.keys()
    for name, tensor in masters.items():
        assert names[name].dtype == checkpoint_export.DTYPES[dtype]
        assert torch.equal(names[name], tensor.to(names[name].dtype)), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "ab"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<bos><user>ab<eos><assistant>Think. "
    for file in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (origin / file).read_bytes()
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    before = json.loads((origin / "tokenizer_config.json").read_text())
    assert before.pop("chat_template") and settings == before


def test_without_a_template_of_its_own_the_tokenizer_is_the_same_byte_for_byte(tmp_path, origin, masters):
    kept = write(tmp_path / "step-12", masters, 2, "float32")
    assert run("--checkpoint", kept, "--model", origin, "--to", tmp_path / "out") == 0
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (origin / file).read_bytes()


def changed(folder: Path) -> None:
    file = folder / "rank0000-0000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "code", "said"),
    [
        (changed, "ANT-INVALID-REQUEST", "rank0000-0000.safetensors was changed or is damaged"),
        (lambda folder: (folder / "rank0001-0000.safetensors").unlink(), "ANT-INVALID-REQUEST", "is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "ANT-NOT-FOUND", "there is no manifest.json"),
        (lambda folder: (folder.parent / "out").mkdir(), "ANT-INVALID-REQUEST", "nothing is ever replaced"),
    ],
)
def test_anything_less_than_whole_writes_nothing(tmp_path, capsys, origin, masters, *, spoil, code, said):
    kept = write(tmp_path / "step-12", masters, 2, "float32")
    spoil(kept)
    assert run("--checkpoint", kept, "--model", origin, "--to", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{code}: ") and said in error
    assert not list((tmp_path / "out").glob("*")) and not list(tmp_path.glob(".*"))


def test_weights_that_are_not_those_of_the_policy_are_not_exported(tmp_path, origin, masters):
    other = {name: tensor + 1 for name, tensor in masters.items()}
    kept = write(tmp_path / "step-12", masters, 2, "float32", of=other)
    with pytest.raises(AntiphonError, match=r"its weights have the digest .* version 12 has"):
        checkpoint_export.export(
            kept, model=origin, to=tmp_path / "out", chat_template="", report=lambda phase, done, of: None
        )
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
