"""RewardService over a real channel, with real child processes: every way a user's function can go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from antiphon.events.v1 import events_pb2
from antiphon.reward.v1 import reward_pb2, reward_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2

from services.common.announcements import Registry
from services.common.bus import Bus
from services.common.client import Peer
from services.common.errors import InvalidRequest, NotFound
from services.reward import sandbox
from tests.contract import reward_service
from tests.contract.reward_service import (
    DATA,
    DEADLINE_SECONDS,
    INFRA,
    Reward,
    alive,
    children_of,
    process_config,
    request,
    until,
)

USER_FILE = """
import os, signal, subprocess, sys, threading, time, socket, decimal, fractions, tempfile, asyncio
import numpy

def ok(): return 0.25
def true(): return True
def false(): return False
def integer(): return 3
def numpy_scalar(): return numpy.float32(0.5)
def numpy_bool(): return numpy.bool_(True)
def numpy_one(): return numpy.array([0.75])
def fraction(): return fractions.Fraction(1, 4)
def negative(): return -2.5
def parts(): return {"score": 1, "format": True, "length": 12, "left_out": None}
async def coroutine():
    await asyncio.sleep(0.01)
    return 0.125

def none(): return None
def dict_none(): return {"score": None, "a": 1.0}
def nan(): return float("nan")
def inf(): return float("-inf")
def part_nan(): return {"score": 1.0, "a": float("nan")}
def huge_int(): return 10 ** 5000
def text(): return "1.0"
def a_list(): return [1.0]
def empty_dict(): return {}
def part_text(): return {"score": 1.0, "a": "good"}
def part_name(): return {"score": 1.0, 7: 1.0}
def many_parts(): return {"score": 1.0, **{f"p{i}": 1.0 for i in range(100)}}
def two_numbers(): return numpy.array([1.0, 2.0])
def complex_number(): return 1j
def bad_repr():
    class Evil:
        def __repr__(self): raise RuntimeError("no")
    return Evil()

def raises(): raise ValueError("the reference is odd")
def long_message(): raise ValueError("begin " + "x" * 10_000_000 + " finish")
def surrogate(): raise ValueError("half \\ud800 letter")
def exits(): sys.exit(3)
def interrupted(): raise KeyboardInterrupt
def deep():
    return deep()
def memory():
    blocks = []
    while True:
        blocks.append(bytearray(50_000_000))

def hangs():
    while True: pass
def sleeps(): time.sleep(1000)
def ignores_signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM): signal.signal(number, signal.SIG_IGN)
    while True: time.sleep(1)
async def hangs_async(): await asyncio.sleep(1000)
def catches_everything():
    while True:
        try: time.sleep(1000)
        except BaseException: pass

def os_exit_zero(): os._exit(0)
def os_exit(): os._exit(7)
def kills_itself(): os.kill(os.getpid(), signal.SIGKILL)
def crashes():
    print("about to crash", flush=True)
    import ctypes
    ctypes.string_at(0)
def writes_junk():
    for descriptor in range(3, 512):
        try: os.write(descriptor, b"\\xff\\xff\\xff\\xffjunk")
        except OSError: pass
    time.sleep(1000)

def prints_much():
    print("y" * 10_000_000)
    print("z" * 10_000_000, file=sys.stderr)
    return 0.5
def closes_stdout():
    sys.stdout.close(); os.close(1)
    return 0.5
def reads_stdin(): return float(len(sys.stdin.read()))
def in_main_thread(): return threading.current_thread() is threading.main_thread()
def alarm():
    def ring(*_): raise TimeoutError("rang")
    signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(50)
    except TimeoutError: return 1.0
def leaves_alarm():
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    return 1.0
def seconds_to_alarm(): return signal.getitimer(signal.ITIMER_REAL)[0]
def uses_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(1.0)); thread.start(); thread.join()
    return found[0]
def private_folder(): return "antiphon-reward-" in tempfile.gettempdir()

