"""Supervision of real child processes that have no model: what a rank does, the parent tells rightly and in time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from antiphon.learner.v1 import learner_pb2, ranks_pb2
from antiphon.types.v1 import chat_pb2, transfer_pb2

from services.common.config import ProcessConfig, dump, parse
from services.common.errors import InvalidRequest, Overloaded, Unavailable
from services.learner.config import LearnerConfig
from services.learner.process import rank_environment
from services.learner.ranks import RankProcesses, rank_command_line

START_SECONDS = 30.0
SOON_SECONDS = 5.0


def make_ranks(
    folder: Path, count: int = 2, *, model: str = "none", start=START_SECONDS, silence=30.0
) -> RankProcesses:
    service = {"run_id": "test", "worker_id": "learner", "run_dir": str(folder), "nats_url": "none"}
    tree = {"service": service, "model": {"path": model}, "settings": {"ranks": count}}
    config = folder / "process.yaml"
    config.write_text(dump(parse(ProcessConfig[LearnerConfig], tree, "test")))
    return RankProcesses(
        count,
        rank_command_line(config, count, "tests.unit.learner.fake_rank"),
        folder / "logs",
        "learner",
        environment=rank_environment(1),
        start_seconds=start,
        silence_seconds=silence,
    )


@pytest.fixture
async def ranks(tmp_path):
    made = make_ranks(tmp_path)
    await made.start()
    yield made
    await made.stop()


def tell(**orders: str) -> ranks_pb2.RankCommand:
    """tell(rank0="hang", rank1="killed")"""
    messages = [chat_pb2.ChatMessage(role=who.removeprefix("rank"), content=what) for who, what in orders.items()]
    work = ranks_pb2.RankEncode(conversations=[chat_pb2.Conversation(messages=messages)])
    return ranks_pb2.RankCommand(encode=work)


async def test_rank_0_answers_and_progress_is_its_own(ranks):
    assert ranks.hello.backend == "fake" and ranks.hello.max_sequence_tokens == 10
    assert ranks.problem is None and not ranks.is_lost
    said: list[tuple[str, int, int]] = []
    sequences = [learner_pb2.Sequence(id="a"), learner_pb2.Sequence(id="b")]
    command = ranks_pb2.RankCommand(forward=ranks_pb2.RankForward(sequences=sequences))
    reply = await ranks.run(command, lambda *progress: said.append(progress))
    assert [(r.id, list(r.logprobs)) for r in reply.forward.responses] == [("a", [0.0]), ("b", [0.0])]
    assert said[0] == ("rank 0", 1, 3) and said[-1] == ("rank 0", 3, 3)
    replies = await asyncio.gather(*(ranks.run(tell(all="sleep 0.01")) for _ in range(5)))
    assert all(list(r.encode.encoded[0].ids) == [100] for r in replies)


async def test_every_command_has_its_answer(ranks):
    export = ranks_pb2.RankExport(request=learner_pb2.ExportRequest(path="/x"))
    assert (await ranks.run(ranks_pb2.RankCommand(export=export))).export.path == "/x"
    step = ranks_pb2.RankTrainStep(header=learner_pb2.StepHeader(step_id=4))
    assert (await ranks.run(ranks_pb2.RankCommand(train_step=step))).step.step_id == 4
    join = ranks_pb2.RankJoinTransfer(request=learner_pb2.JoinTransferRequest(epoch=2))
    assert (await ranks.run(ranks_pb2.RankCommand(join_transfer=join))).manifest.epoch == 2
    load = ranks_pb2.RankCommand(load=ranks_pb2.RankLoad(folder="/x"))
    assert [reply.loaded.digest for reply in await ranks.run_all(load)] == [1, 2]
    torn = ranks_pb2.RankCommand(check_load=ranks_pb2.RankCheckLoad(folder="/torn"))
    with pytest.raises(InvalidRequest, match="rank 1: torn"):
        await ranks.run_all(torn)
    publish = ranks_pb2.RankPublish(request=learner_pb2.PublishRequest())
    assert (await ranks.run(ranks_pb2.RankCommand(publish=publish))).HasField("publish")


async def test_every_rank_says_what_its_own_gpu_gave_back(ranks):
    sleep = ranks_pb2.RankCommand(sleep=ranks_pb2.RankSleep(tags=[1]))
    replies = await ranks.run_all(sleep)
    assert [(r.memory_change.device.uuid, r.memory_change.tag_bytes) for r in replies] == [("GPU-0", 10), ("GPU-1", 11)]
    with pytest.raises(Overloaded, match="rank 1 has no room"):
        await ranks.run_all(ranks_pb2.RankCommand(wake=ranks_pb2.RankWake(tags=[1])))
    assert ranks.problem is None


async def test_memory_is_told_in_the_middle_of_work(ranks):
    working = asyncio.create_task(ranks.run(tell(all="sleep 1.0")))
    await asyncio.sleep(0)  # it is sent
    replies = await ranks.run_all(ranks_pb2.RankCommand(memory=ranks_pb2.RankMemory()))
    assert [r.memory.uuid for r in replies] == ["GPU-0", "GPU-1"]
    assert not working.done()
    await working


async def test_ranks_that_are_given_up_are_ended_and_say_why(ranks):
    working = asyncio.create_task(ranks.run(tell(all="hang")))
    await asyncio.sleep(0)  # it is sent
    ranks.give_up("their memory did not come free")
    with pytest.raises(Unavailable, match="did not come free"):
        await working
    assert ranks.is_lost
    await until(lambda: not ranks.pids)


@pytest.mark.parametrize("who", ["rank0", "rank1", "all"])
async def test_an_error_of_the_contracts_leaves_the_ranks_at_work(ranks, who):
    with pytest.raises(InvalidRequest, match="refuses"):
        await ranks.run(tell(**{who: "refuse"}))
    assert ranks.problem is None
    assert list((await ranks.run(tell())).encode.encoded[0].ids) == [100]


async def test_a_bug_in_one_rank_is_told_with_its_traceback_and_log_though_the_other_hangs(ranks, tmp_path):
    begin = time.monotonic()
    waiting = asyncio.create_task(ranks.run(tell()))  # behind it
    await waiting
    first = asyncio.create_task(ranks.run(tell(rank0="hang", rank1="raise")))
    second = asyncio.create_task(ranks.run(tell()))
    for task in (first, second):
        with pytest.raises(Unavailable, match="rank 1 failed: RuntimeError: a bug in rank 1") as caught:
            await asyncio.wait_for(task, SOON_SECONDS)
        assert "fake_rank.py" in str(caught.value)
        assert str(tmp_path / "logs" / "learner-rank1.log") in str(caught.value)
    assert time.monotonic() - begin < SOON_SECONDS
    assert "a bug in rank 1" in (tmp_path / "logs" / "learner-rank1.log").read_text()
    assert ranks.is_lost and "rank 1 failed" in ranks.problem
    await until(lambda: not ranks.pids)
    with pytest.raises(Unavailable, match="a bug in rank 1"):
        await ranks.run(tell())


async def test_a_rank_that_was_killed_is_the_cause_and_not_the_one_that_complains_of_it(ranks, tmp_path):
    """The echo comes before the death is seen."""
    marker = tmp_path / "alive"
    marker.touch()
    begin = time.monotonic()
    with pytest.raises(Unavailable, match=r"rank 1 \(pid \d+\) was killed by SIGKILL .*learner-rank1.log"):
        await asyncio.wait_for(ranks.run(tell(rank0=f"echo {marker}", rank1=f"kill_after {marker}")), SOON_SECONDS)
    assert time.monotonic() - begin < SOON_SECONDS


@pytest.mark.parametrize(("how", "told"), [("killed", "was killed by SIGKILL"), ("exit", "ended with exit code 3")])
async def test_a_death_is_noticed_soon(ranks, how, told):
    begin = time.monotonic()
    with pytest.raises(Unavailable, match=told):
        await asyncio.wait_for(ranks.run(tell(rank0="hang", rank1=how)), SOON_SECONDS)
    assert time.monotonic() - begin < SOON_SECONDS


async def test_a_death_between_commands_is_noticed(ranks):
    os.kill(ranks.pids[0], signal.SIGKILL)
    await asyncio.wait_for(ranks.lost.wait(), SOON_SECONDS)
    assert "rank 0" in ranks.problem
    with pytest.raises(Unavailable, match="rank 0"):
        _ = ranks.hello


async def test_silence_in_the_middle_of_work_is_a_death(tmp_path):
    ranks = make_ranks(tmp_path, 1, silence=0.5)
    await ranks.start()
    try:
        await asyncio.sleep(0.7)  # silence without work is none
        assert not ranks.is_lost
        with pytest.raises(Unavailable, match="no rank has said anything for"):
            await asyncio.wait_for(ranks.run(tell(rank0="hang")), SOON_SECONDS)
        await until(lambda: not ranks.pids)
    finally:
        await ranks.stop()


async def test_waiting_for_receivers_goes_on_beside_other_work(ranks):
    def connect(epoch: int, seconds: float) -> ranks_pb2.RankCommand:
        manifest = transfer_pb2.TransferManifest(epoch=epoch)
        work = ranks_pb2.RankConnectTransfer(manifest=manifest, deadline_seconds=seconds)
        return ranks_pb2.RankCommand(connect_transfer=work)

    slow = asyncio.create_task(ranks.run(connect(1, 1.0)))
    failing = asyncio.create_task(ranks.run(connect(13, 0.5)))
    await ranks.run(tell())
    assert not slow.done() and not failing.done()
    with pytest.raises(Unavailable, match="nobody came"):
        await failing
    assert (await slow).HasField("done")
    assert ranks.problem is None


async def test_a_cancelled_caller_leaves_the_command_to_its_end(ranks):
    task = asyncio.create_task(ranks.run(tell(all="sleep 0.3")))
    await asyncio.sleep(0)  # it is sent
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list((await ranks.run(tell())).encode.encoded[0].ids) == [100]
    assert not ranks.is_lost


async def test_a_rank_that_cannot_start_is_told_though_the_other_still_loads(tmp_path):
    ranks = make_ranks(tmp_path, model="broken")
    with pytest.raises(Unavailable, match="rank 1 failed: no such model"):
        await ranks.start()
    assert ranks.is_lost
    await ranks.stop()
    assert ranks.pids == []


async def test_a_start_that_takes_too_long_is_given_up(tmp_path):
    ranks = make_ranks(tmp_path, 1, model="slow", start=1.0)
    with pytest.raises(Unavailable, match=r"ranks \[0\] had not loaded the model after 1 s; logs: .*rank0.log"):
        await ranks.start()
    await ranks.stop()


async def test_stop_ends_everybody_and_tells_who_waits(tmp_path):
    ranks = make_ranks(tmp_path)
    await ranks.start()
    pids = ranks.pids
    task = asyncio.create_task(ranks.run(tell(all="hang")))
    await asyncio.sleep(0)  # it is sent
    await asyncio.wait_for(ranks.stop(), 10)
    with pytest.raises(Unavailable, match="stopping"):
        await task
    assert len(pids) == 2 and not any(alive(pid) for pid in pids)
    assert not ranks.is_lost


PARENT = """
import asyncio, sys
from pathlib import Path
from tests.unit.learner.test_learner_ranks import make_ranks

async def main():
    ranks = make_ranks(Path(sys.argv[1]))
    await ranks.start()
    print(*ranks.pids, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_ranks_die_with_their_parent(tmp_path):
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(alive(pid) for pid in pids)
        parent.kill()
    end = time.monotonic() + SOON_SECONDS
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), SOON_SECONDS)
