"""What a recipe refuses, and with which words; where its paths point."""

from __future__ import annotations

import copy
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.launch.local import visible_gpus
from services.cli.recipe import next_name, problems, read_recipe, save_recipe
from services.common.errors import ConfigError
from tests.unit.cli.standins.recipe import WEIGHTS

HEAVY = ("torch", "vllm", "deepspeed", "transformers", "ray", "datasets", "numpy", "tokenizers", "rich.live")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a model folder, data and a reward file."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "heldout.jsonl").write_text("{}\n")
    (tmp_path / "reward.py").write_text("def score(prompt, response, reference): return 1.0\n")
    return tmp_path


def tree() -> dict[str, Any]:
    return copy.deepcopy(
        {
            "run": {"name": "demo"},
            "model": {"path": "model"},
            "coordinator": {
                "steps": 2,
                "data": {"path": "train.jsonl", "max_prompt_tokens": 100},
                "sampling": {"max_tokens": 24},
                "prompts_per_step": 8,
                "samples_per_prompt": 8,
                "scorer": "exact",
                "evaluation": {"path": "heldout.jsonl", "max_tokens": 24},
            },
            "rollout": {"max_sequence_tokens": 256},
            "reward": {"scorers": [{"name": "exact", "path": "reward.py"}]},
            "learner": {},
        }
    )


