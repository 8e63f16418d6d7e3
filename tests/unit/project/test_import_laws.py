"""docs/design.md, law 1: what may load a heavy library, seen in fresh interpreters; and that the linter bites."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HEAVY = (
    "torch", "vllm", "deepspeed", "transformers", "ray", "datasets", "pyarrow", "tensorboard", "wandb", "trackio",
)  # fmt: skip

# Named for a heavy library, or for the model work that they do with one. Everything else must load without any.
NAMED_FOR_IT = (
    "services.common.weights",
    "services.coordinator.data.arrow_rows",
    "services.coordinator.data.datasets_process",
    "services.coordinator.sinks.tensorboard",
    "services.coordinator.sinks.trackio",
    "services.coordinator.sinks.wandb",
    "services.rollout.receiving",
    "services.rollout.sampling",
    "services.rollout.transformers_cache",
    "services.rollout.transformers_decoding",
    "services.rollout.transformers_model",
    "services.rollout.transformers_worker",
    "services.rollout.vllm_copies",
    "services.rollout.vllm_in_place",
    "services.rollout.vllm_memory",
    "services.rollout.vllm_names",
    "services.rollout.vllm_weights",
    "services.reward.reference_model",
    "services.learner.deepspeed_trainer",
    "services.learner.device_memory",
    "services.learner.fused_layers",
    "services.learner.head_kernels",
    "services.learner.layer_kernels",
    "services.learner.dry_stepping",
    "services.learner.step_tokens",
    "services.learner.update_sums",
    "services.learner.varlen_attention",
    "services.learner.checkpoint_export",
    "services.learner.checkpoint_slices",
    "services.learner.rank_checkpoint",
    "services.learner.memory_peak",
    "services.learner.zero_state",
    "services.learner.zero_engine",
    "services.learner.policy_model",
    "services.learner.logprob_head",
    "services.learner.packing",
    "services.learner.stepping",
    "services.learner.publishing",
    "services.learner.exporting",
    "services.learner.objectives",
)

# Imports the modules one after another; prints which of them first brought which heavy library.
PROBE = """
import importlib, json, sys
heavy, modules = json.loads(sys.argv[1])
found, seen = {}, set()
for module in modules:
    importlib.import_module(module)
    new = {name for name in heavy if name in sys.modules} - seen
    if new:
        found[module] = sorted(new)
    seen |= new
print(json.dumps(found))
"""

HELP = """
import contextlib, io, json, sys
heavy = json.loads(sys.argv[1])
sys.argv = ["antiphon", *sys.argv[2:]]
from services.cli.__main__ import main
with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
    main()
assert "Usage" in text.getvalue(), text.getvalue()
print(json.dumps([name for name in heavy if name in sys.modules]))
"""


def service_modules() -> list[str]:
    """Every module under services/, the package of a folder under its own name."""
    paths = sorted((ROOT / "services").rglob("*.py"))
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    return [name.removesuffix(".__init__") for name in names]


def is_named_for_it(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in NAMED_FOR_IT)


def probe(modules: list[str], *, first_on_path: Path | None = None) -> dict[str, list[str]]:
    """Module to heavy libraries that its import brought, from a fresh interpreter."""
    path = os.pathsep.join(str(part) for part in (first_on_path, ROOT, ROOT / "protos") if part)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([HEAVY, modules])],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_light_modules_load_no_heavy_library() -> None:
    light = [module for module in service_modules() if not is_named_for_it(module)]
    for required in (
        "services.cli.__main__",
        "services.cli.train",
        "services.coordinator.loop",
        "services.coordinator.text",
        "services.learner.__main__",
        "services.learner.ranks",
        "services.learner.service",
        "services.reward.child",
        "services.rollout.__main__",
        "services.common.server",
        *(f"services.{name}.config" for name in ("rollout", "reward", "learner", "coordinator")),
    ):
        assert required in light, f"{required} is gone or is listed as heavy: the test would not look at it"
    assert probe(light) == {}


@pytest.mark.parametrize(
    "arguments", [["--help"], *([name, "--help"] for name in ("train", "plan", "doctor", "watch", "generate"))]
)
def test_help_loads_no_heavy_library(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP, json.dumps(HEAVY), *arguments],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_the_probe_sees_a_heavy_library(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "innocent.py").write_text("")
    (tmp_path / "guilty.py").write_text("import torch\n")
    assert probe(["innocent", "guilty"], first_on_path=tmp_path) == {"guilty": ["torch"]}


def test_the_list_of_heavy_files_is_no_longer_than_needed() -> None:
    """A file that needs no heavy library any more leaves the list here and in pyproject.toml."""
    for name in NAMED_FOR_IT:
        path = ROOT / name.replace(".", "/")
        sources = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        text = "\n".join(source.read_text() for source in sources)
        assert any(f"import {heavy}" in text or f"from {heavy}" in text for heavy in HEAVY), name


# Contract of pyproject.toml, and a file with one more line that breaks it.
VIOLATIONS = {
    "services never import one another": ("services/reward/config.py", "from services.rollout import config"),
    "cli imports of the services nothing but": ("services/cli/watch.py", "import services.coordinator.loop"),
    "configs, cli, coordinator and reward": ("services/coordinator/groups.py", "import services.common.weights.digest"),
    "heavy libraries are imported only": ("services/learner/ranks.py", "import torch"),
    "grpc is imported by handlers": ("services/coordinator/loop.py", "import grpc"),
}


def lint_imports(tree: Path) -> tuple[int, str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_every_contract_bites(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "services", tmp_path / "services", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    code, report = lint_imports(tmp_path)
    assert code == 0, report
    assert report.count(" KEPT") == len(VIOLATIONS), "each contract of pyproject.toml has a violation to try here"
    for path, line in VIOLATIONS.values():
        source = tmp_path / path
        source.write_text(source.read_text() + f"\n{line}\n")
    code, report = lint_imports(tmp_path)
    assert code == 1, report
    broken = [contract for contract in VIOLATIONS if f"{contract}" in report.partition("Broken contracts")[2]]
    assert broken == list(VIOLATIONS), report
