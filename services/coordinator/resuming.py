"""Taking up a run again: where the ledger says it stands, and bringing a new learner there.

    newest checkpoint that verifies (or version 0) ▶ Load ▶ TrainStep with every Batch stored after it, as it was sent

Nothing of it is generated or scored again. The last stored Batch may have no Step: the run ended between the two, and
it is applied now. What was sampled for the Step after it is in the ledger, too, and is used.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from antiphon.learner.v1 import learner_pb2
from antiphon.reward.v1 import reward_pb2
from antiphon.types.v1 import chat_pb2, policy_pb2, trajectory_pb2

from services.common.client import new_request_id
from services.common.digest import digest_messages
from services.common.errors import ConfigError, Conflict, InvalidRequest, NotFound
from services.coordinator.checkpoints import Checkpoint
from services.coordinator.clients import LearnerClient, OnProgress
from services.coordinator.data import Order
from services.coordinator.groups import Group
from services.coordinator.identity import PromptKey
from services.coordinator.ledger import Ledger, connect
from services.coordinator.ledger_schema import SCHEMA_VERSION
from services.coordinator.waits import within

# Of the admitted prompts, so many of the newest are compared with what the data says now.
PROMPTS_COMPARED = 256

Tell = Callable[[str, str], None]


@dataclass(frozen=True)
class StoredGroup:
    """An admitted prompt and what was paid for it."""

    key: PromptKey
    admission: int
    samples: int
    token_ids: tuple[int, ...]
    state: str
    trajectories: tuple[trajectory_pb2.Trajectory, ...]
    answers: tuple[reward_pb2.ScoreResponse, ...]

    def restore(self, group: Group, version: int) -> None:
        """Gives a newly admitted group what is stored.

        Raises Conflict when another policy version sampled it, or when it is judged otherwise than it was.
        """
        for trajectory in self.trajectories:
            versions = {span.policy_version for span in trajectory.version_spans}
            if versions - {version}:
                raise Conflict(
                    f"{self.key}: sampled by version(s) {sorted(versions)}, stored for a Step that follows version "
                    f"{version}"
                )
            group.add_trajectory(trajectory)
        if self.answers:
            group.add_answers(self.answers)
            if group.state.value != self.state:
                raise Conflict(
                    f"{self.key}: stored as {self.state}, by its scores it is {group.state.value}: coordinator.filter "
                    "was changed since; a run goes on with what it began with"
                )


@dataclass(frozen=True)
class Stored:
    """Where a run stands by its ledger."""

    steps_applied: int
    """The last Step that the learner said it applied."""
    batches: int
    """The last Step whose Batch is stored: that one, or the one after it."""
    next_admission: int
    """Position in the order of the prompts where the Step after that begins."""
    checkpoints: tuple[Checkpoint, ...]
    """By Step."""
    scores: dict[int, float]
    """Policy version to its mean score over the held-out data sets."""
    evaluated: dict[int, frozenset[str]]
    """Policy version to the data sets that it was evaluated on."""
    epoch: int
    """The highest transfer epoch that was used."""
    newest_groups: tuple[StoredGroup, ...]
    """The last ones admitted, without what was paid for them; for a comparison with the data."""
    waiting: dict[PromptKey, StoredGroup]
    """Admitted for a Step whose Batch is not stored, with what is stored of them; filtered ones included."""


def read_stored(path: Path, run_id: str, seed: int, prompts_per_step: int) -> Stored:
    """Reads a ledger. Raises ConfigError when it is none, another run's or another build's."""
    try:
        return _read_stored(path, run_id, seed, prompts_per_step)
    except sqlite3.DatabaseError as error:
        raise ConfigError(
            f"{path} exists and is no ledger that can be read: {error}; choose another run name"
        ) from None


def _read_stored(path: Path, run_id: str, seed: int, prompts_per_step: int) -> Stored:
    with contextlib.closing(connect(path)) as db:
        (version,) = db.execute("SELECT schema_version FROM run").fetchone() or (0,)
        if version != SCHEMA_VERSION:
            raise ConfigError(f"{path}: its tables have version {version}, this build reads {SCHEMA_VERSION}")
        found_id, found_seed = db.execute("SELECT run_id, seed FROM run").fetchone()
        if (found_id, found_seed) != (run_id, seed):
            raise ConfigError(
                f"{path} exists: run {found_id} with seed {found_seed} has been here, this is {run_id} with seed "
                f"{seed}; choose another run name, or take that one up with `antiphon resume`"
            )
        (applied,) = db.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()
        (batches,) = db.execute("SELECT coalesce(max(step), 0) FROM batches").fetchone()
        (epoch,) = db.execute("SELECT coalesce(max(epoch), 0) FROM epochs").fetchone()
        (admitted,) = db.execute("SELECT count(*) FROM groups").fetchone()
        last = "SELECT prompts_wanted, next_admission FROM batches ORDER BY step DESC LIMIT 1"
        wanted, trained = db.execute(last).fetchone() or (prompts_per_step, 0)
        if wanted != prompts_per_step:
            raise ConfigError(
                f"{path}: prompts_per_step is {prompts_per_step}, the run began with {wanted}; a run goes on with what "
                "it began with"
            )
        scores: dict[int, list[float]] = {}
        evaluated: dict[int, set[str]] = {}
        for name, at, score in db.execute("SELECT dataset, policy_version, score_mean FROM evaluations"):
            scores.setdefault(at, []).append(score)
            evaluated.setdefault(at, set()).add(name)
        checkpoints = db.execute("SELECT step, path, digest FROM checkpoints ORDER BY step").fetchall()
        groups = db.execute(
            "SELECT dataset, epoch, row, admission, samples, state, token_ids, group_id FROM groups "
            "JOIN prompts USING (dataset, epoch, row) WHERE admission >= ? ORDER BY admission",
            (min(trained, admitted - PROMPTS_COMPARED),),
        ).fetchall()
        newest, waiting = [], {}
        for dataset, at, row, admission, samples, state, ids, group_id in groups:
            key = PromptKey(dataset, at, row)
            token_ids = tuple(chat_pb2.TokenIds.FromString(ids).ids)
            newest.append(StoredGroup(key, admission, samples, token_ids, state, (), ()))
            if admission < trained:
                continue
            sampled = db.execute("SELECT message FROM trajectories WHERE group_id = ? ORDER BY sample", (group_id,))
            trajectories = tuple(trajectory_pb2.Trajectory.FromString(blob) for (blob,) in sampled)
            scored = db.execute(
                "SELECT scores.message FROM scores JOIN trajectories USING (trajectory_id) WHERE group_id = ? "
                "ORDER BY sample",
                (group_id,),
            )
            answers = tuple(reward_pb2.ScoreResponse.FromString(blob) for (blob,) in scored)
            waiting[key] = StoredGroup(key, admission, samples, token_ids, state, trajectories, answers)
    return Stored(
        steps_applied=applied,
        batches=batches,
        next_admission=trained,
        checkpoints=tuple(Checkpoint(step, Path(folder), digest) for step, folder, digest in checkpoints),
        scores={at: sum(values) / len(values) for at, values in scores.items()},
        evaluated={at: frozenset(names) for at, names in evaluated.items()},
        epoch=epoch,
        newest_groups=tuple(newest),
        waiting=waiting,
    )


def require_same_data(stored: Stored, order: Order, samples: int) -> None:
    """Raises ConfigError when the prompts that were admitted are not those that the data gives for their positions."""
    for group in stored.newest_groups:
        key, prompt = order.at(group.admission)
        if (key, tuple(prompt.token_ids), samples) != (group.key, group.token_ids, group.samples):
            raise ConfigError(
                f"prompt number {group.admission + 1} of the run was {group.key} of {len(group.token_ids)} tokens, "
                f"{group.samples} samples; the data says {key} of {len(prompt.token_ids)} tokens, {samples} samples: "
                "data, template or sizes were changed since; a run goes on with what it began with"
            )


async def catch_up(
    stored: Stored,
    learner: LearnerClient,
    ledger: Ledger,
    *,
    load_seconds: float,
    train_seconds: float,
    tell: Tell,
    on_progress: OnProgress,
) -> policy_pb2.Policy:
    """Brings the learner to the last stored Batch; the policy that it has then. Every Step is in the ledger then.

    What it holds of this run already it keeps: a coordinator that was started again finds it so. Raises Conflict when
    the learner holds, or applies, something else than what it is sent.
    """
    held = (await learner.state()).policy
    if held.version > stored.batches:
        raise Conflict(
            f"{learner.worker_id}: expected at most version {stored.batches}, that of the last stored Batch; it holds "
            f"version {held.version}"
        )
    policy = await _load_newest(stored, learner, held, seconds=load_seconds, tell=tell, on_progress=on_progress)
    begun = policy.version
    # A Step whose answer nobody heard is sent again: the learner remembers it.
    for step in range(min(begun, stored.steps_applied) + 1, stored.batches + 1):
        header, rows = await ledger.read_batch(step)
        if digest_messages(rows) != header.batch_digest:
            raise Conflict(f"{ledger.path}: the Batch of step {step} is not what its digest says; it was changed")
        what = f"replay of step {step} at {learner.worker_id}"
        async with within(train_seconds, what):
            result = await learner.train_step(header, rows, train_seconds, on_progress)
        done = [update.tokens for update in result.updates]
        if result.policy.version != step or done != [update.token_count for update in header.updates]:
            raise Conflict(f"{what}: it made version {result.policy.version} from Updates of {done} tokens")
        if step > stored.steps_applied:
            await ledger.record_step(result)
        policy = result.policy
    if stored.batches > begun:
        replayed = f"steps {begun + 1} to {stored.batches} were replayed from the ledger"
        tell("info", f"{replayed}; nothing was generated for them")
    return policy


async def _load_newest(
    stored: Stored,
    learner: LearnerClient,
    held: policy_pb2.Policy,
    *,
    seconds: float,
    tell: Tell,
    on_progress: OnProgress,
) -> policy_pb2.Policy:
    """The policy of the newest checkpoint that is newer than what the learner holds, loaded; else what it holds.

    One that is missing or broken is named, and an older one is taken; before all of them there is version 0, which a
    new learner holds.
    """
    for checkpoint in reversed(stored.checkpoints):
        if checkpoint.step <= held.version:
            break
        request = learner_pb2.LoadRequest(
            request_id=new_request_id(), path=str(checkpoint.path), digest=checkpoint.digest
        )
        try:
            async with within(seconds, f"{learner.worker_id} to load {checkpoint.path}"):
                loaded = await learner.load(request, seconds, on_progress)
        except (NotFound, InvalidRequest, Conflict) as error:
            tell("warning", f"the checkpoint of step {checkpoint.step} is not used: {error}")
            continue
        if loaded.policy.version != checkpoint.step:
            raise Conflict(
                f"{learner.worker_id}: expected version {checkpoint.step} from {checkpoint.path}, it holds "
                f"{loaded.policy.version}"
            )
        tell("info", f"the learner goes on from the checkpoint of step {checkpoint.step}, {checkpoint.path}")
        for part in loaded.parts:
            if not part.restored:
                tell("warning", f"the checkpoint's {part.name} begins anew: {part.detail}")
        return loaded.policy
    if held.version:
        tell("info", f"{learner.worker_id} holds version {held.version} of this run already")
    return held