def written(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    content = tree()
    for dotted, value in (changes or {}).items():
        *parents, last = dotted.split(".")
        node = content
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_recipe_that_fits_has_no_problems_and_absolute_paths(folder: Path) -> None:
    recipe = read_recipe(written(folder), ["run.seed=5", "learner.optimizer.learning_rate=1e-5"])
    assert problems(recipe) == []
    assert recipe.run_dir == folder / "runs" / "demo"
    assert recipe.model.path == str(folder / "model")
    assert recipe.data_files() == [folder / "train.jsonl", folder / "heldout.jsonl", folder / "reward.py"]
    assert (recipe.run.seed, recipe.learner.optimizer.learning_rate) == (5, 1e-5)


def test_the_saved_recipe_reads_back_to_the_same_from_anywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read_recipe(written(folder), ["run.directory=elsewhere"])
    save_recipe(recipe, folder / "saved.yaml")
    monkeypatch.chdir("/")
    assert read_recipe(folder / "saved.yaml", []) == recipe


def test_scorers_without_a_file_and_a_reference_model_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [
        "reward.scorers=[{name: right, type: number}, {name: all, type: composite, parts: {right: 1.0}}]",
        "reward.reference={path: model, device: cpu}",
        "coordinator.scorer=all",
    ]
    recipe = read_recipe(written(folder), changes)
    assert problems(recipe) == []
    assert recipe.data_files() == [folder / "train.jsonl", folder / "heldout.jsonl"]
    assert recipe.reward.reference is not None and recipe.reward.reference.path == str(folder / "model")
    save_recipe(recipe, folder / "saved.yaml")
    monkeypatch.chdir("/")
    assert read_recipe(folder / "saved.yaml", []) == recipe


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("learner.optimizer.learning_rat=1", "learning_rat: unknown key; did you mean 'learning_rate'?"),
        ("rolout.max_running=1", "rolout: unknown key; did you mean 'rollout'?"),
        ("coordinator.samples_per_prompt=1", "every advantage would be 0; take 2 or more"),
        ("run.name=My Run", "run.name"),
        ("run.name=../x", "run.name"),
        ("coordinator.steps=many", "coordinator.steps"),
    ],
)
def test_what_does_not_parse_is_named(folder: Path, assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_recipe(written(folder), [assignment])
    assert message in str(caught.value)


@pytest.mark.parametrize("there", ["nothing", "a folder", "the library"])
def test_a_sink_whose_library_is_not_installed_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    """A folder of that name is none: W&B leaves one wherever it was used."""
    spec = importlib.machinery.ModuleSpec("wandb", None, origin="wandb/__init__.py" if there == "the library" else None)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (None if there == "nothing" else spec) if name == "wandb" else find(name),
    )
    found = problems(read_recipe(written(folder), ["coordinator.sinks=[wandb]"]))
    if there == "the library":
        assert found == []
    else:
        (problem,) = found
        assert problem.startswith("coordinator.sinks: wandb needs the library wandb, which is not installed: .venv/bin")


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (
            ["coordinator.sinks=[wandb]"],
            "coordinator.sinks: wandb needs the library wandb, which is not installed: .venv",
        ),
        (["coordinator.scorer=other"], "coordinator.scorer: no scorer 'other' in reward.scorers; there is exact"),
        (["coordinator.algorithm.kl.coefficient=0.1"], "`reward.reference: {}` takes the one that the run begins with"),
        (["coordinator.data.path=x.jsonl"], "coordinator.data.path: no such file"),
        (["coordinator.evaluation.path=x.jsonl"], "coordinator.evaluation.path: no such file"),
        (["coordinator.data.path=trian.jsonl"], "trian.jsonl; did you mean "),
        (["coordinator.data.path=.", "coordinator.data.kind=parquet"], "coordinator.data.path: "),
        (["coordinator.evaluation.path='*.csv'"], "coordinator.evaluation.path: "),
        (
            ["coordinator.data.path=null", "coordinator.data.sources=[{path: y.jsonl}]"],
            "coordinator.data.sources.0.path: no",
        ),
        (["coordinator.data.template=own.jinja"], "coordinator.data.template: no such file: "),
        (["coordinator.data.template='{{ messages[0].content }}'"], None),
        (["coordinator.data.path=owner/name:train"], None),  # on the Hub; asked when the run starts
        (["reward.scorers.0.path=x.py"], "reward.scorers.0.path: no such file"),
        (["reward.scorers.0.path=train.jsonl", "model.path=model"], None),  # a JSON object is Python too
        (["model.path=nowhere"], "model.path: no such folder"),
        (["model.path=."], "has no tokenizer.json"),
        (["reward.reference.path=nowhere"], "reward.reference.path: no such folder"),
        (["reward.reference.path=."], "reward.reference.path: "),
        (["rollout.max_sequence_tokens=4096"], "max_position_embeddings, 2048; at most 2048"),
        (
            ["rollout.max_sequence_tokens=120"],
            "coordinator.data.max_prompt_tokens + coordinator.sampling.max_tokens = 100 + 24 = 124 > "
            "rollout.max_sequence_tokens = 120; nearest that fit: rollout.max_sequence_tokens=124 or "
            "coordinator.sampling.max_tokens=20 or coordinator.data.max_prompt_tokens=96",
        ),
        (["rollout.max_sequence_tokens=32"], "has no room for the probe of 32 tokens"),
        (["learner.gpus=[0]", "rollout.gpus=[1]"], None),
        (["learner.gpus=[0, 1]"], "learner.gpus: [0, 1] are 2, ranks = 1 take 1"),
        (["learner.gpus=[0]", "rollout.gpus=[0]"], "rollout.gpus: 0 is named in learner.gpus already"),
        (
            ["rollout.gpus=[1]", "rollout.tensor_parallel=2", "coordinator.rollout_workers=2"],
            "rollout.gpus: [1] are 1, 2 engine(s) x tensor_parallel = 2 x 2 take 4",
        ),
        (["coordinator.evaluation.max_tokens=200"], "coordinator.evaluation.max_tokens = 100 + 200 = 300"),
    ],
)
def test_what_does_not_fit_is_said_with_what_does(folder: Path, assignments: list[str], message: str | None) -> None:
    found = "\n".join(problems(read_recipe(written(folder), assignments)))
    if message is None:
        assert found == ""
    else:
        assert message in found


def test_paths_of_data_are_absolute_and_names_on_the_hub_stay(folder: Path) -> None:
    (folder / "own.jinja").write_text("{{ messages[0].content }}")
    sources = [{"path": ["train.jsonl", "*.jsonl"]}, {"path": "owner/name", "split": "train"}]
    changes = {"coordinator.data": {"sources": sources, "template": "own.jinja", "max_prompt_tokens": 100}}
    recipe = read_recipe(written(folder, changes), [])
    local, hub = recipe.coordinator.data.sources
    assert local.path == (str(folder / "train.jsonl"), str(folder / "*.jsonl"))
    assert hub.path == "hf://owner/name"
    assert recipe.coordinator.data.template == str(folder / "own.jinja")
    assert problems(recipe) == []
    names = [file.name for file in recipe.data_files()]
    assert names == ["train.jsonl", "heldout.jsonl", "train.jsonl", "heldout.jsonl", "own.jinja", "reward.py"]
    save_recipe(recipe, folder / "saved.yaml")
    assert read_recipe(folder / "saved.yaml", []) == recipe


