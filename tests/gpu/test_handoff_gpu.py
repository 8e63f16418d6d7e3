"""Learner and engine on one GPU: what each hand-over gives back, by the driver."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from antiphon.types.v1 import transfer_pb2

from benchmarks.handoff import model_sizes, write_random_model
from benchmarks.shared_node import KV, OPTIMIZER, WEIGHTS, SharedNode, started, training_rows
from services.common.config import ModelConfig
from services.common.weights.digest import RunningDigest
from services.common.weights.sender import Sender
from services.common.weights.store import bind_store
from services.learner.config import LearnerConfig
from services.rollout.config import RolloutConfig
from services.rollout.gpus import engine_gpus
from services.rollout.vllm_start import weight_bytes_of
from tests.gpu.mapping_reader import map_and_stay
from tests.unit.weights.pipe_processes import FORKED, make_manifest

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

KV_GIB = 4.0
PROMPT = list(range(100, 150))
ROWS = training_rows(4, 64, 49152, seed=3)
SAME_BYTES = 32 << 20  # two looks at the same state may differ by so much


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedNode]:
    folder: Path = tmp_path_factory.mktemp("node")
    write_random_model(folder / "model", "135m", "bfloat16", on_gpu=True)
    model = ModelConfig(path=str(folder / "model"), dtype="bfloat16")
    learner = LearnerConfig.model_validate({"micro_batch_tokens": 1024, "failed_linger_seconds": 1.0})
    engine = RolloutConfig.model_validate({"max_sequence_tokens": 1024, "kv_cache_gib": KV_GIB, "eager": True})
    sizes = model_sizes(engine_gpus(), weight_bytes_of(folder / "model", "bfloat16"), KV_GIB)
    async with started(folder / "run", model, learner, engine, sizes) as node:
        await node.load()
        await node.refill(0)
        await node.give(engine=[WEIGHTS, KV])
        yield node


async def free_bytes(node: SharedNode) -> int:
    return (await node.engine.state()).devices[0].free_bytes


async def test_cycles_give_back_all_that_they_took(node: SharedNode) -> None:
    seen = []
    for version in range(1, 5):
        await node.give(learner=[WEIGHTS, OPTIMIZER], discard=True)
        asleep = await free_bytes(node)
        await node.train(ROWS)
        await node.refill(version)
        await node.give(engine=[WEIGHTS, KV])
        assert len(await node.generate(PROMPT, samples=4)) == 4
        seen.append((asleep, await free_bytes(node)))
    for before, after in itertools.pairwise(seen[1:]):  # the first Step makes the moments
        assert after == pytest.approx(before, abs=SAME_BYTES)
    held = {part.tag: part.bytes for d in (await node.learner.state()).devices for part in d.held}
    assert held == {WEIGHTS: 0, OPTIMIZER: 0}


async def test_the_same_version_gives_the_same_tokens_after_either_sleep(node: SharedNode) -> None:
    before = await node.greedy(PROMPT)
    await node.give(learner=[WEIGHTS, OPTIMIZER])  # the engine keeps its weights
    await node.give(engine=[WEIGHTS, KV])
    assert await node.greedy(PROMPT) == before
    await node.give(learner=[WEIGHTS], discard=True)
    await node.refill(before[1])
    await node.give(engine=[WEIGHTS, KV])
    assert await node.greedy(PROMPT) == before


def test_a_sender_has_its_buffers_back_whatever_became_of_the_readers() -> None:
    device = torch.device("cuda:0")
    RunningDigest(device).warm()
    before = torch.cuda.memory_allocated(device)
    store, address = bind_store()
    manifest = make_manifest(address, receiver_ranks=2, transport=transfer_pb2.TRANSPORT_CUDA_IPC)
    readers = [FORKED.Process(target=map_and_stay, args=(manifest.SerializeToString(), rank)) for rank in range(2)]
    try:
        for reader in readers:
            reader.start()
        sender = Sender(manifest, 0, device=device, store=store, deadline_seconds=60)
        assert torch.cuda.memory_allocated(device) > before
        readers[0].kill()
        sender.close()
        assert torch.cuda.memory_allocated(device) == before
    finally:
        for reader in readers:
            reader.kill()
            reader.join(10)
