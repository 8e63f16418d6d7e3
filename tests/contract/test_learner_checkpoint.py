"""Save, Load and dry runs of a learner over a real channel, in front of ranks that are a twin in memory."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from antiphon.learner.v1 import learner_pb2
from antiphon.tenant.v1 import tenant_pb2

from services.common.errors import Conflict, InvalidRequest, NotFound, Overloaded, Unavailable
from services.learner import checkpoints, history
from services.learner.whole_folder import WholeFolder
from tests.contract.learner_client import OPTIMIZER, WEIGHTS, Client, served_learner, step_requests, until
from tests.unit.learner.batches import make_batch, make_header
from tests.unit.learner.ranks_twin import DIGEST_OF_VERSION_0

BATCH = make_batch(50)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with served_learner() as served:
        yield served


async def trained(client: Client, steps: int, first: int = 1) -> list[learner_pb2.StepResult]:
    return [await client.step(make_header(number, BATCH), BATCH) for number in range(first, first + steps)]


# Save


async def test_a_save_answers_the_digests_and_a_repeat_is_the_same(client, tmp_path):
    await trained(client, 2)
    saved = await client.save(tmp_path / "two", 2, "s")
    assert (saved.path, saved.policy.version, saved.bytes) == (str(tmp_path / "two"), 2, 200)
    assert saved.policy.digest == DIGEST_OF_VERSION_0 + 2
    assert saved.digest == hashlib.sha256((tmp_path / "two" / "manifest.json").read_bytes()).digest()
    assert (await client.state()).policy.digest == saved.policy.digest
    assert await client.save(tmp_path / "two", 2, "s") == saved
    assert client.ranks.asked.count("save") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["two"]
    with pytest.raises(Conflict, match="save s: asked before with other content"):
        await client.save(tmp_path / "other", 2, "s")


async def test_a_save_that_nobody_heard_of_is_known_after_a_restart(client, tmp_path):
    await trained(client, 1)
    saved = await client.save(tmp_path / "one", 1, "s")
    async with served_learner() as restarted:  # at version 0
        again = await restarted.save(tmp_path / "one", 1, "s")
        assert (again.policy, again.digest, again.bytes) == (saved.policy, saved.digest, saved.bytes)
        assert restarted.ranks.asked == []
        with pytest.raises(InvalidRequest, match="it exists, and nothing is ever replaced"):
            await restarted.save(tmp_path / "one", 0, "t")


async def test_save_refuses(client, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").touch()
    for path, version, request_id, error, message in (
        (Path("ck"), 0, "s", InvalidRequest, "expected an absolute path"),
        (Path("/tmp/a\0b"), 0, "s", InvalidRequest, "expected an absolute path"),
        (tmp_path / "ck", 0, "", InvalidRequest, "request_id is empty"),
        (tmp_path / "ck", 3, "s", Conflict, "save version 3: the policy is at 0"),
        (tmp_path / "no" / "ck", 0, "s", InvalidRequest, "there is no folder"),
        (tmp_path / "taken", 0, "s", InvalidRequest, "it exists"),
        (tmp_path / "file" / "ck", 0, "s", InvalidRequest, "there is no folder"),
        (
            Path("/proc/ck"),
            0,
            "s",
            Unavailable,
            "'/proc/.ck.* there is no new checkpoint, the older ones are as they were",
        ),
    ):
        with pytest.raises(error, match=message):
            await client.save(path, version, request_id)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"]


async def test_a_rank_that_cannot_write_leaves_nothing_and_the_next_save_works(client, tmp_path):
    await client.save(tmp_path / "old", 0, "old")
    client.ranks.errors["save"] = Unavailable("rank 1 cannot write its slices: No space left on device")
    with pytest.raises(Unavailable, match="No space left"):
        await client.save(tmp_path / "new", 0, "s")
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert (await client.save(tmp_path / "new", 0, "s")).policy.version == 0
    assert (await client.load(tmp_path / "old", "l")).policy.version == 0


async def test_a_parent_that_cannot_write_says_what_the_system_said(client, tmp_path, monkeypatch):
    def full(folder: WholeFolder) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints.WholeFolder, "publish", full)
    with pytest.raises(
        Unavailable, match=r"No space left on device; there is no new checkpoint, the older ones are as"
    ):
        await client.save(tmp_path / "new", 0, "s")
    assert list(tmp_path.iterdir()) == []


async def test_older_checkpoints_go_only_after_the_new_one_is_there(client, tmp_path):
    """And only those that the call names, and that are checkpoints of this role."""
    for number in (1, 2):
        await trained(client, 1, number)
        await client.save(tmp_path / f"v{number}", number, f"s{number}")
    (tmp_path / "precious").mkdir()
    shutil.copytree(tmp_path / "v1", tmp_path / "critic")
    manifest = json.loads((tmp_path / "critic" / "manifest.json").read_text())
    text = json.dumps({**manifest, "role": "critic"})
    (tmp_path / "critic" / "manifest.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "critic" / "manifest.json.sha256").write_text(f"{digest}  manifest.json\n")
    delete = [tmp_path / name for name in ("v1", "gone", "precious", "critic")]
    client.ranks.errors["save"] = Unavailable("No space left on device")
    with pytest.raises(Unavailable):
        await client.save(tmp_path / "v2b", 2, "s3", *delete)
    assert (tmp_path / "v1").exists()
    saved = await client.save(tmp_path / "v2b", 2, "s3", *delete)
    assert list(saved.deleted_paths) == [str(tmp_path / "v1")]
    assert ["no whole checkpoint" in saved.kept_paths[0], "it is of the critic" in saved.kept_paths[1]] == [True, True]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["critic", "precious", "v2", "v2b"]
    with pytest.raises(InvalidRequest, match="it is to be deleted, too"):
        await client.save(tmp_path / "v3", 2, "s4", tmp_path / "v3")


async def test_a_caller_that_goes_away_does_not_stop_a_save(client, tmp_path):
    client.ranks.hold.add("save")
    first = asyncio.create_task(client.save(tmp_path / "ck", 0, "s"))
    await until(lambda: client.ranks.asked)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(client.save(tmp_path / "ck", 0, "s"))
    client.ranks.release()
    assert (await second).policy.version == 0
    assert client.ranks.asked.count("save") == 1


async def test_a_rank_that_dies_in_a_save_leaves_no_folder(client, tmp_path):
    client.ranks.hold.add("save")
    save = asyncio.create_task(client.save(tmp_path / "ck", 0, "s"))
    await until(lambda: client.ranks.asked)
    client.ranks.lose("rank 1 (pid 41) was killed by SIGKILL; log: /logs/rank1.log")
    with pytest.raises(Unavailable, match="rank 1"):
        await save
    assert list(tmp_path.iterdir()) == []


# Load


async def test_after_a_load_the_next_step_is_the_loaded_version_plus_one(client, tmp_path):
    first = await trained(client, 3)
    saved = await client.save(tmp_path / "three", 3, "s")
    async with served_learner() as restarted:
        loaded = await restarted.load(tmp_path / "three", "l", digest=saved.digest)
        assert (loaded.policy, loaded.next_step_id) == (saved.policy, 4)
        assert (await restarted.state()).policy == saved.policy
        # Steps that are in the weights are answered as they were the first time, and not applied again.
        for number, result in enumerate(first, start=1):
            assert await restarted.step(make_header(number, BATCH), BATCH) == result
        assert "train_step" not in restarted.ranks.asked
        with pytest.raises(Conflict, match="step 3: asked before with other content"):
            await restarted.step(make_header(3, BATCH, temperature=0.1), BATCH)
        (fourth,) = await trained(restarted, 1, 4)
        assert fourth.policy.version == 4
        with pytest.raises(Conflict, match=r"step 6: the policy is version 4; expected 5: send the Steps from 5 on"):
            await restarted.step(make_header(6, BATCH), BATCH)


async def test_a_step_in_the_weights_whose_answer_is_forgotten_says_what_to_do(client, tmp_path, monkeypatch):
    monkeypatch.setattr(history, "STEPS_IN_A_CHECKPOINT", 1)
    async with served_learner() as small:
        await trained(small, 3)
        await small.save(tmp_path / "three", 3, "s")
    await client.load(tmp_path / "three", "l")
    message = (
        rf"step 2: the policy is version 3; expected 4\. Step 2 is in these weights, loaded from {tmp_path}/three, and "
        "its answer is not remembered: do not send it again, go on with step 4"
    )
    with pytest.raises(Conflict, match=message):
        await client.step(make_header(2, BATCH), BATCH)
    assert client.ranks.applied == [1, 2, 3]


async def test_a_load_goes_back_and_forgets_what_came_after(client, tmp_path):
    await trained(client, 1)
    await client.save(tmp_path / "one", 1, "s")
    await client.join(1)
    await trained(client, 1, 2)
    newer = await client.publish(1, 2, "p")
    loaded = await client.load(tmp_path / "one", "l")
    assert loaded.policy.digest == DIGEST_OF_VERSION_0 + 1
    assert await client.load(tmp_path / "one", "l") == loaded and len(client.ranks.loads) == 1
    with pytest.raises(Conflict, match="publish version 2: the policy is at 1"):
        await client.publish(1, 2, "p")  # the answer that was remembered is of weights that are gone
    other = make_batch(50, seed=7)
    await client.step(make_header(2, other), other)  # another Step 2 than before
    assert (await client.publish(1, 2, "p")).policy.version == newer.policy.version


async def test_what_is_restored_and_what_is_new_is_asked_by_name_and_told(client, tmp_path):
    await client.save(tmp_path / "ck", 0, "s")
    told = []
    for number, flags in enumerate([{}, {"fresh_optimizer": True}, {"fresh_schedule": True}]):
        loaded = await client.load(tmp_path / "ck", f"l{number}", **flags)
        told.append({part.name: part.restored for part in loaded.parts})
        work = client.ranks.loads[-1]
        assert (work.fresh_optimizer, work.fresh_schedule) == (number == 1, number == 2)
    assert told == [
        {"optimizer": True, "schedule": True, "answers": True},
        {"optimizer": False, "schedule": True, "answers": True},
        {"optimizer": True, "schedule": False, "answers": True},
    ]


async def test_load_refuses_what_is_not_whole_and_changes_nothing(client, tmp_path):
    await client.save(tmp_path / "ck", 0, "s")
    await trained(client, 2)
    (tmp_path / "empty").mkdir()

    def broken(name: str, change) -> Path:
        copy = tmp_path / name
        shutil.copytree(tmp_path / "ck", copy)
        change(copy)
        return copy

    def reshape(folder: Path) -> None:
        text = (folder / "manifest.json").read_text().replace('"4"', '"5"')
        (folder / "manifest.json").write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        (folder / "manifest.json.sha256").write_text(f"{digest}  manifest.json\n")

    def newer(folder: Path) -> None:
        text = (folder / "manifest.json").read_text().replace('"format": 1', '"format": 2')
        (folder / "manifest.json").write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        (folder / "manifest.json.sha256").write_text(f"{digest}  manifest.json\n")

    for path, error, message in (
        (tmp_path / "nothing", NotFound, "there is no manifest.json"),
        (tmp_path / "empty", NotFound, "there is no manifest.json"),
        (broken("missing", lambda f: (f / "rank1.bin").unlink()), InvalidRequest, "rank1.bin is missing"),
        (
            broken("cut", lambda f: (f / "rank1.bin").write_bytes(b"x" * 99)),
            InvalidRequest,
            "rank1.bin has 99 bytes, 100 were written",
        ),
        (
            broken("changed", lambda f: (f / "rank1.bin").write_bytes(b"x" * 100)),
            InvalidRequest,
            "rank1.bin was changed or is damaged",
        ),
        (
            broken("edited", lambda f: (f / "manifest.json").write_text("{}")),
            InvalidRequest,
            "manifest.json is not what was written",
        ),
        (broken("unsigned", lambda f: (f / "manifest.json.sha256").unlink()), InvalidRequest, "manifest.json.sha256"),
        (broken("other", reshape), InvalidRequest, "the checkpoint is of another model: w"),
        (broken("newer", newer), InvalidRequest, "its format is 2, this build reads 1"),
    ):
        with pytest.raises(error, match=message):
            await client.load(path, path.name)
        assert (await client.state()).policy.version == 2
    assert client.ranks.loads == []
    with pytest.raises(Conflict, match="another checkpoint than the one that was meant"):
        await client.load(tmp_path / "ck", "l", digest=b"\0" * 32)
    await trained(client, 1, 3)


async def test_weights_that_come_out_other_than_they_were_saved_end_the_ranks(client, tmp_path):
    await client.save(tmp_path / "ck", 0, "s")
    client.ranks.loaded_digest = 77
    with pytest.raises(Unavailable, match="the weights' digest is 0x4d, 0x3e8 was saved; the ranks are ended"):
        await client.load(tmp_path / "ck", "l")
    assert (await client.state()).state == tenant_pb2.WORKER_STATE_FAILED


async def test_a_load_that_breaks_in_the_middle_leaves_no_policy(client, tmp_path):
    await client.save(tmp_path / "ck", 0, "s")
    client.ranks.errors["load"] = InvalidRequest("a rank read nonsense")
    with pytest.raises(Unavailable, match="it failed in the middle, the weights are no policy: a rank read nonsense"):
        await client.load(tmp_path / "ck", "l")
    assert (await client.state()).state == tenant_pb2.WORKER_STATE_FAILED


async def test_checkpoints_need_all_that_sleeps_and_a_token_that_holds(client, tmp_path):
    await client.save(tmp_path / "ck", 0, "s")
    await client.sleep("z", OPTIMIZER)
    for call in (client.save(tmp_path / "new", 0, "t"), client.load(tmp_path / "ck", "l")):
        with pytest.raises(Conflict, match="OPTIMIZER sleeps; wake it first"):
            await call
    client.guard.stale = True
    client.guard.checked.clear()
    for call in (client.save(tmp_path / "new", 0, "u"), client.load(tmp_path / "ck", "m")):
        with pytest.raises(Conflict, match="does not hold"):
            await call
    assert [tags for _, tags in client.guard.checked] == [[WEIGHTS, OPTIMIZER]] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["ck"]


# Dry runs


async def test_a_dry_run_uses_no_step_id_and_says_what_each_rank_held(client):
    header = make_header(1, BATCH)
    header.dry_run = True
    tried = await client.step(header, BATCH)
    assert [(peak.rank, peak.bytes, peak.total_bytes) for peak in tried.peaks] == [(0, 5, 7), (1, 5, 7)]
    assert tried.policy.version == 0 and client.ranks.applied == []
    assert await client.step(header, BATCH) == tried
    assert client.ranks.asked.count("train_step") == 1
    (result,) = await trained(client, 1)
    assert result.policy.version == 1 and not result.peaks
    header.step_id = 5
    with pytest.raises(Conflict, match="step 5: the policy is version 1; expected 2"):
        await client.step(header, BATCH)


async def test_a_dry_run_that_does_not_fit_is_told(client):
    client.ranks.errors["train_step"] = Overloaded("too little memory")
    header = make_header(1, BATCH)
    header.dry_run = True
    with pytest.raises(Overloaded, match="too little memory"):
        await client.result(client.stub.TrainStep, step_requests(header, BATCH))
    assert (await client.step(header, BATCH)).peaks
