"""What a stream of score requests comes to: candidates alone, or groups once they are whole."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.reward.v1 import reward_pb2

from services.common.errors import InvalidRequest
from services.reward.answering import Work
from services.reward.scorer import Outcome, Scorer, ScorerSet, full_name

LONGEST_ID = 1000  # characters; what was seen is remembered for the length of a stream
MOST_WAITING = 4096
"""Candidates of groups that are not whole yet."""

GroupKey = tuple[str, str, int, int]
"""Full name of the scorer; data set, row and epoch of the prompt."""


class ScoreStream:
    """One Score call."""

    def __init__(self, scorers: ScorerSet) -> None:
        self._scorers = scorers
        self.room = max(1, 2 * sum(scorer.concurrency for scorer in scorers))
        """Reads ahead no more than what keeps the scorers busy."""
        self._seen: set[tuple[str, int, int, int]] = set()
        self._groups: dict[GroupKey, list[reward_pb2.Candidate]] = {}

    def accept(self, request: reward_pb2.ScoreRequest) -> Work[reward_pb2.ScoreResponse] | None:
        """What can be scored now; None for a candidate that waits for its siblings. Raises InvalidRequest, NotFound."""
        candidate = request.candidate
        self._check(candidate)
        scorer = self._scorers.find(request.scorer)
        if not scorer.whole_groups:
            return _work(scorer, [candidate])
        prompt = candidate.prompt_id
        key = (full_name(scorer), prompt.dataset, prompt.row, prompt.epoch)
        group = self._groups.setdefault(key, [])
        group.append(candidate)
        if candidate.group_size < 1 or candidate.group_size != group[0].group_size:
            raise InvalidRequest(
                f"candidate {_named(candidate)}: group_size {candidate.group_size}; {full_name(scorer)} scores whole "
                f"groups, so it must be at least 1 and the same in all candidates of a group"
            )
        if len(group) < candidate.group_size:
            if sum(map(len, self._groups.values())) > MOST_WAITING:
                raise InvalidRequest(
                    f"more than {MOST_WAITING} candidates wait for the rest of their groups; send group after group"
                )
            return None
        return _work(scorer, sorted(self._groups.pop(key), key=lambda one: one.sample_number))

    def finish(self) -> None:
        """Raises InvalidRequest when a group lacks candidates."""
        for (scorer, *_), group in self._groups.items():
            raise InvalidRequest(
                f"{scorer} scores whole groups, and the stream ended with {len(group)} of the {group[0].group_size} "
                f"candidates of {_named(group[0]).rpartition('/')[0]}"
            )

    def _check(self, candidate: reward_pb2.Candidate) -> None:
        prompt = candidate.prompt_id
        if not prompt.dataset or len(prompt.dataset) > LONGEST_ID:
            raise InvalidRequest(
                f"a candidate needs a prompt_id.dataset of 1 to {LONGEST_ID} characters, got {len(prompt.dataset)}"
            )
        key = (prompt.dataset, prompt.row, prompt.epoch, candidate.sample_number)
        if key in self._seen:
            raise InvalidRequest(
                f"candidate {_named(candidate)} came twice in one stream; an id is scored once per call"
            )
        self._seen.add(key)


def _named(candidate: reward_pb2.Candidate) -> str:
    prompt = candidate.prompt_id
    return f"{prompt.dataset}/{prompt.epoch}/{prompt.row}/{candidate.sample_number}"


def _work(scorer: Scorer, candidates: Sequence[reward_pb2.Candidate]) -> Work[reward_pb2.ScoreResponse]:
    async def run() -> list[reward_pb2.ScoreResponse]:
        outcomes = await scorer.score(candidates)
        return [_response(scorer, one, outcome) for one, outcome in zip(candidates, outcomes, strict=True)]

    return Work(1, run)


def _response(scorer: Scorer, candidate: reward_pb2.Candidate, outcome: Outcome) -> reward_pb2.ScoreResponse:
    response = reward_pb2.ScoreResponse(
        prompt_id=candidate.prompt_id, sample_number=candidate.sample_number, scorer=full_name(scorer)
    )
    if isinstance(outcome, reward_pb2.ScoreFailure):
        response.failure.CopyFrom(outcome)
    else:
        response.score.CopyFrom(outcome)
    return response
