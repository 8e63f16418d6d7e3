"""Real ranks: DeepSpeed ZeRO-3 on gloo, one rank and two, against plain torch; publication, export, death of a rank."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
import pytest_asyncio
import torch
import transformers
from antiphon.learner.v1 import learner_pb2
from antiphon.types.v1 import transfer_pb2

from services.common.config import ProcessConfig, dump, parse
from services.common.errors import InvalidRequest, Unavailable
from services.common.weights.receiver import Receiver
from services.learner.batching import Layout, Row, plan_micro_batches
from services.learner.config import LearnerConfig
from services.learner.learner import Learner
from services.learner.process import rank_environment
from services.learner.ranks import RankProcesses, rank_command_line
from tests.tiny.models import make_tiny_model
from tests.unit.learner.batches import make_batch, make_header
from tests.unit.learner.guards import open_guard
from tests.unit.learner.plain_policy import PlainTrainer, token_logprobs

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

TEMPERATURE = 0.7
RATE = 0.01
START_SECONDS = 120.0
WORK_SECONDS = 60.0


class Group:
    """Ranks of one model, the learner over them, and the same model in plain transformers."""

    def __init__(self, folder: Path, *, ranks: int, tied: bool, dtype: str = "float32") -> None:
        self.folder = folder
        self.model_folder = make_tiny_model(folder / "model", seed=ranks, tied=tied)
        self.plain = transformers.AutoModelForCausalLM.from_pretrained(self.model_folder, dtype=torch.float32).eval()
        self.cuts: dict[str, dict] = {}
        service = {"run_id": "test", "worker_id": "learner", "run_dir": str(folder), "nats_url": "none"}
        model = {"path": str(self.model_folder), "dtype": dtype}
        settings = {"ranks": ranks, "micro_batch_tokens": 64, "optimizer": {"learning_rate": 0.0}}
        tree = {"service": service, "model": model, "settings": settings}
        (folder / "process.yaml").write_text(dump(parse(ProcessConfig[LearnerConfig], tree, "test")))
        self.cut({})
        self.ranks = RankProcesses(
            ranks,
            rank_command_line(folder / "process.yaml", ranks, "tests.unit.learner.capturing_rank"),
            folder / "logs",
            "learner",
            environment={**rank_environment(1), "CAPTURE": str(folder)},
            start_seconds=START_SECONDS,
            silence_seconds=WORK_SECONDS,
        )
        self.learner = Learner(self.ranks, open_guard())

    def cut(self, cuts: dict) -> int:
        """Says how the next Step is to be cut; answers its id."""
        step_id = self.learner.policy.version + 1 if hasattr(self, "learner") else 0
        self.cuts[str(step_id)] = cuts
        (self.folder / "cuts.json").write_text(json.dumps(self.cuts))
        return step_id

    async def step(self, batch, *, plan=None, cuts=None) -> learner_pb2.StepResult:
        header = make_header(self.cut(cuts or {}), batch, plan, TEMPERATURE)
        operation = await self.learner.train_step(header, batch)
        return await asyncio.wait_for(operation.result(), WORK_SECONDS)

    def gradients(self, update: int = 1) -> dict[str, torch.Tensor]:
        """The whole gradient of an Update of the last Step."""
        found: dict[str, torch.Tensor] = torch.load(
            self.folder / f"gradients-{self.learner.policy.version}-{update}.pt", weights_only=True
        )
        return found

    async def weights(self, name: str) -> tuple[Path, dict[str, torch.Tensor]]:
        """Exports, and reads the folder back with plain transformers."""
        path = self.folder / name
        operation = self.learner.export(learner_pb2.ExportRequest(request_id=name, path=str(path)))
        await asyncio.wait_for(operation.result(), WORK_SECONDS)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        return path, dict(loaded.state_dict())

    async def logprobs(self, rows: list[list[int]], temperature: float) -> list[list[float]]:
        sequences = [learner_pb2.Sequence(id=str(i), token_ids=row) for i, row in enumerate(rows)]
        answer = self.learner.forward(learner_pb2.ForwardHeader(temperature=temperature), sequences)
        return [list(r.logprobs) for r in await asyncio.wait_for(answer, WORK_SECONDS)]

    async def received(self, epoch: int, receivers: int = 1):
        """Publishes to receivers in this process: the result, and what each received."""
        request = learner_pb2.JoinTransferRequest(
            epoch=epoch,
            transport=transfer_pb2.TRANSPORT_GLOO,
            receiver_ranks=receivers,
            bucket_bytes=100_000,
            deadline_seconds=WORK_SECONDS,
        )
        manifest = await self.learner.join_transfer(request)
        ends = await asyncio.gather(
            *(asyncio.to_thread(Receiver, manifest, r, deadline_seconds=WORK_SECONDS) for r in range(receivers))
        )
        publication = self.learner.publish(
            learner_pb2.PublishRequest(
                request_id=f"publish-{epoch}",
                epoch=epoch,
                policy_version=self.learner.policy.version,
                deadline_seconds=WORK_SECONDS,
            )
        )

        def receive(end: Receiver) -> dict[str, torch.Tensor]:
            buckets = end.receive(deadline_seconds=WORK_SECONDS)
            return {spec.name: tensor.clone() for bucket in buckets for spec, tensor in bucket}

        tensors = await asyncio.gather(*(asyncio.to_thread(receive, end) for end in ends))
        result = await asyncio.wait_for(publication.result(), WORK_SECONDS)
        digests = {end.digest for end in ends}
        for end in ends:
            end.close()
        assert digests == {result.policy.digest}
        return manifest, result, tensors


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def groups(tmp_path_factory):
    """Started together: `one` (a rank, tied head), `two` (two ranks, untied), `half` (a rank in bfloat16, tied)."""
    made = {
        "one": Group(tmp_path_factory.mktemp("one"), ranks=1, tied=True),
        "two": Group(tmp_path_factory.mktemp("two"), ranks=2, tied=False),
        "half": Group(tmp_path_factory.mktemp("half"), ranks=1, tied=True, dtype="bfloat16"),
    }
    try:
        await asyncio.gather(*(group.ranks.start() for group in made.values()))
        yield made
    finally:
        await asyncio.gather(*(group.ranks.stop() for group in made.values()))


@pytest.fixture(params=["one", "two"])
def group(request, groups) -> Group:
    return groups[request.param]


def assert_same_gradients(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        assert scale > 0, name
        worst = (found[name].double() - gradient).abs().max().item()
        assert worst <= 2e-5 * scale + 1e-9, f"{name}: {worst} of {scale}"


async def test_gradient_is_that_of_plain_torch_however_the_batch_is_cut(group):
    """The same eight rows as 1×8, 2×4, 8×1 micro-batches, prompts shared or not, on one rank and on two."""
    batch = make_batch(group.plain.config.vocab_size)  # 1 + 3 + 3 rows of groups, and 1 more
    batch.append(make_batch(group.plain.config.vocab_size, seed=9, prompts=1)[0])
    batch[-1].trajectory_id = "train/0/9/0"
    assert len(batch) == 8
    longest = max(len(row.token_ids) for row in batch)
    rows = [Row(list(r.token_ids), [i for i, trained in enumerate(r.loss_mask) if trained]) for r in batch]
    ((whole,),) = plan_micro_batches(rows, ranks=1, token_budget=10_000, layout=Layout.SHARED)
    assert len(whole) < len(rows)  # some do share
    plain = PlainTrainer(group.plain, 0.0)
    plain.begin_step(batch, TEMPERATURE)
    expected = plain.update(batch, TEMPERATURE)
    norms = set()
    for cuts in (
        {"token_budget": 10_000, "layout": "padded"},
        {"token_budget": 4 * longest, "layout": "padded"},
        {"token_budget": 1, "layout": "padded"},
        {"token_budget": 10_000, "layout": "shared"},
        {"token_budget": 2 * longest, "layout": "shared"},
    ):
        result = await group.step(batch, cuts=cuts)
        assert_same_gradients(group.gradients(), expected["gradients"])
        metrics = result.updates[0]
        for name in ("loss", "gradient_norm", "entropy", "ratio_mean", "ratio_max"):
            assert getattr(metrics, name) == pytest.approx(expected[name], rel=1e-4), (cuts, name)
        assert metrics.clip_fraction == 0 and not metrics.skipped
        assert metrics.tokens == sum(sum(row.loss_mask) for row in batch)
        norms.add(round(metrics.gradient_norm, 4))
    assert len(norms) == 1
    assert result.policy.version == result.step_id == group.learner.policy.version


@pytest.mark.parametrize("rows", [1, 2, 3])
async def test_rows_that_do_not_divide_by_the_ranks(groups, rows):
    group = groups["two"]
    batch = make_batch(group.plain.config.vocab_size, seed=4)[:rows]
    plain = PlainTrainer(group.plain, 0.0)
    plain.begin_step(batch, TEMPERATURE)
    expected = plain.update(batch, TEMPERATURE)
    await group.step(batch, cuts={"token_budget": 1})
    assert_same_gradients(group.gradients(), expected["gradients"])


async def test_behavior_statistics_by_hand(group):
    batch = make_batch(group.plain.config.vocab_size)
    result = await group.step(batch)
    differences = []
    for row in batch:
        if row.behavior_logprobs:
            with torch.no_grad():
                logprobs = token_logprobs(group.plain, list(row.token_ids), TEMPERATURE)
            differences += [
                logprobs[i].item() - row.behavior_logprobs[i] for i, trained in enumerate(row.loss_mask) if trained
            ]
    count = len(differences)
    assert count < sum(sum(row.loss_mask) for row in batch)  # some rows sent none
    assert result.behavior_difference == pytest.approx(sum(map(abs, differences)) / count, rel=1e-4)
    assert result.behavior_ratio == pytest.approx(sum(map(math.exp, differences)) / count, rel=1e-4)
    k3 = sum(math.exp(d) - 1 - d for d in differences) / count
    assert result.mismatch_kl_k3 == pytest.approx(k3, rel=1e-4)


async def test_forward_gives_the_log_probs_of_plain_transformers(group):
    rows = [[3, 9, 27, 81 % 70, 5], [7], [11, 12], list(range(6, 40))]
    for temperature in (1.0, 0.6):
        for found, row in zip(await group.logprobs(rows, temperature), rows, strict=True):
            with torch.no_grad():
                expected = token_logprobs(group.plain, row, temperature)
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(InvalidRequest, match="token id 9999 is outside the vocabulary"):
        await group.logprobs([[1, 9999]], 1.0)


async def test_encode_is_the_tokenizers_own_template(groups):
    from antiphon.types.v1 import chat_pb2

    group = groups["one"]
    conversation = chat_pb2.Conversation(messages=[chat_pb2.ChatMessage(role="user", content="reverse abc")])
    (encoded,) = await group.learner.encode([conversation])
    tokenizer = transformers.AutoTokenizer.from_pretrained(group.model_folder)
    assert list(encoded.ids) == tokenizer.encode("<bos><user>reverse abc<eos><assistant>", add_special_tokens=False)


async def test_learning_rate_zero_leaves_every_bit_and_a_step_moves_as_adamw_does(group):
    """Then the published slices, put together, are the exported model, and both are plain AdamW's."""
    _, before = await group.weights("before")
    for name, tensor in group.plain.state_dict().items():
        assert torch.equal(tensor, before[name]), name  # after all the Steps above at rate 0

    batch = make_batch(group.plain.config.vocab_size, seed=5)
    plan = [[0, 1, 2], [3, 4, 5, 6], [6, 5, 4, 3], [2, 0, 1]]  # two epochs of two mini-batches
    result = await group.step(batch, plan=plan, cuts={"learning_rate": RATE, "token_budget": 40})
    # Steps at rate 0 have moved AdamW's moments, but not the weights: the plain one goes through them, too.
    plain = PlainTrainer(group.plain, RATE)
    plain.begin_step(batch, TEMPERATURE)
    for number, rows in enumerate(plan):
        expected = plain.update([batch[i] for i in rows], TEMPERATURE)
        if number == 0:
            assert result.updates[0].ratio_mean == pytest.approx(1.0, abs=1e-6)
            assert_same_gradients(group.gradients(1), expected["gradients"])
    assert [m.learning_rate for m in result.updates] == [pytest.approx(RATE)] * 4
    assert result.updates[3].ratio_max > 1.0 + 1e-3

    path, after = await group.weights("after")
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == set(after)

    manifest, published, (received,) = await group.received(epoch=1)
    sent = {spec.name: spec for spec in manifest.tensors if not spec.alias_of}
    aliases = {spec.name: spec.alias_of for spec in manifest.tensors if spec.alias_of}
    assert received.keys() == sent.keys()
    assert manifest.sender_ranks == group.ranks.count
    assert all(len(spec.slice_numel) == group.ranks.count for spec in sent.values())
    tied = group.plain.config.tie_word_embeddings
    assert aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    for name, tensor in after.items():
        assert torch.equal(received[aliases.get(name, name)], tensor), name

    exported = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        probe = token_logprobs(exported, list(published.probe_token_ids), 1.0)[1:]
    torch.testing.assert_close(torch.tensor(list(published.probe_logprobs)), probe, rtol=1e-4, atol=1e-4)
    assert len(published.probe_token_ids) == 32
    for row, found in zip([[5, 6, 7, 8]], await group.logprobs([[5, 6, 7, 8]], 1.0), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(torch.tensor(found), token_logprobs(exported, row, 1.0), rtol=1e-4, atol=1e-4)


async def test_export_keeps_the_files_and_refuses_a_path_that_exists(groups):
    group = groups["two"]
    (group.model_folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.5}')
    path, _ = await group.weights("kept")
    for file in group.model_folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            assert (path / file.name).read_bytes() == file.read_bytes(), file.name
    with pytest.raises(InvalidRequest, match="it exists"):
        request = learner_pb2.ExportRequest(request_id="again", path=str(path))
        await group.learner.export(request).result()
    assert [p for p in group.folder.iterdir() if p.name.endswith(".partial")] == []
    missing = learner_pb2.ExportRequest(request_id="nowhere", path=str(group.folder / "no" / "folder"))
    with pytest.raises(InvalidRequest, match="there is no folder"):
        await group.learner.export(missing).result()
    await group.logprobs([[1, 2, 3]], 1.0)  # the other rank was not left waiting


async def test_publication_to_two_receivers_and_one_that_dies(groups):
    group = groups["two"]
    _, first, (left, right) = await group.received(epoch=2, receivers=2)
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)

    request = learner_pb2.JoinTransferRequest(
        epoch=3, transport=transfer_pb2.TRANSPORT_GLOO, receiver_ranks=1, bucket_bytes=50_000, deadline_seconds=30
    )
    manifest = await group.learner.join_transfer(request)
    receiver = await asyncio.to_thread(Receiver, manifest, 0, deadline_seconds=30)
    tensors = receiver.receive(deadline_seconds=30)
    publish = learner_pb2.PublishRequest(
        request_id="dies", epoch=3, policy_version=group.learner.policy.version, deadline_seconds=30
    )
    operation = group.learner.publish(publish)
    await asyncio.to_thread(next, tensors)
    tensors.close()  # in the middle: the receiver leaves its groups
    with pytest.raises(Unavailable, match=r"peer went away|a receiver stopped taking"):
        await asyncio.wait_for(operation.result(), 20)
    publish.request_id = "dies again"
    with pytest.raises(Unavailable, match="epoch 3 cannot be used any more"):
        await group.learner.publish(publish).result()
    _, second, _ = await group.received(epoch=4)
    assert second.policy == first.policy and second.probe_logprobs == first.probe_logprobs


