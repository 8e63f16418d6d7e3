"""COLLECT: the groups of one Step, sampled and scored, with what the filter takes out replaced (see loop.py)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable

from antiphon.events.v1 import events_pb2

from services.common.errors import Expired, Unavailable
from services.coordinator import scoring
from services.coordinator.admissions import Admissions, Share, trajectories
from services.coordinator.config import CoordinatorConfig
from services.coordinator.events import EventLog
from services.coordinator.groups import Group, GroupState
from services.coordinator.waits import within
from services.coordinator.workers import Workers

LISTED = 5
"""Groups, failures or scores that a message names."""

Until = Callable[[Callable[[], bool]], Awaitable[None]]
"""Returns when a condition holds; raises the first error of any task of the loop."""


class Collector:
    """Waits for the next Step's share of what was admitted."""

    def __init__(
        self, config: CoordinatorConfig, admissions: Admissions, workers: Workers, events: EventLog, until: Until
    ) -> None:
        self._config = config
        self._admissions = admissions
        self._workers = workers
        self._events = events
        self._until = until

    async def collect(self, step: int) -> tuple[Share, dict[str, float]]:
        """What the Step trains on, finished, and how long sampling and what scoring was left after it took.

        One round, or several: what the filter takes out is replaced, and the replacements are waited for. Raises
        Expired when a round is late; Unavailable when too much could not be scored, or nothing is left to train on.
        """
        times = {"time/generate": 0.0, "time/score": 0.0}
        while True:
            started = time.monotonic()
            await self._all_sampled(step)
            sampled = time.monotonic()
            times["time/generate"] += sampled - started
            share = await self._all_scored(step)
            times["time/score"] += time.monotonic() - sampled
            self._judge_failures(step, share)
            if share.complete:
                self._judge_shortage(step, share)
                return share, times

    async def _all_sampled(self, step: int) -> None:
        """Until the Step has all its groups and each of their trajectories is there."""
        config = self._config
        share = self._admissions.share()
        engines = ", ".join(client.worker_id for client in self._workers.serving())
        unsampled = [group for group in share.groups if group.state is GroupState.ADMITTED]
        total = trajectories(unsampled) + share.lacking * config.samples_per_prompt
        left = len(share.groups) - len(share.kept)
        what = f"{total} trajectories from {engines}" + (f", in place of {left} groups that left" if left else "")
        self._events.enter(events_pb2.RUN_PHASE_GENERATE, step, f"{what}, {config.generate_seconds:.0f} s at most")

        def reached() -> bool:
            share = self._admissions.share()
            done = sum(group.sampled for group in share.groups)
            of = trajectories(share.groups) + share.lacking * config.samples_per_prompt
            self._events.progress(done, of)
            return done == of

        await self._in_time(
            step,
            config.generate_seconds,
            "sampled",
            reached,
            lambda: [group for group in self._admissions.share().groups if group.state is GroupState.ADMITTED],
        )

    async def _all_scored(self, step: int) -> Share:
        """Until the groups that are sampled are scored; then what the Step has."""
        seconds = self._config.score_seconds
        groups = self._admissions.share().groups
        total = trajectories(groups)
        rewards = ", ".join(client.worker_id for client in self._workers.rewards())
        self._events.enter(events_pb2.RUN_PHASE_SCORE, step, f"{total} scores from {rewards}, {seconds:.0f} s at most")

        def reached() -> bool:
            done = trajectories(group for group in groups if group.finished)
            self._events.progress(done, total)
            return done == total

        await self._in_time(step, seconds, "scored", reached, lambda: [group for group in groups if not group.finished])
        return self._admissions.share()

    async def _in_time(
        self, step: int, seconds: float, verb: str, reached: Callable[[], bool], late: Callable[[], list[Group]]
    ) -> None:
        """Until `reached`; at the deadline the groups that are late are named."""
        try:
            async with within(seconds, verb):
                await self._until(reached)
        except Expired:
            keys = [str(group.key) for group in late()]
            raise Expired(
                f"step {step}: {len(keys)} of {len(self._admissions.share().groups)} groups not {verb} after "
                f"{seconds:.0f} s: {', '.join(keys[:LISTED])}{', …' if len(keys) > LISTED else ''}"
            ) from None

    def _judge_failures(self, step: int, share: Share) -> None:
        """Names what could not be scored once all is there, and ends the run when it is more than the budget."""
        failures = [answer for group in share.groups for answer in group.failures]
        if not failures:
            return
        total = trajectories(share.groups)
        listed = "; ".join(scoring.describe_failure(answer) for answer in failures[:LISTED])
        more = "" if len(failures) <= LISTED else f"; and {len(failures) - LISTED} more"
        message = (
            f"step {step}: {len(failures)} of {total} trajectories could not be scored and are left out: {listed}{more}"
        )
        if len(failures) > self._config.failure_budget * total:
            raise Unavailable(f"{message}; failure_budget allows {self._config.failure_budget:.0%}")
        if share.complete:
            self._events.notice("warning", message)

    def _judge_shortage(self, step: int, share: Share) -> None:
        """Where groups left and the most prompts were sampled: trains on what is there, or ends the run."""
        config = self._config
        if config.filter is None or len(share.kept) == config.prompts_per_step:
            return
        message = (
            f"step {step}: {len(share.kept)} of {config.prompts_per_step} groups are left of {len(share.groups)} "
            f"prompts that were sampled; {_described(share.groups)}"
        )
        if not share.kept or config.filter.when_exhausted == "fail":
            raise Unavailable(
                f"{message}. filter {config.filter.type!r} allows {config.most_prompts_per_step} prompts a Step: "
                "resume with more filter.most_extra_prompts, or begin a run with prompts that are neither too easy nor "
                "too hard, more samples_per_prompt, or a wider filter"
            )
        self._events.notice("warning", f"{message}. The Step trains on these")


def _described(groups: Iterable[Group]) -> str:
    """How many groups left, why, and what the scores of some were."""
    filtered = [group for group in groups if group.state is GroupState.FILTERED]
    failed = sum(group.state is GroupState.FAILED for group in groups)
    shown = []
    for group in filtered[:LISTED]:
        scores = list(group.rewards().values())
        shown.append(f"{group.key} {min(scores):g} to {max(scores):g}" if scores else f"{group.key} no score")
    text = (
        f"{len(filtered)} were filtered by their scores ({', '.join(shown)}{', …' if len(filtered) > LISTED else ''})"
    )
    return text + (f", {failed} could not be scored" if failed else "")