def forks(): return os.fork()
def subprocesses(): return subprocess.run(["true"]).returncode
def dials(): socket.create_connection(("127.0.0.1", 9), timeout=0.2)
def dials_udp(): socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
def unix_socket():
    for end in socket.socketpair(): end.close()
    return 1.0

def fork_that_hangs(path):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(path, "w").write(str(os.getpid()))
            while True: time.sleep(1)
        os._exit(0)
    time.sleep(1000)
def fork_and_return(path):
    pid = os.fork()
    if pid == 0:
        while True: time.sleep(1)
    open(path, "w").write(str(pid))
    return 1.0
def runs_program(path):
    return float(subprocess.run(["echo", "0.5"], capture_output=True, text=True, start_new_session=True).stdout)

def score(prompt, response, reference, **columns):
    return globals()[response](**columns)
"""

SCORES: dict[str, float] = {
    "ok": 0.25, "true": 1.0, "false": 0.0, "integer": 3.0, "numpy_scalar": 0.5, "numpy_bool": 1.0, "numpy_one": 0.75,
    "fraction": 0.25, "negative": -2.5, "parts": 1.0, "coroutine": 0.125, "prints_much": 0.5, "closes_stdout": 0.5,
    "reads_stdin": 0.0, "in_main_thread": 1.0, "alarm": 1.0, "leaves_alarm": 1.0, "uses_thread": 1.0,
    "private_folder": 1.0, "unix_socket": 1.0,
}  # fmt: skip

FAILURES: dict[str, tuple[int, str, str]] = {
    "none": (DATA, "none", "returned None"),
    "dict_none": (DATA, "none", "'score' is None"),
    "nan": (DATA, "not_finite", "got nan"),
    "inf": (DATA, "not_finite", "got -inf"),
    "part_nan": (DATA, "not_finite", "part 'a'"),
    "huge_int": (DATA, "not_finite", "too large"),
    "text": (DATA, "wrong_type", "got str: '1.0'"),
    "a_list": (DATA, "wrong_type", "got list: [1.0]"),
    "empty_dict": (DATA, "wrong_type", "no 'score'"),
    "part_text": (DATA, "wrong_type", "part 'a' must be a number, got str"),
    "part_name": (DATA, "wrong_type", "name of a part"),
    "many_parts": (DATA, "wrong_type", "at most 64 parts, got 100"),
    "two_numbers": (DATA, "wrong_type", "got ndarray"),
    "complex_number": (DATA, "wrong_type", "got complex"),
    "bad_repr": (DATA, "wrong_type", "got Evil"),
    "raises": (DATA, "exception", "ValueError: the reference is odd"),
    "long_message": (DATA, "exception", "ValueError: begin xxx"),
    "surrogate": (DATA, "exception", "ValueError: half "),
    "exits": (DATA, "exception", "SystemExit: 3"),
    "interrupted": (DATA, "exception", "KeyboardInterrupt"),
    "deep": (DATA, "exception", "RecursionError"),
    "memory": (DATA, "exception", "MemoryError"),
    "no_such_name": (DATA, "exception", "KeyError: 'no_such_name'"),
    "forks": (DATA, "exception", "allow_processes"),
    "subprocesses": (DATA, "exception", "allow_processes"),
    "dials": (DATA, "exception", "allow_network"),
    "dials_udp": (DATA, "exception", "allow_network"),
    "os_exit_zero": (INFRA, "killed", "ended with exit code 0"),
    "os_exit": (INFRA, "killed", "ended with exit code 7"),
    "kills_itself": (INFRA, "killed", "SIGKILL"),
    "crashes": (INFRA, "killed", "about to crash"),
    "writes_junk": (INFRA, "killed", "makes no sense"),
}


def settings(folder: Path) -> dict[str, Any]:
    return {"scorers": [{"name": "user", "path": str(folder / "user.py")}]}


HANGS = ("hangs", "sleeps", "hangs_async", "ignores_signals", "catches_everything")


@contextlib.asynccontextmanager
async def serving(folder: Path, source: str = USER_FILE, **settings: Any) -> AsyncIterator[Reward]:
    """One scorer, user@v1, whose limits are too wide to matter unless a test narrows them."""
    path = folder / "user.py"
    path.write_text(source)
    defaults = {"name": "user", "version": "v1", "timeout_seconds": 50.0, "memory_mib": 400, "processes": 2}
    async with reward_service.serving(folder, [{"path": str(path), **defaults, **settings}]) as reward:
        yield reward


async def test_every_failure_is_typed_and_the_siblings_still_score(tmp_path: Path) -> None:
    names = [*SCORES, *FAILURES]
    requests = [request(name, row=row) for row, name in enumerate(names)]
    requests += [request("ok", row=row, sample=1) for row in range(len(names))]
    others = set(children_of(os.getpid()))  # of tests before this one
    async with serving(tmp_path, processes=3) as reward:
        responses = await reward.score(requests)
        family = set(children_of(os.getpid())) - others
    found = {(r.prompt_id.row, r.sample_number): r for r in responses}
    assert len(found) == len(responses) == len(requests)
    assert {r.scorer for r in responses} == {"user@v1"}
    for row, name in enumerate(names):
        response = found[row, 0]
        if name in SCORES:
            assert response.WhichOneof("outcome") == "score", (name, response)
            assert response.score.value == SCORES[name], name
        else:
            kind, reason, text = FAILURES[name]
            assert response.WhichOneof("outcome") == "failure", (name, response)
            assert (response.failure.kind, response.failure.reason) == (kind, reason), (name, response.failure)
            assert text in response.failure.message, (name, response.failure.message)
            assert len(response.failure.message) < 5000, name
        assert found[row, 1].score.value == 0.25
    assert {p.name: p.value for p in found[names.index("parts"), 0].score.parts} == {"format": 1.0, "length": 12.0}
    message = found[names.index("raises"), 0].failure.message
    assert 'user.py", line' in message and "in raises" in message  # the user's own frame
    assert "services/reward" not in message
    assert await until(lambda: not any(alive(pid) for pid in family)), "children outlived the service"


async def test_whatever_hangs_is_ended_and_the_siblings_still_score(tmp_path: Path) -> None:
    path = tmp_path / "user.py"
    path.write_text(USER_FILE)
    hasty = {"name": "hasty", "path": str(path), "timeout_seconds": 0.5, "processes": 3}
    patient = {"name": "patient", "path": str(path), "timeout_seconds": 50.0}
    others = set(children_of(os.getpid()))  # of tests before this one
    async with reward_service.serving(tmp_path, [hasty, patient]) as reward:
        requests = [request(name, row=row, scorer="hasty") for row, name in enumerate(HANGS)]
        requests += [request("ok", row=row, sample=1, scorer="patient") for row in range(len(HANGS))]
        responses = await reward.score(requests)
        family = set(children_of(os.getpid())) - others
    for response in responses:
        if response.sample_number == 1:
            assert response.score.value == 0.25
        else:
            assert (response.failure.kind, response.failure.reason) == (DATA, "timeout"), response
            assert "hasty (score in" in response.failure.message and "within 0.5 s" in response.failure.message
    assert len(responses) == 2 * len(HANGS)
    assert await until(lambda: not any(alive(pid) for pid in family)), "children outlived the service"


async def test_a_forgotten_alarm_does_not_reach_the_next_call(tmp_path: Path) -> None:
    async with serving(tmp_path, processes=1) as reward:
        (left,) = await reward.score([request("leaves_alarm")])
        (following,) = await reward.score([request("seconds_to_alarm")])
    assert (left.score.value, following.score.value) == (1.0, 0.0)


async def test_last_words_are_told_however_late_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a child is known before what it printed has been read."""
    read = sandbox._Child._read_output

    async def late(child: Any) -> None:
        await asyncio.sleep(0.3)
        await read(child)

    monkeypatch.setattr(sandbox._Child, "_read_output", late)
    async with serving(tmp_path, processes=1) as reward:
        (response,) = await reward.score([request("crashes")])
    assert response.failure.reason == "killed" and "about to crash" in response.failure.message


