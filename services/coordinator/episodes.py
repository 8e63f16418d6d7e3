"""An episode: how one group comes about. Here the single turn: sample every answer, then score them together.

Durable in between: a trajectory is in the ledger before it is scored, a score before it is used.
"""

from __future__ import annotations

from collections.abc import Callable

from services.coordinator.config import CoordinatorConfig
from services.coordinator.groups import Group, GroupState
from services.coordinator.ledger import Ledger
from services.coordinator.sampling import Sampler
from services.coordinator.scoring import Scorer
from services.coordinator.trajectories import Trajectory


class SingleTurn:
    """Runs groups from admitted to complete (or failed)."""

    def __init__(
        self, sampler: Sampler, scorer: Scorer, ledger: Ledger, config: CoordinatorConfig, on_change: Callable[[], None]
    ) -> None:
        self._sampler = sampler
        self._scorer = scorer
        self._ledger = ledger
        self._config = config
        self._on_change = on_change

    async def run(self, group: Group, version: int) -> None:
        """Brings the group to its end under one policy version. A failure to score is an outcome, not an error.

        A group of a run that was taken up again may be further than admitted: what it has is not asked for again.
        """
        if group.state is GroupState.ADMITTED:
            await self._sample(group, version)
        if not group.finished:
            answers = await self._scorer.score(group.prompt, group.trajectories, self._config.score_seconds)
            group.add_answers(answers)
            await self._ledger.record_scores(group.answers, group.state)
        self._on_change()

    async def _sample(self, group: Group, version: int) -> None:
        sampling = self._config.sampling

        def take(trajectory: Trajectory) -> None:
            group.add_trajectory(trajectory)
            self._on_change()

        await self._sampler.sample(
            group.key,
            group.prompt,
            samples=group.samples,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            version=version,
            deadline_seconds=self._config.generate_seconds,
            on_trajectory=take,
            keep=lambda: self._ledger.record_trajectories(group.trajectories, group.state),
        )
