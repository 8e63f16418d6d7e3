"""A group: the sibling trajectories of one prompt, from admission to the last score. Unit of advantage and of retry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from antiphon.reward.v1 import reward_pb2
from antiphon.types.v1 import trajectory_pb2

from services.common.errors import Conflict, Internal
from services.coordinator.data import Prompt
from services.coordinator.identity import PromptKey, TrajectoryKey
from services.coordinator.trajectories import Trajectory, key_of


class GroupState(Enum):
    """How far a group is."""

    ADMITTED = "admitted"
    """Being sampled."""
    SAMPLED = "sampled"
    """Every trajectory is there; being scored."""
    COMPLETE = "complete"
    """Every trajectory is scored or has failed to be, at least one is scored."""
    FAILED = "failed"
    """None could be scored: it enters no Batch."""
    FILTERED = "filtered"
    """Scored, and not worth training on: it enters no Batch."""


_NEXT: dict[GroupState, tuple[GroupState, ...]] = {
    GroupState.ADMITTED: (GroupState.SAMPLED,),
    GroupState.SAMPLED: (GroupState.COMPLETE, GroupState.FAILED, GroupState.FILTERED),
    GroupState.COMPLETE: (),
    GroupState.FAILED: (),
    GroupState.FILTERED: (),
}


class Group:
    """Gathers what belongs to one prompt; by sample number, never by order of arrival."""

    def __init__(
        self,
        key: PromptKey,
        prompt: Prompt,
        samples: int,
        keeps: Callable[[Sequence[float]], bool] | None = None,
        *,
        masks_cut: bool = False,
    ) -> None:
        """`keeps` says of the scores that take part whether the group is trained; without it every group is.
        `masks_cut`: those of answers that were cut take no part.
        """
        self.key = key
        self.prompt = prompt
        self.samples = samples
        self.state = GroupState.ADMITTED
        self.has_left = False
        """FAILED or FILTERED. Looked at for every group whenever a trajectory comes, so it is an attribute."""
        self._keeps = keeps
        self._masks_cut = masks_cut
        self._trajectories: dict[int, Trajectory] = {}
        self._answers: dict[int, reward_pb2.ScoreResponse] = {}

    @property
    def sampled(self) -> int:
        """Trajectories that have come."""
        return len(self._trajectories)

    @property
    def finished(self) -> bool:
        return self.state is not GroupState.ADMITTED and self.state is not GroupState.SAMPLED

    @property
    def trajectories(self) -> list[Trajectory]:
        """Those that have come, by sample number."""
        return [self._trajectories[sample] for sample in sorted(self._trajectories)]

    @property
    def answers(self) -> list[reward_pb2.ScoreResponse]:
        """Scores and failures, by sample number."""
        return [self._answers[sample] for sample in sorted(self._answers)]

    @property
    def failures(self) -> list[reward_pb2.ScoreResponse]:
        return [answer for answer in self.answers if answer.WhichOneof("outcome") == "failure"]

    def add_trajectory(self, trajectory: Trajectory) -> None:
        """One more trajectory; the last one makes the group SAMPLED. One that is there already is left as it is."""
        key = key_of(trajectory)
        if key.prompt != self.key or not 0 <= key.sample < self.samples:
            raise Internal(
                f"group {self.key} of {self.samples} samples got trajectory {key} from {trajectory.worker_id}"
            )
        if key.sample in self._trajectories:
            return
        self._trajectories[key.sample] = trajectory
        if len(self._trajectories) == self.samples:
            self._move(GroupState.SAMPLED)

    def add_answers(self, answers: Sequence[reward_pb2.ScoreResponse]) -> None:
        """The scorer's answers to all trajectories at once, by one scorer version."""
        by_sample = {answer.sample_number: answer for answer in answers if PromptKey.of(answer.prompt_id) == self.key}
        if sorted(by_sample) != list(range(self.samples)) or len(answers) != self.samples:
            raise Internal(
                f"group {self.key}: expected a score or a failure for each of {self.samples} samples, got "
                f"{len(answers)}"
            )
        scorers = sorted({answer.scorer for answer in answers})
        if len(scorers) != 1:
            raise Conflict(f"group {self.key}: scored by {' and '.join(scorers)}; a group is scored by one version")
        self._answers = by_sample
        if not any(answer.WhichOneof("outcome") == "score" for answer in answers):
            self._move(GroupState.FAILED)
        elif self._keeps is None or self._keeps(self._scores_that_take_part()):
            self._move(GroupState.COMPLETE)
        else:
            self._move(GroupState.FILTERED)

    def rewards(self) -> dict[TrajectoryKey, float]:
        """Scores of the trajectories that take part: scored, with at least one trainable token."""
        return {
            TrajectoryKey(self.key, sample): answer.score.value
            for sample, answer in sorted(self._answers.items())
            if answer.WhichOneof("outcome") == "score" and any(self._trajectories[sample].loss_mask)
        }

    def _scores_that_take_part(self) -> list[float]:
        """Truncation is decided before any statistic (docs/math.md, Filters), the filter's as well."""
        return [
            score
            for key, score in self.rewards().items()
            if not (
                self._masks_cut and self._trajectories[key.sample].finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
            )
        ]

    def _move(self, state: GroupState) -> None:
        if state not in _NEXT[self.state]:
            raise Internal(f"group {self.key}: cannot go from {self.state.value} to {state.value}")
        self.state = state
        self.has_left = state in (GroupState.FAILED, GroupState.FILTERED)
