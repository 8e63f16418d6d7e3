"""What a rollout worker delivers is refused with the place and the value; sound answers pass, whatever is masked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from antiphon.types.v1 import policy_pb2, trajectory_pb2

from services.common.errors import Internal
from services.coordinator import trajectories

PROMPT = [3, 4]


def answer(**changes: Any) -> trajectory_pb2.Trajectory:
    """Two prompt tokens, four after them, of which the second is a tool's."""
    fields: dict[str, Any] = {
        "prompt_id": trajectory_pb2.PromptId(dataset="train", epoch=1, row=7),
        "sample_number": 2,
        "worker_id": "rollout-3",
        "token_ids": [*PROMPT, 5, 6, 7, 8],
        "loss_mask": [False, False, True, False, True, True],
        "behavior_logprobs": [0.0, 0.0, -0.5, math.nan, 0.0, -2.25],
        "finish_reason": trajectory_pb2.FINISH_REASON_STOP,
        "version_spans": spans((2, 3), (4, 6)),
    }
    return trajectory_pb2.Trajectory(**fields | changes)


def spans(*borders: tuple[int, int]) -> list[policy_pb2.VersionSpan]:
    return [policy_pb2.VersionSpan(start=start, end=end, policy_version=1) for start, end in borders]


def with_logprob(value: float) -> trajectory_pb2.Trajectory:
    return answer(behavior_logprobs=[0.0, 0.0, -0.5, 0.0, value, value])


def test_a_sound_answer_passes_and_its_tokens_are_those_that_were_sampled() -> None:
    """What is masked may hold anything, and needs no span; rounding may put a certain token above 0."""
    trajectories.check(answer(), PROMPT, max_tokens=4)
    trajectories.check(with_logprob(1e-3 - 1e-6), PROMPT, max_tokens=4)
    assert trajectories.sampled_ids(answer()) == [5, 7, 8]
    assert trajectories.sampled_tokens(answer()) == 3
    empty = answer(token_ids=PROMPT, loss_mask=[False] * 2, behavior_logprobs=[0.0] * 2, version_spans=[])
    trajectories.check(empty, PROMPT, max_tokens=4)
    assert (trajectories.sampled_ids(empty), trajectories.sampled_tokens(empty)) == ([], 0)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (
            lambda: answer(behavior_logprobs=[0.0]),
            "expected 6 loss mask entries and log-probabilities, one per token, got 6 and 1",
        ),
        (
            lambda: answer(token_ids=[3, 5, 5, 6, 7, 8]),
            "expected the token ids of the prompt at its beginning, masked; it begins otherwise",
        ),
        (
            lambda: answer(loss_mask=[False, True, True, False, True, True]),
            "expected the token ids of the prompt at its beginning, masked; it begins otherwise",
        ),
        (
            lambda: answer(finish_reason=trajectory_pb2.FINISH_REASON_ABORTED),
            "expected it to be finished by STOP or LENGTH, got FINISH_REASON_ABORTED",
        ),
        (
            lambda: with_logprob(0.5),
            "expected a finite log-probability of at most 0 at position 4, got 0.5",
        ),
        (
            lambda: with_logprob(math.nan),
            "expected a finite log-probability of at most 0 at position 4, got nan",
        ),
        (
            lambda: with_logprob(-math.inf),
            "expected a finite log-probability of at most 0 at position 4, got -inf",
        ),
        (
            lambda: answer(version_spans=spans((4, 6), (2, 3))),
            "expected version spans in order within its tokens, got [2, 3)",
        ),
        (
            lambda: answer(version_spans=spans((2, 7))),
            "expected version spans in order within its tokens, got [2, 7)",
        ),
        (
            lambda: answer(version_spans=spans((2, 5))),
            "expected version spans over every sampled token, position 5 has none",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_worker_and_the_place(
    make: Callable[[], trajectory_pb2.Trajectory], complaint: str
) -> None:
    with pytest.raises(Internal) as caught:
        trajectories.check(make(), PROMPT, max_tokens=4)
    assert str(caught.value) == f"train/1/7/2 from rollout-3: {complaint}"
    assert caught.value.worker_id == "rollout-3"


def test_more_tokens_than_were_asked_for() -> None:
    with pytest.raises(Internal, match="expected at most 3 tokens after the prompt, got 4"):
        trajectories.check(answer(), PROMPT, max_tokens=3)
