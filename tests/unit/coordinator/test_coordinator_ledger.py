"""The ledger: its settings, what its constraints refuse, group commit, and what a kill leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from antiphon.learner.v1 import learner_pb2
from antiphon.reward.v1 import reward_pb2
from antiphon.types.v1 import policy_pb2, trajectory_pb2

from services.common.errors import ConfigError, Conflict, Internal, Unavailable
from services.coordinator.batch import Batch
from services.coordinator.data import Prompt
from services.coordinator.groups import Group, GroupState
from services.coordinator.identity import PromptKey
from services.coordinator.ledger import Ledger, connect
from services.coordinator.ledger_schema import SCHEMA_VERSION

SAMPLES = 2
PLACE = {"prompts_wanted": 1, "next_admission": 10}


def group(row: int) -> Group:
    return Group(PromptKey("train", 0, row), Prompt(row, (), "", (1, 2), "", "{}"), SAMPLES)


def trajectories(row: int, version: int = 0) -> list[trajectory_pb2.Trajectory]:
    rows = []
    for sample in range(SAMPLES):
        trajectory = trajectory_pb2.Trajectory(
            prompt_id=PromptKey("train", 0, row).message(),
            sample_number=sample,
            token_ids=[1, 2, 3],
            loss_mask=[False, False, True],
        )
        trajectory.version_spans.add(start=2, end=3, policy_version=version)
        rows.append(trajectory)
    return rows


def score(row: int, sample: int, value: float = 1.0) -> reward_pb2.ScoreResponse:
    answer = reward_pb2.ScoreResponse(
        prompt_id=PromptKey("train", 0, row).message(), sample_number=sample, scorer="s@1"
    )
    answer.score.value = value
    return answer


def batch(step: int, rows: list[int], digest: int = 0) -> Batch:
    messages = [
        learner_pb2.TrainTrajectory(trajectory_id=f"train/0/{row}/{sample}")
        for row in rows
        for sample in range(SAMPLES)
    ]
    header = learner_pb2.StepHeader(step_id=step, batch_digest=bytes([digest] * 32))
    return Batch(header, messages, {}, 0, 0, 0)


def result(step: int, version: int | None = None) -> learner_pb2.StepResult:
    policy = policy_pb2.Policy(version=step if version is None else version)
    return learner_pb2.StepResult(step_id=step, policy=policy)


async def fill(ledger: Ledger, row: int) -> None:
    """One group, up to its scores."""
    await ledger.admit(group(row), row)
    await ledger.record_trajectories(trajectories(row), GroupState.SAMPLED)
    await ledger.record_scores([score(row, sample) for sample in range(SAMPLES)], GroupState.COMPLETE)


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    made = Ledger.create(tmp_path / "run" / "run.db", "run-1", 7)
    yield made
    await made.close()


def rows_of(ledger: Ledger, query: str) -> list[tuple[Any, ...]]:
    with connect(ledger.path) as db:
        return db.execute(query).fetchall()


async def test_every_connection_has_the_settings_of_durability(ledger: Ledger) -> None:
    for connection in (connect(ledger.path), ledger._connection):
        found = [
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        ]
        assert found == ["wal", 2, 1, 10_000]
    assert oct(ledger.path.stat().st_mode & 0o777) == "0o600"
    assert rows_of(ledger, "SELECT schema_version, run_id, seed FROM run") == [(SCHEMA_VERSION, "run-1", 7)]


def test_a_file_system_without_wal_is_refused() -> None:
    with pytest.raises(ConfigError, match="SQLite must run with journal_mode = wal, it has memory"):
        connect(Path(":memory:"))


async def test_an_existing_ledger_is_refused(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="a run has been here"):
        Ledger.create(ledger.path, "run-2", 8)


async def test_a_group_from_admission_to_its_step(ledger: Ledger) -> None:
    await ledger.admit(group(3), 0)
    assert rows_of(ledger, "SELECT group_id, admission, samples, state FROM groups") == [
        ("train/0/3", 0, 2, "admitted")
    ]
    await ledger.record_trajectories(trajectories(3, version=4), GroupState.SAMPLED)
    assert rows_of(ledger, "SELECT state FROM groups") == [("sampled",)]
    assert rows_of(
        ledger, "SELECT trajectory_id, oldest_version, sampled_tokens FROM trajectories ORDER BY sample"
    ) == [
        ("train/0/3/0", 4, 1),
        ("train/0/3/1", 4, 1),
    ]
    failed = reward_pb2.ScoreResponse(prompt_id=PromptKey("train", 0, 3).message(), sample_number=1, scorer="s@1")
    failed.failure.kind = reward_pb2.FAILURE_KIND_DATA
    failed.failure.reason = "timeout"
    await ledger.record_scores([score(3, 0, 0.0), failed], GroupState.COMPLETE)
    assert rows_of(ledger, "SELECT value, failure FROM scores ORDER BY trajectory_id") == [
        (0.0, None),
        (None, "FAILURE_KIND_DATA: timeout"),
    ]
    await ledger.record_batch(batch(1, [3]), **PLACE)
    assert rows_of(ledger, "SELECT trajectory_id, step, position FROM batch_rows ORDER BY position") == [
        ("train/0/3/0", 1, 0),
        ("train/0/3/1", 1, 1),
    ]
    await ledger.record_step(result(1))
    assert rows_of(ledger, "SELECT step, policy_version FROM steps") == [(1, 1)]


async def test_a_trajectory_enters_one_step_at_most(ledger: Ledger) -> None:
    for row in (0, 1):
        await fill(ledger, row)
    await ledger.record_batch(batch(1, [0]), **PLACE)
    with pytest.raises(Conflict, match="batch_rows has train/0/0/0 already"):
        await ledger.record_batch(batch(2, [1, 0]), **PLACE)
    # The refused Batch left nothing behind, its own new rows included.
    assert rows_of(ledger, "SELECT step FROM batches") == [(1,)]
    assert rows_of(ledger, "SELECT DISTINCT step FROM batch_rows") == [(1,)]
    with connect(ledger.path) as db, pytest.raises(sqlite3.IntegrityError):  # the constraint, not our look before it
        db.execute("INSERT INTO batch_rows VALUES ('train/0/0/0', 1, 9, x'00')")


async def test_a_repeat_changes_nothing_and_other_content_is_a_conflict(ledger: Ledger) -> None:
    for _ in range(2):
        await fill(ledger, 0)
        await ledger.record_batch(batch(1, [0]), **PLACE)
        await ledger.record_step(result(1))
    assert rows_of(ledger, "SELECT count(*) FROM trajectories") == [(SAMPLES,)]
    with pytest.raises(
        Conflict, match="trajectories has train/0/0/0 already, with other content in oldest_version, message"
    ):
        await ledger.record_trajectories(trajectories(0, version=9), GroupState.SAMPLED)
    with pytest.raises(Conflict, match="scores has train/0/0/0 already"):
        await ledger.record_scores([score(0, 0, 2.0)], GroupState.COMPLETE)
    with pytest.raises(Conflict, match="batches has 1 already, with other content in digest"):
        await ledger.record_batch(batch(1, [0], digest=1), **PLACE)


async def test_a_step_that_was_replayed_keeps_its_first_answer(ledger: Ledger) -> None:
    """A replay takes other seconds; that is no other Step."""
    await fill(ledger, 0)
    await ledger.record_batch(batch(1, [0]), **PLACE)
    first = result(1)
    first.seconds = 1.5
    await ledger.record_step(first)
    await ledger.record_step(result(1))
    (found,) = await ledger.read_results({1})
    assert found.seconds == 1.5


async def test_what_has_no_ground_is_refused(ledger: Ledger) -> None:
    with pytest.raises(Conflict, match="FOREIGN KEY"):
        await ledger.record_trajectories(trajectories(5), GroupState.SAMPLED)
    with pytest.raises(Conflict, match="FOREIGN KEY"):
        await ledger.record_step(result(1))
    await ledger.admit(group(0), 0)
    with pytest.raises(Conflict, match=r"groups\.admission"):
        await ledger.admit(group(1), 0)
    await fill(ledger, 2)
    await ledger.record_batch(batch(1, [2]), **PLACE)
    await ledger.record_step(result(1))
    await fill(ledger, 3)
    await ledger.record_batch(batch(2, [3]), **PLACE)
    with pytest.raises(Conflict, match=r"steps\.policy_version"):
        await ledger.record_step(result(2, version=1))


async def test_writes_that_wait_are_committed_together_and_a_bad_one_alone_fails(ledger: Ledger) -> None:
    transactions: list[str] = []
    ledger._connection.set_trace_callback(lambda sql: transactions.append(sql) if sql == "COMMIT" else None)
    writes = [ledger.admit(group(row), row) for row in range(200)]
    writes.insert(100, ledger.admit(group(900), 5))  # position 5 is taken by then, or takes it from row 5
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    refused = [outcome for outcome in outcomes if outcome is not None]
    assert [type(outcome) for outcome in refused] == [Conflict]
    assert rows_of(ledger, "SELECT count(*), count(DISTINCT admission) FROM groups") == [(200, 200)]
    assert len(transactions) < 50


async def test_a_waiter_that_is_cancelled_does_not_undo_the_write(ledger: Ledger) -> None:
    write = asyncio.create_task(ledger.admit(group(0), 0))
    await asyncio.sleep(0)  # it is with the writer now
    write.cancel()
    await asyncio.gather(write, return_exceptions=True)
    await ledger.admit(group(1), 1)
    assert rows_of(ledger, "SELECT count(*) FROM groups") == [(2,)]


async def test_after_a_failed_commit_nothing_is_written_any_more(ledger: Ledger) -> None:
    await ledger.admit(group(0), 0)

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise sqlite3.OperationalError("disk I/O error")

    whole, ledger._connection = ledger._connection, Broken()  # type: ignore[assignment]
    with pytest.raises(Unavailable, match="disk I/O error"):
        await ledger.admit(group(1), 1)
    ledger._connection = whole
    with pytest.raises(Unavailable, match="disk I/O error"):
        await ledger.admit(group(2), 2)
    assert rows_of(ledger, "SELECT row FROM groups") == [(0,)]


async def test_a_closed_ledger_says_so(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "run.db", "run-1", 0)
    pending = asyncio.gather(*(ledger.admit(group(row), row) for row in range(20)))
    await asyncio.sleep(0)
    await ledger.close()
    await pending  # what was asked for before is committed
    assert rows_of(ledger, "SELECT count(*) FROM groups") == [(20,)]
    with pytest.raises(Internal, match="closed"):
        await ledger.admit(group(99), 99)


WRITER = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = {paths!r}
from test_coordinator_ledger import fill
from services.coordinator.ledger import Ledger

async def main():
    ledger = Ledger.create(Path(sys.argv[1]), "run-1", 0)
    for row in range(10**6):
        await fill(ledger, row)
        print(row, flush=True)

asyncio.run(main())
"""


def test_what_was_acknowledged_is_there_after_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    program = WRITER.format(paths=[str(Path(__file__).parent), str(Path(__file__).parents[3])])
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    end = time.monotonic() + 60
    acknowledged = -1
    while acknowledged < 50:
        assert time.monotonic() < end
        acknowledged = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    for line in child.stdout:
        acknowledged = int(line)
    child.wait(10)
    with connect(path) as db:
        found = db.execute(
            "SELECT count(*) FROM groups WHERE state = 'complete' AND row <= ?", (acknowledged,)
        ).fetchone()
        assert found == (acknowledged + 1,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
