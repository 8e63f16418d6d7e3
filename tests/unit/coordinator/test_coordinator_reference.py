"""Reference log-probs from several reward workers, one of which dies; workers that do not agree are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from antiphon.reward.v1 import reward_pb2
from antiphon.types.v1 import trajectory_pb2

from services.common.errors import ConfigError, Conflict, Unavailable
from services.coordinator import reference as under_test
from services.coordinator.data import Prompt
from services.coordinator.groups import Group
from services.coordinator.identity import PromptKey, TrajectoryKey
from services.coordinator.reference import Reference

VOCABULARY = b"v" * 32


class Worker:
    """A reward worker whose log-prob of a token is minus its id."""

    def __init__(self, name: str, **info: Any) -> None:
        self.worker_id, self.in_flight, self.calls = name, 0, 0
        described = {"path": "/models/m", "digest": 7, "tokenizer_digest": VOCABULARY}
        self._info = None if info.get("path", "") is None else reward_pb2.ReferenceInfo(**{**described, **info})
        self.dies = False
        self.short = 0

    async def reference_info(self) -> reward_pb2.ReferenceInfo | None:
        return self._info

    async def reference_logprobs(
        self, sequences: dict[str, Any], temperature: float, seconds: float, digest: bytes
    ) -> dict[str, list[float]]:
        assert (temperature, seconds, digest) == (0.7, 5.0, VOCABULARY)
        self.calls += 1
        await asyncio.sleep(0)
        if self.dies:
            raise Unavailable(f"{self.worker_id}: gone")
        return {name: [-float(i) for i in ids][self.short :] for name, ids in sequences.items()}


class Workers:
    def __init__(self, *workers: Worker) -> None:
        self._workers = list(workers)
        self.replacement_seconds = 5.0

    def rewards(self) -> list[Worker]:
        return self._workers


def reference(*workers: Worker) -> Reference:
    return Reference(Workers(*workers), VOCABULARY, temperature=0.7)  # type: ignore[arg-type]


async def checked(*workers: Worker) -> Reference:
    found = reference(*workers)
    await found.check()
    return found


def groups(count: int, samples: int = 2) -> list[Group]:
    made = []
    for row in range(count):
        group = Group(PromptKey("train", 0, row), Prompt(row, (), "", (1, 2), "", "{}"), samples)
        for sample in range(samples):
            ids = [1, 2, 10 * row + sample]
            group.add_trajectory(
                trajectory_pb2.Trajectory(prompt_id=group.key.message(), sample_number=sample, token_ids=ids)
            )
        made.append(group)
    return made


async def test_every_row_once_though_a_worker_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "ROWS_PER_CALL", 3)
    first, second = Worker("reward-0"), Worker("reward-1")
    first.dies = True
    asked = await checked(first, second)
    found = await asked.logprobs(groups(4), 5.0)
    assert {key: list(row) for key, row in found.items()} == {
        TrajectoryKey(PromptKey("train", 0, row), sample): [-1.0, -2.0, -(10.0 * row + sample)]
        for row in range(4)
        for sample in range(2)
    }
    assert first.calls and second.calls and first.in_flight == second.in_flight == 0


async def test_a_row_that_is_not_whole_is_no_answer() -> None:
    worker = Worker("reward-0")
    worker.short = 1
    with pytest.raises(Conflict, match="train/0/0/0: 3 tokens, 2 reference log-probs"):
        await (await checked(worker)).logprobs(groups(1), 5.0)


async def test_a_number_that_is_none_is_no_answer() -> None:
    worker = Worker("reward-0")
    asked = await checked(worker)
    rows = groups(1)
    worker.reference_logprobs = _not_finite  # type: ignore[method-assign]
    with pytest.raises(Conflict, match="train/0/0/0: 3 tokens, 3 reference log-probs, 2 finite"):
        await asked.logprobs(rows, 5.0)


async def _not_finite(sequences: dict[str, Any], *rest: object) -> dict[str, list[float]]:
    return {name: [0.0, float("nan"), -1.0] for name in sequences}


async def test_a_worker_that_comes_back_with_another_model_is_refused() -> None:
    worker = Worker("reward-0")
    asked = await checked(worker)
    assert worker._info is not None
    worker._info.digest = 8
    with pytest.raises(Conflict, match=r"/models/m has the digest 0000000000000008, the run began with .*7; put"):
        await asked.logprobs(groups(1), 5.0)


async def test_workers_that_agree() -> None:
    assert await reference(Worker("a"), Worker("b")).check() == "/models/m"


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ([Worker("a"), Worker("b", path=None)], "b has no reference model; set reward.reference"),
        ([], "no reward worker is alive"),
        ([Worker("a"), Worker("b", digest=8)], "different reference models: a /models/m 0000000000000007, b"),
        ([Worker("a", tokenizer_digest=b"x")], "another vocabulary than the policy"),
    ],
)
async def test_workers_that_do_not(workers: list[Worker], words: str) -> None:
    with pytest.raises((ConfigError, Unavailable), match=words):
        await reference(*workers).check()
