"""Publications that break, and what the run makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from antiphon.events.v1 import events_pb2
from antiphon.rollout.v1 import rollout_pb2

from services.common.errors import Conflict, Expired
from tests.contract.coordinator.coordinator_setup import Setup
from tests.simulated.coordinator import Live


@pytest.mark.parametrize("where", ["begin", "publish", "commit"])
async def test_a_publication_that_breaks_is_tried_once_more_in_a_new_epoch(setup: Setup, where: str) -> None:
    error = Expired("the transfer stalled")
    {
        "begin": setup.rollout.begin_errors,
        "publish": setup.learner.publish_errors,
        "commit": setup.rollout.commit_errors,
    }[where].append(error)
    outcome = await setup.run(steps=1)
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    assert setup.rollout.epochs == [1, 2]
    assert setup.learner.published[-2:] == [(2, 0), (2, 1)]
    assert any("the transfer stalled" in notice.message for notice in outcome.of("notice"))


async def test_a_publication_that_breaks_twice_ends_the_run_with_the_first_error(setup: Setup) -> None:
    setup.rollout.commit_errors = [Conflict("digest differs"), Conflict("it differs again")]
    outcome = await setup.run(steps=1)
    assert outcome.ended.outcome == "failed"
    assert "digest differs" in outcome.ended.reason
    assert "logs/rollout-0.log" in outcome.ended.reason
    assert not [request for request in setup.rollout.requests if request.prompt_id.dataset == "train"]


async def test_an_engine_that_says_it_committed_and_did_not_is_found_out(setup: Setup) -> None:
    async def drop(event: events_pb2.RunEvent, live: Live) -> None:
        if event.phase_changed.phase == events_pb2.RUN_PHASE_TRAIN:
            setup.rollout.commits_take_effect = False

    outcome = await setup.run(drop)
    assert outcome.ended.outcome == "failed"
    assert "rollout-0: expected version 1 with digest" in outcome.ended.reason
    assert "it holds version 0" in outcome.ended.reason
    assert outcome.ended.export_path.endswith("policy-1")


async def test_every_unmatched_tensor_ends_the_run_by_name(make_setup: Callable[..., Any]) -> None:
    setup = await make_setup(rollouts=2)
    first, second = setup.simulation.rollouts
    first.join_answer = rollout_pb2.JoinTransferResponse(
        unknown_tensors=["lm_head.weight"], missing_tensors=["norm.weight"]
    )
    second.join_answer = rollout_pb2.JoinTransferResponse(differing_tensors=["embed: expected [4, 4], got [4, 5]"])
    outcome = await setup.run(rollout_workers=2)
    assert outcome.ended.outcome == "failed"
    for line in (
        "differ in 3 tensor(s)",
        "rollout-0: no place for lm_head.weight",
        "rollout-0: nothing fills norm.weight",
        "rollout-1: embed: expected [4, 4], got [4, 5]",
    ):
        assert line in outcome.ended.reason
    assert first.epochs == [1]  # no second try


async def test_publication_goes_on_over_the_survivors(make_setup: Callable[..., Any]) -> None:
    setup = await make_setup(rollouts=2)

    async def die(event: events_pb2.RunEvent, live: Live) -> None:
        change = event.phase_changed
        if (change.phase, change.step) == (events_pb2.RUN_PHASE_TRAIN, 1):
            # As after kill -9: the server is gone, the last announcement stays for a while.
            await setup.simulation.announced["rollout-1"].server.stop(0.0)

    outcome = await setup.run(die, rollout_workers=2, steps=2)
    assert outcome.ended.outcome == "finished", outcome.ended.reason
    lines = [line for line in outcome.metrics if "publish/engines" in line]
    assert [line["publish/engines"] for line in lines] == [1.0, 1.0]
    assert len(setup.simulation.rollouts[0].commits) == 3
