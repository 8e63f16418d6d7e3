"""The learner on a GPU: its kernels, rows in one line, its memory asleep and awake, and the service around it."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
import transformers
from antiphon.learner.v1 import checkpoint_pb2, learner_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import grant_pb2

from services.common.config import ProcessConfig, dump, parse
from services.common.errors import Conflict, Unavailable
from services.learner import checkpoint, logprob_head
from services.learner.batching import Layout, Row, plan_micro_batches
from services.learner.config import LearnerConfig
from services.learner.learner import Learner
from services.learner.logprob_head import LogprobHead
from services.learner.packing import pack
from services.learner.policy_model import PolicyModel, layout_of, load_policy_model
from services.learner.process import rank_environment
from services.learner.ranks import RankProcesses, rank_command_line
from tests.system.test_learner_memory import check, run_ranks
from tests.tiny.models import make_tiny_model
from tests.unit.learner.batches import make_batch, make_header
from tests.unit.learner.guards import open_guard
from tests.unit.learner.plain_policy import token_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
WEIGHTS, OPTIMIZER = grant_pb2.MEMORY_TAG_WEIGHTS, grant_pb2.MEMORY_TAG_OPTIMIZER
GPU = torch.device("cuda", 0)
SECONDS = 120.0


# Kernels, against torch's own operations


@pytest.fixture
def kernel_checks():
    from tests.unit.learner import kernel_checks  # needs triton, which comes with torch for GPUs

    return kernel_checks


def test_head_kernels(kernel_checks):
    kernel_checks.check_head("cuda", tokens=700, hidden_size=64, vocabulary=30_011)


def test_a_slope_that_is_one_number_for_all_tokens():
    """The gradient of a plain sum has a stride of 0."""
    head = LogprobHead(torch.nn.Parameter(torch.randn(100, 16, device=GPU)))
    hidden = torch.randn(9, 16, device=GPU, requires_grad=True)
    targets = torch.arange(9, device=GPU)
    head(hidden, targets, 1.0)[0].sum().backward()
    plain = hidden.detach().clone().requires_grad_(True)
    torch.log_softmax(plain @ head.weight.detach().t(), -1).gather(-1, targets[:, None]).sum().backward()
    torch.testing.assert_close(hidden.grad, plain.grad, rtol=1e-3, atol=1e-3)


def test_the_heads_memory_grows_with_its_chunk_and_not_with_tokens_times_vocabulary():
    """32,768 tokens over 150,000 words: 19.7 GB of float32 logits, which nobody ever holds (cases.md, G07, G08)."""
    head = LogprobHead(torch.nn.Parameter(torch.randn(150_000, 128, device=GPU, dtype=torch.bfloat16)))
    hidden = torch.randn(32_768, 128, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 150_000, (32_768,), device=GPU)
    for is_training in (False, True):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.set_grad_enabled(is_training):
            logprobs, _ = head(hidden, targets, 1.0)
        if is_training:
            logprobs.sum().backward()
        assert torch.cuda.max_memory_allocated() - before < 1.5 * 2 * logprob_head.KERNEL_CHUNK_LOGITS


def test_silu_product(kernel_checks):
    kernel_checks.check_silu_product("cuda", count=10_007)


def test_rotation(kernel_checks):
    kernel_checks.check_rotation("cuda")


# Rows in one line


def rows_of(count: int, seed: int = 0) -> list[Row]:
    dice = random.Random(seed)
    lengths = [dice.randint(4, 200) for _ in range(count)]
    return [Row([dice.randrange(60) for _ in range(n)], list(range(1 + n // 3, n))) for n in lengths]


def models() -> dict[str, transformers.PreTrainedModel]:
    small: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.08,
    }
    torch.manual_seed(0)
    return {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)),
        "qwen2": transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**small)),
        "qwen3": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**small, head_dim=64)),
    }


def trained(policy: PolicyModel, rows: list[Row]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probs of each row, and the gradient of a weighted sum of all."""
    policy.zero_grad()
    found: dict[int, torch.Tensor] = {}
    layout = layout_of(policy.model, 512)
    for micro_batch in plan_micro_batches(rows, ranks=1, token_budget=512, layout=layout)[0]:
        packed = pack(micro_batch, rows, layout, GPU)
        logprobs, _ = policy(packed, 0.8)
        parts = dict(zip(packed.rows, logprobs.split(packed.counts), strict=True))
        sum((row + 1) * part.sum() for row, part in parts.items()).backward()
        found |= {row: part.detach() for row, part in parts.items()}
    gradients = {name: p.grad.float().cpu() for name, p in policy.model.named_parameters()}
    return [found[row] for row in range(len(rows))], gradients


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_rows_in_one_line_are_the_rows_alone_in_values_and_gradient(tmp_path, kind, checkpointing):
    model = models()[kind].to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    policy = load_policy_model(str(tmp_path), "bfloat16", gradient_checkpointing=checkpointing, device=GPU)
    assert layout_of(policy.model, 512) is Layout.ONE_LINE
    rows = rows_of(12)
    found, gradients = trained(policy, rows)

    plain = model.float().set_attn_implementation("eager") or model
    expected = [token_logprobs(plain, list(row.token_ids), 0.8)[list(row.predicted)] for row in rows]
    sum((number + 1) * part.sum() for number, part in enumerate(expected)).backward()
    for part, value in zip(found, expected, strict=True):
        assert (part.cpu() - value.detach()).abs().mean() < 0.03
    for name, parameter in plain.named_parameters():
        if parameter.dim() > 1:
            apart = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
            assert apart < 0.05, f"{name}: {apart:.3f}"


