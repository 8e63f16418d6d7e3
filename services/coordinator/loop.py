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
    COLLECT  the Groups of one Step, in   its Groups, in admission order, and    each trajectory, each score; what the
             admission order; those that  those that replace filtered ones;      filter takes out leaves, and ADMIT
             are filtered go no further   generate_seconds, score_seconds        replaces it (collecting.py)
    TRAIN    a Batch, durable before it   the learner; train_seconds             its result, progress in between
             is sent; a Step, once                                               (silence is an error)
    PUBLISH  a policy that every engine   learner and engines; twice             what the engines say they hold
             in routing serves            publication.deadline_seconds

COLLECT, TRAIN and PUBLISH are one task, step after step; ADMIT and the episodes run beside it. Under `sync` ADMIT finds
the door closed until PUBLISH (and an evaluation that is due) is over, so phases follow one another. A stop cancels
ADMIT, episodes and COLLECT at once, and waits for TRAIN and PUBLISH. A service that dies is waited for where it is
needed (services/coordinator/recovery.py); the first other error of any task ends the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable, Mapping

from antiphon.events.v1 import events_pb2
from antiphon.learner.v1 import learner_pb2
from antiphon.types.v1 import policy_pb2, progress_pb2

from services.common import trace
from services.common.errors import Internal
from services.coordinator.admissions import Admissions, Share
from services.coordinator.algorithms import Keeps
from services.coordinator.algorithms.estimators import Estimator
from services.coordinator.batch import Batch, build_batch
from services.coordinator.collecting import Collector
from services.coordinator.config import CoordinatorConfig
from services.coordinator.data import Order
from services.coordinator.episodes import SingleTurn
from services.coordinator.events import EventLog
from services.coordinator.groups import Group
from services.coordinator.identity import PromptKey
from services.coordinator.ledger import Ledger
from services.coordinator.metrics import MetricsFile, batch_metrics, filter_metrics, step_metrics
from services.coordinator.publication import Publication, Published
from services.coordinator.recovery import Recovery
from services.coordinator.reference import Reference
from services.coordinator.resuming import StoredGroup
from services.coordinator.sampling import Sampler
from services.coordinator.schedule import Schedule
from services.coordinator.scoring import Scorer
from services.coordinator.waits import StopSignal, cancelled, within
from services.coordinator.workers import Workers


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
        keeps: Keeps | None,
        workers: Workers,
        publication: Publication,
        recovery: Recovery,
        ledger: Ledger,
        metrics: MetricsFile,
        events: EventLog,
        stop: StopSignal,
        evaluate: Callable[[int], Awaitable[None]],
        save: Callable[[int], Awaitable[None]],
        waiting: Mapping[PromptKey, StoredGroup],
        position: int,
    ) -> None:
        """The Steps begin after the policy's version, with the prompt at `position` in the order; `waiting` are groups
        that were admitted for them in an earlier life.
        """
        self._config = config
        self._seed = seed
        self.policy = policy
        self._order = order
        self._episode = SingleTurn(sampler, scorer, ledger, config, self._tell)
        self._schedule = schedule
        self._estimator = estimator
        self._reference = reference
        self._keeps = keeps
        self._workers = workers
        self._publication = publication
        self._recovery = recovery
        self._ledger = ledger
        self._metrics = metrics
        self._events = events
        self._stop = stop
        self._evaluate = evaluate
        self._save = save
        self._waiting = waiting
        self.steps_done = policy.version
        self._published = policy.version
        self._admissions = Admissions(
            wanted=config.prompts_per_step,
            most=config.most_prompts_per_step,
            refills=keeps is not None,
            steps=config.steps,
            steps_done=policy.version,
            position=position,
        )
        self._collector = Collector(config, self._admissions, workers, events, self._until)
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._change = asyncio.Event()
        self._contexts: dict[int, contextvars.Context] = {}

    async def run(self) -> None:
        """All Steps. Raises Stopped when the run is to stop, else the first error of any stage."""
        if self.steps_done == self._config.steps:
            return
        try:
            self._start(self._admit())
            for step in range(self.steps_done + 1, self._config.steps + 1):
                await asyncio.create_task(self._step(step), context=self._context(step))
                del self._contexts[step]
        finally:
            await cancelled(*self._tasks)

    async def _step(self, step: int) -> None:
        started = time.monotonic()
        share, times = await self._stop.interrupting(self._collector.collect(step))
        metrics = await self._stop.after(self._train_and_publish(step, share), self._config.stop_seconds)
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
        """Without end: a group that leaves may open the door again."""
        admissions = self._admissions
        while True:
            await self._until(
                lambda: not admissions.all_admitted and self._schedule.may_admit(admissions.counts(self._published))
            )
            position, step = admissions.position, admissions.step
            key, prompt = self._order.at(position)
            masks_cut = self._config.algorithm.truncated == "mask"
            group = Group(key, prompt, self._config.samples_per_prompt, self._keeps, masks_cut=masks_cut)
            if key in self._waiting:
                self._waiting[key].restore(group, self._published)
            admissions.add(group)
            self._start(self._run_episode(group, position, self._published), self._context(step))
            self._tell()

    async def _run_episode(self, group: Group, admission: int, version: int) -> None:
        await self._ledger.admit(group, admission)
        await self._episode.run(group, version)

    # TRAIN and PUBLISH

    async def _train_and_publish(self, step: int, share: Share) -> dict[str, float]:
        async with self._recovery.turn:
            metrics = await self._train(step, share)
            if self._schedule.publishes_after(step):
                started = time.monotonic()
                published = await self._publish(step)
                metrics |= _publication_metrics(published) | {"time/publish": time.monotonic() - started}
        if self._config.algorithm.control != "none":
            metrics[f"control/{self._config.algorithm.control}"] = 1.0
        return metrics

    async def _train(self, step: int, share: Share) -> dict[str, float]:
        config = self._config
        started = time.monotonic()
        reference = None
        if self._reference is not None:
            async with within(config.score_seconds, f"reference log-probs of step {step}"):
                reference = await self._reference.logprobs(share.kept, config.score_seconds)
        referred = time.monotonic()
        batch = await asyncio.to_thread(
            build_batch,
            step,
            share.kept,
            self._estimator,
            config.algorithm,
            sampling=config.sampling,
            seed=self._seed,
            reference=reference,
        )
        await self._ledger.record_batch(batch, prompts_wanted=config.prompts_per_step, next_admission=share.end)
        built = time.monotonic()
        learner = self._workers.learner().worker_id
        what = f"step {step} on {len(batch.trajectories)} trajectories at {learner}"
        self._events.enter(events_pb2.RUN_PHASE_TRAIN, step, f"{what}, {config.train_seconds:.0f} s at most")
        result = await self._recovery.through(what, lambda: self._apply(batch, what))
        self._check_result(batch, result, learner)
        await self._ledger.record_step(result)
        self.policy = result.policy
        self.steps_done = step
        self._admissions.trained(share)
        if skipped := sum(update.skipped for update in result.updates):
            self._events.notice("warning", f"step {step}: {skipped} Update(s) left out: the gradient was not finite")
        times = {"time/batch": built - referred, "time/train": time.monotonic() - built}
        if self._reference is not None:
            times["time/reference"] = referred - started
        numbers = batch_metrics(share.groups, batch) | step_metrics(result) | times
        return numbers if self._keeps is None else numbers | filter_metrics(share.groups, share.kept)

    async def _apply(self, batch: Batch, what: str) -> learner_pb2.StepResult:
        """The learner's answer. One that was started again was sent this Batch before, and remembers it."""
        seconds = self._config.train_seconds
        learner = await self._recovery.learner()
        async with within(seconds, what):
            return await learner.train_step(batch.header, batch.trajectories, seconds, self._on_progress)

    async def _publish(self, step: int) -> Published:
        engines = ", ".join(client.worker_id for client in self._workers.rollouts())
        seconds = self._config.publication.deadline_seconds
        self._events.enter(
            events_pb2.RUN_PHASE_PUBLISH,
            step,
            f"version {self.policy.version} to {engines}, {seconds:.0f} s at most a try",
        )
        version = self.policy.version
        published = await self._recovery.through(
            f"publication of version {version}", lambda: self._publication.publish(version, self._on_progress)
        )
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
