"""Which groups a filter keeps, and whose Step the groups are when some leave."""

from __future__ import annotations

import random
from typing import Any

import pytest
from antiphon.reward.v1 import reward_pb2
from antiphon.types.v1 import trajectory_pb2

from services.common.config import parse
from services.common.errors import ConfigError
from services.coordinator.admissions import Admissions
from services.coordinator.algorithm_settings import MeanFilter, SpreadFilter
from services.coordinator.algorithms import make_filter
from services.coordinator.config import CoordinatorConfig
from services.coordinator.data import Prompt
from services.coordinator.groups import Group, GroupState
from services.coordinator.identity import PromptKey


@pytest.mark.parametrize(
    ("filter_", "scores", "kept"),
    [
        (SpreadFilter(type="spread"), [1.0, 1.0, 0.0], True),
        (SpreadFilter(type="spread"), [1.0, 1.0, 1.0], False),
        (SpreadFilter(type="spread"), [0.1, 0.1 + 1e-12], True),
        (SpreadFilter(type="spread", tolerance=1e-6), [0.1, 0.1 + 1e-12], False),
        (SpreadFilter(type="spread", tolerance=0.5), [0.0, 0.5], False),
        (SpreadFilter(type="spread"), [1.0], False),
        (SpreadFilter(type="spread"), [], False),
        (MeanFilter(type="mean"), [1.0, 1.0, 0.0], True),
        (MeanFilter(type="mean"), [1.0, 1.0], False),
        (MeanFilter(type="mean"), [0.0, 0.0], False),
        (MeanFilter(type="mean"), [0.5], False),
        (MeanFilter(type="mean", above=0.25, below=0.75), [0.0, 0.0, 0.0, 1.0], False),  # the interval is open
        (MeanFilter(type="mean", above=0.2, below=0.75), [0.0, 0.0, 0.0, 1.0], True),
    ],
)
def test_a_group_is_kept_by_its_raw_scores(filter_: Any, scores: list[float], kept: bool) -> None:
    rule = make_filter(filter_)
    assert rule is not None and rule(scores) is kept
    assert rule(scores[::-1]) is kept


def group(number: int, scores: list[float | None] | None = None, masked: tuple[int, ...] = ()) -> Group:
    """A group of two under the filter of spread; scored when scores are given, None is a failure."""
    made = Group(PromptKey("t", 0, number), Prompt(number, (), "", (1,), "", "{}"), 2, make_filter(SPREAD))
    if scores is not None:
        finish(made, scores, masked)
    return made


SPREAD = SpreadFilter(type="spread")


def finish(made: Group, scores: list[float | None], masked: tuple[int, ...] = ()) -> None:
    for n, score in enumerate(scores):
        made.add_trajectory(
            trajectory_pb2.Trajectory(
                prompt_id=made.key.message(), sample_number=n, token_ids=[1, 2], loss_mask=[False, n not in masked]
            )
        )
        del score
    answers = [reward_pb2.ScoreResponse(prompt_id=made.key.message(), sample_number=n, scorer="s@1") for n in range(2)]
    for answer, score in zip(answers, scores, strict=True):
        if score is None:
            answer.failure.reason = "raised"
        else:
            answer.score.value = score
    made.add_answers(answers)


@pytest.mark.parametrize(
    ("scores", "masked", "state"),
    [
        ([1.0, 0.0], (), GroupState.COMPLETE),
        ([1.0, 1.0], (), GroupState.FILTERED),
        ([1.0, None], (), GroupState.FILTERED),  # one survivor
        ([1.0, 0.0], (1,), GroupState.FILTERED),  # the other has no trainable token: its score counts for nothing
        ([None, None], (), GroupState.FAILED),
    ],
)
def test_a_scored_group_is_complete_filtered_or_failed(
    scores: list[float | None], masked: tuple[int, ...], state: GroupState
) -> None:
    made = group(0, scores, masked)
    assert made.state is state and made.finished
    assert made.has_left is (state is not GroupState.COMPLETE)


def admissions(wanted: int, most: int, steps: int = 3) -> Admissions:
    return Admissions(wanted=wanted, most=most, refills=True, steps=steps, steps_done=0, position=0)


