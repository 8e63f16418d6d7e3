"""The real vLLM on tiny fp32 models: what it samples, how it takes policies, and how it dies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
import transformers
from antiphon.rollout.v1 import rollout_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import chat_pb2, trajectory_pb2
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_KV, MEMORY_TAG_WEIGHTS
from antiphon.types.v1.policy_pb2 import Policy
from antiphon.types.v1.trajectory_pb2 import PromptId, Trajectory

from services.common.config import ModelConfig, ProcessConfig, ServiceConfig, dump
from services.common.errors import Conflict, Expired, Unavailable
from services.common.weights.manifest import buckets
from services.rollout.config import RolloutConfig
from services.rollout.engine import EngineDead
from services.rollout.rollout import Rollout
from services.rollout.states import FAILED, READY, STALE
from services.rollout.updates import Committed, Probe
from services.rollout.vllm_engine import VllmEngine
from tests.system import vllm_publications as learner
from tests.tiny.models import make_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

PROBE = [1, 40, 41, 42, 50, 60, 12, 33, 7, 80]
LONG = 150  # tokens; above the size of a cache block on CPU, 128


def policy_of(version: int, digest: int) -> Policy:
    return Policy(version=version, digest=digest)


def process_config(folder: Path, run_dir: Path) -> ProcessConfig[RolloutConfig]:
    return ProcessConfig[RolloutConfig](
        service=ServiceConfig(run_id="test", worker_id="rollout-0", run_dir=run_dir, nats_url="nats://127.0.0.1:1"),
        model=ModelConfig(path=str(folder), dtype="float32"),
        settings=RolloutConfig(kv_cache_gib=0.125, max_running=32, join_seconds=30),
    )


@dataclass
class Live:
    """An engine and the model that the learner would hold."""

    rollout: Rollout
    model: Any
    folder: Path
    running: asyncio.Task[None]
    epoch: int = 0
    version: int = -1
    counter: int = field(default=0)

    @property
    def engine_pid(self) -> int:
        return self.rollout.engine.info.pids[0]

    async def publish(self, version: int) -> Committed:
        """A whole publication of the model, by a new rank in a new epoch."""
        self.epoch += 1
        sender = learner.ThreadSender(self.model, self.epoch)
        connected = asyncio.create_task(asyncio.to_thread(sender.connect))
        assert not await self.rollout.updates.join(sender.manifest, 0, deadline_seconds=20)
        await connected
        await self.rollout.updates.begin(self.epoch, version, deadline_seconds=20)
        report = await asyncio.to_thread(sender.send)
        committed = await self.rollout.updates.commit(policy_of(version, report.digest), self.probe())
        self.version = version
        return committed

    def probe(self, tolerance: float = 1e-3) -> Probe:
        return Probe(PROBE, learner.token_logprobs(self.model, PROBE), tolerance)

    async def generate(
        self,
        prompt: list[int],
        *,
        samples: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 8,
        stop: tuple[int, ...] = (),
        row: int = 0,
    ) -> list[Trajectory]:
        self.counter += 1
        request = rollout_pb2.GenerateRequest(
            request_id=f"r{self.counter}",
            prompt_id=PromptId(dataset="train", row=row),
            prompt_token_ids=prompt,
            samples=samples,
            run_seed=7,
            sampling=rollout_pb2.Sampling(temperature=temperature, max_tokens=max_tokens, stop_token_ids=stop),
        )
        found = [trajectory async for trajectory in self.rollout.generations.stream(request)]
        return sorted(found, key=lambda trajectory: trajectory.sample_number)

    async def greedy(self, prompts: list[list[int]], max_tokens: int = 12) -> list[list[int]]:
        answers = await asyncio.gather(
            *(self.generate(p, temperature=0.0, max_tokens=max_tokens, row=i) for i, p in enumerate(prompts))
        )
        return [list(answer.token_ids[len(p) :]) for p, (answer,) in zip(prompts, answers, strict=True)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[True, False], ids=["tied", "untied"])
async def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), tied=request.param)
    # A model folder's own sampling defaults must have no say.
    (folder / "generation_config.json").write_text(
        json.dumps(
            {"do_sample": True, "temperature": 0.3, "top_k": 3, "repetition_penalty": 1.5, "eos_token_id": [2, 9]}
        )
    )
    rollout = Rollout(process_config(folder, tmp_path_factory.mktemp("run")), VllmEngine.start)
    running = asyncio.create_task(rollout.run())
    end = time.monotonic() + 200
    while rollout.life.state != STALE:
        assert time.monotonic() < end and not running.done(), running
        await asyncio.sleep(0.05)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    it = Live(rollout, model, folder, running)
    with pytest.raises(Unavailable, match="STALE"):
        await it.generate([5, 6])  # dummy weights are never served
    await it.publish(0)
    yield it
    running.cancel()
    if rollout.life.state != FAILED:
        await rollout.drain()


def prompts_of(length: int, count: int = 32) -> list[list[int]]:
    chooser = random.Random(3)
    return [[chooser.randrange(6, 80) for _ in range(length)] for _ in range(count)]


async def test_state_tells_what_it_is(live: Live) -> None:
    state = await live.rollout.get_state()
    assert state.state == tenant_pb2.WORKER_STATE_READY
    assert (state.policy.version, state.backend, state.dtype) == (0, "vllm 0.32.0", "float32")
    assert (state.transfer_ranks, state.max_sequence_tokens) == (1, 256)
    assert psutil.pid_exists(live.engine_pid) and os.getpid() in state.pids
    assert await live.rollout.health_check() is None


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
async def test_logprobs_are_those_of_the_distribution_sampled_from(live: Live, temperature: float) -> None:
    prompt = [1, 3, 40, 41, 42]
    for trajectory in await live.generate(prompt, samples=4, temperature=temperature, max_tokens=24):
        ids = list(trajectory.token_ids)
        assert ids[:5] == prompt and len(ids) == 29
        assert list(trajectory.loss_mask) == [False] * 5 + [True] * 24
        expected = learner.token_logprobs(live.model, ids, temperature)[4:]
        assert list(trajectory.behavior_logprobs[5:]) == pytest.approx(expected, abs=1e-4)
        assert list(trajectory.behavior_logprobs[:5]) == [0.0] * 5
        spans = [(span.start, span.end, span.policy_version) for span in trajectory.version_spans]
        assert spans == [(5, 29, live.version)]
        assert trajectory.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH


async def test_greedy_equals_transformers(live: Live) -> None:
    prompts = prompts_of(9)
    assert await live.greedy(prompts) == learner.greedy(live.model, prompts, 12)


async def test_seeds_reproduce_and_differ_among_siblings(live: Live) -> None:
    first = await live.generate([1, 3, 50], samples=6, temperature=1.3, max_tokens=16)
    again = await live.generate([1, 3, 50], samples=6, temperature=1.3, max_tokens=16)
    other = await live.generate([1, 3, 50], samples=6, temperature=1.3, max_tokens=16, row=1)
    assert [list(t.token_ids) for t in first] == [list(t.token_ids) for t in again]
    assert len({tuple(t.token_ids) for t in [*first, *other]}) == 12
    assert len({t.seed for t in first}) == 6


async def test_more_prompt_tokens_than_one_step_takes(live: Live) -> None:
    """vLLM takes 2,048 in a step; a prompt that it cut in two, and that has a seed, once ended its core on CPU."""
    asked = (live.generate(prompt, max_tokens=4, row=i) for i, prompt in enumerate(prompts_of(LONG)))
    answers = await asyncio.gather(*asked)
    assert {len(t.token_ids) for (t,) in answers} == {LONG + 4}


async def test_only_the_stop_tokens_of_the_request_end_it(live: Live) -> None:
    (free,) = await live.generate([1, 3, 50], temperature=0.0, max_tokens=20)
    sampled = list(free.token_ids[3:])
    assert free.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH and len(sampled) == 20
    stop = sampled[7]
    (ended,) = await live.generate([1, 3, 50], temperature=0.0, max_tokens=20, stop=(stop,))
    assert list(ended.token_ids[3:]) == sampled[: sampled.index(stop) + 1]  # the stop token is the last
    assert ended.finish_reason == trajectory_pb2.FINISH_REASON_STOP


async def test_encode_is_the_chat_template_of_the_folder(live: Live) -> None:
    conversation = chat_pb2.Conversation(messages=[chat_pb2.ChatMessage(role="user", content="ab+1")])
    tokenizer = transformers.AutoTokenizer.from_pretrained(live.folder)
    expected = tokenizer.encode("<bos><user>ab+1<eos><assistant>", add_special_tokens=False)
    assert await live.rollout.engine.encode([conversation]) == [expected]


async def test_abort_gives_what_was_sampled_so_far(live: Live) -> None:
    request = rollout_pb2.GenerateRequest(
        request_id="to-abort",
        prompt_id=PromptId(dataset="train"),
        prompt_token_ids=[1, 3],
        samples=2,
        sampling=rollout_pb2.Sampling(temperature=1.0, max_tokens=250),
    )
    found = asyncio.create_task(_collected(live.rollout.generations.stream(request)))
    await asyncio.sleep(0.05)
    assert await live.rollout.generations.abort(["to-abort"]) == 2
    for trajectory in await asyncio.wait_for(found, 10):
        assert trajectory.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
        assert len(trajectory.token_ids) < 252
        assert len(trajectory.token_ids) == len(trajectory.loss_mask) == len(trajectory.behavior_logprobs)


async def _collected(stream: AsyncIterator[Trajectory]) -> list[Trajectory]:
    return [trajectory async for trajectory in stream]


async def test_a_publication_takes_effect_with_a_warm_prefix_cache(live: Live) -> None:
    prompts = prompts_of(LONG)
    before = await live.greedy(prompts)
    assert await live.greedy(prompts) == before  # from the cache
    learner.shaken(live.model, seed=live.epoch)
    committed = await live.publish(live.version + 1)
    after = await live.greedy(prompts)
    assert after == learner.greedy(live.model, prompts, 12)
    assert sum(a != b for a, b in zip(after, before, strict=True)) >= 16
    assert committed.probe_difference < 1e-4
    assert committed.bytes == sum(p.numel() * 4 for p in live.model.parameters())
    (trajectory,) = await live.generate([5, 6, 7])
    assert [span.policy_version for span in trajectory.version_spans] == [live.version]


async def test_the_same_version_may_be_published_again(live: Live) -> None:
    await live.publish(live.version)
    prompts = prompts_of(9, 4)
    assert await live.greedy(prompts) == learner.greedy(live.model, prompts, 12)


@pytest.mark.parametrize("moment", ["first", "middle", "last", "commit"])
async def test_a_sender_killed_at_any_moment_leaves_the_engine_as_it_was(live: Live, moment: str) -> None:
    pid, version = live.engine_pid, live.version
    prompts = prompts_of(9, 4)
    engine = live.rollout.engine
    held = live.probe().logprobs
    learner.shaken(live.model, seed=100 + live.epoch)
    live.epoch += 1
    count = len(buckets(learner.describe(live.model, "x:1", 1)))
    assert count >= 4
    die_at = {"first": 0, "middle": count // 2, "last": count - 1, "commit": count + 1}[moment]
    with learner.doomed(live.model, live.epoch, die_at) as sender:
        assert not await live.rollout.updates.join(sender.manifest, 0, deadline_seconds=20)
        await live.rollout.updates.begin(live.epoch, version + 1, deadline_seconds=20)
        sender.send()
        begin = time.monotonic()
        if moment == "commit":  # it dies after the last bucket: the coordinator has no digest to commit
            digest = await asyncio.to_thread(sender.digest)
            sender.kill()
            with pytest.raises(Conflict, match="digest"):
                await live.rollout.updates.commit(policy_of(version + 1, digest ^ 1), live.probe())
        else:
            # Two buckets are under way at a time: what was sent before the death may still arrive whole.
            with pytest.raises((Expired, Conflict), match="broke|digest" if moment == "last" else "broke"):
                await live.rollout.updates.commit(policy_of(version + 1, 1), live.probe())
        assert time.monotonic() - begin < 12  # noticed before the deadline of 20 s
    state = await live.rollout.get_state()
    assert state.state == tenant_pb2.WORKER_STATE_STALE
    assert state.policy.version == version
    assert live.engine_pid == pid and psutil.pid_exists(pid)
    with pytest.raises(Unavailable, match="STALE"):
        await live.generate([5, 6])
    assert await engine.probe(PROBE) == pytest.approx(held, abs=1e-4)  # the model itself is untouched
    await live.publish(version + 1)
    assert await live.greedy(prompts) == learner.greedy(live.model, prompts, 12)
    assert live.engine_pid == pid


async def test_a_failing_probe_makes_it_stale_until_the_next_publication(live: Live) -> None:
    live.epoch += 1
    sender = learner.ThreadSender(live.model, live.epoch)
    connected = asyncio.create_task(asyncio.to_thread(sender.connect))
    assert not await live.rollout.updates.join(sender.manifest, 0, deadline_seconds=20)
    await connected
    await live.rollout.updates.begin(live.epoch, live.version + 1, deadline_seconds=20)
    report = await asyncio.to_thread(sender.send)
    off = Probe(PROBE, [value + 0.01 for value in live.probe().logprobs], 1e-3)
    with pytest.raises(Conflict, match=r"off by 0\.01"):
        await live.rollout.updates.commit(policy_of(live.version + 1, report.digest), off)
    assert live.rollout.life.state == STALE
    await live.publish(live.version + 1)
    assert live.rollout.life.state == READY


async def test_it_sleeps_wakes_and_is_refilled(live: Live) -> None:
    """On CPU no memory is given up; what vLLM pauses and resumes, and the way through the states, are as on a GPU."""
    tags = {MEMORY_TAG_WEIGHTS, MEMORY_TAG_KV}
    prompts = prompts_of(9, 4)
    sleeping, version = live.rollout.sleeping, live.version
    before = await live.greedy(prompts)
    running = asyncio.create_task(live.generate([1, 3], samples=4, max_tokens=100))
    async with asyncio.timeout(10):
        while live.rollout._gate.running < 4:  # noqa: ASYNC110 - the gate sets no event
            await asyncio.sleep(0.001)
    await sleeping.sleep(tags, discard_weights=False, deadline_seconds=20)
    assert {len(t.token_ids) for t in await running} == {102}  # nothing was aborted
    with pytest.raises(Unavailable, match="ASLEEP"):
        await live.generate([5, 6])
    await sleeping.wake(sleeping.wakeable(()), deadline_seconds=20)
    assert (await live.rollout.get_state()).policy.version == version
    assert await live.greedy(prompts) == before

    await sleeping.sleep((), discard_weights=True, deadline_seconds=20)
    await sleeping.wake({MEMORY_TAG_WEIGHTS}, deadline_seconds=20)
    assert (live.rollout.life.state, sleeping.asleep) == (STALE, [MEMORY_TAG_KV])
    with pytest.raises(Unavailable, match="discarded"):
        await live.generate([5, 6])
    learner.shaken(live.model, seed=500 + live.epoch)
    committed = await live.publish(version + 1)
    assert committed.kv_woken is not None and sleeping.asleep == []
    assert await live.greedy(prompts) == learner.greedy(live.model, prompts, 12)


async def test_names_that_do_not_match_are_all_named(live: Live) -> None:
    manifest = learner.describe(live.model, "127.0.0.1:1", live.epoch + 1)
    by_name = {spec.name: spec for spec in manifest.tensors}
    by_name["model.norm.weight"].name = "model.norm_of.weight"
    by_name["model.layers.1.self_attn.k_proj.weight"].shape[:] = [64, 256]
    head = by_name["lm_head.weight"]
    if head.alias_of:
        head.alias_of = ""
        head.slice_numel.append(head.shape[0] * head.shape[1])
    unmatched = await live.rollout.updates.join(manifest, 0, deadline_seconds=5)
    assert list(unmatched.unknown) == ["model.norm_of.weight"]
    assert list(unmatched.missing) == ["model.norm.weight"]
    differing = "\n".join(unmatched.differing)
    assert "model.layers.1.self_attn.k_proj.weight: expected shape [128, 128], got [64, 256]" in differing
    tied = live.model.config.tie_word_embeddings
    assert ("lm_head.weight: expected an alias of model.embed_tokens.weight" in differing) == tied
    assert live.rollout.life.state == READY  # nothing was joined, nothing left


async def test_a_dead_engine_core_is_noticed_and_named(live: Live) -> None:
    """Last: it ends the engine."""
    request = asyncio.create_task(live.generate([1, 3], samples=2, max_tokens=250))
    await asyncio.sleep(0.05)
    os.kill(live.engine_pid, signal.SIGKILL)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(request, 10)
    with pytest.raises(EngineDead, match="dead"):
        await asyncio.wait_for(live.running, 10)
    assert live.rollout.life.state == FAILED
    assert "dead" in str(await live.rollout.health_check())
    with pytest.raises(Unavailable, match="FAILED"):
        await live.generate([1, 3])


@dataclass
class Service:
    """`python -m services.rollout` in a process of its own."""

    process: subprocess.Popen[bytes]
    log: Path

    def engine_cores(self) -> list[psutil.Process]:
        """Children that multiprocessing spawned, whatever they call themselves by now; not its resource tracker."""
        return [child for child in psutil.Process(self.process.pid).children(recursive=True) if is_engine_core(child)]


def is_engine_core(child: psutil.Process) -> bool:
    try:
        return "resource_tracker" not in " ".join(child.cmdline())
    except psutil.NoSuchProcess:  # vLLM asks short-lived programs about the machine
        return False


@pytest.fixture
def service(nats_server: Any, tmp_path: Path) -> Iterator[Service]:
    folder = make_tiny_model(tmp_path / "model")
    config = process_config(folder, tmp_path).model_copy(
        update={
            "service": ServiceConfig(run_id="test", worker_id="rollout-0", run_dir=tmp_path, nats_url=nats_server.url)
        }
    )
    (tmp_path / "config.yaml").write_text(dump(config))
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.rollout", "--config", str(tmp_path / "config.yaml")],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield Service(process, log)
    finally:
        process.kill()
        process.wait(10)


def loads_torch(process: psutil.Process) -> bool:
    try:
        return any("libtorch_cpu" in region.path for region in process.memory_maps())
    except psutil.Error:
        return False


@pytest.mark.parametrize("moment", ["start", pytest.param("serve", marks=pytest.mark.slow)])
async def test_kill_9_of_the_service_leaves_no_engine_core(service: Service, moment: str) -> None:
    end = time.monotonic() + 120
    up = "STARTING -> STALE"

    def reached() -> bool:
        if moment == "serve":
            return up in service.log.read_text()
        return any(loads_torch(core) for core in service.engine_cores())  # it is importing vLLM

    while not reached():
        assert service.process.poll() is None and time.monotonic() < end, service.log.read_text()[-2000:]
        await asyncio.sleep(0.02)
    assert (up in service.log.read_text()) == (moment == "serve")
    cores = service.engine_cores()
    service.process.kill()
    _, alive = await asyncio.to_thread(psutil.wait_procs, cores, 10)
    assert not alive
