"""Answers of one model to the held-out prompts of a recipe, scored if wished; no Step, no ledger.

    START ▶ PUBLISH ▶ EVALUATE ▶ ENDED

A process beside a learner, engines and, for scores, reward workers, as of a run: an engine serves only what a learner
published (docs/design.md §6), so the model's own weights reach it as version 0.
`python -m services.coordinator.answers --config FILE`; the answers are in evaluations/ of its run's folder.
"""

from __future__ import annotations

import asyncio
import sys

from antiphon.events.v1 import events_pb2

from services.common.config import ProcessConfig
from services.common.errors import ConfigError
from services.common.worker import Worker, main
from services.coordinator.__main__ import serve
from services.coordinator.config import AnswersConfig
from services.coordinator.evaluations import Evaluations
from services.coordinator.inputs import Inputs, read_heldout, tell_surprises
from services.coordinator.publication import Publication
from services.coordinator.run import Run
from services.coordinator.sampling import Sampler
from services.coordinator.scoring import Scorer
from services.coordinator.workers import REWARD, Workers


class Answers(Run):
    """The run of a process that only evaluates."""

    def __init__(self, process: ProcessConfig[AnswersConfig]) -> None:
        # Too short to be worth a wait for somebody's next life.
        settings = process.settings.model_copy(update={"replacement_seconds": 0.0})
        super().__init__(ProcessConfig(service=process.service, model=process.model, settings=settings))
        self._scored = process.settings.score

    def _expected(self) -> dict[events_pb2.WorkerKind, int]:
        expected = super()._expected()
        return expected if self._scored else {**expected, REWARD: 0}

    def _whole(self) -> str:
        return "all prompts answered"

    async def _from_start_to_last_step(self, workers: Workers) -> None:
        interrupting = self._stop.interrupting
        inputs = await interrupting(self._read_heldout())
        await interrupting(self._wait_for_workers(workers, inputs))
        config = self._config
        calls = config.calls_per_worker
        scorer: Scorer | None = None
        if self._scored:
            scorer = Scorer(workers, inputs.text, tries=config.score_tries, calls_per_worker=calls)
            await interrupting(scorer.resolve(config.scorer))
        publication = Publication(
            workers, config.publication, self._model.dtype, lambda text: self.events.notice("warning", text)
        )
        await interrupting(self._publish_first(publication))
        sampler = Sampler(
            workers,
            run_id=self._service.run_id,
            run_seed=self._service.seed,
            stop_token_ids=inputs.text.stop_token_ids,
            calls_per_worker=calls,
        )
        evaluations = Evaluations(
            self._service, config, inputs=inputs, sampler=sampler, scorer=scorer, events=self.events
        )
        await interrupting(evaluations.evaluate(self._current_policy.version, 0))

    async def _read_heldout(self) -> Inputs:
        self.events.enter(events_pb2.RUN_PHASE_START, 0, "tokenizer and prompts to be read")
        if self._config.evaluation is None:
            raise ConfigError("coordinator.evaluation: expected held-out prompts, the configuration has none")
        inputs = await asyncio.to_thread(read_heldout, self._config, self._model)
        tell_surprises(inputs, self._config, self.events.notice)
        return inputs


async def build(process: ProcessConfig[AnswersConfig]) -> Worker:
    return serve(process.service, Answers(process))


if __name__ == "__main__":
    sys.exit(main("services.coordinator.answers", AnswersConfig, build))