def test_each_group_that_leaves_is_replaced_and_the_others_stay_in_order() -> None:
    queue = admissions(2, 6)
    for n in range(2):
        queue.add(group(n))
    assert queue.share().lacking == 0 and queue.step == 2
    finish(queue.share().groups[0], [1.0, 1.0])
    share = queue.share()
    assert (share.lacking, share.complete, queue.step) == (1, False, 1)
    queue.add(group(2, [0.0, 1.0]))
    assert not queue.share().complete
    finish(share.groups[1], [0.0, 1.0])
    share = queue.share()
    assert [one.key.row for one in share.groups] == [0, 1, 2]
    assert ([one.key.row for one in share.kept], share.complete, share.end) == ([1, 2], True, 3)
    queue.trained(share)
    assert (queue.step, queue.position, queue.share().groups) == (2, 3, [])
    assert queue.counts(1).trained == 2


def test_a_step_that_had_its_most_takes_what_stays_and_all_its_places() -> None:
    queue = admissions(2, 3)
    for n in range(3):
        queue.add(group(n, [1.0, 1.0] if n != 1 else [1.0, 0.0]))
    share = queue.share()
    assert (len(share.kept), share.complete, share.end, queue.step) == (1, True, 3, 2)
    counts = queue.counts(0)
    assert (counts.running, counts.finished, counts.trained) == (0, 2, 0)
    queue.add(group(3))  # of the second Step: the first takes no more
    assert queue.share().end == 3


def test_steps_have_what_going_through_all_groups_once_gives_them() -> None:
    """Against another way to say it: one pass with a counter, over runs in which everything is finished in order."""
    random_ = random.Random(3)
    for _ in range(200):
        wanted, extra, steps = random_.randint(1, 3), random_.randint(1, 4), random_.randint(1, 4)
        stays = [random_.random() < 0.5 for _ in range(60)]
        expected, rows = [], []
        for row, stay in enumerate(stays):
            rows.append((row, stay))
            if sum(s for _, s in rows) == wanted or len(rows) == wanted + extra:
                expected.append([r for r, s in rows if s])
                rows = []
        queue = admissions(wanted, wanted + extra, steps)
        found = []
        while len(found) < steps:
            while queue.step <= len(found) + 1:  # the door of the sync schedule
                queue.add(group(queue.position, [0.0, 1.0 if stays[queue.position] else 0.0]))
            share = queue.share()
            assert share.complete and share.end == queue.position
            found.append([one.key.row for one in share.kept])
            queue.trained(share)
        assert found == expected[:steps] and queue.all_admitted


BASE: dict[str, Any] = {
    "steps": 1,
    "data": {"path": "x.jsonl"},
    "sampling": {"max_tokens": 4},
    "prompts_per_step": 3,
    "samples_per_prompt": 4,
    "scorer": "s",
}


def test_the_most_prompts_of_a_step_are_five_times_as_many_unless_it_is_said() -> None:
    assert parse(CoordinatorConfig, BASE, "x").most_prompts_per_step == 3
    spread = {"type": "spread"}
    assert parse(CoordinatorConfig, BASE | {"filter": spread}, "x").most_prompts_per_step == 15
    told = BASE | {"filter": spread | {"most_extra_prompts": 2}}
    assert parse(CoordinatorConfig, told, "x").most_prompts_per_step == 5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"filter": {"type": "spread"}, "samples_per_prompt": 1}, "filter 'spread' looks at how the samples"),
        ({"filter": {"type": "mean", "above": 1.0, "below": 0.5}}, "no mean is above 1.0 and below 0.5"),
        ({"filter": {"type": "spread", "tolerance": -1}}, "filter.tolerance"),
        ({"filter": {"type": "dapo"}}, "'spread', 'mean'"),
        ({"filter": {"type": "spread", "most_extra_prompt": 3}}, "did you mean 'most_extra_prompts'"),
        ({"filter": {"tolerance": 0.1}}, "filter: lacks the key 'type'"),
        ({"filter": {"type": "spread", "most_extra_prompts": 0}}, "filter.most_extra_prompts"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(CoordinatorConfig, BASE | changes, "x")
    assert reason in str(caught.value)
