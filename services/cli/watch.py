"""Finds the coordinator of a run and follows its events until it ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from antiphon.coordinator.v1 import coordinator_pb2, coordinator_pb2_grpc
from antiphon.events.v1 import events_pb2
from google.protobuf import json_format

from services.common.announcements import Registry
from services.common.bus import Bus
from services.common.client import Peer
from services.common.errors import AntiphonError, Expired, Unavailable

FIND_SECONDS = 3600.0
STREAM_SECONDS = 3600.0  # then it is asked again from where it was
AGAIN_SECONDS = 1.0
STOP_CALL_SECONDS = 5.0


class Watcher:
    """The coordinator of one run, as seen from outside."""

    def __init__(self, run_id: str, nats_url: str, nats_monitor_url: str | None, events_path: Path) -> None:
        self._run_id = run_id
        self._nats_url = nats_url
        self._nats_monitor_url = nats_monitor_url
        self._events_path = events_path
        self._peer: Peer | None = None

    async def events(self) -> AsyncIterator[events_pb2.RunEvent]:
        """Every event, kept in events.jsonl as well, until RunEnded. A coordinator that is away is looked for and asked
        again; another life of it numbers its events anew.

        Raises Unavailable or ConfigError about NATS, Expired when no coordinator announces itself.
        """
        bus = await Bus.connect(self._nats_url, "cli", self._nats_monitor_url)
        registry = Registry(bus, self._run_id)
        listening = asyncio.create_task(registry.run())
        life, following = "", 0
        try:
            with self._events_path.open("a") as file:
                while True:
                    found = await self._find(registry)
                    if found.instance_id != life:
                        await self.close()
                        self._peer = Peer(found.worker_id, found.address)
                        life, following = found.instance_id, 0
                    assert self._peer is not None
                    stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._peer.channel)
                    request = coordinator_pb2.WatchRunRequest(from_sequence=following)
                    with contextlib.suppress(Unavailable, Expired):
                        async for answer in self._peer.stream(stub.WatchRun, request, deadline_seconds=STREAM_SECONDS):
                            event = answer.event
                            following = event.sequence + 1
                            file.write(json_format.MessageToJson(event, indent=None) + "\n")
                            file.flush()
                            yield event
                            if event.WhichOneof("event") == "run_ended":
                                return
                    await asyncio.sleep(AGAIN_SECONDS)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await bus.close()

    async def request_stop(self, reason: str) -> bool:
        """Asks for StopRun; False when there is no coordinator to ask, or it does not answer."""
        if self._peer is None:
            return False
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._peer.channel)
        request = coordinator_pb2.StopRunRequest(reason=reason)
        try:
            await self._peer.call(stub.StopRun, request, deadline_seconds=STOP_CALL_SECONDS)
        except AntiphonError:
            return False
        return True

    async def close(self) -> None:
        if self._peer is not None:
            await self._peer.close()

    async def _find(self, registry: Registry) -> events_pb2.WorkerAnnouncement:
        kind = events_pb2.WORKER_KIND_COORDINATOR
        if not await registry.wait_for(lambda: bool(registry.alive(kind)), FIND_SECONDS):
            raise Expired(f"no coordinator of run {self._run_id} announced itself within {FIND_SECONDS:.0f} s")
        return registry.alive(kind)[0]
