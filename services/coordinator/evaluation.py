"""Evaluation: answers to held-out prompts, all by one policy version, scored as in training."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from antiphon.events.v1 import events_pb2
from antiphon.reward.v1 import reward_pb2
from antiphon.types.v1 import trajectory_pb2

from services.common.errors import Unavailable
from services.coordinator import scoring, trajectories
from services.coordinator.config import EvaluationConfig
from services.coordinator.data import Dataset, Prompt
from services.coordinator.identity import PromptKey
from services.coordinator.sampling import Sampler
from services.coordinator.scoring import Scorer
from services.coordinator.text import Text
from services.coordinator.trajectories import Trajectory
from services.coordinator.waits import cancelled

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Graded:
    prompt: Prompt
    trajectory: Trajectory
    answer: reward_pb2.ScoreResponse | None
    """None: nobody was asked to score it."""

    @property
    def score(self) -> float | None:
        answer = self.answer
        return answer.score.value if answer is not None and answer.WhichOneof("outcome") == "score" else None

    @property
    def failure(self) -> reward_pb2.ScoreResponse | None:
        return self.answer if self.score is None else None


class Evaluation:
    """Evaluates policies on one data set. Its sampling is its own and changes nothing of training's."""

    def __init__(
        self,
        sampler: Sampler,
        scorer: Scorer | None,
        text: Text,
        dataset: Dataset,
        config: EvaluationConfig,
        *,
        folder: Path,
        failure_budget: float,
        seconds: float,
    ) -> None:
        self._sampler = sampler
        self._scorer = scorer
        self._text = text
        self._dataset = dataset
        self._config = config
        self._folder = folder
        self._failure_budget = failure_budget
        self._seconds = seconds

    @property
    def name(self) -> str:
        """Of its data set."""
        return self._dataset.name

    @property
    def prompts(self) -> int:
        return len(self._dataset.prompts)

    async def run(self, version: int, on_progress: OnProgress) -> events_pb2.Evaluated:
        """The mean score of this version; every answer is in evaluations/<data set>-v<version>.jsonl.

        Of several answers to a prompt the mean counts, so that each prompt weighs the same. Those that could not be
        scored are counted and in no mean. Raises Unavailable when they exceed the budget. Without a scorer there is no
        mean: it is 0 then, and means nothing.
        """
        tasks = [asyncio.create_task(self._one(prompt, version)) for prompt in self._dataset.prompts]
        try:
            for done, task in enumerate(asyncio.as_completed(tasks), 1):
                await task
                on_progress(done, len(tasks))
            by_prompt = [task.result() for task in tasks]
        finally:
            await cancelled(*tasks)
        graded = [one for answers in by_prompt for one in answers]
        self._write(graded, version)
        if self._scorer is None:
            return events_pb2.Evaluated(dataset=self._dataset.name, policy_version=version, prompts=len(by_prompt))
        scores = [
            math.fsum(scored) / len(scored)
            for answers in by_prompt
            if (scored := [one.score for one in answers if one.score is not None])
        ]
        failures = [one.failure for one in graded if one.failure is not None]
        if len(failures) > self._failure_budget * len(graded) or not scores:
            raise Unavailable(
                f"evaluation of version {version} on {self._dataset.name}: {len(failures)} of {len(graded)} answers "
                f"could not be scored, more than failure_budget {self._failure_budget}; "
                f"{scoring.describe_failure(failures[0])}"
            )
        return events_pb2.Evaluated(
            dataset=self._dataset.name,
            policy_version=version,
            prompts=len(by_prompt),
            score_mean=math.fsum(scores) / len(scores),
            failures=len(failures),
        )

    async def _one(self, prompt: Prompt, version: int) -> list[_Graded]:
        sampled = await self._sampler.sample(
            PromptKey(self._dataset.name, 0, prompt.row),
            prompt,
            samples=self._config.samples,
            temperature=self._config.temperature,
            max_tokens=self._config.max_tokens,
            version=version,
            deadline_seconds=self._seconds,
        )
        if self._scorer is None:
            return [_Graded(prompt, trajectory, None) for trajectory in sampled]
        answers = await self._scorer.score(prompt, sampled, self._seconds)
        return [_Graded(prompt, *pair) for pair in zip(sampled, answers, strict=True)]

    def _write(self, graded: list[_Graded], version: int) -> None:
        """In row order; written aside, then renamed, so a file that is there is whole."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._dataset.name}-v{version}.jsonl"
        aside = path.with_suffix(".tmp")
        with aside.open("w", encoding="utf-8") as lines:
            for one in graded:
                ids = trajectories.sampled_ids(one.trajectory)
                line = {
                    "row": one.prompt.row,
                    "sample": one.trajectory.sample_number,
                    "policy_version": version,
                    "prompt": one.prompt.text,
                    "response": self._text.decode(ids, special_tokens=False),
                    "score": one.score,
                    "parts": {part.name: part.value for part in one.answer.score.parts} if one.answer else {},
                    "failure": None if one.failure is None else scoring.describe_failure(one.failure),
                    "tokens": len(ids),
                    "reference": one.prompt.reference,
                    "finish_reason": trajectory_pb2.FinishReason.Name(one.trajectory.finish_reason),
                }
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")
        os.replace(aside, path)
