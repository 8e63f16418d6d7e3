"""What a user may name to export, ask or evaluate, and what is said of anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.subject import find_run_folder, find_subject, weights_of_run
from services.cli.told import NoModel, NoRun, NoWeights
from tests.unit.cli.standins.recipe import write_recipe
from tests.unit.cli.standins.run_folder import make_run


def test_models_runs_and_checkpoints(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    run = make_run(tmp_path / "runs" / "first", steps=(3,))
    assert find_subject(tmp_path / "model").kind == "model"
    assert find_subject(run).run_dir == run
    found = find_subject(run / "checkpoints" / "step-3")
    assert (found.kind, found.recipe_path) == ("checkpoint", run / "recipe.yaml")


def test_the_newest_is_the_newest_by_number_and_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=(9, 10, 100), policies=(9,))
    (run / "checkpoints" / "step-200").mkdir()  # its manifest was never written
    (run / "checkpoints" / ".step-300.ab.partial").mkdir()
    assert weights_of_run(run).path.name == "step-100"
    assert weights_of_run(run, 9).path.name == "policy-9"  # exported already
    with pytest.raises(NoWeights, match=r"of Step 11; there are those of 9, 10, 100"):
        weights_of_run(run, 11)
    with pytest.raises(NoWeights, match=r"no checkpoint or exported policy$"):
        weights_of_run(make_run(tmp_path / "new"))


def test_anything_else_is_told_with_what_is_near(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    run = make_run(tmp_path / "runs" / "first")
    for path, said in (
        (tmp_path / "runs", "runs in .*: first"),
        (tmp_path / "mdoel", "no such folder .*models in .*: model"),
        (tmp_path / "recipe.yaml", "no such folder"),
    ):
        with pytest.raises(NoModel, match=said):
            find_subject(path)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(NoModel, match=r"it lacks \*.safetensors; no run"):
        find_subject(tmp_path / "model")
    assert find_run_folder(run) == run
    (run / "manifest.json").write_text("{")
    with pytest.raises(NoRun, match=r"no recipe.yaml and manifest.json"):
        find_run_folder(run)
    with pytest.raises(NoRun, match=r"runs in .*: first"):
        find_run_folder(tmp_path / "runs" / "frist")