async def test_bfloat16_weights_float32_masters(groups):
    group = groups["half"]
    rounded = transformers.AutoModelForCausalLM.from_pretrained(group.model_folder, dtype=torch.bfloat16).float()
    batch = make_batch(group.plain.config.vocab_size, seed=6)
    rows = [list(row.token_ids) for row in batch]
    for found, row in zip(await group.logprobs(rows, 1.0), rows, strict=True):
        with torch.no_grad():
            expected = token_logprobs(rounded, row, 1.0)
        assert (torch.tensor(found) - expected).abs().mean() < 0.02

    plain = PlainTrainer(rounded, 0.0)
    plain.begin_step(batch, TEMPERATURE)
    expected = plain.update(batch, TEMPERATURE)
    result = await group.step(batch)
    assert result.updates[0].gradient_norm == pytest.approx(expected["gradient_norm"], rel=0.02)

    # One Update of 2e-5 is lost in a bfloat16 weight above 0.03, whose neighbours are 1.2e-4 away; twenty are not lost,
    # if the masters are float32.
    _, before = await group.weights("start")
    assert all(tensor.dtype == torch.bfloat16 for tensor in before.values())
    for _ in range(2):
        await group.step(batch, plan=[list(range(len(batch)))] * 10, cuts={"learning_rate": 2e-5})
    _, after = await group.weights("end")
    for name, tensor in before.items():
        if tensor.dim() > 1:
            large = tensor.abs() > 0.03
            assert (after[name] != tensor)[large].float().mean() > 0.3, name
    _, published, (received,) = await group.received(epoch=1)
    assert all(torch.equal(received[name], after[name]) for name in received)
    assert published.bytes == sum(2 * tensor.numel() for tensor in received.values())


