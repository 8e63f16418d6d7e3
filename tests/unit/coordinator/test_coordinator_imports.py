"""The coordinator holds no model: none of its modules loads a heavy library, and its settings load next to nothing."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import pytest

import services.coordinator

HEAVY = {"torch", "transformers", "vllm", "deepspeed", "ray", "datasets", "pandas"}
SINKS = {f"services.coordinator.sinks.{name}" for name in ("tensorboard", "trackio", "wandb")}
"""Named for the library that each hands metrics to; imported only where the recipe asks for it."""


def loaded_by(*modules: str) -> set[str]:
    """Top-level names in sys.modules after importing these, in a fresh interpreter."""
    program = (
        "import importlib, json, sys\n"
        f"for name in {list(modules)!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout))


def test_all_modules_load_none_of_the_heavy_ones() -> None:
    modules = [m.name for m in pkgutil.walk_packages(services.coordinator.__path__, "services.coordinator.")]
    assert {"services.coordinator.run", "services.coordinator.algorithms.advantages.grpo"} <= set(modules)
    assert set(modules) >= SINKS
    assert not loaded_by(*(name for name in modules if name not in SINKS)) & (
        HEAVY | {"tensorboard", "trackio", "wandb"}
    )


def test_the_settings_load_neither_grpc_nor_a_tokenizer() -> None:
    assert not loaded_by("services.coordinator.config") & (
        HEAVY | {"numpy", "grpc", "nats", "tokenizers", "jinja2", "sqlite3"}
    )


@pytest.mark.parametrize("module", ["grpo", "placement", "controls", "batch", "groups", "schedule", "ledger", "loop"])
def test_domain_files_do_not_name_grpc(module: str) -> None:
    path = next(iter(services.coordinator.__path__))
    names = {
        "grpo": "algorithms/advantages/grpo",
        "placement": "algorithms/placement",
        "controls": "algorithms/controls",
    }
    with open(f"{path}/{names.get(module, module)}.py", encoding="utf-8") as source:
        text = source.read()
    assert "import grpc" not in text
    assert "_pb2_grpc" not in text
