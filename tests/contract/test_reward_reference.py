"""ReferenceLogProbs: the stream, the life of the model's process, and the real model in a real process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from antiphon.events.v1 import events_pb2
from antiphon.reward.v1 import reward_pb2
from antiphon.tenant.v1 import tenant_pb2

from services.common.announcements import Registry
from services.common.bus import Bus
from services.common.digest import digest_vocabulary
from services.common.errors import ConfigError, Conflict, InvalidRequest, NotFound, Unavailable
from services.coordinator.clients import RewardClient
from services.reward import reference_process, service
from services.reward.readiness import Readiness
from services.reward.reference import Reference
from services.reward.reference_process import ReferenceProcess
from services.reward.reference_settings import ReferenceSettings
from services.reward.scorer import ScorerSet
from tests.contract.reference_twin import EXITS, HANGS, TOKENIZER, expected
from tests.contract.reward_service import Reward, alive, children_of, process_config, serving, until
from tests.tiny.models import make_tiny_model

Part = reward_pb2.ReferenceLogProbsRequest


def header(temperature: float = 1.0, tokenizer_digest: bytes = b"") -> Part:
    return Part(header=reward_pb2.ReferenceHeader(temperature=temperature, tokenizer_digest=tokenizer_digest))


def sequence(name: str, ids: Sequence[int]) -> Part:
    return Part(sequence=reward_pb2.ReferenceSequence(id=name, token_ids=ids))


async def asked(reward: Reward, parts: Iterable[Part] | AsyncIterator[Part]) -> dict[str, list[float]]:
    stream = reward.peer.stream(reward.stub.ReferenceLogProbs, parts, deadline_seconds=30.0)
    return {answer.id: list(answer.logprobs) async for answer in stream}


@contextlib.asynccontextmanager
async def running(folder: Path, path: str = "twin", **changes: Any) -> AsyncIterator[tuple[Reward, ReferenceProcess]]:
    """A service whose reference model is the twin, up and loaded."""
    settings = {
        "dtype": "float32", "device": "cpu", "micro_batch_tokens": 24, "max_sequence_tokens": None, "threads": 1,
        "start_seconds": 30.0, "batch_seconds": 30.0,
    }  # fmt: skip
    process = ReferenceProcess(
        ReferenceSettings(path=path, **(settings | changes)),  # type: ignore[arg-type]
        folder / "reference.log",
        "tests.contract.reference_twin",
    )
    reference = Reference(process, settings["micro_batch_tokens"])  # type: ignore[arg-type]
    tasks = [asyncio.create_task(process.run()), asyncio.create_task(reference.run())]
    try:
        async with serving(folder, reference=reference) as reward:
            assert await until(lambda: process.problem is None or tasks[0].done(), 30.0)
            if tasks[0].done():
                tasks[0].result()
            yield reward, process
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_rows_are_answered_by_id_in_micro_batches_of_at_most_the_budget(tmp_path: Path) -> None:
    rows = {f"r{n}": [(3 * n + k) % 80 for k in range(1 + n % 12)] for n in range(40)}
    async with running(tmp_path) as (reward, _):
        found = await asked(reward, [header(0.5), *(sequence(name, ids) for name, ids in rows.items())])
        info = (await reward.list()).reference
    assert found == {name: pytest.approx(expected(ids, 0.5)) for name, ids in rows.items()}
    assert (info.path, info.digest, info.tokenizer_digest, info.vocabulary_size) == ("twin", 77, TOKENIZER, 100)
    batches = [line.split() for line in (tmp_path / "reference.log").read_text().splitlines() if "micro-batch" in line]
    sizes = [int(words[2]) * int(words[4]) for words in batches]
    assert max(sizes) <= 24 and len(sizes) < len(rows)


async def test_streams_of_two_temperatures_are_not_mixed(tmp_path: Path) -> None:
    rows = {f"r{n}": [n, n + 1, n + 2] for n in range(20)}
    async with running(tmp_path) as (reward, _):
        parts = [sequence(name, ids) for name, ids in rows.items()]
        cold, hot = await asyncio.gather(asked(reward, [header(0.5), *parts]), asked(reward, [header(2.0), *parts]))
    assert cold == {name: pytest.approx(expected(ids, 0.5)) for name, ids in rows.items()}
    assert hot == {name: pytest.approx(expected(ids, 2.0)) for name, ids in rows.items()}


async def test_answers_come_before_the_stream_is_closed(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def parts() -> AsyncIterator[Part]:
        yield header()
        yield sequence("a", [1, 2])
        await asyncio.wait_for(release.wait(), 20)
        for n in range(200):  # far more than there is room for
            yield sequence(f"b{n}", [1] * 20)

    async with running(tmp_path) as (reward, _):
        stream = reward.peer.stream(reward.stub.ReferenceLogProbs, parts(), deadline_seconds=30.0)
        assert (await anext(stream)).id == "a"
        release.set()
        assert len([answer.id async for answer in stream]) == 200


REFUSED: list[tuple[list[Part], Any, str]] = [
    ([sequence("a", [1])], InvalidRequest, "must begin with its header, got sequence"),
    ([header(), header()], InvalidRequest, "expected a sequence, got header"),
    ([header(0.0)], InvalidRequest, "temperature 0"),
    ([header(float("nan"))], InvalidRequest, "temperature nan"),
    ([header(), sequence("a", [1]), sequence("a", [2])], InvalidRequest, "sequence a came twice"),
    ([header(), sequence("a", [])], InvalidRequest, "sequence a: 0 tokens; the reference model takes 1 to 32"),
    ([header(), sequence("a", [1] * 33)], InvalidRequest, "sequence a: 33 tokens"),
    ([header(), sequence("a", [1, 100])], InvalidRequest, "token 100; the reference model knows 0 to 99"),
    ([header(), sequence("a", [-1])], InvalidRequest, "token -1"),
    ([header(1.0, b"other"), sequence("a", [1])], Conflict, "take a reference with the policy's tokenizer"),
]


async def test_what_can_never_be_computed_is_refused(tmp_path: Path) -> None:
    """cases.md R11: the ids of another tokenizer are a refusal, not nonsense or an index error."""
    many = [sequence(f"more{n}", [1] * 32) for n in range(300)]  # still being sent when it is refused
    async with running(tmp_path) as (reward, _):
        with pytest.raises(InvalidRequest, match="ended before its header"):
            await asked(reward, [])
        for parts, error, message in REFUSED:
            with pytest.raises(error, match=message):
                await asked(reward, [*parts, *many])
            assert await asked(reward, [header(1.0, TOKENIZER), sequence("a", [1])]) == {"a": [0.0]}


async def test_more_streams_than_there_is_room_for_are_overloaded_and_none_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_REFERENCE_STREAMS", 0)
    async with running(tmp_path) as (reward, _):
        with pytest.raises(Exception, match="0 streams of ReferenceLogProbs run already"):
            await asked(reward, [header()])
    async with serving(tmp_path) as reward:
        with pytest.raises(NotFound, match="no reference model"):
            await asked(reward, [header()])
        assert not (await reward.list()).HasField("reference")


@pytest.mark.parametrize("way", ["exit", "kill", "hang"])
async def test_a_lost_process_is_told_and_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(reference_process, "PAUSES_SECONDS", (0.0,))
    seen, load = asyncio.Event(), ReferenceProcess._load

    async def load_once_seen(process: ReferenceProcess) -> None:
        if process.info is not None:
            await seen.wait()
            process._settings = dataclasses.replace(process._settings, batch_seconds=30.0)
        await load(process)

    monkeypatch.setattr(ReferenceProcess, "_load", load_once_seen)
    async with running(tmp_path, **({"batch_seconds": 0.5} if way == "hang" else {})) as (reward, process):
        first = process.pid
        assert first is not None
        readiness = Readiness(ScorerSet([]), Reference(process, 24))
        problems: list[str | None] = []
        process.on_change = lambda: problems.append(process.problem)
        causes = {"kill": "was killed by SIGKILL", "exit": "ended with exit code 7", "hang": "within 0.5 s"}
        if way == "kill":
            os.kill(first, signal.SIGKILL)
            assert await until(lambda: process.problem is not None)
        else:
            with pytest.raises(Unavailable, match=causes[way]) as caught:
                await asked(reward, [header(), sequence("a", [1, EXITS if way == "exit" else HANGS])])
            assert "reference.log" in str(caught.value)
        assert causes[way] in (await readiness.check_health() or "")
        announcement = events_pb2.WorkerAnnouncement()
        readiness.describe(announcement)
        assert announcement.state == tenant_pb2.WORKER_STATE_FAILED
        with pytest.raises(Unavailable, match=causes[way]):
            await asked(reward, [header(), sequence("a", [1, 2])])
        seen.set()
        assert await until(lambda: process.problem is None, 20.0)
        assert process.pid != first and not alive(first)
        assert await asked(reward, [header(), sequence("a", [1, 2])]) == {"a": [0.0, -3.0]}
        assert problems[-1] is None and await readiness.check_health() is None


async def test_a_model_that_can_never_be_used_ends_the_work_and_others_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_process, "PAUSES_SECONDS", (0.1,))
    with pytest.raises(ConfigError, match=r"it has no output layer; log: .*reference\.log"):
        async with running(tmp_path, "refused"):
            pass
    process = ReferenceProcess(
        ReferenceSettings("breaks", "float32", "cpu", 24, None, 1, 30.0, 30.0),
        tmp_path / "breaks.log",
        "tests.contract.reference_twin",
    )
    running_it = asyncio.create_task(process.run())
    assert await until(lambda: (tmp_path / "breaks.log").exists() and _failures(tmp_path) >= 2, 30.0)
    assert process.is_loading and "RuntimeError: no memory for it" in (process.problem or "")
    running_it.cancel()
    await asyncio.gather(running_it, return_exceptions=True)
    assert process.pid is None


def _failures(folder: Path) -> int:
    return (folder / "breaks.log").read_text().count("the model cannot be used")


class InProcess:
    """The real model, in this process."""

    problem = None
    pid = None

    def __init__(self, folder: Path) -> None:
        from services.reward.reference_model import ReferenceModel

        self._model = ReferenceModel(str(folder), "float32", "cpu")
        self.info = reward_pb2.ReferenceInfo(
            path=str(folder), dtype="float32", digest=self._model.digest, vocabulary_size=self._model.vocabulary_size,
            tokenizer_digest=self._model.tokenizer_digest, max_sequence_tokens=self._model.max_sequence_tokens,
        )  # fmt: skip

    async def compute(self, rows: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        return await asyncio.to_thread(self._model.logprobs, rows, temperature)


@contextlib.asynccontextmanager
async def in_process(folder: Path, model: Path, nats_server: Any) -> AsyncIterator[str]:
    reference = Reference(InProcess(model), 64)  # type: ignore[arg-type]
    computing = asyncio.create_task(reference.run())
    async with serving(folder, reference=reference) as reward:
        yield reward.peer.address
    computing.cancel()


@contextlib.asynccontextmanager
async def over_the_wire(folder: Path, model: Path, nats_server: Any) -> AsyncIterator[str]:
    """`python -m services.reward` with a reference alone; ends and leaves nothing."""
    config = process_config(folder, nats_server, {"reference": {"micro_batch_tokens": 64}}, str(model))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.reward", "--config", str(config), stderr=asyncio.subprocess.DEVNULL
    )
    bus = await Bus.connect(nats_server.url, "test", nats_server.monitor_url)
    registry = Registry(bus, "run-1")
    listening = asyncio.create_task(registry.run())
    states: list[int] = []

    def ready() -> bool:
        found = registry.alive(events_pb2.WORKER_KIND_REWARD)
        states.extend(one.state for one in found)
        return any(one.state == tenant_pb2.WORKER_STATE_READY for one in found)

    try:
        assert await registry.wait_for(ready, 120)  # it imports torch and transformers
        assert states[0] == tenant_pb2.WORKER_STATE_STARTING
        yield registry.alive(events_pb2.WORKER_KIND_REWARD)[0].address
        family = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 15) == 0
        assert family and await until(lambda: not any(alive(pid) for pid in family))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        listening.cancel()
        await bus.close()
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("target", [in_process, pytest.param(over_the_wire, marks=pytest.mark.slow)])
async def test_the_client_gets_the_log_probs_of_plain_transformers(
    tmp_path: Path, nats_server: Any, target: Any
) -> None:
    import torch
    import transformers

    model = make_tiny_model(tmp_path / "model", seed=3)
    vocabulary = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab(with_added_tokens=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = {f"r{n}": [(7 * n + k * k) % 60 for k in range(1 + 3 * n)] for n in range(8)}
    async with target(tmp_path, model, nats_server) as address:
        client = RewardClient("reward-0", "life", address)
        try:
            info = await client.reference_info()
            found = await client.reference_logprobs(rows, 0.7, 60.0, digest_vocabulary(vocabulary))
            with pytest.raises(Conflict, match=r"reward-0.*another|reward-0.*tokenizer"):
                await client.reference_logprobs(rows, 0.7, 60.0, digest_vocabulary({**vocabulary, "extra": 999}))
            with pytest.raises(InvalidRequest, match="token 100000"):
                await client.reference_logprobs({"a": [1, 100_000]}, 0.7, 60.0)
        finally:
            await client.close()
    assert info is not None and info.path == str(model) and info.max_sequence_tokens == 256
    assert info.tokenizer_digest == digest_vocabulary(vocabulary)
    assert found.keys() == rows.keys()
    for name, ids in rows.items():
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([ids])).logits[0].double() / 0.7
        wanted = torch.log_softmax(logits, -1)[:-1].gather(-1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])
        assert found[name] == pytest.approx([0.0, *wanted.flatten().tolist()], abs=2e-5)
