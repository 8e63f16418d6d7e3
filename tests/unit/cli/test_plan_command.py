"""`antiphon plan`: the numbers against arithmetic by hand and against what was measured; what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli import plan as command
from services.cli import plan_memory
from services.cli.__main__ import app
from services.cli.model_size import read_shape, read_size
from services.cli.recipe import Recipe, problems, read_recipe
from services.cli.train import prepare
from services.common.errors import ConfigError
from tests.unit.cli.standins.recipe import write_recipe
from tests.unit.cli.test_model_size import PUBLISHED, TIED, config, write_config, write_headers

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
SMOLLM2 = 134_515_008
HEAVY = ("torch", "transformers", "vllm", "deepspeed", "tokenizers", "numpy", "grpc", "nats", "datasets", "pyarrow")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of SmolLM2's shape, without weights."""
    path = write_recipe(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    write_config(tmp_path / "model", {**PUBLISHED["SmolLM2-135M"][0], "max_position_embeddings": 4096})
    monkeypatch.chdir(tmp_path)
    return path


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def planned(*arguments: str | Path) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def parts(tree: Any, name: str) -> dict[str, int]:
    (process,) = (process for process in tree["memory"] if process["name"] == name)
    assert process["bytes"] == sum(part["bytes"] for part in process["parts"])
    return {part["name"]: part["bytes"] for part in process["parts"]}


def test_sizes_by_hand(recipe: Path) -> None:
    tree = planned(
        recipe, "coordinator.steps=5", "coordinator.algorithm={epochs: 2, mini_batches: 3}",
        "coordinator.prompts_per_step=4", "coordinator.data.max_prompt_tokens=100",
        "coordinator.evaluation={path: train.jsonl, name: held, every: 2, max_tokens: 8}",
        "learner.micro_batch_tokens=50",
    )  # fmt: skip
    sizes = {size["name"]: size["value"] for size in tree["sizes"]}
    assert sizes == {
        "trajectories per Step": 8,
        "trajectories of the run": 40,
        "Updates planned": 30,
        "trajectories per Update, at most": 3,
        "tokens of a row, at most": 116,
        "tokens per Step, at most": 928,
        "tokens trained per Step, at most": 256,
        "tokens of a micro-batch of a rank, at most": 116,  # a row is never cut
        "evaluations": 4,  # at 0, 2, 4 and the end
    }
    assert tree["seconds"] is None


def test_what_a_filter_may_sample_more_is_told(recipe: Path) -> None:
    tree = planned(recipe, "coordinator.prompts_per_step=4", "coordinator.filter={type: spread}")
    assert {
        key: size[key] for size in tree["sizes"] if size["name"].startswith("prompts") for key in ("name", "value")
    } == {"name": "prompts sampled per Step, at most", "value": 20}


def test_memory_on_a_cpu_by_hand(recipe: Path) -> None:
    tree = planned(recipe, "reward.reference={}", "rollout.kv_cache_gib=0.5")
    learner = parts(tree, "learner-0 rank 0")
    assert "float32 masters" not in learner  # DeepSpeed trains the float32 weights themselves
    assert learner["weights"] == learner["gradients"] == learner["gradients as AdamW sees them"] == 4 * SMOLLM2
    assert learner["AdamW moments"] == 8 * SMOLLM2
    assert learner["transfer buckets"] == 2 * 4 * 49152 * 576  # larger than 64 MiB
    assert parts(tree, "rollout-0") == {
        "weights": 4 * SMOLLM2,
        "keys and values": 2**29,
        "staging of a publication": 4 * SMOLLM2,
        "transfer buckets": 2 * 4 * 49152 * 576,
    }
    assert parts(tree, "reward-0 reference model")["weights"] == 4 * SMOLLM2
    assert list(tree["memory_by_place"]) == ["host"]


def test_memory_on_gpus_is_shared_out(recipe: Path) -> None:
    tree = planned(
        recipe, "model.dtype=bfloat16", "learner={ranks: 2, gpus: [0, 1]}",
        "rollout={gpus: [2, 3, 4], tensor_parallel: 3}",
    )  # fmt: skip
    half = SMOLLM2 // 2
    for rank in range(2):
        learner = parts(tree, f"learner-0 rank {rank}")
        assert (learner["weights"], learner["float32 masters"], learner["AdamW moments"]) == (
            2 * half,
            4 * half,
            8 * half,
        )
    engine = parts(tree, "rollout-0")
    assert engine["weights"] == 2 * SMOLLM2 // 3 and "staging of a publication" not in engine  # in place on a GPU
    assert list(tree["memory_by_place"]) == ["GPU 0", "GPU 1", "GPU 2", "GPU 3", "GPU 4", "host"]  # the libraries
    assert tree["memory_by_place"]["GPU 3"] == sum(engine.values())


def test_processes_by_themselves_are_counted(recipe: Path) -> None:
    mib = {name: count * 2**20 for name, count in plan_memory.BY_ITSELF_MIB.items()}
    tree = planned(
        recipe, "learner.ranks=3", "coordinator.rollout_workers=2", "rollout.engine=transformers",
        "reward.scorers=[{name: exact, path: reward.py, processes: 4}, {name: number, type: number}]",
    )  # fmt: skip
    assert parts(tree, "processes by themselves, libraries mostly") == {
        "command": mib["command"],
        "NATS": mib["NATS"],
        "coordinator": mib["coordinator"],
        "reward worker": mib["reward worker"],
        "scorer": 5 * mib["scorer"],
        "learner": mib["learner"],
        "rank of the learner": 3 * mib["rank of the learner"],
        "rollout worker of transformers": 2 * mib["rollout worker of transformers"],
        "transformers engine": 2 * mib["transformers engine"],
        "helper of the engine": 2 * mib["helper of the engine"],
    }


def test_what_they_take_is_what_was_measured_and_some_more() -> None:
    seen = json.loads((RESULTS / "process-memory.json").read_text())["summary"]["highest_mib"]
    assert seen.keys() == plan_memory.BY_ITSELF_MIB.keys()
    for kind, mib in plan_memory.BY_ITSELF_MIB.items():
        assert 1.1 * seen[kind] <= mib <= max(1.6 * seen[kind], seen[kind] + 32), kind


@pytest.mark.parametrize("name", ["demo-cpu", "demo-cpu-lr-2e-5"])
def test_the_demo_stayed_within_the_bound(name: str, recipe: Path) -> None:
    seen = json.loads((RESULTS / f"{name}.json").read_text())
    peak = max(map(float, re.findall(r'"peak_memory_gib_pss": ([\d.]+)', json.dumps(seen))))  # of the run, the control
    folder = recipe.parent / "model"  # SmolLM2's
    shape = read_shape(folder)
    size = read_size(folder, shape)
    assert size is not None
    demo = read_recipe(ROOT / "recipes" / "demo" / "addition.yaml", ["model.dtype=float32"])
    bound = plan_memory.by_place(plan_memory.processes(demo, size, shape, None))["host"] / 2**30
    assert peak <= bound <= 1.25 * peak


def learner_of(recipe: Path, family: str, shape: dict[str, int], *changes: str) -> plan_memory.Process:
    """The learner of a model of Qwen2.5's widths on a GPU, as a benchmark trained it."""
    tree = config(family, shape["hidden"], shape["layers"], (shape["heads"], 2), shape["inner"], 151936, **TIED)
    folder = write_config(recipe.parent / "model", tree)
    found = read_shape(folder)
    size = read_size(folder, found)
    assert size is not None
    loaded = read_recipe(recipe, ["model.dtype=bfloat16", "learner.gpus=[0]", *changes])
    return plan_memory.processes(loaded, size, found, None)[0]


def test_what_is_kept_is_what_a_gpu_was_seen_to_hold(recipe: Path) -> None:
    seen = json.loads((RESULTS / "handoff.json").read_text())
    process = learner_of(recipe, "llama", {"hidden": 2048, "layers": 36, "heads": 16, "inner": 11008})
    kept = {part.name: part.bytes for part in process.parts}
    held = seen["samples"]["level_1"][0]["learner_held_bytes"]  # by tag: weights; masters, moments, gradients
    assert kept["weights"] == seen["parameters"]["weight_bytes"] == held["1"]
    optimizer = kept["float32 masters"] + kept["AdamW moments"] + kept["gradients"]
    assert optimizer == pytest.approx(held["3"], rel=1e-6)  # and the counts of Updates


@pytest.mark.parametrize(("checkpointing", "variant"), [("false", "base"), ("true", "checkpointing")])
def test_a_measured_peak_is_within_the_bound(checkpointing: str, variant: str, recipe: Path) -> None:
    seen = json.loads((RESULTS / "learner-throughput.json").read_text())
    process = learner_of(
        recipe, "qwen2", {"hidden": 1536, "layers": 28, "heads": 12, "inner": 8960},
        f"learner.micro_batch_tokens={seen['parameters']['micro_batch_tokens']}",
        f"learner.gradient_checkpointing={checkpointing}", "coordinator.prompts_per_step=512",
    )  # fmt: skip
    peak = seen["summary"][variant]["peak_gib"]
    assert peak <= process.bytes / 2**30 <= 1.35 * peak


def test_time_is_told_only_by_a_measured_rate(recipe: Path) -> None:
    assert "\ntime: " not in run(recipe).stdout
    assert planned(recipe, "--step-seconds", "30")["seconds"] == 60.0
    assert "\ntime: 1 min 0 s" in run(recipe, "--step-seconds", "30").stdout
    for other in ("nan", "inf", "-1", "soon"):
        assert run(recipe, "--step-seconds", other).exit_code == 2


def test_missing_weights_and_an_old_run_are_only_mentioned(recipe: Path) -> None:
    (recipe.parent / "runs" / "story").mkdir(parents=True)
    notes = "\n".join(planned(recipe)["notes"])
    assert "has no *.safetensors" in notes and "run.name=story-2" in notes
    assert len(problems(read_recipe(recipe, []))) == 2  # train refuses both


def test_everything_else_is_refused_in_the_words_of_train(recipe: Path) -> None:
    write_headers(recipe.parent / "model" / "model.safetensors", {"a": [2]})
    for change in (["coordinator.scorer=other", "coordinator.data.path=none.jsonl"], ["learner.lerning_rate=1"]):
        with pytest.raises(ConfigError) as refused:
            prepare(recipe, change)
        done = run(recipe, *change)
        assert done.exit_code == 2 and done.stderr.startswith(f"{refused.value}\nANT-CONFIG: ")
        told = json.loads(run(recipe, *change, "--json").stderr)
        assert told["code"] == "ANT-CONFIG" and told["what_to_do"]
        assert [told["what"], *told["problems"]] == [line.strip() for line in str(refused.value).splitlines()]


def test_broken_weights_are_refused(recipe: Path) -> None:
    (recipe.parent / "model" / "model.safetensors").write_bytes(b"weights")
    done = run(recipe)
    assert done.exit_code == 2 and "not a whole safetensors file" in done.stderr


def test_a_model_of_another_kind_is_planned_without_memory(recipe: Path) -> None:
    write_config(recipe.parent / "model", {"model_type": "mamba"})
    tree = planned(recipe)
    assert tree["memory"] == [] and any("memory is not known" in note for note in tree["notes"])


def test_rows_of_the_preview_and_its_errors() -> None:
    row = {"dataset": "train", "place": "line 1", "text": "a", "tokens": 1, "reference": "b", "problem": ""}
    assert command._rows([sys.executable, "-c", f"print({json.dumps(row)!r})"]) == [row]
    failing = "import sys; print('ANT-CONFIG: no column prompt', file=sys.stderr); sys.exit(2)"
    with pytest.raises(ConfigError, match=r"coordinator\.data: ANT-CONFIG: no column prompt"):
        command._rows([sys.executable, "-c", failing])


def test_the_preview_is_asked_with_a_file_that_it_can_read(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is read; the stand-in's tokenizer is refused."""
    loaded: Recipe = read_recipe(recipe, [])
    with pytest.raises(ConfigError, match="tokenizer"):
        command._preview(loaded)


def test_planning_loads_no_heavy_library(recipe: Path) -> None:
    probe = (
        "import json, sys\nsys.argv = ['antiphon', 'plan', sys.argv[1]]\n"
        "from services.cli.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    path = f"{ROOT}:{ROOT / 'protos'}"
    done = subprocess.run(
        [sys.executable, "-c", probe, str(recipe)], cwd=recipe.parent, env={"PYTHONPATH": path, "PATH": ""},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Updates planned" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1]) == []
