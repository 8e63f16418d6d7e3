from __future__ import annotations

import asyncio

import pytest
from antiphon.types.v1.policy_pb2 import Policy

from services.rollout.states import ASLEEP, FAILED, READY, STALE, STARTING, STOPPING, UPDATING, Life, name

ALLOWED = {
    (STARTING, STALE),
    (STARTING, STOPPING),
    (STARTING, FAILED),
    (STALE, UPDATING),
    (STALE, STOPPING),
    (STALE, FAILED),
    (UPDATING, READY),
    (UPDATING, STALE),
    (UPDATING, STOPPING),
    (UPDATING, FAILED),
    (READY, UPDATING),
    (READY, STOPPING),
    (READY, FAILED),
    (STOPPING, FAILED),
    (STALE, ASLEEP),
    (READY, ASLEEP),
    (ASLEEP, STALE),
    (ASLEEP, READY),
    (ASLEEP, STOPPING),
    (ASLEEP, FAILED),
}
PATHS = {
    STARTING: (),
    STALE: (STALE,),
    UPDATING: (STALE, UPDATING),
    READY: (STALE, UPDATING, READY),
    STOPPING: (STOPPING,),
    ASLEEP: (STALE, ASLEEP),
    FAILED: (FAILED,),
}


def life_in(state: int) -> Life:
    life = Life()
    for step in PATHS[state]:
        life.move(step, verified=Policy(version=3) if step == READY else None)
    return life


@pytest.mark.parametrize("before", PATHS)
@pytest.mark.parametrize("after", PATHS)
def test_only_the_moves_of_the_table(before: int, after: int) -> None:
    life = life_in(before)
    verified = Policy(version=4) if after == READY else None
    if (before, after) in ALLOWED:
        life.move(after, verified=verified)
        assert life.state == after
    else:
        with pytest.raises(RuntimeError, match=f"no way from {name(before)} to {name(after)}"):
            life.move(after, verified=verified)
        assert life.state == before


def test_only_a_verified_policy_makes_it_ready() -> None:
    with pytest.raises(RuntimeError, match="READY"):
        life_in(UPDATING).move(READY)
    with pytest.raises(RuntimeError, match="STALE"):
        life_in(UPDATING).move(STALE, verified=Policy(version=1))


def test_a_failed_update_keeps_the_policy_it_had() -> None:
    life = life_in(READY)
    life.move(UPDATING)
    life.move(STALE, "the digest differs")
    assert life.policy == Policy(version=3)
    assert "STALE" in str(life.refusal()) and "the digest differs" in str(life.refusal())


async def test_every_move_is_told() -> None:
    life = Life()
    told: list[int] = []
    life.on_change = lambda: told.append(life.state)
    waiting = asyncio.create_task(life.wait_change())
    await asyncio.sleep(0)
    life.move(STALE)
    await asyncio.wait_for(waiting, 1)
    life.move(UPDATING)
    assert told == [STALE, UPDATING]
