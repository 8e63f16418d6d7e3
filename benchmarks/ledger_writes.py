"""How many trajectories the ledger makes durable in a second, and where the time goes.

Groups of trajectories are recorded by the coordinator's own `Ledger` in a file on disk, so many groups at a time as a
Step has, each acknowledged when a power cut would leave it. Beside each round the same bytes are written to a plain
file, with one fsync for each commit that the ledger makes at most: what the disk itself allows.
"""

from __future__ import annotations

import asyncio
import cProfile
import os
import pstats
import random
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon.types.v1 import trajectory_pb2

from services.coordinator.data import Prompt
from services.coordinator.groups import Group, GroupState
from services.coordinator.identity import PromptKey
from services.coordinator.ledger import MOST_WRITES_PER_COMMIT, Ledger

PROMPT_TOKENS = 64
VOCABULARY = 49_152
SHOWN = 10


class ProfiledLedger(Ledger):
    """A ledger whose writing thread is profiled."""

    def _work(self) -> None:
        self.profile = cProfile.Profile()
        self.profile.runcall(super()._work)


@dataclass(frozen=True)
class Round:
    """One ledger from empty to full."""

    trajectories: int
    message_bytes: int
    seconds: float
    """From the first write to the last acknowledgement; groups were admitted before."""
    disk_seconds: float
    """To write the same bytes to a plain file, synced as often as the ledger has to at least."""
    syncs: int
    """Of the plain file."""

    @property
    def per_second(self) -> float:
        return self.trajectories / self.seconds


def make_groups(count: int, samples: int, tokens: int, seed: int) -> list[list[trajectory_pb2.Trajectory]]:
    """Finished groups: `samples` answers of `tokens` tokens, prompt included, with ids of a large vocabulary."""
    draw = random.Random(seed)
    answered = tokens - PROMPT_TOKENS
    ids = [draw.randrange(VOCABULARY) for _ in range(tokens + samples * count)]
    logprobs = [0.0] * PROMPT_TOKENS + [-5.0 * draw.random() for _ in range(answered)]
    mask = [False] * PROMPT_TOKENS + [True] * answered
    groups = []
    for row in range(count):
        prompt = trajectory_pb2.PromptId(dataset="train", epoch=0, row=row)
        group = []
        for sample in range(samples):
            start = row * samples + sample  # other ids for each
            trajectory = trajectory_pb2.Trajectory(
                prompt_id=prompt,
                sample_number=sample,
                token_ids=ids[start : start + tokens],
                loss_mask=mask,
                behavior_logprobs=logprobs,
                finish_reason=trajectory_pb2.FINISH_REASON_LENGTH,
                seed=start,
                worker_id="rollout-0",
            )
            trajectory.version_spans.add(start=PROMPT_TOKENS, end=tokens, policy_version=0)
            group.append(trajectory)
        groups.append(group)
    return groups


async def write_all(ledger: Ledger, groups: Sequence[Sequence[trajectory_pb2.Trajectory]], at_once: int) -> float:
    """Seconds from the first write to the last acknowledgement, `at_once` groups under way."""
    prompt = Prompt(0, (), "", tuple(range(PROMPT_TOKENS)), "", "{}")
    admitted = [Group(PromptKey.of(group[0].prompt_id), prompt, len(group)) for group in groups]
    await asyncio.gather(*(ledger.admit(group, number) for number, group in enumerate(admitted)))
    slots = asyncio.Semaphore(at_once)

    async def one(group: Sequence[trajectory_pb2.Trajectory]) -> None:
        async with slots:
            await ledger.record_trajectories(group, GroupState.SAMPLED)

    started = time.monotonic()
    await asyncio.gather(*(one(group) for group in groups))
    return time.monotonic() - started


async def measure(folder: Path, groups: Sequence[Sequence[trajectory_pb2.Trajectory]], at_once: int) -> Round:
    """Writes them to a new ledger in the folder, and checks by reading that each is there."""
    path = folder / "run.db"
    ledger = Ledger.create(path, "benchmark", 0)
    try:
        seconds = await write_all(ledger, groups, at_once)
    finally:
        await ledger.close()
    size = await asyncio.to_thread(check, path, groups)
    chunks = -(-len(groups) // min(at_once, MOST_WRITES_PER_COMMIT))
    disk = await asyncio.to_thread(plain_write_seconds, folder / "plain", size, chunks)
    return Round(sum(map(len, groups)), size, seconds, disk, chunks)


def check(path: Path, groups: Sequence[Sequence[trajectory_pb2.Trajectory]]) -> int:
    """Bytes of all messages. Raises RuntimeError when the file does not hold exactly those of the groups."""
    connection = sqlite3.connect(path)
    try:
        found = dict(connection.execute("SELECT trajectory_id, message FROM trajectories"))
    finally:
        connection.close()
    wanted = {
        f"train/0/{trajectory.prompt_id.row}/{trajectory.sample_number}": trajectory
        for group in groups
        for trajectory in group
    }
    if found != {key: trajectory.SerializeToString(deterministic=True) for key, trajectory in wanted.items()}:
        raise RuntimeError(f"{path}: {len(found)} trajectories, not the {len(wanted)} that were acknowledged")
    return sum(map(len, found.values()))


def plain_write_seconds(path: Path, size: int, chunks: int) -> float:
    """Seconds to write so many bytes in so many parts, each synced. The file is removed."""
    part = os.urandom(-(-size // chunks))
    started = time.monotonic()
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
    try:
        for _ in range(chunks):
            os.write(descriptor, part)
            os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
        path.unlink()
    return time.monotonic() - started


async def profile(
    folder: Path, groups: Sequence[Sequence[trajectory_pb2.Trajectory]], at_once: int
) -> dict[str, list[dict[str, object]]]:
    """Where each of the two threads spends its time: own seconds by function and caller, most first."""
    ledger = ProfiledLedger.create(folder / "profiled.db", "benchmark", 0)
    assert isinstance(ledger, ProfiledLedger)
    asking = cProfile.Profile()
    try:
        asking.enable()
        await write_all(ledger, groups, at_once)
    finally:
        asking.disable()
        await ledger.close()
    return {"asking": own_seconds(asking), "writing": own_seconds(ledger.profile)}


def own_seconds(profile: cProfile.Profile) -> list[dict[str, object]]:
    """Own seconds of each (function, caller), most first, with their share of the thread's time."""
    found = []
    total = 0.0
    for (_, _, name), (_, _, own, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        total += own
        for (_, _, caller), (calls, _, by_caller, _) in callers.items():
            found.append((by_caller, calls, name, caller))
    return [
        {"function": name, "called_by": caller, "calls": calls, "seconds": own, "share": own / total}
        for own, calls, name, caller in sorted(found, reverse=True)[:SHOWN]
    ]