async def test_a_wait_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """cases.md R04, for what runs here: the log names the scorer, its limit and how many wait."""
    monkeypatch.setattr(sandbox, "REPORT_SECONDS", 0.1)
    caplog.set_level(logging.INFO, "services.reward.sandbox")
    async with serving(tmp_path, processes=1, timeout_seconds=1.0) as reward:
        responses = await reward.score([request("sleeps"), request("ok", row=1)])
    assert [response.failure.reason for response in responses] == ["timeout", ""]
    lines = [record.getMessage() for record in caplog.records if "wait for one of" in record.getMessage()]
    assert lines and "user@v1: 1 call(s) run, the oldest for 0 of at most 1 s; 1 more wait for one of 1" in lines[0]


async def test_what_is_not_enforced_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """cases.md R08: what user code is not kept from is in the log, plainly."""
    caplog.set_level(logging.INFO, "services.reward.sandbox")
    async with serving(tmp_path, processes=1, allow_network=True, allow_processes=True):
        pass
    (line,) = [record.getMessage() for record in caplog.records if "not enforced" in record.getMessage()]
    for text in ("access to files", "the number of processes", "no network (allowed by allow_network)"):
        assert text in line


async def test_a_caller_that_is_still_sending_is_told_what_was_wrong(tmp_path: Path) -> None:
    large = "x" * 200_000

    async def requests(first: reward_pb2.ScoreRequest, rest: int) -> AsyncIterator[reward_pb2.ScoreRequest]:
        yield first
        for row in range(rest):
            yield request("ok", row=100 + row, reference=large)

    async def waits_for_an_answer() -> AsyncIterator[reward_pb2.ScoreRequest]:
        yield request("ok", scorer="other")
        await asyncio.sleep(1000)

    async with serving(tmp_path) as reward:
        for _ in range(3):
            with pytest.raises(NotFound, match="no scorer 'other' here"):
                await reward.score(requests(request("ok", scorer="other"), 100))
            with pytest.raises(InvalidRequest, match="columns_json"):  # known only when it is scored
                await reward.score(requests(request("ok", columns="{"), 100))
        with pytest.raises(NotFound, match="no scorer 'other' here"):
            await reward.score(waits_for_an_answer())


