"""The loop: from prompts to policies, the same code under every schedule.

            schedule.may_admit(counts)? ◀──────────────────────────────────────────────────────────────┐
              ▼                                                                                        │
    Order ▶ ADMIT ─Group▶ EPISODE ─finished Group▶ COLLECT ─Groups▶ TRAIN ─Policy v+1▶ PUBLISH ─served─┘
                            │  (a task per Group)                     │
                            ▼                                         ▼
             Generate ▶ ledger ▶ Score ▶ ledger        Batch ▶ ledger ▶ TrainStep ▶ ledger
             (rollout)          (reward)                               (learner)

    stage    produces                     waits for                              unblocked by
    ADMIT    Groups, in the order of the  schedule.may_admit                     PUBLISH: a newer policy serves
             run; each begins an episode
    EPISODE  a finished Group: each       an engine that serves the policy and   the stream's end, the score; a worker
             trajectory scored, or        has a free slot; a reward worker       that dies fails the call at once
             failed and counted
    COLLECT  the Groups of one Step, in   its Groups, in admission order;        each trajectory, each score
             admission order              generate_seconds, score_seconds
    TRAIN    a Batch, durable before it   the learner; train_seconds             its result, progress in between
             is sent; a Step, once                                               (silence is an error)
    PUBLISH  a policy that every engine   learner and engines; twice             what the engines say they hold
             in routing serves            publication.deadline_seconds

COLLECT, TRAIN and PUBLISH are one task, step after step; ADMIT and the episodes run beside it. Under `sync` ADMIT finds
the door closed until PUBLISH (and an evaluation that is due) is over, so phases follow one another. A stop cancels
ADMIT, episodes and COLLECT at once, and waits for TRAIN and PUBLISH. The first error of any task ends the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

from antiphon.events.v1 import events_pb2
from antiphon.learner.v1 import learner_pb2
from antiphon.types.v1 import policy_pb2, progress_pb2

from services.common import trace
from services.common.errors import Expired, Internal, Unavailable
from services.coordinator import scoring
from services.coordinator.algorithms.estimators import Estimator
from services.coordinator.batch import Batch, build_batch
from services.coordinator.config import CoordinatorConfig
from services.coordinator.data import Order
from services.coordinator.episodes import SingleTurn
from services.coordinator.events import EventLog
from services.coordinator.groups import Group, GroupState
from services.coordinator.identity import PromptKey
from services.coordinator.ledger import Ledger
from services.coordinator.metrics import MetricsFile, batch_metrics, step_metrics
from services.coordinator.publication import Publication, Published
from services.coordinator.reference import Reference
from services.coordinator.resuming import StoredGroup
from services.coordinator.sampling import Sampler
from services.coordinator.schedule import Counts, Schedule
from services.coordinator.scoring import Scorer
from services.coordinator.waits import StopSignal, cancelled, within
from services.coordinator.workers import Workers

FAILURES_LISTED = 5


class Loop:
    """Runs the Steps of one run. `policy` and `steps_done` tell how far it is."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        seed: int,
        policy: policy_pb2.Policy,
        order: Order,
        sampler: Sampler,
        scorer: Scorer,
        reference: Reference | None,
        schedule: Schedule,
        estimator: Estimator,
        workers: Workers,
        publication: Publication,
        ledger: Ledger,
        metrics: MetricsFile,
        events: EventLog,
        stop: StopSignal,
        evaluate: Callable[[int], Awaitable[None]],
        save: Callable[[int], Awaitable[None]],
        waiting: Mapping[PromptKey, StoredGroup],
    ) -> None:
        """The Steps begin after the policy's version; `waiting` are groups admitted for them in an earlier life."""
        self._config = config
        self._seed = seed
        self.policy = policy
        self._order = order
        self._episode = SingleTurn(sampler, scorer, ledger, config, self._tell)
        self._schedule = schedule
        self._estimator = estimator
        self._reference = reference
        self._workers = workers
        self._publication = publication
        self._ledger = ledger
        self._metrics = metrics
        self._events = events
        self._stop = stop
        self._evaluate = evaluate
        self._save = save
        self._waiting = waiting
        self.steps_done = policy.version
        self._published = policy.version
        # The position in the order of the prompts: each Step takes as many, so nothing else need be remembered.
        self._admitted = self._trained = policy.version * config.prompts_per_step
        # Admitted and not trained, in admission order.
        self._groups: deque[Group] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._change = asyncio.Event()
        self._contexts: dict[int, contextvars.Context] = {}

    async def run(self) -> None:
        """All Steps. Raises Stopped when the run is to stop, else the first error of any stage."""
        try:
            self._start(self._admit())
            for step in range(self.steps_done + 1, self._config.steps + 1):
                await asyncio.create_task(self._step(step), context=self._context(step))
                del self._contexts[step]
        finally:
            await cancelled(*self._tasks)

    async def _step(self, step: int) -> None:
        started = time.monotonic()
        groups, times = await self._stop.interrupting(self._collect(step))
        metrics = await self._stop.after(self._train_and_publish(step, groups), self._config.stop_seconds)
        metrics |= times | {"time/step": time.monotonic() - started}
        metrics["tokens_per_second"] = metrics["tokens"] / max(times["time/generate"], 1e-9)
        self._metrics.write(step, self.policy.version, metrics)
        self._events.step_finished(step, self._config.steps, metrics)
        every = self._config.evaluation.every if self._config.evaluation else 0
        if every and step % every == 0:
            await self._stop.interrupting(_after(step, self._evaluate))
        await self._stop.after(_after(step, self._save), self._config.stop_seconds)
        self._published = self.policy.version
        self._tell()

    # ADMIT and EPISODE

    async def _admit(self) -> None:
        total = self._config.steps * self._config.prompts_per_step
        while self._admitted < total:
            await self._until(lambda: self._schedule.may_admit(self._counts()))
            key, prompt = self._order.at(self._admitted)
            group = Group(key, prompt, self._config.samples_per_prompt)
            if key in self._waiting:
                self._waiting[key].restore(group, self._published)
            step = 1 + self._admitted // self._config.prompts_per_step
            self._groups.append(group)
            self._start(self._run_episode(group, self._admitted, self._published), self._context(step))
            self._admitted += 1
            self._tell()

    async def _run_episode(self, group: Group, admission: int, version: int) -> None:
        await self._ledger.admit(group, admission)
        await self._episode.run(group, version)

    def _counts(self) -> Counts:
        finished = sum(group.finished for group in self._groups)
        return Counts(
            running=len(self._groups) - finished,
            finished=finished,
            trained=self._trained,
            published=self._published,
            batch=self._config.prompts_per_step,
        )

    # COLLECT

    async def _collect(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """The groups of a Step, finished, and how long sampling and what scoring was left after it took."""
        config = self._config
        total = config.trajectories_per_step
        engines = ", ".join(client.worker_id for client in self._workers.serving())
        started = time.monotonic()
        self._events.enter(
            events_pb2.RUN_PHASE_GENERATE,
            step,
            f"{total} trajectories from {engines}, {config.generate_seconds:.0f} s at most",
        )
        await self._all_groups(step, config.generate_seconds, "sampled", lambda g: g.state is not GroupState.ADMITTED)
        sampled = time.monotonic()
        rewards = ", ".join(client.worker_id for client in self._workers.rewards())
        self._events.enter(
            events_pb2.RUN_PHASE_SCORE, step, f"{total} scores from {rewards}, {config.score_seconds:.0f} s at most"
        )
        groups = await self._all_groups(step, config.score_seconds, "scored", lambda g: g.finished)
        self._judge_failures(step, groups)
        return groups, {"time/generate": sampled - started, "time/score": time.monotonic() - sampled}

    async def _all_groups(self, step: int, seconds: float, verb: str, reached: Callable[[Group], bool]) -> list[Group]:
        """The next groups in admission order, once all have reached a state; tells progress in trajectories."""
        wanted, samples = self._config.prompts_per_step, self._config.samples_per_prompt

        def next_groups() -> list[Group]:
            return [self._groups[n] for n in range(min(wanted, len(self._groups)))]

        def all_reached() -> bool:
            groups = next_groups()
            done = sum(samples if reached(g) else g.sampled if verb == "sampled" else 0 for g in groups)
            self._events.progress(done, wanted * samples)
            return done == wanted * samples

        try:
            async with within(seconds, verb):
                await self._until(all_reached)
        except Expired:
            late = [str(group.key) for group in next_groups() if not reached(group)]
            raise Expired(
                f"step {step}: {len(late)} of {wanted} groups not {verb} after {seconds:.0f} s: "
                f"{', '.join(late[:FAILURES_LISTED])}{', …' if len(late) > FAILURES_LISTED else ''}"
            ) from None
        return next_groups()

    def _judge_failures(self, step: int, groups: Sequence[Group]) -> None:
        """Names what could not be scored, and ends the run when it is more than the budget."""
        failures = [answer for group in groups for answer in group.failures]
        if not failures:
            return
        total = self._config.trajectories_per_step
        listed = "; ".join(scoring.describe_failure(answer) for answer in failures[:FAILURES_LISTED])
        more = "" if len(failures) <= FAILURES_LISTED else f"; and {len(failures) - FAILURES_LISTED} more"
        message = (
            f"step {step}: {len(failures)} of {total} trajectories could not be scored and are left out: {listed}{more}"
        )
        if len(failures) > self._config.failure_budget * total:
            raise Unavailable(f"{message}; failure_budget allows {self._config.failure_budget:.0%}")
        self._events.notice("warning", message)

    # TRAIN and PUBLISH

    async def _train_and_publish(self, step: int, groups: list[Group]) -> dict[str, float]:
        metrics = await self._train(step, groups)
        if self._schedule.publishes_after(step):
            started = time.monotonic()
            published = await self._publish(step)
            metrics |= _publication_metrics(published) | {"time/publish": time.monotonic() - started}
        if self._config.algorithm.control != "none":
            metrics[f"control/{self._config.algorithm.control}"] = 1.0
        return metrics

    async def _train(self, step: int, groups: list[Group]) -> dict[str, float]:
        config = self._config
        started = time.monotonic()
        reference = None
        if self._reference is not None:
            async with within(config.score_seconds, f"reference log-probs of step {step}"):
                reference = await self._reference.logprobs(groups, config.score_seconds)
        referred = time.monotonic()
        batch = await asyncio.to_thread(
            build_batch,
            step,
            groups,
            self._estimator,
            config.algorithm,
            sampling=config.sampling,
            seed=self._seed,
            reference=reference,
        )
        await self._ledger.record_batch(batch)
        built = time.monotonic()
        learner = self._workers.learner()
        what = f"step {step} on {len(batch.trajectories)} trajectories at {learner.worker_id}"
        self._events.enter(events_pb2.RUN_PHASE_TRAIN, step, f"{what}, {config.train_seconds:.0f} s at most")
        async with within(config.train_seconds, what):
            result = await learner.train_step(batch.header, batch.trajectories, config.train_seconds, self._on_progress)
        self._check_result(batch, result, learner.worker_id)
        await self._ledger.record_step(result)
        self.policy = result.policy
        self.steps_done = step
        self._trained += len(groups)
        for _ in groups:
            self._groups.popleft()
        if skipped := sum(update.skipped for update in result.updates):
            self._events.notice("warning", f"step {step}: {skipped} Update(s) left out: the gradient was not finite")
        times = {"time/batch": built - referred, "time/train": time.monotonic() - built}
        if self._reference is not None:
            times["time/reference"] = referred - started
        return batch_metrics(groups, batch) | step_metrics(result) | times

    async def _publish(self, step: int) -> Published:
        engines = ", ".join(client.worker_id for client in self._workers.rollouts())
        seconds = self._config.publication.deadline_seconds
        self._events.enter(
            events_pb2.RUN_PHASE_PUBLISH,
            step,
            f"version {self.policy.version} to {engines}, {seconds:.0f} s at most a try",
        )
        published = await self._publication.publish(self.policy.version, self._on_progress)
        self.policy = published.policy
        return published

    def _check_result(self, batch: Batch, result: learner_pb2.StepResult, learner: str) -> None:
        """The effect, not the status code: the right step, the right version, every token of the plan."""
        planned = [update.token_count for update in batch.header.updates]
        done = [update.tokens for update in result.updates]
        if (result.step_id, result.policy.version) != (batch.step, batch.step) or done != planned:
            error = Internal(
                f"{learner}: expected step {batch.step} to make version {batch.step} from Updates of {planned} "
                f"tokens, it says step {result.step_id}, version {result.policy.version}, Updates of {done} tokens"
            )
            error.worker_id = learner
            raise error

    # Tasks and waiting

    def _on_progress(self, progress: progress_pb2.Progress) -> None:
        self._events.progress(progress.done, progress.of, progress.phase)

    def _context(self, step: int) -> contextvars.Context:
        """Everything done for one Step, wherever it is done, is one trace."""
        if step not in self._contexts:
            with trace.root():
                self._contexts[step] = contextvars.copy_context()
        return self._contexts[step].copy()

    def _start(self, work: Awaitable[None], context: contextvars.Context | None = None) -> None:
        task = asyncio.create_task(_as_coroutine(work), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
            self._tell()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds, looked at after each change; raises the first error of any task."""
        while True:
            change = self._change
            if self._error is not None:
                raise self._error
            if condition():
                return
            await change.wait()

    def _tell(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def _publication_metrics(published: Published) -> dict[str, float]:
    return {
        "publish/engines": float(published.engines),
        "publish/bytes": float(published.bytes),
        "publish/transfer_seconds": published.transfer_seconds,
        "publish/load_seconds": published.load_seconds,
        "publish/probe_seconds": published.probe_seconds,
        "publish/pause_seconds": published.pause_seconds,
        "publish/probe_difference": published.probe_difference,
    }


async def _after(step: int, work: Callable[[int], Awaitable[None]]) -> None:
    """Begins the work only when it is awaited: a run that is to stop begins none."""
    await work(step)


async def _as_coroutine(work: Awaitable[None]) -> None:
    await work
