"""What a run sampled, read beside the run that writes it, and by `antiphon samples`."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from antiphon.learner.v1 import learner_pb2
from antiphon.reward.v1 import reward_pb2
from antiphon.types.v1 import trajectory_pb2

from services.cli import samples as command
from services.cli.told import NoSamples
from services.common.errors import ConfigError, NotFound
from services.coordinator import samples
from services.coordinator.batch import Batch
from services.coordinator.data import Prompt
from services.coordinator.groups import Group, GroupState
from services.coordinator.identity import PromptKey
from services.coordinator.ledger import Ledger
from services.coordinator.text import Text
from tests.tiny.models import BOS, EOS, make_tokenizer

WORDS = ("ab", "cd")
"""Of the two answers to each prompt."""


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    """A run in the middle: two Steps have their Batches, a third prompt is sampled and not scored."""
    (tmp_path / "model").mkdir()
    make_tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    made = Ledger.create(tmp_path / "run.db", "run-1", 7)
    for row, scores in enumerate(([0.25, 1.0], [0.5, None])):
        await sample(made, row)
        await made.record_scores([answer(row, n, value) for n, value in enumerate(scores)], GroupState.COMPLETE)
        await made.record_batch(batch(row + 1, row), prompts_wanted=1, next_admission=row + 1)
    await sample(made, 2)
    yield made
    await made.close()


async def sample(ledger: Ledger, row: int) -> None:
    key, tokenizer = PromptKey("train", 0, row), make_tokenizer()
    prompt = tokenizer.encode(f"{BOS}q{row}").ids
    await ledger.admit(Group(key, Prompt(row, (), "", tuple(prompt), "", "{}"), 2), row)
    rows = []
    for number, word in enumerate(WORDS):
        ids = tokenizer.encode(word + EOS).ids
        trajectory = trajectory_pb2.Trajectory(
            prompt_id=key.message(), sample_number=number, token_ids=[*prompt, *ids],
            loss_mask=[False] * len(prompt) + [True] * len(ids), finish_reason=trajectory_pb2.FINISH_REASON_STOP,
        )  # fmt: skip
        trajectory.version_spans.add(start=len(prompt), end=len(prompt) + len(ids), policy_version=row)
        rows.append(trajectory)
    await ledger.record_trajectories(rows, GroupState.SAMPLED)


def answer(row: int, number: int, value: float | None) -> reward_pb2.ScoreResponse:
    made = reward_pb2.ScoreResponse(
        prompt_id=PromptKey("train", 0, row).message(), sample_number=number, scorer="exact@1"
    )
    if value is None:
        made.failure.kind, made.failure.reason = reward_pb2.FAILURE_KIND_DATA, "exception"
        made.failure.message = "ValueError: no"
    else:
        made.score.value = value
        made.score.parts.add(name="form", value=value / 2)
    return made


def batch(step: int, row: int) -> Batch:
    rows = [
        learner_pb2.TrainTrajectory(
            trajectory_id=f"train/0/{row}/{number}", loss_mask=[False, True, True], advantages=[9.0, 0.5, 0.5]
        )
        for number in range(2)
        if (row, number) != (1, 1)  # what failed is left out
    ]
    return Batch(learner_pb2.StepHeader(step_id=step, batch_digest=bytes([step] * 32)), rows, {}, 0, 0, 0)


def read(ledger: Ledger, **asked: Any) -> list[samples.Sample]:
    text = Text(ledger.path.parent / "model")
    return list(samples.read_samples(ledger.path, text, **{"step": None, "pick": "first", "count": 0, **asked}))


async def test_everything_of_one_sample(ledger: Ledger) -> None:
    first = read(ledger, step=1)[1]
    assert first == samples.Sample(
        trajectory_id="train/0/0/1", step=1, policy_versions=[0], prompt=f"{BOS}q0", response="cd", score=1.0,
        failure=None, parts={"form": 0.5}, scorer="exact@1", advantage=0.5, tokens=3, finish_reason="stop",
        stop_string="",
    )  # fmt: skip


async def test_of_a_step_of_the_run_the_best_and_the_worst(ledger: Ledger) -> None:
    def ids(**asked: Any) -> list[str]:
        return [one.trajectory_id.removeprefix("train/0/") for one in read(ledger, **asked)]

    assert samples.newest_step(ledger.path) == 2
    assert ids(step=2) == ["1/0"]
    assert ids() == ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1"]  # in no Step: failed, and not yet
    assert ids(pick="best", count=2) == ["0/1", "1/0"]
    assert ids(pick="worst") == ["0/0", "1/0", "0/1", "1/1", "2/0", "2/1"]  # without a score at the end
    failed, waiting = read(ledger)[3:5]
    assert (failed.score, failed.failure, failed.step) == (None, "exception: ValueError: no", None)
    assert (waiting.score, waiting.failure, waiting.scorer) == (None, None, None)
    with pytest.raises(NotFound, match="no Step 7; there are Steps 1 to 2"):
        read(ledger, step=7)


async def test_reading_changes_nothing_whether_the_run_is_alive_or_over(ledger: Ledger) -> None:
    folder = ledger.path.parent
    alive = {path.name for path in folder.iterdir()}
    assert alive >= {"run.db", "run.db-wal"}
    assert len(read(ledger)) == 6
    assert {path.name for path in folder.iterdir()} == alive
    with contextlib.closing(samples.open_read_only(ledger.path)) as db, pytest.raises(sqlite3.Error, match="readonly"):
        db.execute("DELETE FROM scores")
    await sample(ledger, 3)  # the run goes on
    await ledger.close()
    over = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert "run.db-wal" not in over
    assert len(read(ledger)) == 8
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == over


async def test_what_is_no_ledger_is_told(tmp_path: Path, ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotFound, match="has sampled nothing yet"):
        samples.open_read_only(tmp_path / "none.db")
    (tmp_path / "text.db").write_text("no database, and long enough to be looked at as one" * 40)
    with pytest.raises(ConfigError, match="no ledger that can be read"):
        samples.newest_step(tmp_path / "text.db")
    arguments = ["--model", str(tmp_path / "model"), "--ledger", str(ledger.path)]
    assert samples.main([*arguments, "--newest-step"]) == 0
    assert json.loads(capsys.readouterr().out)["trajectory_id"] == "train/0/1/0"
    assert samples.main([*arguments, "--step", "9"]) == 2
    assert capsys.readouterr().err.startswith("ANT-NOT-FOUND: ")


# The command: answers to held-out prompts are files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    (folder / "evaluations").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("{}")
    (folder / "manifest.json").write_text('{"run_id": "first-0a1b2c"}')
    for version, scores in ((9, [0.0]), (10, [0.5, None, 1.0])):
        lines = [
            {"row": row, "sample": 0, "policy_version": version, "prompt": "p", "response": "r", "score": score,
             "parts": {}, "failure": None if score is not None else "DATA, timeout", "tokens": 2, "reference": "x",
             "finish_reason": "FINISH_REASON_LENGTH"}
            for row, score in enumerate(scores)
        ]  # fmt: skip
        path = folder / "evaluations" / f"held-out-v{version}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def heldout(run: Path, **asked: Any) -> list[dict[str, Any]]:
    return command.heldout(run, **{"step": None, "best": None, "worst": None, "everything": False, **asked})


def test_answers_to_held_out_prompts_of_the_newest_policy(run: Path) -> None:
    assert [one["row"] for one in heldout(run)] == [0, 1, 2]
    assert [one["row"] for one in heldout(run, best=1)] == [2]
    assert [one["row"] for one in heldout(run, worst=3)] == [0, 2, 1]
    assert [one["score"] for one in heldout(run, step=9)] == [0.0]
    text = command.as_text(heldout(run))
    assert text.startswith('held-out, row 0, policy 10: score 0.5, 2 tokens, length\n  prompt:   "p"\n')
    assert "row 1, policy 10: no score, 2 tokens, length" in text and "failure:  DATA, timeout" in text
    with pytest.raises(NoSamples, match="none of policy 3; there are those of 9, 10"):
        heldout(run, step=3)
    with pytest.raises(ConfigError, match="--best and --all: one of them at a time"):
        heldout(run, best=1, everything=True)
    with pytest.raises(NoSamples, match=r"there is no run\.db"):
        command.samples(run, step=None, best=None, worst=None, everything=False)
