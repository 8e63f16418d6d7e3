"""Scores of one group from some reward worker. A failure stays a failure: it never becomes a number."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Sequence

from antiphon.reward.v1 import reward_pb2
from antiphon.types.v1 import chat_pb2

from services.common.errors import ConfigError, Conflict, Overloaded, Unavailable
from services.coordinator import trajectories
from services.coordinator.clients import RewardClient
from services.coordinator.data import Prompt
from services.coordinator.identity import PromptKey, TrajectoryKey
from services.coordinator.text import Text
from services.coordinator.trajectories import Trajectory
from services.coordinator.waits import FIRST_PAUSE_SECONDS
from services.coordinator.workers import REWARD, Workers, least_loaded, life_of

logger = logging.getLogger(__name__)

Answer = reward_pb2.ScoreResponse


class Scorer:
    """Asks reward workers for the scores of one scorer, whose version stays the same for the run."""

    def __init__(self, workers: Workers, text: Text, *, tries: int, calls_per_worker: int) -> None:
        self._workers = workers
        self._text = text
        self._tries = tries
        self._slots = asyncio.Semaphore(calls_per_worker)
        self.scorer = ""
        """name@version, known after `resolve`."""

    async def resolve(self, wanted: str) -> None:
        """Finds the scorer on every reward worker and pins its version. Raises ConfigError naming what there is."""
        for worker in self._workers.rewards():
            known = {f"{info.name}@{info.version}": info.name for info in await worker.list_scorers()}
            found = [full for full, name in known.items() if wanted in (full, name)]
            if len(found) != 1:
                raise ConfigError(
                    f"scorer {wanted!r}: {worker.worker_id} has {len(found)} of that name; it has: "
                    f"{', '.join(known) or 'none'}"
                )
            if self.scorer not in ("", found[0]):
                raise ConfigError(f"scorer {wanted!r}: {worker.worker_id} has {found[0]}, another worker {self.scorer}")
            self.scorer = found[0]

    async def score(self, prompt: Prompt, group: Sequence[Trajectory], deadline_seconds: float) -> list[Answer]:
        """An answer for each trajectory of the group, by sample number, all by one scorer version.

        Where the machinery failed the group is sent again, elsewhere first; what still fails then stays a failure. A
        worker that died is no failure: the group goes to another, or to its replacement, which is waited for.
        Raises NotFound or InvalidRequest when the reward service refuses the request itself.
        """
        requests = [
            reward_pb2.ScoreRequest(scorer=self.scorer, candidate=self._candidate(prompt, trajectory, len(group)))
            for trajectory in group
        ]
        avoid: set[str] = set()
        best: dict[int, Answer] = {}
        end = time.monotonic() + deadline_seconds
        tries = 0
        while True:
            answers, silent = await self._once(requests, group, avoid, deadline_seconds)
            best = _better(best, answers)
            if not any(map(_failed_by_machinery, best.values())):
                break
            try:
                if silent is None or not await self._replaced(silent, end):
                    tries += 1
            except Unavailable as error:  # nobody came
                logger.warning("%s", error)
                break
            if tries == self._tries or time.monotonic() >= end:
                break
            await asyncio.sleep(FIRST_PAUSE_SECONDS * 2 ** max(tries - 1, 0) * random.uniform(0.5, 1.0))
        return [best[number] for number in sorted(best)]

    async def _replaced(self, silent: RewardClient, end: float) -> bool:
        """Whether the worker that did not answer is gone, and another, or another life of it, is there: waited for.

        What it was sent then is no try of the scorer's. Raises Unavailable when nobody came.
        """
        seconds = min(self._workers.replacement_seconds, end - time.monotonic())
        if seconds <= 0.0:
            return False
        answering = await self._workers.answering(REWARD, seconds)
        return life_of(silent) not in {life_of(worker) for worker in answering}

    async def _once(
        self, requests: Sequence[reward_pb2.ScoreRequest], group: Sequence[Trajectory], avoid: set[str], seconds: float
    ) -> tuple[dict[int, Answer], RewardClient | None]:
        """The answers of one worker, failures where it gave none; and the worker, if it could not be reached."""
        silent: RewardClient | None = None
        async with self._slots:
            worker = least_loaded(self._workers.rewards(), avoid)
            worker.in_flight += 1
            avoid.add(worker.worker_id)
            try:
                answers = await worker.score(requests, seconds)
                cause = f"{worker.worker_id} ended the stream without an answer"
            except (Unavailable, Overloaded) as error:
                answers, cause = [], str(error)
                silent = worker if isinstance(error, Unavailable) else None
            finally:
                worker.in_flight -= 1
        by_sample = {answer.sample_number: self._checked(answer) for answer in answers}
        return {t.sample_number: by_sample.get(t.sample_number) or self._unanswered(t, cause) for t in group}, silent

    def _checked(self, answer: Answer) -> Answer:
        """A score that is not finite, or no outcome at all, is a failure; it must not reach a mean.

        Raises Conflict when another scorer than the run's answered.
        """
        if answer.scorer != self.scorer:
            raise Conflict(
                f"{identity(answer)}: expected a score by {self.scorer}, got one by {answer.scorer or 'nobody'}"
            )
        outcome = answer.WhichOneof("outcome")
        if outcome == "failure" or (outcome == "score" and math.isfinite(answer.score.value)):
            return answer
        reason, got = (
            ("not_finite", str(answer.score.value)) if outcome == "score" else ("none", "neither score nor failure")
        )
        failure = reward_pb2.ScoreFailure(
            kind=reward_pb2.FAILURE_KIND_DATA, reason=reason, message=f"expected a finite score, got {got}"
        )
        return Answer(
            prompt_id=answer.prompt_id, sample_number=answer.sample_number, scorer=answer.scorer, failure=failure
        )

    def _candidate(self, prompt: Prompt, trajectory: Trajectory, group_size: int) -> reward_pb2.Candidate:
        ids = trajectories.sampled_ids(trajectory)
        text, raw = self._text.decode_both(ids)
        return reward_pb2.Candidate(
            prompt_id=trajectory.prompt_id,
            sample_number=trajectory.sample_number,
            group_size=group_size,
            conversation=chat_pb2.Conversation(
                messages=[chat_pb2.ChatMessage(**message) for message in prompt.messages]
            ),
            prompt_text=prompt.text,
            response_text=text,
            response_text_raw=raw,
            response_token_ids=ids,
            finish_reason=trajectory.finish_reason,
            reference=prompt.reference,
            columns_json=prompt.columns_json,
        )

    def _unanswered(self, trajectory: Trajectory, cause: str) -> Answer:
        failure = reward_pb2.ScoreFailure(kind=reward_pb2.FAILURE_KIND_INFRA, reason="unanswered", message=cause)
        return Answer(
            prompt_id=trajectory.prompt_id, sample_number=trajectory.sample_number, scorer=self.scorer, failure=failure
        )


def identity(answer: Answer) -> TrajectoryKey:
    return TrajectoryKey(PromptKey.of(answer.prompt_id), answer.sample_number)


def describe_failure(answer: Answer) -> str:
    """One line about an answer that is a failure."""
    kind = reward_pb2.FailureKind.Name(answer.failure.kind).removeprefix("FAILURE_KIND_").lower()
    return f"{identity(answer)}: {kind}, {answer.failure.reason}: {answer.failure.message.strip()[-300:]}"


def _failed_by_machinery(answer: Answer) -> bool:
    return answer.WhichOneof("outcome") == "failure" and answer.failure.kind != reward_pb2.FAILURE_KIND_DATA


def _better(old: dict[int, Answer], new: dict[int, Answer]) -> dict[int, Answer]:
    """The old answers, but the new ones where the machinery had failed."""
    return {n: answer for n, answer in new.items() if n not in old or _failed_by_machinery(old[n])} | {
        n: answer for n, answer in old.items() if not _failed_by_machinery(answer)
    }
