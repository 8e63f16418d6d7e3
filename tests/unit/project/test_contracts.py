"""That `make check` refuses a change of the contracts that would break a peer of the last release."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BUF = Path(sys.executable).parent / "buf"
RELEASED = Path("protos/released.binpb")


def breaking(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(BUF), "breaking", "--against", str(RELEASED)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    shutil.copytree(ROOT / "protos", tmp_path / "protos", ignore=shutil.ignore_patterns("*.py", "*.pyi", ".*"))
    return tmp_path


def test_the_contracts_keep_what_was_released(checkout: Path) -> None:
    ended = breaking(checkout)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("rollout/v1/rollout.proto", "int64 run_seed = 6;", "", "run_seed"),
        ("rollout/v1/rollout.proto", "int64 run_seed = 6;", "string run_seed = 6;", "changed type"),
        ("rollout/v1/rollout.proto", "rpc Abort(AbortRequest) returns (AbortResponse);", "", "Abort"),
        ("tenant/v1/tenant.proto", "WORKER_STATE_STALE = 2;", "WORKER_STATE_STALE = 22;", "WorkerState"),
        ("events/v1/handoff.proto", "message Grant {", "message Granted {", "Grant"),
    ],
)
def test_a_breaking_change_is_refused(checkout: Path, file: str, old: str, new: str, says: str) -> None:
    path = checkout / "protos" / "antiphon" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    ended = breaking(checkout)
    assert ended.returncode != 0
    assert says in ended.stdout + ended.stderr


def test_what_only_adds_is_allowed(checkout: Path) -> None:
    path = checkout / "protos" / "antiphon" / "rollout/v1/rollout.proto"
    path.write_text(path.read_text().replace("int64 run_seed = 6;", "int64 run_seed = 6;\n  int64 added = 99;", 1))
    assert breaking(checkout).returncode == 0
