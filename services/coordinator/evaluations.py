"""The evaluations of a run: every data set of held-out prompts, each policy version once, and who is told the score."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from antiphon.events.v1 import events_pb2

from services.common.config import ServiceConfig
from services.coordinator.config import CoordinatorConfig
from services.coordinator.evaluation import Evaluation
from services.coordinator.events import EventLog
from services.coordinator.inputs import Inputs
from services.coordinator.ledger import Ledger
from services.coordinator.metrics import MetricsFile
from services.coordinator.sampling import Sampler
from services.coordinator.scoring import Scorer
from services.coordinator.waits import within


class Evaluations:
    """Those of one run, or of one command that only evaluates. Without held-out prompts there is nothing to do."""

    def __init__(
        self,
        service: ServiceConfig,
        config: CoordinatorConfig,
        *,
        inputs: Inputs,
        sampler: Sampler,
        scorer: Scorer | None,
        events: EventLog,
        metrics: MetricsFile | None = None,
        ledger: Ledger | None = None,
        on_score: Callable[[int, float], None] = lambda version, score: None,
    ) -> None:
        """`on_score` is told each version's mean score over the data sets. Without a scorer there is none to tell."""
        self._config = config
        self._events = events
        self._metrics = metrics
        self._ledger = ledger
        self._on_score = on_score
        self._scored = scorer is not None
        self._done_version = -1
        self._each: list[Evaluation] = []
        if config.evaluation is not None:
            self._each = [
                Evaluation(
                    sampler,
                    scorer,
                    inputs.text,
                    dataset,
                    config.evaluation,
                    folder=service.run_dir / "evaluations",
                    failure_budget=config.failure_budget,
                    seconds=config.evaluate_seconds,
                )
                for dataset in inputs.heldout
            ]

    def due_before_loop(self, step: int, done: Collection[str]) -> bool:
        """At the start of a run, or where it ended after Step `step` before an evaluation that was due was done.

        `done` are the data sets on which that policy was evaluated.
        """
        config = self._config.evaluation
        if config is None:
            return False
        if set(done) >= {evaluation.name for evaluation in self._each}:
            self._done_version = step
            return False
        return config.at_start if step == 0 else bool(config.every) and step % config.every == 0

    async def evaluate(self, version: int, step: int) -> None:
        """Evaluates a policy version, once."""
        if version == self._done_version:
            return
        results = [await self._on_data_set(evaluation, version, step) for evaluation in self._each]
        self._done_version = version
        if results:
            self._on_score(version, sum(result.score_mean for result in results) / len(results))

    async def _on_data_set(self, evaluation: Evaluation, version: int, step: int) -> events_pb2.Evaluated:
        seconds = self._config.evaluate_seconds
        what = f"answers to {evaluation.prompts} prompts by version {version}"
        self._events.enter(events_pb2.RUN_PHASE_EVALUATE, step, f"{what}, {seconds:.0f} s at most")
        started = time.monotonic()
        async with within(seconds, what):
            result = await evaluation.run(version, self._events.progress)
        if self._metrics is not None:
            name = f"eval/{result.dataset}"
            numbers = {
                f"{name}/score_mean": result.score_mean,
                f"{name}/prompts": float(result.prompts),
                f"{name}/failures": float(result.failures),
                "time/evaluate": time.monotonic() - started,
            }
            self._metrics.write(step, version, numbers)
        if self._ledger is not None:
            await self._ledger.record_evaluation(result.dataset, version, result.score_mean)
        if self._scored:
            self._events.evaluated(result)
        return result