async def test_three_updates_without_a_finite_gradient_end_it_and_change_nothing(groups):
    group = groups["one"]
    _, before = await group.weights("finite")
    batch = make_batch(group.plain.config.vocab_size, seed=8)
    for row in batch:
        for position in range(len(row.advantages)):
            row.advantages[position] = 3e38
    version = group.learner.policy.version
    for _ in range(2):
        result = await group.step(batch, cuts={"learning_rate": RATE})
        assert result.updates[0].skipped and not math.isfinite(result.updates[0].gradient_norm)
    with pytest.raises(InvalidRequest, match=r"3 Updates in a row had no finite gradient; trajectories train/0/0/0"):
        await group.step(batch, cuts={"learning_rate": RATE})
    assert group.learner.policy.version == version + 2
    _, after = await group.weights("still-finite")
    assert all(torch.equal(before[name], after[name]) for name in before)


async def test_a_rank_killed_in_the_middle_of_a_step(groups):
    """Last: it ends the group `two`. Everybody who waits hears which rank it was, and where its log is."""
    group = groups["two"]
    batch = make_batch(group.plain.config.vocab_size, seed=3)
    loop = asyncio.get_running_loop()
    begin = loop.time()
    with pytest.raises(Unavailable, match=r"rank 1 \(pid \d+\) was killed by SIGKILL .* log: \S+learner-rank1.log"):
        await group.step(batch, cuts={"killed_rank": 1})
    assert loop.time() - begin < 10
    assert group.ranks.is_lost and group.ranks.problem is not None
    with pytest.raises(Unavailable, match="rank 1"):
        await group.logprobs([[1, 2, 3]], 1.0)
    await asyncio.wait_for(gone(group.ranks), 5)


async def gone(ranks: RankProcesses) -> None:
    while ranks.pids:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
