"""run.db: what the run paid for, durable before it is used (docs/design.md §8).

One thread owns the one writing connection. Writes that arrive while it commits are committed together next time (group
commit): each in a savepoint of its own, so one that is refused leaves the others alone. A write is acknowledged when
it would survive a power cut. Every write may be repeated: the same content again changes nothing, other content under
the same id is a Conflict.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from antiphon.learner.v1 import learner_pb2
from antiphon.reward.v1 import reward_pb2
from antiphon.types.v1 import chat_pb2, trajectory_pb2

from services.common.errors import AntiphonError, ConfigError, Conflict, Internal, Unavailable
from services.coordinator.batch import Batch
from services.coordinator.groups import Group, GroupState
from services.coordinator.identity import PromptKey, TrajectoryKey
from services.coordinator.ledger_schema import SCHEMA, SCHEMA_VERSION
from services.coordinator.trajectories import sampled_tokens
from services.coordinator.waits import within

logger = logging.getLogger(__name__)

Write = Callable[[sqlite3.Connection], None]
MOST_WRITES_PER_COMMIT = 256
BUSY_MILLISECONDS = 10_000
WRITE_SECONDS = 60.0


def connect(path: Path) -> sqlite3.Connection:
    """A connection with the settings that durability needs, asserted. Raises ConfigError where the file lacks one."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    wanted = {"journal_mode": "wal", "synchronous": 2, "busy_timeout": BUSY_MILLISECONDS, "foreign_keys": 1}
    for name, value in wanted.items():
        connection.execute(f"PRAGMA {name} = {value}")
        (found,) = connection.execute(f"PRAGMA {name}").fetchone()
        if found != value:
            connection.close()
            raise ConfigError(
                f"{path}: SQLite must run with {name} = {value}, it has {found}; the run directory must be on a local "
                "disk"
            )
    return connection