def test_what_a_neighbour_says_changes_no_bit(tmp_path):
    models()["qwen2"].to(torch.bfloat16).save_pretrained(tmp_path)
    policy = load_policy_model(str(tmp_path), "bfloat16", gradient_checkpointing=False, device=GPU)
    rows = rows_of(5)
    first, _ = trained(policy, rows)
    rows[2] = Row([7] * len(rows[2].token_ids), rows[2].predicted)
    second, _ = trained(policy, rows)
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(a, b) == (number != 2)


def test_a_float32_model_is_trained_side_by_side(tmp_path):
    """The kernel for rows in one line takes bfloat16 alone."""
    models()["qwen2"].save_pretrained(tmp_path)
    policy = load_policy_model(str(tmp_path), "float32", gradient_checkpointing=False, device=GPU)
    assert layout_of(policy.model, 512) is Layout.PADDED
    trained(policy, rows_of(4))


# Memory


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_after_sleep_is_the_step_that_would_have_been(tmp_path, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    for seen in run_ranks(tmp_path, ranks=ranks, dtype="bfloat16", kind="cuda"):
        check(seen)


# The service's ranks


class Live:
    """A learner of one rank, without gRPC before it."""

    def __init__(self, folder: Path) -> None:
        model = make_tiny_model(folder / "model", hidden=1024, layers=8)
        service = {"run_id": "test", "worker_id": "learner", "run_dir": str(folder), "nats_url": "none"}
        settings = {"micro_batch_tokens": 512, "optimizer": {"learning_rate": 1e-4}}
        tree = {"service": service, "model": {"path": str(model), "dtype": "bfloat16"}, "settings": settings}
        (folder / "process.yaml").write_text(dump(parse(ProcessConfig[LearnerConfig], tree, "test")))
        self.vocabulary = transformers.AutoConfig.from_pretrained(model).vocab_size
        self.ranks = RankProcesses(
            1,
            rank_command_line(folder / "process.yaml", 1),
            folder / "logs",
            "learner",
            environment=rank_environment(4),
            start_seconds=SECONDS,
            silence_seconds=SECONDS,
        )
        self.learner = Learner(self.ranks, open_guard())

    async def step(self) -> learner_pb2.StepResult:
        batch = make_batch(self.vocabulary, seed=self.learner.policy.version)
        operation = await self.learner.train_step(make_header(self.learner.policy.version + 1, batch), batch)
        return await operation.result()

    async def sleep(self, name: str, *tags: int) -> tenant_pb2.SleepResponse:
        request = tenant_pb2.SleepRequest(request_id=name, tags=tags, deadline_seconds=SECONDS)
        return await self.learner.memory.sleep(request).result()

    async def wake(self, name: str, *tags: int) -> tenant_pb2.WakeResponse:
        request = tenant_pb2.WakeRequest(request_id=name, tags=tags, deadline_seconds=SECONDS)
        return await self.learner.memory.wake(request).result()

    async def logprobs(self) -> list[float]:
        header, sequence = learner_pb2.ForwardHeader(temperature=1.0), learner_pb2.Sequence(id="a", token_ids=range(40))
        return list((await self.learner.forward(header, [sequence]))[0].logprobs)


@pytest_asyncio.fixture
async def live(tmp_path) -> AsyncIterator[Live]:
    made = Live(tmp_path)
    await made.ranks.start()
    yield made
    await made.ranks.stop()


async def test_sleep_gives_back_what_it_says_and_wake_brings_it_back(live):
    await live.step()
    before = await live.logprobs()
    held = {part.tag: part.bytes for part in (await live.learner.state()).devices[0].held}
    assert min(held.values()) > 100 << 20
    optimizer = (await live.sleep("s1", OPTIMIZER)).devices[0]
    assert optimizer.free_bytes_after - optimizer.free_bytes_before > 0.9 * held[OPTIMIZER]
    assert await live.logprobs() == before
    with pytest.raises(Conflict, match="OPTIMIZER sleeps"):
        await live.step()
    both = (await live.sleep("s2")).devices[0]
    assert both.free_bytes_after - both.free_bytes_before > 0.9 * held[WEIGHTS]
    with pytest.raises(Conflict, match="WEIGHTS sleeps"):
        await live.logprobs()
    await live.wake("w1", WEIGHTS)
    assert await live.logprobs() == before
    await live.wake("w2")
    state = await live.learner.state()
    assert {part.tag: part.bytes for part in state.devices[0].held} == held and not state.asleep
    assert not (await live.step()).updates[0].skipped


async def test_a_checkpoint_is_what_sleep_cannot_change_and_a_load_brings_back(live, tmp_path):
    async def save(name: str) -> checkpoint_pb2.CheckpointManifest:
        path, version = tmp_path / name, live.learner.policy.version
        request = learner_pb2.SaveRequest(request_id=name, path=str(path), policy_version=version)
        await live.learner.checkpoints.save(request).result()
        return checkpoint.read_manifest(path)[0]

    await live.step()
    first, before = await save("first"), await live.logprobs()
    await live.sleep("s")
    await live.wake("w")
    assert (await save("awake")).files == first.files
    await live.step()
    assert await live.logprobs() != before
    request = learner_pb2.LoadRequest(request_id="l", path=str(tmp_path / "first"))
    loaded = await live.learner.checkpoints.load(request).result()
    assert (loaded.policy, loaded.next_step_id) == (first.policy, 2)
    assert await live.logprobs() == before
    assert (await save("back")).files == first.files
    await live.sleep("s2")  # the whole copies of parameters that a load makes are the ones that sleep
    await live.wake("w2")
    assert await live.logprobs() == before
    assert not (await live.step()).updates[0].skipped


async def test_a_dry_run_measures_the_peak_and_changes_nothing(live):
    before = await live.logprobs()
    batch = make_batch(live.vocabulary)
    header = make_header(1, batch)
    header.dry_run = True
    tried = await (await live.learner.train_step(header, batch)).result()
    (peak,) = tried.peaks
    assert peak.device.startswith("GPU-")
    # The moments are there already: the first Step needs no more.
    assert sum(part.bytes for part in (await live.learner.state()).devices[0].held) < peak.bytes < peak.total_bytes
    assert await live.logprobs() == before and live.learner.policy.version == 0
    assert not (await live.step()).updates[0].skipped


async def test_a_rank_that_is_killed_in_a_step_is_told_and_its_memory_is_free(live):
    import asyncio

    await live.step()
    asleep = await live.sleep("s")
    free_when_asleep = asleep.devices[0].free_bytes_after
    await live.wake("w")
    pid = live.ranks.pids[0]
    step = asyncio.create_task(live.step())
    await asyncio.sleep(0)
    os.kill(pid, 9)
    with pytest.raises(Unavailable, match=rf"rank 0 \(pid {pid}\) was killed by SIGKILL"):
        await asyncio.wait_for(step, 10)
    async with asyncio.timeout(30):
        while torch.cuda.mem_get_info(GPU)[0] < free_when_asleep:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_too_little_memory_in_a_step_is_told_with_the_settings_that_help(live):
    others = []
    try:
        for size in (1 << 30, 1 << 26, 1 << 22):
            while True:
                try:
                    others.append(torch.empty(size, dtype=torch.uint8, device=GPU))
                except torch.OutOfMemoryError:
                    break
        dice = random.Random(0)
        batch = make_batch(live.vocabulary)
        for row in batch:
            extra = 230 - len(row.token_ids)
            row.token_ids.extend(dice.randrange(live.vocabulary) for _ in range(extra))
            for name in ("loss_mask", "advantages"):
                getattr(row, name).extend([1.0 if name == "advantages" else True] * extra)
            del row.behavior_logprobs[:]
        operation = await live.learner.train_step(make_header(1, batch), batch)
        with pytest.raises(Unavailable, match=r"too little GPU memory.*micro_batch_tokens is 512") as caught:
            await operation.result()
        assert "train/0/" in str(caught.value)
    finally:
        others.clear()
        torch.cuda.empty_cache()
