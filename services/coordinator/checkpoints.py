"""When a run's checkpoints are written, and which older ones go: the learner writes them, the ledger knows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from antiphon.learner.v1 import learner_pb2

from services.common.errors import AntiphonError, Conflict, Unavailable
from services.coordinator.clients import LearnerClient
from services.coordinator.config import CheckpointConfig
from services.coordinator.events import EventLog
from services.coordinator.ledger import Ledger
from services.coordinator.waits import within


@dataclass(frozen=True)
class Checkpoint:
    """A folder that the learner wrote, and the digest that it answered."""

    step: int
    path: Path
    digest: bytes


class Checkpoints:
    """The checkpoints of one run, in `folder`, by Step."""

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        folder: Path,
        run_id: str,
        ledger: Ledger,
        events: EventLog,
        known: Iterable[Checkpoint] = (),
        scores: Mapping[int, float] | None = None,
    ) -> None:
        self._config = config
        self._folder = folder.resolve()
        self._run_id = run_id
        self._ledger = ledger
        self._events = events
        self._known = {checkpoint.step: checkpoint for checkpoint in known}
        self.scores = dict(scores or {})
        """Policy version to its score on held-out prompts."""

    async def after_step(self, step: int, find_learner: Callable[[], LearnerClient]) -> None:
        """Saves when this Step is one to save after. What goes wrong is told: the run loses nothing by it."""
        if self._config.every and step % self._config.every == 0:
            try:
                learner = find_learner()
            except Unavailable as error:  # the next checkpoint is its own
                self._events.notice("warning", f"no checkpoint of step {step}: {error}")
                return
            await self.save(step, learner, self._config.seconds)

    async def save(self, step: int, learner: LearnerClient, seconds: float) -> None:
        """Saves the policy of this Step, unless that is done; the ledger knows it once the learner has it on disk."""
        if step in self._known:
            return
        path = self._folder / f"step-{step}"
        going = superfluous(
            [*self._known, step], self.scores, keep_last=self._config.keep_last, keep_best=self._config.keep_best
        )
        request = learner_pb2.SaveRequest(
            # The same after a restart: the folder remembers who asked for it.
            request_id=f"{self._run_id}/step-{step}",
            path=str(path),
            policy_version=step,
            delete_paths=[str(self._known[old].path) for old in going],
        )
        what = f"{learner.worker_id} to write the checkpoint {path}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            async with within(seconds, what):
                result = await learner.save(
                    request, seconds, lambda p: self._events.progress(p.done, p.of, f"checkpoint: {p.phase}")
                )
            if result.policy.version != step:
                raise Conflict(f"{what}: expected version {step}, it wrote {result.policy.version}")
        except (AntiphonError, OSError) as error:
            self._events.notice("warning", f"no checkpoint of step {step}: {error}; older ones are as they were")
            return
        # A folder that could not be deleted is told below, and is not this run's to count on any more.
        await self._ledger.record_checkpoint(step, path, result, going)
        self._known[step] = Checkpoint(step, path, result.digest)
        for old in going:
            del self._known[old]
        gone = f"; deleted: {', '.join(result.deleted_paths)}" if result.deleted_paths else ""
        self._events.notice("info", f"checkpoint of step {step}: {result.bytes:,} bytes in {path}{gone}")
        for kept in result.kept_paths:
            self._events.notice("warning", f"an older checkpoint was not deleted: {kept}")


def superfluous(steps: Iterable[int], scores: Mapping[int, float], *, keep_last: int, keep_best: int) -> list[int]:
    """The Steps whose checkpoints go: neither among the newest nor among the best of those that have a score.

    Of equal scores the newer one is the better one. Example: steps 1 to 4, scores {1: 0.9, 2: 0.1}, one newest and one
    best are kept: 2 and 3 go.
    """
    ordered = sorted(steps)
    scored = sorted((step for step in ordered if step in scores), key=lambda step: (scores[step], step))
    kept = {*ordered[-keep_last:], *(scored[-keep_best:] if keep_best else ())}
    return [step for step in ordered if step not in kept]