class Ledger:
    """The ledger of one run. Make it with `create`, take it up with `open`, end it with `close`."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.path = path
        self._connection = connection
        self._waiting: queue.Queue[tuple[Write, asyncio.Future[None]] | None] = queue.Queue()
        self._broken: AntiphonError | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    @staticmethod
    def refuse_existing(path: Path) -> None:
        """Raises ConfigError when there is a ledger: a run's record is never overwritten."""
        if path.exists():
            raise ConfigError(
                f"{path} exists: a run has been here; choose another run name, or take it up with `antiphon resume`"
            )

    @classmethod
    def create(cls, path: Path, run_id: str, seed: int) -> Ledger:
        """A new ledger. Raises ConfigError when there is one."""
        cls.refuse_existing(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Made aside: a ledger that is there has its tables and says whose it is, whatever was killed meanwhile.
        aside = path.with_name(f"{path.name}.new")
        for left in path.parent.glob(f"{aside.name}*"):
            left.unlink()
        os.close(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        with contextlib.closing(connect(aside)) as connection:
            connection.executescript(f"BEGIN IMMEDIATE;\n{SCHEMA}\nCOMMIT;")
            with _transaction(connection):
                connection.execute(
                    "INSERT INTO run VALUES (1, ?, ?, ?, ?)", (SCHEMA_VERSION, run_id, seed, time.time())
                )
        aside.rename(path)
        _sync_folder(path.parent)
        return cls(connect(path), path)

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """The ledger of a run that is taken up again; services/coordinator/resuming.py looks whether it may be."""
        return cls(connect(path), path)

    async def admit(self, group: Group, admission: int) -> None:
        """A group and its prompt enter the run."""
        key = group.key._asdict()
        ids = chat_pb2.TokenIds(ids=group.prompt.token_ids).SerializeToString(deterministic=True)
        row = {"group_id": str(group.key), **key, "admission": admission, "samples": group.samples}

        def write(db: sqlite3.Connection) -> None:
            _insert(db, "prompts", {**key, "token_ids": ids}, keys=3)
            _insert(db, "groups", row, {"state": GroupState.ADMITTED.value})

        await self._write(write)

    async def record_trajectories(self, trajectories: Sequence[trajectory_pb2.Trajectory], state: GroupState) -> None:
        """The finished trajectories of one group, and the state that they bring it to."""
        rows = []
        for trajectory in trajectories:
            prompt = PromptKey.of(trajectory.prompt_id)
            rows.append(
                {
                    "trajectory_id": str(TrajectoryKey(prompt, trajectory.sample_number)),
                    "group_id": str(prompt),
                    "sample": trajectory.sample_number,
                    "oldest_version": min((span.policy_version for span in trajectory.version_spans), default=-1),
                    "sampled_tokens": sampled_tokens(trajectory),
                    "message": trajectory.SerializeToString(deterministic=True),
                }
            )

        def write(db: sqlite3.Connection) -> None:
            for row in rows:
                _insert(db, "trajectories", row)
            _set_state(db, {str(row["group_id"]) for row in rows}, state)

        await self._write(write)

    async def record_scores(self, answers: Sequence[reward_pb2.ScoreResponse], state: GroupState) -> None:
        """The scores and failures of one group, and the state that they bring it to."""
        rows = []
        groups = {str(PromptKey.of(answer.prompt_id)) for answer in answers}
        for answer in answers:
            value = answer.score.value if answer.WhichOneof("outcome") == "score" else None
            failure = f"{reward_pb2.FailureKind.Name(answer.failure.kind)}: {answer.failure.reason}"
            rows.append(
                {
                    "trajectory_id": str(TrajectoryKey(PromptKey.of(answer.prompt_id), answer.sample_number)),
                    "scorer": answer.scorer,
                    "value": value,
                    "failure": failure if value is None else None,
                    "message": answer.SerializeToString(deterministic=True),
                }
            )

        def write(db: sqlite3.Connection) -> None:
            for row in rows:
                _insert(db, "scores", row)
            _set_state(db, groups, state)

        await self._write(write)

    async def record_batch(self, batch: Batch, *, prompts_wanted: int, next_admission: int) -> None:
        """A Batch as it is about to be sent, and the position in the order of the prompts where the next one begins.

        Raises Conflict when one of its trajectories was in a Batch before.
        """
        head = {
            "step": batch.step,
            "digest": batch.header.batch_digest,
            "header": batch.header.SerializeToString(deterministic=True),
            "prompts_wanted": prompts_wanted,
            "next_admission": next_admission,
        }
        rows = [
            {
                "trajectory_id": row.trajectory_id,
                "step": batch.step,
                "position": position,
                "message": row.SerializeToString(deterministic=True),
            }
            for position, row in enumerate(batch.trajectories)
        ]

        def write(db: sqlite3.Connection) -> None:
            _insert(db, "batches", head, {"committed_at": time.time()})
            for row in rows:
                _insert(db, "batch_rows", row)

        await self._write(write)

    async def record_step(self, result: learner_pb2.StepResult) -> None:
        """A Step that the learner applied."""
        row = {"step": result.step_id, "policy_version": result.policy.version}
        # A replay takes other seconds: the first answer stays.
        told = {"result": result.SerializeToString(deterministic=True), "applied_at": time.time()}

        def write(db: sqlite3.Connection) -> None:
            _insert(db, "steps", row, told)

        await self._write(write)

    async def record_checkpoint(
        self, step: int, path: Path, result: learner_pb2.SaveResult, gone: Sequence[int]
    ) -> None:
        """A checkpoint that the learner has on disk; those of the Steps `gone` were told to go with it."""
        row = {"step": step, "path": str(path), "digest": result.digest, "bytes": result.bytes}

        def write(db: sqlite3.Connection) -> None:
            _insert(db, "checkpoints", row, {"saved_at": time.time()})
            db.executemany("DELETE FROM checkpoints WHERE step = ?", [(old,) for old in gone])

        await self._write(write)

    async def record_evaluation(self, dataset: str, policy_version: int, score_mean: float) -> None:
        """The score of a policy; the first one stays."""
        row = {"dataset": dataset, "policy_version": policy_version}
        await self._write(lambda db: _insert(db, "evaluations", row, {"score_mean": score_mean}, keys=2))

    async def record_epoch(self, epoch: int) -> None:
        """A transfer epoch that is about to begin."""
        await self._write(lambda db: _insert(db, "epochs", {"epoch": epoch}))

    async def read_batch(self, step: int) -> tuple[learner_pb2.StepHeader, list[learner_pb2.TrainTrajectory]]:
        """A Batch as it was sent. Raises Conflict when none is stored for this Step."""

        def read() -> tuple[learner_pb2.StepHeader, list[learner_pb2.TrainTrajectory]]:
            with contextlib.closing(connect(self.path)) as db:
                found = db.execute("SELECT header FROM batches WHERE step = ?", (step,)).fetchone()
                if found is None:
                    raise Conflict(f"{self.path}: there is no Batch of step {step}")
                rows = db.execute("SELECT message FROM batch_rows WHERE step = ? ORDER BY position", (step,))
                messages = [learner_pb2.TrainTrajectory.FromString(blob) for (blob,) in rows]
            return learner_pb2.StepHeader.FromString(found[0]), messages

        return await asyncio.to_thread(read)

    async def read_results(self, steps: Collection[int]) -> list[learner_pb2.StepResult]:
        """What the learner said of those of these Steps that it applied."""

        def read() -> list[learner_pb2.StepResult]:
            with contextlib.closing(connect(self.path)) as db:
                rows = db.execute("SELECT step, result FROM steps ORDER BY step").fetchall()
            return [learner_pb2.StepResult.FromString(blob) for step, blob in rows if step in steps]

        return await asyncio.to_thread(read)

    async def close(self) -> None:
        """Commits what was asked for, and ends the thread."""
        self._waiting.put(None)
        await asyncio.to_thread(self._thread.join, WRITE_SECONDS)

    async def _write(self, write: Write) -> None:
        """Acknowledged when durable. A caller that is cancelled does not undo the write."""
        if self._broken is not None:
            raise self._broken
        if not self._thread.is_alive():
            raise Internal(f"{self.path}: the ledger is closed; nothing is recorded any more")
        done = self._loop.create_future()
        self._waiting.put((write, done))
        async with within(WRITE_SECONDS, f"{self.path}: a write"):
            await asyncio.shield(done)

    def _work(self) -> None:
        while True:
            batch, last = self._take()
            if batch:
                self._commit(batch)
            if last:
                self._connection.close()
                return

    def _take(self) -> tuple[list[tuple[Write, asyncio.Future[None]]], bool]:
        """The next writes, at least one, and whether `close` came behind them."""
        batch: list[tuple[Write, asyncio.Future[None]]] = []
        item = self._waiting.get()
        while item is not None:
            batch.append(item)
            if len(batch) == MOST_WRITES_PER_COMMIT:
                return batch, False
            try:
                item = self._waiting.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _commit(self, batch: list[tuple[Write, asyncio.Future[None]]]) -> None:
        outcomes: list[Exception | None] = []
        try:
            if self._broken is not None:
                raise self._broken
            with _transaction(self._connection):
                outcomes = [self._try(write) for write, _ in batch]
        except Exception as error:
            # After a failed commit or sync the file may not hold what memory says: nothing more is written to it.
            self._broken = self._broken or Unavailable(f"{self.path}: cannot be written: {error}; the run cannot go on")
            logger.error("%s", self._broken)
            outcomes = [self._broken] * len(batch)
        for (_, done), outcome in zip(batch, outcomes, strict=True):
            try:
                self._loop.call_soon_threadsafe(_resolve, done, outcome)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

    def _try(self, write: Write) -> Exception | None:
        self._connection.execute("SAVEPOINT one")
        try:
            write(self._connection)
        except (sqlite3.IntegrityError, Conflict) as error:
            self._connection.execute("ROLLBACK TO one")
            self._connection.execute("RELEASE one")
            return error if isinstance(error, Conflict) else Conflict(f"{self.path}: {error}")
        self._connection.execute("RELEASE one")
        return None


class _transaction:
    """BEGIN IMMEDIATE … COMMIT, or ROLLBACK on any error."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is not None and self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
        elif error is None:
            self._connection.execute("COMMIT")


def _insert(
    db: sqlite3.Connection,
    table: str,
    row: Mapping[str, object],
    unchecked: Mapping[str, object] | None = None,
    keys: int = 1,
) -> None:
    """Inserts a row whose first `keys` columns name it. The same row again changes nothing, another is a Conflict.

    `unchecked` columns (a time) may differ in a repeat.
    """
    names, values = list(row), list(row.values())
    where = " AND ".join(f"{name} = ?" for name in names[:keys])
    found = db.execute(f"SELECT {', '.join(names)} FROM {table} WHERE {where}", values[:keys]).fetchone()
    if found is not None:
        differing = [name for name, old in zip(names, found, strict=True) if old != row[name]]
        if differing:
            raise Conflict(
                f"ledger: {table} has {'/'.join(map(str, values[:keys]))} already, with other content in "
                f"{', '.join(differing)}: each enters once"
            )
        return
    every = {**row, **(unchecked or {})}
    marks = ", ".join("?" for _ in every)
    db.execute(f"INSERT INTO {table} ({', '.join(every)}) VALUES ({marks})", tuple(every.values()))


def _set_state(db: sqlite3.Connection, groups: set[str], state: GroupState) -> None:
    for group in groups:
        db.execute("UPDATE groups SET state = ? WHERE group_id = ?", (state.value, group))


def _resolve(done: asyncio.Future[None], outcome: Exception | None) -> None:
    if done.cancelled():
        return
    if outcome is None:
        done.set_result(None)
    else:
        done.set_exception(outcome)


def _sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