async def test_output_of_user_code_is_kept_apart_and_bounded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with serving(tmp_path) as reward:
        (response,) = await reward.score([request("prints_much")])
    assert response.score.value == 0.5
    captured = capfd.readouterr()
    assert "yyy" not in captured.out + captured.err and "zzz" not in captured.out + captured.err
    kept = (tmp_path / "scorer-user-v1.out").stat().st_size
    assert 500_000 < kept < 1_100_000


@pytest.mark.parametrize("name", ["fork_that_hangs", "fork_and_return"])
async def test_processes_of_user_code_die_with_its_child(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "pid"
    async with serving(tmp_path, allow_processes=True, processes=1, timeout_seconds=2.0) as reward:
        columns = f'{{"path": "{marker}"}}'
        first, second, third = await reward.score(
            [request(name, columns=columns), request("ok", row=1), request("runs_program", row=2, columns=columns)]
        )
        pid = int(marker.read_text())
        if name == "fork_that_hangs":  # a daemon in a session of its own
            assert first.failure.reason == "timeout"
            assert await until(lambda: not alive(pid)), "the grandchild outlived the call that timed out"
        else:
            assert first.score.value == 1.0
            assert alive(pid)
        assert second.score.value == 0.25
        assert third.score.value == 0.5
    assert await until(lambda: not alive(pid)), "the grandchild outlived the service's children"


async def test_a_killed_service_leaves_no_process_behind(tmp_path: Path) -> None:
    """kill -9 of the service while a daemon of the user's function runs in another session."""
    marker = tmp_path / "pid"
    (tmp_path / "user.py").write_text(USER_FILE)
    program = f"""
import asyncio
from pathlib import Path
from services.reward.config import FunctionScorer as Settings
from services.reward.function_scorer import FunctionScorer
from services.reward.readiness import Readiness
from antiphon.reward.v1 import reward_pb2
async def run():
    folder = Path({str(tmp_path)!r})
    scorer = FunctionScorer(Settings(name="user", path=folder / "user.py", allow_processes=True), folder)
    await scorer.start()
    await scorer.score([reward_pb2.Candidate(response_text="fork_that_hangs", columns_json='{{"path": "{marker}"}}')])
asyncio.run(run())
"""
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await until(lambda: marker.exists() and marker.read_text(), 20.0)
    family = children_of(service.pid)
    assert int(marker.read_text()) in family
    assert len(family) >= 4  # guardian, worker, first fork or its zombie, daemon
    os.kill(service.pid, signal.SIGKILL)
    await service.wait()
    assert await until(lambda: not any(alive(pid) for pid in family)), "something outlived the service"


async def test_a_new_child_runs_the_text_that_was_read_at_the_start(tmp_path: Path) -> None:
    source = "import os\ndef score(prompt, response, reference): return 0.5 if response == 'ok' else os._exit(1)"
    async with serving(tmp_path, source, processes=1) as reward:
        (tmp_path / "user.py").write_text("def score(prompt, response, reference): return 0.75")
        (dead,) = await reward.score([request("die")])
        (healed,) = await reward.score([request("ok")])
    assert dead.failure.reason == "killed"
    assert healed.score.value == 0.5


async def test_the_process_announces_itself_scores_and_stops(tmp_path: Path, nats_server: Any) -> None:
    (tmp_path / "user.py").write_text(USER_FILE)
    config = process_config(tmp_path, nats_server, settings(tmp_path))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.reward", "--config", str(config), stderr=asyncio.subprocess.PIPE
    )
    bus = await Bus.connect(nats_server.url, "test", nats_server.monitor_url)
    registry = Registry(bus, "run-1")
    listening = asyncio.create_task(registry.run())
    try:
        kind = events_pb2.WORKER_KIND_REWARD
        assert await registry.wait_for(lambda: bool(registry.alive(kind)), 30)
        (announcement,) = registry.alive(kind)
        assert announcement.worker_id == "reward-0" and announcement.pid == process.pid
        assert announcement.state == tenant_pb2.WORKER_STATE_READY
        peer = Peer("reward-0", announcement.address)
        stub = reward_pb2_grpc.RewardServiceStub(peer.channel)
        stream = peer.stream(stub.Score, [request("ok")], deadline_seconds=20)
        assert [response.score.value async for response in stream] == [0.25]
        await peer.close()
        family = children_of(process.pid)
        assert len(family) >= 2
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
        assert await until(lambda: not any(alive(pid) for pid in family))
    finally:
        listening.cancel()
        await bus.close()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_process_whose_file_does_not_import_ends_with_the_reason(tmp_path: Path, nats_server: Any) -> None:
    (tmp_path / "user.py").write_text("import does_not_exist\n")
    config = process_config(tmp_path, nats_server, settings(tmp_path))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.reward", "--config", str(config), stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2
    assert "No module named 'does_not_exist'" in errors.decode()
    assert f"{tmp_path}/user.py" in errors.decode()


