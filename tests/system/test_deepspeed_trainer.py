"""Real ranks: DeepSpeed ZeRO-3 on gloo, one rank and two, against plain torch; publication, export, death of a rank."""

from __future__ import annotations

import asyncio
import math

import pytest
import pytest_asyncio
import torch
import transformers
from antiphon.learner.v1 import learner_pb2
from antiphon.types.v1 import transfer_pb2

from services.common.errors import InvalidRequest, Unavailable
from services.common.weights.receiver import Receiver
from services.learner.batching import Layout, Row, plan_micro_batches
from services.learner.ranks import RankProcesses
from tests.reference import objective_batches
from tests.system.learner_group import TEMPERATURE, Group, assert_same_gradients
from tests.unit.learner.batches import make_batch
from tests.unit.learner.plain_policy import PlainTrainer, token_logprobs

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

RATE = 0.01


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


@pytest.mark.parametrize("name", objective_batches.OBJECTIVES)
async def test_every_objective_however_the_batch_is_cut(group, name):
    """Against slopes by hand in float64 (tests/reference/objectives_numpy.py), carried through plain transformers."""
    batch = objective_batches.complete(make_batch(group.plain.config.vocab_size, seed=3), seed=5)
    message = objective_batches.OBJECTIVES[name]()
    message.temperature = TEMPERATURE
    loss, gradients = objective_batches.expected(name, group.plain, batch, TEMPERATURE)
    for cuts in ({"token_budget": 10_000, "layout": "shared"}, {"token_budget": 1, "layout": "padded"}):
        result = await group.step(batch, cuts=cuts, policy=message)
        assert_same_gradients(group.gradients(), gradients)
        assert result.updates[0].loss == pytest.approx(loss, rel=1e-4)


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


TWO_UPDATES = [[0, 1, 2, 3], [6, 5, 4]]


@pytest.mark.parametrize("name", ["one", "two", "half"])
async def test_a_checkpoint_holds_all_that_training_goes_on_from(groups, name):
    """Back to it and on again: the same metrics, weights, masters, moments and random numbers, bit by bit."""
    group = groups[name]
    batches = [make_batch(group.plain.config.vocab_size, seed=seed) for seed in (21, 22)]

    async def train() -> list[list[learner_pb2.UpdateMetrics]]:
        results = [await group.step(batch, plan=TWO_UPDATES, cuts={"learning_rate": RATE}) for batch in batches]
        return [list(result.updates) for result in results]

    path, manifest = await group.save("ck-start")
    assert (await group.save("ck-again"))[1].files == manifest.files  # saving changes nothing
    metrics = await train()
    _, first = await group.save("ck-first")
    loaded = await group.load(path, "back")
    assert loaded.policy == manifest.policy and loaded.next_step_id == manifest.policy.version + 1
    assert all(part.restored for part in loaded.parts)
    assert (await group.save("ck-back"))[1].files == manifest.files
    assert await train() == metrics
    _, second = await group.save("ck-second")
    assert second.files == first.files and second.policy == first.policy and second.position == first.position
    assert first.files != manifest.files and first.policy.digest != manifest.policy.digest
    assert first.position.updates == manifest.position.updates + 4
    assert len(first.files) == first.ranks == group.ranks.count
    if name != "two":  # weights of two ranks were put together above
        _, published, _ = await group.received(epoch=9)
        assert published.policy == second.policy


async def test_a_dry_run_changes_nothing_and_tells_what_it_held(group):
    batch = make_batch(group.plain.config.vocab_size, seed=23)
    path, before = await group.save("ck-dry")
    tried = await group.step(batch, plan=TWO_UPDATES, cuts={"learning_rate": RATE, "token_budget": 1}, dry_run=True)
    assert group.learner.policy.version == before.policy.version
    assert [(peak.rank, peak.device) for peak in tried.peaks] == [(rank, "host") for rank in range(group.ranks.count)]
    assert all(100_000_000 < peak.bytes < peak.total_bytes for peak in tried.peaks)
    _, after = await group.save("ck-dried")
    assert after.files == before.files and after.policy == before.policy and after.position == before.position
    with_it = await group.step(batch, plan=TWO_UPDATES, cuts={"learning_rate": RATE})
    await group.load(path, "undo the dry run")
    assert (await group.step(batch, plan=TWO_UPDATES, cuts={"learning_rate": RATE})).updates == with_it.updates


async def test_what_is_to_be_new_is_new(groups):
    group = groups["one"]
    batch = make_batch(group.plain.config.vocab_size, seed=24)
    await group.step(batch, cuts={"learning_rate": RATE})
    path, saved = await group.save("ck-flags")
    assert saved.position.optimizer_updates > 0 and saved.position.updates >= saved.position.optimizer_updates
    loaded = await group.load(path, "no moments", fresh_optimizer=True)
    assert [part.name for part in loaded.parts if not part.restored] == ["optimizer"]
    fresh = (await group.save("ck-no-moments"))[1]
    assert (fresh.position.optimizer_updates, fresh.position.updates) == (0, saved.position.updates)
    assert fresh.policy == saved.policy
    # AdamW's first Update moves every weight that has a gradient by the rate, whatever the gradient's size.
    _, before = await group.weights("before-fresh")
    await group.step(batch, cuts={"learning_rate": RATE})
    _, after = await group.weights("after-fresh")
    moved = (after["model.norm.weight"] - before["model.norm.weight"]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, RATE), rtol=1e-3, atol=0.0)
    await group.load(path, "new schedule", fresh_schedule=True)
    again = (await group.save("ck-new-schedule"))[1]
    assert (again.position.optimizer_updates, again.position.updates) == (saved.position.optimizer_updates, 0)
    await group.load(path, "all of it")


async def test_a_checkpoint_of_another_model_is_refused_with_what_differs(groups):
    path, _ = await groups["one"].save("ck-foreign")
    version = groups["two"].learner.policy.version
    with pytest.raises(InvalidRequest, match=r"of another model: lm_head.weight: not there in the checkpoint, \(\d+, "):
        await groups["two"].load(path, "foreign")
    with pytest.raises(InvalidRequest, match=r"of another model: its dtype is float32, this learner's bfloat16"):
        await groups["half"].load(path, "foreign")
    assert groups["two"].learner.policy.version == version and not groups["two"].ranks.is_lost


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
