"""What this machine lacks for a recipe: said before anything is made or started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.cli import preflight
from services.cli.recipe import read_recipe
from services.cli.train import prepare
from services.common.errors import ConfigError
from tests.unit.cli.standins.recipe import write_recipe


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_recipe(tmp_path)


def test_gpus_that_are_not_there(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = read_recipe(recipe, ["learner.gpus=[0]", "rollout={gpus: [2], engine: vllm}"])
    for lines, said in (
        ([], ["learner.gpus: [0]: this machine has 0 GPU(s), none", "rollout.gpus: [2]: this machine has 0"]),
        (["0, H200", "1, H200"], ["rollout.gpus: [2]: this machine has 2 GPU(s), 0 to 1"]),
        (None, ["gpus: nvidia-smi fails"]),
        (["0", "1", "2"], []),
    ):
        monkeypatch.setattr(preflight, "gpu_lines", lambda lines=lines: lines)
        found = preflight._gpus(wanted)
        assert len(found) == len(said)
        assert all(line.startswith(words) for line, words in zip(found, said, strict=True))


def test_a_nats_server_of_ones_own_is_to_listen(recipe: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"nats.url: nothing listens at 127.0.0.1:{port}"):
            prepare(recipe, [f"nats.url=nats://127.0.0.1:{port}"])
        taken.listen()
        assert preflight.lacks(prepare(recipe, [f"nats.url=nats://127.0.0.1:{port}"])) == []
    with pytest.raises(ConfigError, match="expected nats://host:port"):
        prepare(recipe, ["nats.url=here"])
    assert not (recipe.parent / "runs").exists()


def test_an_engine_that_cannot_be(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="the transformers engine is one process; set 1, or engine: vllm"):
        prepare(recipe, ["rollout={engine: transformers, tensor_parallel: 2}"])
