"""A reward service for tests, in this process or in one of its own, and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

from antiphon.reward.v1 import reward_pb2, reward_pb2_grpc
from antiphon.types.v1 import trajectory_pb2

from services.common.client import Peer
from services.common.config import ModelConfig, ProcessConfig, ServiceConfig, dump, parse
from services.common.server import Server
from services.reward.assembly import make_scorers
from services.reward.config import RewardConfig
from services.reward.readiness import Readiness
from services.reward.reference import Reference
from services.reward.service import RewardService

FULL_NAME = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
DEADLINE_SECONDS = 60.0
INFRA, DATA = reward_pb2.FAILURE_KIND_INFRA, reward_pb2.FAILURE_KIND_DATA


class Reward:
    """A running service and a channel to it."""

    def __init__(self, peer: Peer, folder: Path) -> None:
        self.stub = reward_pb2_grpc.RewardServiceStub(peer.channel)
        self.peer = peer
        self.folder = folder

    async def score(
        self, requests: Iterable[reward_pb2.ScoreRequest] | AsyncIterator[reward_pb2.ScoreRequest]
    ) -> list[reward_pb2.ScoreResponse]:
        stream = self.peer.stream(self.stub.Score, requests, deadline_seconds=DEADLINE_SECONDS)
        return [response async for response in stream]

    async def list(self) -> reward_pb2.ListScorersResponse:
        answer: reward_pb2.ListScorersResponse = await self.peer.call(
            self.stub.ListScorers, reward_pb2.ListScorersRequest(), deadline_seconds=5
        )
        return answer


@contextlib.asynccontextmanager
async def serving(
    folder: Path, scorers: Sequence[dict[str, Any]] = (), reference: Reference | None = None
) -> AsyncIterator[Reward]:
    """`scorers` as a recipe has them."""
    found = parse(RewardConfig, {"scorers": list(scorers)}, "test").scorers if scorers else ()
    made = make_scorers(RewardConfig.model_construct(scorers=found), folder)
    server = Server("127.0.0.1", 0, Readiness(made, reference).check_health)
    server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, RewardService(made, reference), FULL_NAME)
    await made.start()
    await server.start()
    stopped = asyncio.create_task(server.serve_until_stopped(grace_seconds=0.1))
    peer = Peer("reward-0", server.address)
    try:
        yield Reward(peer, folder)
    finally:
        await peer.close()
        server.request_stop()
        await stopped
        await made.close()


def request(
    response: str,
    *,
    row: int = 0,
    sample: int = 0,
    scorer: str = "user",
    columns: str = "",
    reference: str = "ref",
    group_size: int = 8,
    **fields: Any,
) -> reward_pb2.ScoreRequest:
    """A candidate and who shall score it; `fields` are further ones of the candidate."""
    prompt_id = trajectory_pb2.PromptId(dataset="train", row=row)
    candidate = reward_pb2.Candidate(
        prompt_id=prompt_id, sample_number=sample, group_size=group_size, prompt_text="<user>the prompt",
        response_text=response, reference=reference, columns_json=columns, **fields,
    )  # fmt: skip
    return reward_pb2.ScoreRequest(scorer=scorer, candidate=candidate)


def children_of(pid: int) -> set[int]:
    """All descendants, by parent ids."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Any, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True


def process_config(folder: Path, nats_server: Any, settings: dict[str, Any], model: str = "none") -> Path:
    """The file that `python -m services.reward` is started with."""
    path = folder / "reward-0.yaml"
    service = ServiceConfig(
        run_id="run-1", worker_id="reward-0", run_dir=folder, nats_url=nats_server.url,
        nats_monitor_url=nats_server.monitor_url,
    )  # fmt: skip
    config = parse(RewardConfig, settings, "test")
    process = ProcessConfig(service=service, model=ModelConfig(path=model, dtype="float32"), settings=config)
    path.write_text(dump(process))
    return path
