"""One node's hand-overs with everything real but the GPU: NATS, learner, engine, grants, publications, deaths."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import pytest_asyncio
from antiphon.tenant.v1 import tenant_pb2

from benchmarks.shared_node import (
    ENGINE_ID,
    KV,
    LEARNER_ID,
    ON_CPU,
    OPTIMIZER,
    WEIGHTS,
    SharedNode,
    started,
    training_rows,
)
from services.common.config import ModelConfig
from services.common.errors import Conflict, Expired, Unavailable
from services.common.grants import TenantId
from services.learner.config import LearnerConfig
from services.rollout.config import RolloutConfig
from tests.tiny.models import CHARACTERS, SPECIAL_TOKENS, make_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]  # two services start

PROMPT = list(range(10, 30))
VOCABULARY = len(SPECIAL_TOKENS) + len(CHARACTERS)
ROWS = training_rows(4, 32, VOCABULARY, seed=3)
READY = tenant_pb2.WORKER_STATE_READY
LINGER_SECONDS = 0.5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory):
    folder = tmp_path_factory.mktemp("node")
    model = ModelConfig(path=str(make_tiny_model(folder / "model", seed=5)), dtype="float32")
    learner = LearnerConfig.model_validate(
        {"optimizer": {"learning_rate": 0.01}, "micro_batch_tokens": 64, "failed_linger_seconds": LINGER_SECONDS}
    )
    engine = RolloutConfig(max_sequence_tokens=128, kv_cache_gib=0.1)
    async with started(folder / "run", model, learner, engine, ON_CPU) as node:
        await node.load()
        yield node


async def awake(node: SharedNode) -> dict[str, list[int]]:
    """What the log says is awake, by worker."""
    holdings = (await node.state()).holdings
    return {tenant.worker_id: sorted(h.awake) for tenant, h in holdings.items() if h.memory}


async def test_the_engine_starts_under_its_own_grant_while_the_learner_sleeps(node):
    assert await awake(node) == {ENGINE_ID: [WEIGHTS, KV]}
    assert (await node.engine.state()).state == tenant_pb2.WORKER_STATE_STALE
    assert list((await node.learner.state()).asleep) == [WEIGHTS, OPTIMIZER]


async def test_cycles_of_publish_generate_and_train(node):
    answers = []
    for version in range(3):
        published = await node.refill(version)
        assert (published.policy.version, published.engines) == (version, 1)
        assert await awake(node) == {LEARNER_ID: [WEIGHTS], ENGINE_ID: [WEIGHTS, KV]}
        await node.give(engine=[WEIGHTS, KV])
        assert [list((await node.learner.state()).asleep), await awake(node)] == [
            [WEIGHTS, OPTIMIZER],
            {ENGINE_ID: [WEIGHTS, KV]},
        ]
        sampled = await node.generate(PROMPT, samples=4)
        assert [list({span.policy_version for span in t.version_spans}) for t in sampled] == [[version]] * 4
        answers.append(await node.greedy(PROMPT))
        await node.give(learner=[WEIGHTS, OPTIMIZER], discard=True)
        assert await awake(node) == {LEARNER_ID: [WEIGHTS, OPTIMIZER]}
        with pytest.raises(Conflict, match="carries the token of its grant"):
            await node.generate(PROMPT)
        assert (await node.train(ROWS)).policy.version == version + 1
    assert len({tuple(tokens) for tokens, _ in answers}) > 1  # it learns something


async def test_the_same_version_gives_the_same_tokens_after_either_sleep(node):
    version = (await node.learner.state()).policy.version
    await node.refill(version)
    await node.give(engine=[WEIGHTS, KV])
    before = await node.greedy(PROMPT)
    assert before[1] == version
    await node.give(learner=[WEIGHTS, OPTIMIZER])  # the engine keeps its weights
    await node.give(engine=[WEIGHTS, KV])
    assert (await node.engine.state()).state == READY
    assert await node.greedy(PROMPT) == before
    await node.give(learner=[WEIGHTS], discard=True)
    await node.refill(version)
    await node.give(engine=[WEIGHTS, KV])
    assert await node.greedy(PROMPT) == before


async def test_a_token_of_the_grant_before_comes_to_nothing(node):
    before = await node.standing()
    outcomes = await node.refusals()
    assert {name for name, outcome in outcomes.items() if not outcome.startswith("Conflict: ")} == set(), outcomes
    assert len(outcomes) == 10
    assert await node.standing() == before


async def test_a_rank_killed_on_the_way_to_waking_is_named_and_the_engine_serves_on(node):
    before = await node.greedy(PROMPT)
    rank = await node.learner_rank()
    os.kill(rank, signal.SIGSTOP)  # so that it dies with the Wake in its hands
    handing_over = asyncio.create_task(node.give(learner=[WEIGHTS, OPTIMIZER], seconds=20))
    await node.until_held_by(LEARNER_ID)
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(Unavailable, match=rf"{LEARNER_ID} exited before it woke .*rank 0 \(pid {rank}\) was killed"):
        await handing_over
    await node.ended(LEARNER_ID)
    await node.give(engine=[WEIGHTS, KV])
    assert await node.greedy(PROMPT) == before


@pytest.mark.slow
async def test_an_engine_killed_with_the_grant_is_passed_over_once_its_supervisor_says_so(node):
    if not node.is_alive(LEARNER_ID):  # the test before this one killed it
        await node.start_service(LEARNER_ID)
    engine = TenantId(node.run_id, ENGINE_ID, node.engine.instance_id)
    node.kill(ENGINE_ID, tell=False)
    with pytest.raises(Expired, match=rf"waiting for {ENGINE_ID} .* to give up WEIGHTS, KV: .*connect"):
        await node.give(learner=[WEIGHTS, OPTIMIZER], seconds=2)
    assert (await node.state()).holdings[engine].memory  # its end is not guessed from silence
    node.tell_end(ENGINE_ID)
    await node.give(learner=[WEIGHTS, OPTIMIZER])
    assert engine in (await node.state()).exited
    assert await awake(node) == {LEARNER_ID: [WEIGHTS, OPTIMIZER]}
    assert (await node.train(ROWS)).policy.version == 1  # a new life, of the folder's weights
