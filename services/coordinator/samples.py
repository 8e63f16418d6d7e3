"""What a run sampled, with its scores, out of its ledger: as text, for people. Changes nothing; the run may be alive.

A process: `python -m services.coordinator.samples --model DIR --ledger run.db` prints a JSON object for each sample.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from antiphon.learner.v1 import learner_pb2
from antiphon.reward.v1 import reward_pb2
from antiphon.types.v1 import trajectory_pb2

from services.common.errors import AntiphonError, ConfigError, NotFound
from services.coordinator import trajectories
from services.coordinator.ledger_schema import SCHEMA_VERSION
from services.coordinator.text import Text

BUSY_SECONDS = 10.0
Pick = Literal["first", "best", "worst"]
_ORDERS: dict[Pick, str] = {
    "first": "step IS NULL, step, position, admission, sample",
    "best": "value IS NULL, value DESC, step, admission, sample",
    "worst": "value IS NULL, value, step, admission, sample",
}


@dataclass(frozen=True)
class Sample:
    """One trajectory. Example: "train/0/17/3", Step 4, sampled by version 3, score 1.0, advantage 0.87."""

    trajectory_id: str
    step: int | None
    """That trained on it; None: none yet, or it was left out."""
    policy_versions: list[int]
    prompt: str
    """As the model saw it, special tokens included."""
    response: str
    score: float | None
    failure: str | None
    """Why there is no score; None where there is one, or nobody has answered yet."""
    parts: dict[str, float]
    scorer: str | None
    advantage: float | None
    """Of its tokens; their mean where they differ."""
    tokens: int
    finish_reason: str
    stop_string: str


def read_samples(ledger: Path, text: Text, *, step: int | None, pick: Pick, count: int) -> Iterator[Sample]:
    """`count` samples of a Step, or of the whole run; 0: all. Of the best or worst those with a score come first.

    Raises ConfigError for what is no ledger of this build, NotFound for a Step that the ledger lacks.
    """
    try:
        with contextlib.closing(open_read_only(ledger)) as db:
            (version,) = db.execute("SELECT schema_version FROM run").fetchone() or (0,)
            if version != SCHEMA_VERSION:
                raise ConfigError(f"{ledger}: its tables have version {version}, this build reads {SCHEMA_VERSION}")
            if step is not None:
                _require_step(db, ledger, step)
            rows = db.execute(
                "SELECT trajectories.trajectory_id, step, trajectories.message, scores.message, batch_rows.message "
                "FROM trajectories JOIN groups USING (group_id) LEFT JOIN scores USING (trajectory_id) "
                "LEFT JOIN batch_rows USING (trajectory_id) WHERE :step IS NULL OR step = :step "
                f"ORDER BY {_ORDERS[pick]} LIMIT :count",
                {"step": step, "count": count or -1},
            )
            for trajectory_id, at, *messages in rows:
                yield _sample(trajectory_id, at, messages, text)
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{ledger}: no ledger that can be read: {error}") from None


def newest_step(ledger: Path) -> int | None:
    """The last Step that has its Batch; None before the first."""
    try:
        with contextlib.closing(open_read_only(ledger)) as db:
            found: tuple[int | None] = db.execute("SELECT max(step) FROM batches").fetchone()
            return found[0]
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{ledger}: no ledger that can be read: {error}") from None


def open_read_only(ledger: Path) -> sqlite3.Connection:
    """A connection that cannot write, beside a run that does."""
    if not ledger.is_file():
        raise NotFound(f"{ledger}: there is no ledger: the run has sampled nothing yet")
    # Without a write-ahead log nobody has it open, and a reader would leave one of its own behind.
    alone = "" if ledger.with_name(f"{ledger.name}-wal").exists() else "&immutable=1"
    return sqlite3.connect(f"file:{quote(str(ledger))}?mode=ro{alone}", uri=True, timeout=BUSY_SECONDS)


def _require_step(db: sqlite3.Connection, ledger: Path, step: int) -> None:
    first, last = db.execute("SELECT min(step), max(step) FROM batches").fetchone()
    if db.execute("SELECT 1 FROM batches WHERE step = ?", (step,)).fetchone() is None:
        there = "no Step has been trained yet" if last is None else f"there are Steps {first} to {last}"
        raise NotFound(f"{ledger}: no Step {step}; {there}")


def _sample(trajectory_id: str, step: int | None, messages: Sequence[bytes | None], text: Text) -> Sample:
    trajectory = trajectory_pb2.Trajectory.FromString(messages[0] or b"")
    answer = reward_pb2.ScoreResponse.FromString(messages[1]) if messages[1] is not None else None
    row = learner_pb2.TrainTrajectory.FromString(messages[2]) if messages[2] is not None else None
    sampled = list(trajectory.loss_mask)
    prompt = list(trajectory.token_ids)[: sampled.index(True) if True in sampled else len(sampled)]
    scored = answer is not None and answer.WhichOneof("outcome") == "score"
    failed = answer is not None and not scored
    advantages = [a for a, mask in zip(row.advantages, row.loss_mask, strict=False) if mask] if row is not None else []
    ids = trajectories.sampled_ids(trajectory)
    return Sample(
        trajectory_id=trajectory_id,
        step=step,
        policy_versions=sorted({span.policy_version for span in trajectory.version_spans}),
        prompt=text.decode(prompt, special_tokens=True),
        response=text.decode(ids, special_tokens=False),
        score=answer.score.value if answer is not None and scored else None,
        failure=f"{answer.failure.reason}: {answer.failure.message}" if answer is not None and failed else None,
        parts={part.name: part.value for part in answer.score.parts} if answer is not None and scored else {},
        scorer=answer.scorer if answer is not None else None,
        advantage=sum(advantages) / len(advantages) if advantages else None,
        tokens=len(ids),
        finish_reason=trajectory_pb2.FinishReason.Name(trajectory.finish_reason).removeprefix("FINISH_REASON_").lower(),
        stop_string=trajectory.stop_string,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="services.coordinator.samples", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the run's model, for its tokenizer")
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--step", type=int)
    parser.add_argument("--newest-step", action="store_true", help="of the last Step that has its Batch")
    parser.add_argument("--pick", choices=tuple(_ORDERS), default="first")
    parser.add_argument("--count", type=int, default=0, help="0: all")
    given = parser.parse_args(arguments)
    try:
        step = newest_step(given.ledger) if given.newest_step else given.step
        text = Text(given.model)
        for sample in read_samples(given.ledger, text, step=step, pick=given.pick, count=given.count):
            sys.stdout.write(json.dumps(asdict(sample), ensure_ascii=False) + "\n")
    except AntiphonError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
