"""The RPCs of a rollout worker: check, call the domain object, answer."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from antiphon.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from antiphon.types.v1.chat_pb2 import TokenIds
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_KV, MEMORY_TAG_WEIGHTS
from google.protobuf.message import Message

from services.common.errors import AntiphonError, InvalidRequest
from services.common.operations import Operations, Report
from services.common.server import Server
from services.common.tenancy import TenantGuard
from services.rollout import validation
from services.rollout.engine import Unmatched
from services.rollout.rollout import Rollout
from services.rollout.sleeping import Change
from services.rollout.updates import Committed, Probe

Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

# What a call touches.
WEIGHTS = (MEMORY_TAG_WEIGHTS,)
KV = (MEMORY_TAG_KV,)
SERVING = (MEMORY_TAG_WEIGHTS, MEMORY_TAG_KV)


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """antiphon.rollout.v1.RolloutService."""

    def __init__(self, rollout: Rollout, guard: TenantGuard) -> None:
        self._rollout = rollout
        self._guard = guard
        self._joins: Operations[Unmatched] = Operations("JoinTransfer of epoch")
        self._begins: Operations[None] = Operations("BeginUpdate")
        self._commits: Operations[Committed] = Operations("CommitUpdate")

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        await self._guard.check(request.token, SERVING)
        validation.check_generate(request, self._rollout.engine.info)
        request.ClearField("token")  # no part of what is asked: a repeat may carry a newer one
        async with aclosing(self._rollout.generations.stream(request)) as trajectories:
            async for trajectory in trajectories:
                yield rollout_pb2.GenerateResponse(trajectory=trajectory)

    async def Acknowledge(
        self, request: rollout_pb2.AcknowledgeRequest, context: Context
    ) -> rollout_pb2.AcknowledgeResponse:
        validation.check_acknowledge(request)
        return rollout_pb2.AcknowledgeResponse(forgotten=self._rollout.generations.acknowledge(request.calls))

    async def Abort(self, request: rollout_pb2.AbortRequest, context: Context) -> rollout_pb2.AbortResponse:
        aborted = await self._rollout.generations.abort(request.request_ids)
        return rollout_pb2.AbortResponse(aborted=aborted)

    async def Encode(self, request: rollout_pb2.EncodeRequest, context: Context) -> rollout_pb2.EncodeResponse:
        encoded = await self._rollout.engine.encode(request.conversations)
        return rollout_pb2.EncodeResponse(encoded=[TokenIds(ids=ids) for ids in encoded])

    async def JoinTransfer(
        self, request: rollout_pb2.JoinTransferRequest, context: Context
    ) -> rollout_pb2.JoinTransferResponse:
        await self._guard.check(request.token, WEIGHTS)
        updates = self._rollout.updates
        rank = request.first_receiver_rank
        last = rank + self._rollout.engine.info.transfer_ranks
        if rank < 0 or last > request.manifest.receiver_ranks:
            raise InvalidRequest(
                f"JoinTransfer: receiver ranks {rank} to {last - 1} are not among the manifest's "
                f"{request.manifest.receiver_ranks}"
            )

        async def work(_: Report) -> Unmatched:
            return await updates.join(request.manifest, rank, deadline_seconds=self._rollout.settings.join_seconds)

        key = str(request.manifest.epoch)
        content = rollout_pb2.JoinTransferRequest(manifest=request.manifest, first_receiver_rank=rank)
        unmatched = await self._joins.start_or_attach(key, _fingerprint(content), work).result()
        return rollout_pb2.JoinTransferResponse(
            unknown_tensors=unmatched.unknown,
            missing_tensors=unmatched.missing,
            differing_tensors=unmatched.differing,
        )

    async def BeginUpdate(
        self, request: rollout_pb2.BeginUpdateRequest, context: Context
    ) -> rollout_pb2.BeginUpdateResponse:
        await self._guard.check(request.token, WEIGHTS)
        updates = self._rollout.updates
        validation.check_begin_update(request)

        async def work(_: Report) -> None:
            await updates.begin(request.epoch, request.policy_version, deadline_seconds=request.deadline_seconds)

        await self._begins.start_or_attach(request.request_id, _fingerprint(request), work).result()
        return rollout_pb2.BeginUpdateResponse()

    async def CommitUpdate(
        self, request: rollout_pb2.CommitUpdateRequest, context: Context
    ) -> rollout_pb2.CommitUpdateResponse:
        await self._guard.check(request.token, SERVING)
        updates = self._rollout.updates
        validation.check_commit_update(request, self._rollout.engine.info)
        probe = Probe(request.probe_token_ids, request.probe_logprobs, request.probe_tolerance)

        async def work(_: Report) -> Committed:
            committed = await updates.commit(request.policy, probe)
            # Also where they did not sleep: under this grant nobody has said yet that they are awake.
            await self._tell_kv_woken(committed.kv_woken or Change())
            return committed

        committed = await self._commits.start_or_attach(request.request_id, _fingerprint(request), work).result()
        return rollout_pb2.CommitUpdateResponse(
            transfer_seconds=committed.transfer_seconds,
            load_seconds=committed.load_seconds,
            pause_seconds=committed.pause_seconds,
            probe_difference=committed.probe_difference,
            bytes=committed.bytes,
            probe_seconds=committed.probe_seconds,
            extra_bytes=committed.extra_bytes,
        )

    async def _tell_kv_woken(self, change: Change) -> None:
        try:
            await self._guard.woke(tenant_pb2.WakeResponse(devices=_devices(change), seconds=change.seconds), KV)
        except AntiphonError as error:  # the grant decided; this only tells what was measured, and the policy serves
            logger.warning("that keys and values are awake was not told: %s", error)


class TenantServicer(tenant_pb2_grpc.TenantServiceServicer):
    """antiphon.tenant.v1.TenantService."""

    def __init__(self, rollout: Rollout, guard: TenantGuard) -> None:
        self._rollout = rollout
        self._guard = guard
        self._sleeps: Operations[tenant_pb2.SleepResponse] = Operations("Sleep")
        self._wakes: Operations[tenant_pb2.WakeResponse] = Operations("Wake")

    async def GetState(self, request: tenant_pb2.GetStateRequest, context: Context) -> tenant_pb2.GetStateResponse:
        state = await self._rollout.get_state()
        state.shares_gpus = self._guard.shares_gpus
        state.token.CopyFrom(self._guard.token)
        return state

    async def Sleep(self, request: tenant_pb2.SleepRequest, context: Context) -> tenant_pb2.SleepResponse:
        await self._guard.check(request.token)
        sleeping = self._rollout.sleeping
        validation.check_request("Sleep", request.request_id, request.deadline_seconds)

        async def work(_: Report) -> tenant_pb2.SleepResponse:
            async with self._guard.moving(request.token):
                change = await sleeping.sleep(
                    request.tags, discard_weights=request.discard_weights, deadline_seconds=request.deadline_seconds
                )
                response = tenant_pb2.SleepResponse(devices=_devices(change), seconds=change.seconds)
                await self._guard.slept(response, SERVING)
            return response

        return await self._sleeps.start_or_attach(request.request_id, _fingerprint(request), work).result()

    async def Wake(self, request: tenant_pb2.WakeRequest, context: Context) -> tenant_pb2.WakeResponse:
        await self._guard.check(request.token)
        sleeping = self._rollout.sleeping
        validation.check_request("Wake", request.request_id, request.deadline_seconds)

        async def work(_: Report) -> tenant_pb2.WakeResponse:
            async with self._guard.moving(request.token):
                tags = sleeping.wakeable(request.tags)  # of what sleeps now: a Sleep may have been under way before
                await self._guard.check(request.token, tags)
                change = await sleeping.wake(tags, deadline_seconds=request.deadline_seconds)
                response = tenant_pb2.WakeResponse(devices=_devices(change), seconds=change.seconds)
                await self._guard.woke(response, tags)
            return response

        return await self._wakes.start_or_attach(request.request_id, _fingerprint(request), work).result()


def add_to(server: Server, rollout: Rollout, guard: TenantGuard) -> None:
    """Registers both services."""
    server.add(
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
        RolloutServicer(rollout, guard),
        rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name,
    )
    server.add(
        tenant_pb2_grpc.add_TenantServiceServicer_to_server,
        TenantServicer(rollout, guard),
        tenant_pb2.DESCRIPTOR.services_by_name["TenantService"].full_name,
    )


def _devices(change: Change) -> list[tenant_pb2.DeviceChange]:
    return [
        tenant_pb2.DeviceChange(
            uuid=device.uuid,
            free_bytes_before=device.free_bytes_before,
            free_bytes_after=device.free_bytes_after,
        )
        for device in change.devices
    ]


def _fingerprint(request: Message) -> bytes:
    """Of the content; a repeat may carry a newer token."""
    if request.HasField("token"):
        content = type(request)()
        content.CopyFrom(request)
        content.ClearField("token")
        request = content
    return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