async def test_arguments_arrive_by_name(tmp_path: Path) -> None:
    source = """
def score(response, *, reference, level=0, prompt):
    assert prompt == "<user>the prompt", prompt
    return {"score": float(response == reference), "level": level}
"""
    async with serving(tmp_path, source) as reward:
        (response,) = await reward.score([request("42", columns='{"level": 2, "other": [1, null]}', reference="42")])
    assert response.score.value == 1.0
    assert [(p.name, p.value) for p in response.score.parts] == [("level", 2.0)]


async def test_columns_do_not_replace_what_the_policy_answered(tmp_path: Path) -> None:
    source = "def score(prompt, response, reference, **columns): return float(response == 'mine' and not columns)"
    async with serving(tmp_path, source) as reward:
        (response,) = await reward.score([request("mine", columns='{"response": "the dataset\'s"}')])
    assert response.score.value == 1.0


async def test_requests_that_can_never_be_scored_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as reward:
        with pytest.raises(NotFound, match=r"no scorer 'other' here; this worker has user@v1"):
            await reward.score([request("ok", scorer="other")])
        with pytest.raises(NotFound, match="user@v2"):
            await reward.score([request("ok", scorer="user@v2")])
        with pytest.raises(InvalidRequest, match="train/0/5/1 came twice"):
            await reward.score([request("ok", row=5, sample=1), request("ok", row=5, sample=1)])
        with pytest.raises(InvalidRequest, match="columns_json of train row 7"):
            await reward.score([request("ok", row=7, columns="{")])
        with pytest.raises(InvalidRequest, match="expected an object, got list"):
            await reward.score([request("ok", columns="[1]")])
        (response,) = await reward.score([request("ok", scorer="user@v1")])
        assert response.score.value == 0.25
        assert await reward.score([]) == []


