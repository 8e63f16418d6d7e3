"""`antiphon resume` before anything starts: what it refuses, and what it takes up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from services.cli.manifest import write_manifest
from services.cli.recipe import read_recipe, save_recipe
from services.cli.resume import prepare, resume
from services.cli.run_lock import locked
from services.common.errors import ConfigError
from services.common.processes import RUN_ID_VARIABLE
from tests.unit.cli.standins.recipe import write_recipe


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """What a run leaves that was stopped after a Step."""
    recipe = read_recipe(write_recipe(tmp_path), [], tmp_path)
    recipe.run_dir.mkdir(parents=True)
    save_recipe(recipe, recipe.run_dir / "recipe.yaml")
    write_manifest(recipe, "story-abc123", ["antiphon"], recipe.run_dir / "manifest.json")
    (recipe.run_dir / "run.db").touch()
    return recipe.run_dir


def events(run_dir: Path, outcome: str) -> None:
    lines = [{"sequence": "1"}, {"runEnded": {"outcome": outcome}}]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_it_takes_to_run_may_change_and_the_id_stays(run_dir: Path) -> None:
    changes = ["coordinator.steps=9", "coordinator.train_seconds=5", "learner.ranks=2", "rollout.kv_cache_gib=1"]
    recipe, run_id = prepare(run_dir, changes)
    assert (run_id, recipe.coordinator.steps, recipe.learner.ranks) == ("story-abc123", 9, 2)
    assert recipe.run_dir == run_dir


def test_what_the_run_is_made_of_may_not_change_and_every_key_is_named(run_dir: Path) -> None:
    changes = [
        "coordinator.prompts_per_step=4",
        "coordinator.data.max_prompt_tokens=7",
        "model.dtype=bfloat16",
        "run.seed=8",
        "coordinator.steps=3",
    ]
    with pytest.raises(ConfigError) as caught:
        prepare(run_dir, changes)
    text = str(caught.value)
    assert "4 problem(s)" in text
    for said in (
        "coordinator.prompts_per_step: 4, the run began with 2",
        "coordinator.data.max_prompt_tokens: 7, the run began with",
        "model.dtype: 'bfloat16', the run began with 'float32'",
        "run.seed: 8, the run began with 7",
    ):
        assert said in text


def test_what_would_make_replayed_steps_another_policy_may_not_change(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.optimizer\.learning_rate: 0\.5, the run began with"):
        prepare(run_dir, ["learner.optimizer.learning_rate=0.5"])


def test_a_recipe_that_was_edited_is_held_against_what_the_run_began_with(run_dir: Path) -> None:
    path = run_dir / "recipe.yaml"
    tree = yaml.safe_load(path.read_text())
    tree["coordinator"]["algorithm"]["entropy_coefficient"] = 0.25
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=r"entropy_coefficient: 0\.25, the run began with 0\.0"):
        prepare(run_dir, [])


def test_weights_of_another_size_are_named(run_dir: Path) -> None:
    manifest = json.loads((run_dir / "manifest.json").read_text())
    manifest["weights"] = {"gone.safetensors": {"bytes": 9}}
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"gone\.safetensors: no bytes, the run began with 9"):
        prepare(run_dir, [])


def test_inputs_that_were_changed_since_are_named(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "reference": "c"}\n')
    with pytest.raises(ConfigError, match=r"train\.jsonl: it was changed since the run began"):
        prepare(run_dir, [])


@pytest.mark.parametrize(
    ("gone", "said"),
    [("run.db", "there is no run.db"), ("manifest.json", "without it"), ("recipe.yaml", "no folder of a run")],
)
def test_a_folder_that_lacks_something_is_refused(run_dir: Path, gone: str, said: str) -> None:
    (run_dir / gone).unlink()
    with pytest.raises(ConfigError, match=said):
        resume(run_dir, [])


def test_a_finished_run_is_refused_unless_it_is_made_longer(run_dir: Path) -> None:
    events(run_dir, "finished")
    with pytest.raises(ConfigError, match=r"is finished, all 2 Steps.*coordinator\.steps=4"):
        prepare(run_dir, [])
    assert prepare(run_dir, ["coordinator.steps=3"])[0].coordinator.steps == 3
    events(run_dir, "stopped")
    prepare(run_dir, [])


def test_a_run_that_was_moved_is_refused(run_dir: Path) -> None:
    moved = run_dir.rename(run_dir.with_name("moved"))
    with pytest.raises(ConfigError, match="move it back"):
        prepare(moved, [])


def test_a_run_that_another_command_follows_is_alive(run_dir: Path) -> None:
    with locked(run_dir), pytest.raises(ConfigError, match="the run is alive, another command follows it"):
        resume(run_dir, [])
    with locked(run_dir):
        pass  # given up with the block above


def test_a_run_whose_processes_are_left_is_alive(run_dir: Path) -> None:
    left = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env=os.environ | {RUN_ID_VARIABLE: "story-abc123"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert left.stdout is not None and left.stdout.readline()
        with pytest.raises(ConfigError, match=f"1 of its processes, e.g. {left.pid}"):
            prepare(run_dir, [])
    finally:
        left.kill()
        left.communicate()
