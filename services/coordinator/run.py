"""One run from beginning to end: start, check, loop, export, and RunEnded whatever happens.

    START ▶ PUBLISH ▶ CHECK ▶ EVALUATE ▶ (GENERATE ▶ SCORE ▶ TRAIN ▶ PUBLISH)* ▶ EVALUATE ▶ EXPORT ▶ ENDED

A stop or an error leaves this line where it is and goes to EXPORT (if a Step was applied) and ENDED; a stop writes a
checkpoint before. Where the run's ledger is there already, START takes it up (services/coordinator/resuming.py), with
the services as they are: what they hold already is neither loaded nor published again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from antiphon.coordinator.v1 import coordinator_pb2
from antiphon.events.v1 import events_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import policy_pb2

from services.common.announcements import Registry
from services.common.client import retried
from services.common.config import ProcessConfig
from services.common.errors import AntiphonError, ConfigError, Conflict
from services.coordinator import selfcheck
from services.coordinator.algorithms import make_estimator, make_filter
from services.coordinator.checkpoints import Checkpoints
from services.coordinator.clients import LearnerClient, RolloutClient
from services.coordinator.config import CoordinatorConfig
from services.coordinator.data import Order
from services.coordinator.ending import Ending
from services.coordinator.evaluations import Evaluations
from services.coordinator.events import EventLog
from services.coordinator.inputs import Inputs, check_lengths, read_inputs, tell_surprises
from services.coordinator.ledger import Ledger
from services.coordinator.loop import Loop
from services.coordinator.metrics import MetricsFile, step_metrics
from services.coordinator.publication import Publication, Published
from services.coordinator.recovery import Recovery
from services.coordinator.reference import Reference
from services.coordinator.resuming import Stored, read_stored, require_same_data
from services.coordinator.sampling import Sampler
from services.coordinator.schedule import SCHEDULES
from services.coordinator.scoring import Scorer
from services.coordinator.sinks import Origin
from services.coordinator.sinks.delivery import Delivery, close_deliveries, start_deliveries
from services.coordinator.text import Text
from services.coordinator.waits import Stopped, StopSignal, cancelled, within
from services.coordinator.warm_up import longest_batch, told
from services.coordinator.workers import LEARNER, REWARD, ROLLOUT, Workers

logger = logging.getLogger(__name__)

# For what the sinks of metrics were not told yet, at the end.
LAST_LINES_SECONDS, LAST_LINES_AT_STOP_SECONDS = 20.0, 3.0

Answer = TypeVar("Answer")


class Run:
    """The run of one coordinator process. `run` is called once; the rest may be asked at any time."""

    def __init__(self, process: ProcessConfig[CoordinatorConfig]) -> None:
        self.events = EventLog()
        self._service = process.service
        self._model = process.model
        self._config = process.settings
        self._stop = StopSignal()
        self._ended = asyncio.Event()
        self._loop: Loop | None = None
        self._policy = policy_pb2.Policy()
        self._resumed_step = 0
        self._chat_template = ""
        self._stored: Stored | None = None
        self._ending: Ending | None = None
        self._helpers: list[asyncio.Task[None]] = []
        self._ledger: Ledger | None = None
        self._metrics: MetricsFile | None = None
        self._deliveries: list[Delivery] = []

    def stop(self, reason: str) -> None:
        """Ends the run after the work under way. Idempotent."""
        self._stop.request(reason)

    def state(self) -> coordinator_pb2.GetRunResponse:
        return coordinator_pb2.GetRunResponse(
            run_id=self._service.run_id,
            phase=self.events.phase,
            steps_done=self._steps_done,
            steps_planned=self._config.steps,
            policy_version=self._current_policy.version,
        )

    def describe(self, announcement: events_pb2.WorkerAnnouncement) -> None:
        announcement.state = tenant_pb2.WORKER_STATE_READY
        announcement.policy.CopyFrom(self._current_policy)

    async def drain(self) -> None:
        """For the end of the process: stops the run and waits for RunEnded."""
        self._stop.request("the coordinator was told to end")
        await self._ended.wait()

    @property
    def drain_seconds(self) -> float:
        """How long `drain` may take: the Step under way, a checkpoint and the export after it."""
        return self._config.stop_bound_seconds + 1.0

    async def run(self, registry: Registry) -> bool:
        """Runs to the end and says how it went in RunEnded; false when it failed. Raises nothing of its own."""
        self._helpers += [self._beside(registry.run()), self._beside(self.events.run_heartbeat())]
        workers = Workers(registry, self._expected(), self._config.replacement_seconds)
        outcome, reason, exported = "finished", self._whole(), ""
        try:
            try:
                await self._from_start_to_last_step(workers)
                if self._ending is not None and self._config.export and self._steps_done:
                    exported = await self._ending.export(self._current_policy.version)
            except Stopped:
                outcome, reason = "stopped", self._stop.reason
            except Exception as error:
                outcome, reason = "failed", self._blame(error)
            if self._ending is not None and self._steps_done and outcome != "finished":
                if outcome == "stopped" and self._config.checkpoint.at_stop:
                    await self._ending.save_if_possible(self._steps_done)
                if self._config.export:
                    exported = await self._ending.export_if_possible(self._current_policy.version)
        finally:
            await self._close(workers, LAST_LINES_SECONDS if outcome == "finished" else LAST_LINES_AT_STOP_SECONDS)
            await cancelled(*self._helpers)
            self.events.end(outcome, reason, exported, self._current_policy)
            self._ended.set()
        return outcome != "failed"

    def _expected(self) -> dict[events_pb2.WorkerKind, int]:
        """Workers that are waited for."""
        return {ROLLOUT: self._config.rollout_workers, REWARD: self._config.reward_workers, LEARNER: 1}

    def _whole(self) -> str:
        """What was done when nothing ended it before."""
        return f"{self._config.steps} steps"

    async def _from_start_to_last_step(self, workers: Workers) -> None:
        interrupting = self._stop.interrupting
        inputs = await interrupting(self._read_inputs())
        await interrupting(self._wait_for_workers(workers, inputs))
        scorer = Scorer(
            workers, inputs.text, tries=self._config.score_tries, calls_per_worker=self._config.calls_per_worker
        )
        await interrupting(self._patiently(lambda: scorer.resolve(self._config.scorer)))
        reference = await interrupting(self._patiently(lambda: self._find_reference(workers, inputs.text)))
        order = Order(*inputs.training, seed=self._service.seed, shuffle=self._config.data.shuffle)
        stored, ledger = self._stored, self._open_ledger(order)
        metrics = self._metrics = self._open_metrics()
        recovery = Recovery(workers, ledger, config=self._config, events=self.events, read_stored=self._read_stored)
        await interrupting(self._catch_up(recovery, ledger, metrics))
        checkpoints = Checkpoints(
            self._config.checkpoint,
            folder=self._service.run_dir / "checkpoints",
            run_id=self._service.run_id,
            ledger=ledger,
            events=self.events,
            known=stored.checkpoints if stored else (),
            scores=stored.scores if stored else None,
        )
        self._ending = Ending(
            self._service,
            self._config,
            events=self.events,
            recovery=recovery,
            checkpoints=checkpoints,
            stop=self._stop,
            began_with=self._resumed_step,
            chat_template=self._chat_template,
        )
        publication = Publication(
            workers,
            self._config.publication,
            self._model.dtype,
            lambda text: self.events.notice("warning", text),
            after_epoch=stored.epoch if stored else 0,
            on_epoch=ledger.record_epoch,
            find_learner=recovery.learner,
        )
        await interrupting(self._publish_first(publication, recovery))
        if self._config.replacement_seconds:
            self._helpers.append(self._beside(recovery.keep_engines(publication)))
        sampler = Sampler(
            workers,
            run_id=self._service.run_id,
            run_seed=self._service.seed,
            stop_token_ids=inputs.text.stop_token_ids,
            calls_per_worker=self._config.calls_per_worker,
        )
        await interrupting(
            recovery.through("self-check", lambda: self._check(workers, recovery, inputs.text, order, sampler))
        )
        await interrupting(recovery.through("warm-up", lambda: self._warm_up(recovery, inputs)))
        evaluations = Evaluations(
            self._service,
            self._config,
            inputs=inputs,
            sampler=sampler,
            scorer=scorer,
            events=self.events,
            metrics=metrics,
            ledger=ledger,
            on_score=checkpoints.scores.__setitem__,
        )
        evaluated = stored.evaluated.get(self._resumed_step, frozenset()) if stored else frozenset()
        if evaluations.due_before_loop(self._resumed_step, evaluated):
            await interrupting(evaluations.evaluate(self._current_policy.version, self._resumed_step))
        self._loop = Loop(
            self._config,
            seed=self._service.seed,
            policy=self._policy,
            order=order,
            sampler=sampler,
            scorer=scorer,
            reference=reference,
            schedule=SCHEDULES[self._config.schedule](),
            estimator=make_estimator(self._config.algorithm),
            keeps=make_filter(self._config.filter),
            workers=workers,
            publication=publication,
            recovery=recovery,
            ledger=ledger,
            metrics=metrics,
            events=self.events,
            stop=self._stop,
            evaluate=lambda step: evaluations.evaluate(self._current_policy.version, step),
            save=lambda step: checkpoints.after_step(step, recovery.learner_at_hand),
            waiting=stored.waiting if stored else {},
            position=stored.next_admission if stored else 0,
        )
        await self._loop.run()
        if self._config.evaluation and self._config.evaluation.at_end:
            await interrupting(evaluations.evaluate(self._current_policy.version, self._config.steps))

    # The stages before the loop

    async def _read_inputs(self) -> Inputs:
        self.events.enter(events_pb2.RUN_PHASE_START, 0, "tokenizer and prompts to be read")
        if self._ledger_path.exists():
            self._stored = await self._read_stored()
            if self._stored.batches > self._config.steps:
                raise ConfigError(f"steps: {self._config.steps}, and {self._stored.batches} are trained already")
        inputs = await asyncio.to_thread(read_inputs, self._config, self._model)
        # Read now: an export must not fail because the file has gone since.
        self._chat_template = self._config.data.own_template() or ""
        tell_surprises(inputs, self._config, self.events.notice)
        return inputs

    async def _read_stored(self) -> Stored:
        """The ledger as it stands now."""
        where, config = self._service, self._config
        return await asyncio.to_thread(
            read_stored, self._ledger_path, where.run_id, where.seed, config.prompts_per_step
        )

    async def _wait_for_workers(self, workers: Workers, inputs: Inputs) -> None:
        config = self._config
        expected = self._expected()
        self.events.enter(
            events_pb2.RUN_PHASE_START,
            0,
            f"{expected[ROLLOUT]} rollout, {expected[REWARD]} reward worker(s) and the learner to be up, "
            f"{config.start_seconds:.0f} s at most",
        )

        async def tell(missing: str) -> None:
            self.events.progress(0, 0, f"waiting for {missing}")

        await workers.wait_until_up(config.start_seconds, tell)
        states = await self._patiently(lambda: _states(workers))
        learner = workers.learner()
        version = states[learner.worker_id].policy.version
        if version != 0 and self._stored is None:
            raise Conflict(
                f"{learner.worker_id}: expected the model the run starts from, version 0; it holds version {version}"
            )
        check_lengths(inputs, states)

    async def _patiently(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        """Repeats what a service that died did not answer, while it may be replaced."""
        seconds = self._config.replacement_seconds
        return await (retried(attempt, deadline_seconds=seconds) if seconds else attempt())

    def _open_ledger(self, order: Order) -> Ledger:
        """A new one, or the one of an earlier life of this run. Raises ConfigError where the data is not that of it."""
        if self._stored is None:
            self._ledger = Ledger.create(self._ledger_path, self._service.run_id, self._service.seed)
        else:
            require_same_data(self._stored, order, self._config.samples_per_prompt)
            self._ledger = Ledger.open(self._ledger_path)
        return self._ledger

    def _open_metrics(self) -> MetricsFile:
        """The file, and whoever else is handed its lines."""
        service = self._service
        metrics = MetricsFile(service.run_dir / "metrics.jsonl")
        loop = asyncio.get_running_loop()

        def tell(level: str, message: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(self.events.notice, level, message)

        origin = Origin(service.run_id, service.run_dir, self._config.model_dump(mode="json"))
        self._deliveries = start_deliveries(self._config.sinks, origin, metrics.path, tell)

        def on_line() -> None:
            for delivery in self._deliveries:
                delivery.news()

        metrics.on_line = on_line
        return metrics

    async def _catch_up(self, recovery: Recovery, ledger: Ledger, metrics: MetricsFile) -> None:
        """Brings the learner to where the ledger stands."""
        if self._stored is not None:
            step = self._stored.batches
            self.events.enter(events_pb2.RUN_PHASE_START, step, f"the learner to hold version {step} again")
        await recovery.through("taking up the run", recovery.learner)
        self._policy = recovery.policy
        self._resumed_step = self._policy.version
        missing = set(range(1, self._resumed_step + 1)) - metrics.steps
        for result in await ledger.read_results(missing):  # the run ended between the Step and its line
            metrics.write(result.step_id, result.policy.version, step_metrics(result))

    async def _find_reference(self, workers: Workers, text: Text) -> Reference | None:
        """The reference model, where the objective reads one."""
        if self._config.algorithm.kl is None:
            return None
        reference = Reference(workers, text.vocabulary_digest, temperature=self._config.sampling.temperature)
        path = await reference.check()
        self.events.notice(
            "info", f"KL to the reference model {path}, {self._config.algorithm.kl.estimator} in the loss"
        )
        return reference

    async def _publish_first(self, publication: Publication, recovery: Recovery | None = None) -> None:
        """Engines start STALE: the version that the run begins with reaches them as every other version does. Those of
        an earlier life of this process may have it.
        """
        version = self._policy.version
        if not await publication.adopt(self._policy):
            self.events.notice("info", f"every engine serves version {version} already")
            return
        seconds = self._config.publication.deadline_seconds
        self.events.enter(
            events_pb2.RUN_PHASE_PUBLISH, version, f"version {version} to every engine, {seconds:.0f} s at most a try"
        )

        async def publish() -> Published:
            return await publication.publish(version, lambda p: self.events.progress(p.done, p.of, p.phase))

        if recovery is None:
            published = await publish()
        else:
            published = await recovery.through(f"publication of version {version}", publish)
        self._policy = published.policy

    async def _check(self, workers: Workers, recovery: Recovery, text: Text, order: Order, sampler: Sampler) -> None:
        config = self._config
        seconds = config.check_seconds
        self.events.enter(
            events_pb2.RUN_PHASE_CHECK,
            self._resumed_step,
            f"token ids and log-probabilities to be compared, {seconds:.0f} s at most",
        )
        learner = await recovery.learner()
        prompts = [order.at(n) for n in range(min(config.self_check.prompts, config.prompts_per_step))]
        async with within(seconds, "self-check"):
            compared = 0
            engines = await workers.wait_serving(config.replacement_seconds)
            if text.has_template:
                own = [prompt.messages for _, prompt in prompts if prompt.messages]
                conversations = [*selfcheck.awkward_conversations(text), *own]
                compared = await selfcheck.check_token_ids(text, engines, learner, conversations, seconds)
            agreement = await selfcheck.check_logprobs(
                prompts,
                sampler,
                learner,
                config.sampling,
                config.self_check,
                dtype=self._model.dtype,
                version=self._policy.version,
                seconds=seconds,
            )
        self.events.notice(
            "info",
            f"self-check: {compared} conversations encoded alike; over {agreement.tokens} tokens mean |log-prob "
            f"difference| {agreement.difference:.2g}, mean ratio {agreement.ratio:.4f}",
        )

    async def _warm_up(self, recovery: Recovery, inputs: Inputs) -> None:
        if not self._config.warm_up:
            return
        learner = await recovery.learner()
        seconds = self._config.check_seconds
        what = f"{learner.worker_id} to try a Step without effect on the longest rows"
        self.events.enter(events_pb2.RUN_PHASE_CHECK, self._resumed_step, f"{what}, {seconds:.0f} s at most")
        step = self._policy.version + 1
        header, rows = longest_batch(inputs.training, self._config, step=step, seed=self._service.seed)
        async with within(seconds, what):
            result = await learner.train_step(
                header, rows, seconds, lambda p: self.events.progress(p.done, p.of, p.phase)
            )
        self.events.notice("info", told(result, len(rows[0].token_ids)))

    # The rest

    @property
    def _ledger_path(self) -> Path:
        return self._service.run_dir / "run.db"

    @property
    def _steps_done(self) -> int:
        return self._loop.steps_done if self._loop else self._resumed_step

    @property
    def _current_policy(self) -> policy_pb2.Policy:
        return self._loop.policy if self._loop else self._policy

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task without which the run cannot go on."""

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Exception):
                self._stop.fail(error)

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        return task

    def _blame(self, error: Exception) -> str:
        """The error, who had it, and the file that says more."""
        worker_id = getattr(error, "worker_id", "") or self._service.worker_id
        log = self._service.run_dir / "logs" / f"{worker_id}.log"
        if isinstance(error, AntiphonError):
            return f"{error} [{worker_id}; see {log}]"
        logger.error("a bug", exc_info=error)
        return f"a bug in the coordinator: {type(error).__name__}: {error} [{worker_id}; see {log}]"

    async def _close(self, workers: Workers, seconds: float) -> None:
        await workers.close()
        if self._ledger is not None:
            await self._ledger.close()
        if self._metrics is not None:
            self._metrics.close()
        await asyncio.to_thread(close_deliveries, self._deliveries, seconds)


async def _states(workers: Workers) -> dict[str, tenant_pb2.GetStateResponse]:
    """Of every engine and the learner, by worker id."""
    parties: list[RolloutClient | LearnerClient] = [*workers.rollouts(), workers.learner()]
    answers = await asyncio.gather(*(party.state() for party in parties))
    return {party.worker_id: state for party, state in zip(parties, answers, strict=True)}