async def test_scorers_are_listed(tmp_path: Path) -> None:
    async with serving(tmp_path) as reward:
        listed = await reward.peer.call(reward.stub.ListScorers, reward_pb2.ListScorersRequest(), deadline_seconds=5)
    assert list(listed.scorers) == [reward_pb2.ScorerInfo(name="user", version="v1", signature="antiphon")]


async def test_answers_come_before_the_stream_is_closed_and_reading_waits_for_room(tmp_path: Path) -> None:
    large = "x" * 500_000  # more than the channel buffers, so that a service that does not read holds the caller up
    sent: list[int] = []
    release = asyncio.Event()

    async def requests() -> AsyncIterator[reward_pb2.ScoreRequest]:
        yield request("ok", row=10_000)
        await asyncio.wait_for(release.wait(), 20)
        for row in range(100):
            sent.append(row)
            yield request("sleeps", row=row, reference=large)

    async with serving(tmp_path, timeout_seconds=60.0) as reward:
        stream = reward.peer.stream(reward.stub.Score, requests(), deadline_seconds=DEADLINE_SECONDS)
        assert (await anext(stream)).prompt_id.row == 10_000  # the caller has not half-closed
        release.set()
        waiting = asyncio.ensure_future(anext(stream))
        before = 0
        while len(sent) != before or not sent:  # until the caller is held up
            before = len(sent)
            await asyncio.sleep(1.0)
        assert len(sent) < 60  # two children work, as many wait; the rest is the channel's buffers
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_caller_that_leaves_does_not_break_the_children(tmp_path: Path) -> None:
    async with serving(tmp_path, processes=1, timeout_seconds=1.0) as reward:
        stream = reward.peer.stream(
            reward.stub.Score, [request("ok"), request("sleeps", row=1), request("ok", row=2)], deadline_seconds=30
        )
        await anext(stream)
        await stream.aclose()
        (response,) = await reward.score([request("ok", row=3)])
        assert response.score.value == 0.25


async def test_hostile_candidates_are_refused_and_bad_part_names_fail(tmp_path: Path) -> None:
    source = 'def score(prompt, response, reference, **columns): return {"score": 1.0, "\\ud800": 1.0}'
    async with serving(tmp_path, source, processes=1) as reward:
        with pytest.raises(InvalidRequest, match="columns_json"):
            await reward.score([request("a", columns="[" * 100_000)])
        with pytest.raises(InvalidRequest, match="dataset"):
            await reward.score([reward_pb2.ScoreRequest(scorer="user")])
        (answer,) = await reward.score([request("a")])
        assert (answer.failure.kind, answer.failure.reason) == (DATA, "wrong_type")