@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "said"),
    [
        (9, 3, 3, None),
        (14, 2, 2, None),
        (32, 8, 16, None),  # two GPUs for each key-value head
        (9, 3, 2, "num_attention_heads / tensor_parallel = 9 / 2 = 4.5, which is not whole; nearest that fit: 1 or 3"),
        (14, 2, 4, "num_attention_heads / tensor_parallel = 14 / 4 = 3.5, which is not whole; nearest that fit: 2 or 14"),  # noqa: E501
        (24, 8, 12, "num_key_value_heads / tensor_parallel = 8 / 12 = 0.6667, which is not whole; nearest that fit: 8 or 24"),  # noqa: E501
        (8, 8, 16, "num_attention_heads / tensor_parallel = 8 / 16 = 0.5, which is not whole; nearest that fit: 8"),
    ],
)  # fmt: skip
def test_an_engine_shares_out_whole_heads(
    folder: Path, heads: int, key_heads: int, width: int, said: str | None
) -> None:
    config = {"max_position_embeddings": 2048, "num_attention_heads": heads, "num_key_value_heads": key_heads}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    found = problems(read_recipe(written(folder), [f"rollout.tensor_parallel={width}"]))
    assert found == ([] if said is None else [f"rollout.tensor_parallel: {said}"])


def test_cut_weights_are_refused_before_anything_starts(folder: Path) -> None:
    (folder / "model" / "model.safetensors").write_bytes(WEIGHTS[:40])
    (problem,) = problems(read_recipe(written(folder), []))
    assert problem.startswith("model.path: ") and "not a whole safetensors file" in problem


def test_workers_see_the_gpus_that_the_recipe_gives_them(folder: Path) -> None:
    changes = ["learner.gpus=[3, 4]", "learner.ranks=2", "rollout.gpus=[0, 1, 5, 6]", "rollout.tensor_parallel=2"]
    recipe = read_recipe(written(folder), [*changes, "coordinator.rollout_workers=2"])
    assert problems(recipe) == []
    shown = [
        visible_gpus(recipe, *worker) for worker in (("learner", 0), ("rollout", 0), ("rollout", 1), ("reward", 0))
    ]
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in shown] == ["3,4", "0,1", "5,6", None]


def test_all_problems_are_listed_at_once(folder: Path) -> None:
    (folder / "reward.py").write_text("def score(:\n")
    changes = ["coordinator.scorer=exact@9", "reward.scorers.0.version=1", "model.path=nowhere"]
    found = problems(read_recipe(written(folder), changes))
    assert len(found) == 3
    assert any("reward.scorers.0.path: not Python" in line for line in found)
    assert any("there is exact@1" in line for line in found)


def test_a_scorer_may_be_asked_for_by_version(folder: Path) -> None:
    for wanted, version, fits in [("exact@1", 1, True), ("exact@2", 1, False), ("exact@abc", None, True)]:
        changes = [f"coordinator.scorer={wanted}"]
        changes += [f"reward.scorers.0.version='{version}'"] if version else []
        assert (problems(read_recipe(written(folder), changes)) == []) is fits


def test_an_existing_run_is_refused_with_the_next_name(folder: Path) -> None:
    for name in ("demo", "demo-2"):
        (folder / "runs" / name).mkdir(parents=True)
    assert problems(read_recipe(written(folder), [])) == [
        f"run.name: {folder}/runs/demo exists already; name this run otherwise: run.name=demo-3"
    ]
    assert next_name(read_recipe(written(folder), ["run.name=demo-2"]).run) == "demo-3"
    assert next_name(read_recipe(written(folder), ["run.name=try-9"]).run) == "try-10"


def test_the_command_and_a_recipe_load_no_heavy_library(folder: Path) -> None:
    program = (
        "import sys; import services.cli.__main__, services.cli.train; from pathlib import Path; "
        f"services.cli.train.prepare(Path({str(written(folder))!r}), []); "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--version"], 0, "antiphon 0."),
        (["--help"], 0, "train"),
        (["train", "--help"], 0, "RECIPE"),
        (["train", "absent.yaml"], 2, "absent.yaml: cannot be read"),
        (["trian"], 2, "No such command 'trian'"),
    ],
)
def test_the_command_answers(folder: Path, arguments: list[str], code: int, said: str) -> None:
    command = [sys.executable, "-m", "services.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
