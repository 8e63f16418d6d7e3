"""The supervisor's word that a worker has ended, for whoever waits for the memory of its GPUs (docs/design.md §7)."""

from __future__ import annotations

import asyncio
import logging
import time

from antiphon.events.v1 import handoff_pb2

from services.cli.run_processes import find_processes
from services.common.bus import Bus
from services.common.config import ServiceConfig
from services.common.errors import AntiphonError, Unavailable
from services.common.grants import ClaimsState, NodeState, TenantId
from services.common.handoff_log import CLAIMS_SUBJECT, SubjectLog, node_subject
from services.common.handoff_stream import JetStreamStore
from services.common.processes import INSTANCE_ID_VARIABLE

logger = logging.getLogger(__name__)

# How long a stop waits for the word to be said; whoever is never told waits for a deadline of its own.
TELL_SECONDS = 3.0
# Children die with the worker; giving back the memory of a GPU can take the kernel a while.
CHILDREN_SECONDS = 30.0
LOOK_AGAIN_SECONDS = 0.05
TRY_AGAIN_SECONDS = 1.0


async def tell_exited(service: ServiceConfig, pid: int, exit_code: int, *, coordinator: bool) -> None:
    """Says that this life of a worker has ended, once its children have too; tries until cancelled. Raises nothing.

    Without effect where the worker shared no GPUs.
    """
    if not service.shares_gpus:
        return
    try:
        if not await _children_ended(service):
            return
        while True:
            try:
                await _append(service, pid, exit_code, coordinator=coordinator)
                return
            except Unavailable as error:
                logger.warning("the end of %s is not told yet: %s", service.worker_id, error)
            await asyncio.sleep(TRY_AGAIN_SECONDS)
    except AntiphonError as error:
        logger.error("the end of %s cannot be told: %s", service.worker_id, error)


async def _children_ended(service: ServiceConfig) -> bool:
    end = time.monotonic() + CHILDREN_SECONDS
    while left := await asyncio.to_thread(find_processes, service.instance_id, INSTANCE_ID_VARIABLE):
        if time.monotonic() > end:
            logger.error(
                "%s ended and left %s behind, which may hold memory of its GPUs: its end is not told",
                service.worker_id,
                ", ".join(map(str, left)),
            )
            return False
        await asyncio.sleep(LOOK_AGAIN_SECONDS)
    return True


async def _append(service: ServiceConfig, pid: int, exit_code: int, *, coordinator: bool) -> None:
    tenant = TenantId(service.run_id, service.worker_id, service.instance_id)
    exited = handoff_pb2.Exited(tenant=tenant.message(), pid=pid, exit_code=exit_code)
    bus = await Bus.connect(service.nats_url, "supervisor", service.nats_monitor_url)
    try:
        store = await JetStreamStore.open(bus)
        node = SubjectLog(store, node_subject(service.node), NodeState, NodeState.apply)
        if tenant not in (await node.refresh()).exited:
            await node.append(handoff_pb2.HandoffEntry(exited=exited))
        if coordinator:
            claims = SubjectLog(store, CLAIMS_SUBJECT, ClaimsState, ClaimsState.apply)
            await claims.refresh()
            await claims.append(handoff_pb2.HandoffEntry(exited=exited))
    finally:
        await bus.close()
