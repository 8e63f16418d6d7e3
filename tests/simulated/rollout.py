"""A rollout service without a model: keeps the contract, with switches for what may go wrong."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from antiphon.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from antiphon.types.v1 import chat_pb2, grant_pb2, policy_pb2, trajectory_pb2

from services.common.errors import AntiphonError, Conflict, InvalidRequest, Unavailable
from tests.simulated.policy import logprobs

Encode = Callable[[Sequence[dict[str, str]]], list[int]]


class SimulatedRollout(rollout_pb2_grpc.RolloutServiceServicer, tenant_pb2_grpc.TenantServiceServicer):
    """Starts STALE. The answers are letters and digits drawn from a hash of (seed, prompt, sample, version)."""

    def __init__(self, worker_id: str, encode: Encode, alphabet: Sequence[int], stop_id: int) -> None:
        self.worker_id = worker_id
        self.encode = encode
        self.alphabet = list(alphabet)
        self.stop_id = stop_id
        self.state = tenant_pb2.WORKER_STATE_STALE
        self.policy = policy_pb2.Policy(version=-1)
        self.max_sequence_tokens = 256
        self.requests: list[rollout_pb2.GenerateRequest] = []
        self.aborted = 0
        self._abort_seen = asyncio.Event()
        self.epochs: list[int] = []
        self.commits: list[rollout_pb2.CommitUpdateRequest] = []
        self._epoch = 0
        self._open_version: int | None = None
        self.asleep: set[int] = set()
        self.discarded = False
        self._served = False
        self.sleeps: list[tenant_pb2.SleepRequest] = []
        self.wakes: list[tenant_pb2.WakeRequest] = []
        self.tokens: list[tuple[str, int]] = []
        """The calls that touch GPUs, and the sequence of the token each carried, in order."""
        # Switches.
        self.sleep_errors: list[AntiphonError] = []
        self.wake_errors: list[AntiphonError] = []
        self.delay_seconds: Callable[[rollout_pb2.GenerateRequest], float] = lambda request: 0.0
        self.generate_errors: list[AntiphonError] = []  # raised one per call, after the first trajectory
        self.logprob_shift = 0.0
        self.stamp_shift = 0  # added to the version in the spans
        self.change_trajectory: Callable[[trajectory_pb2.Trajectory], None] = lambda trajectory: None
        self.join_answer = rollout_pb2.JoinTransferResponse()
        self.begin_errors: list[AntiphonError] = []
        self.commit_errors: list[AntiphonError] = []
        self.commit_delay_seconds = 0.0
        self.commits_take_effect = True

    async def wait_aborted(self, calls: int) -> None:
        """Until so many Generate calls were cancelled."""
        while self.aborted < calls:
            await self._abort_seen.wait()
            self._abort_seen.clear()

    async def GetState(self, request: Any, context: Any) -> tenant_pb2.GetStateResponse:
        return tenant_pb2.GetStateResponse(
            state=self.state,
            policy=self.policy,
            backend="simulated",
            transfer_ranks=1,
            max_sequence_tokens=self.max_sequence_tokens,
            dtype="float32",
            asleep=sorted(self.asleep),
        )

    async def Sleep(self, request: tenant_pb2.SleepRequest, context: Any) -> tenant_pb2.SleepResponse:
        self.tokens.append(("Sleep", request.token.sequence))
        if self.sleep_errors:
            raise self.sleep_errors.pop(0)
        if self.state == tenant_pb2.WORKER_STATE_UPDATING:
            raise Conflict(f"{self.worker_id}: an update is under way")
        self.sleeps.append(request)
        if len(self.asleep) < 2:
            if self.state != tenant_pb2.WORKER_STATE_ASLEEP:
                self._served = self.state == tenant_pb2.WORKER_STATE_READY
            self.discarded = request.discard_weights
            self.asleep = {grant_pb2.MEMORY_TAG_WEIGHTS, grant_pb2.MEMORY_TAG_KV}
            self.state = tenant_pb2.WORKER_STATE_ASLEEP
        return tenant_pb2.SleepResponse(seconds=0.01)

    async def Wake(self, request: tenant_pb2.WakeRequest, context: Any) -> tenant_pb2.WakeResponse:
        self.tokens.append(("Wake", request.token.sequence))
        if self.wake_errors:
            raise self.wake_errors.pop(0)
        kv = grant_pb2.MEMORY_TAG_KV
        if self.discarded and kv in request.tags:
            raise InvalidRequest(f"{self.worker_id}: keys and values over discarded weights")
        self.wakes.append(request)
        self.asleep -= set(request.tags) or self.asleep - ({kv} if self.discarded else set())
        if self.state == tenant_pb2.WORKER_STATE_ASLEEP:
            if self.discarded:
                self.state = tenant_pb2.WORKER_STATE_STALE
            elif not self.asleep:
                ready, stale = tenant_pb2.WORKER_STATE_READY, tenant_pb2.WORKER_STATE_STALE
                self.state = ready if self._served else stale
        return tenant_pb2.WakeResponse(seconds=0.01)

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        self.requests.append(request)
        self.tokens.append(("Generate", request.token.sequence))
        if self.state != tenant_pb2.WORKER_STATE_READY:
            raise Unavailable(f"{self.worker_id} is STALE")
        if request.HasField("policy_version") and request.policy_version != self.policy.version:
            raise Conflict(f"{self.worker_id} serves version {self.policy.version}, asked for {request.policy_version}")
        try:
            await asyncio.sleep(self.delay_seconds(request))
        except asyncio.CancelledError:
            self.aborted += 1
            self._abort_seen.set()
            raise
        # In an order that is not that of the sample numbers.
        for number in reversed(range(request.first_sample_number, request.first_sample_number + request.samples)):
            yield rollout_pb2.GenerateResponse(trajectory=self._sample(request, number))
            if self.generate_errors:
                raise self.generate_errors.pop(0)

    def _sample(self, request: rollout_pb2.GenerateRequest, number: int) -> trajectory_pb2.Trajectory:
        version = self.policy.version
        prompt = list(request.prompt_token_ids)
        p = request.prompt_id
        seed = hashlib.sha256(f"{request.run_seed}/{p.dataset}/{p.row}/{p.epoch}/{number}/{version}".encode()).digest()
        length = 1 + seed[0] % 4
        answer = [self.alphabet[byte % len(self.alphabet)] for byte in seed[1 : 1 + length]] + [self.stop_id]
        limit = request.sampling.max_tokens
        reason = trajectory_pb2.FINISH_REASON_STOP if len(answer) <= limit else trajectory_pb2.FINISH_REASON_LENGTH
        ids = prompt + answer[:limit]
        mask = [False] * len(prompt) + [True] * (len(ids) - len(prompt))
        values = [v + self.logprob_shift if m else 0.0 for v, m in zip(logprobs(ids, version), mask, strict=True)]
        trajectory = trajectory_pb2.Trajectory(
            prompt_id=request.prompt_id,
            sample_number=number,
            token_ids=ids,
            loss_mask=mask,
            behavior_logprobs=values,
            finish_reason=reason,
            seed=int.from_bytes(seed[:7], "big"),
            worker_id=self.worker_id,
        )
        trajectory.version_spans.add(start=len(prompt), end=len(ids), policy_version=version + self.stamp_shift)
        self.change_trajectory(trajectory)
        return trajectory

    async def Encode(self, request: rollout_pb2.EncodeRequest, context: Any) -> rollout_pb2.EncodeResponse:
        encoded = [
            chat_pb2.TokenIds(ids=self.encode([{"role": m.role, "content": m.content} for m in conversation.messages]))
            for conversation in request.conversations
        ]
        return rollout_pb2.EncodeResponse(encoded=encoded)

    async def JoinTransfer(
        self, request: rollout_pb2.JoinTransferRequest, context: Any
    ) -> rollout_pb2.JoinTransferResponse:
        self.tokens.append(("JoinTransfer", request.token.sequence))
        if request.manifest.epoch < self._epoch:
            raise Conflict(f"epoch {request.manifest.epoch} is over")
        self._epoch = request.manifest.epoch
        self.epochs.append(self._epoch)
        return self.join_answer

    async def BeginUpdate(
        self, request: rollout_pb2.BeginUpdateRequest, context: Any
    ) -> rollout_pb2.BeginUpdateResponse:
        self.tokens.append(("BeginUpdate", request.token.sequence))
        if self.state == tenant_pb2.WORKER_STATE_ASLEEP:
            raise Conflict(f"{self.worker_id} sleeps; wake it first")
        if request.epoch != self._epoch:
            raise Conflict(f"{self.worker_id} is in epoch {self._epoch}, asked for {request.epoch}")
        if self.begin_errors:
            raise self.begin_errors.pop(0)
        self.state = tenant_pb2.WORKER_STATE_UPDATING
        self._open_version = request.policy_version
        return rollout_pb2.BeginUpdateResponse()

    async def CommitUpdate(
        self, request: rollout_pb2.CommitUpdateRequest, context: Any
    ) -> rollout_pb2.CommitUpdateResponse:
        self.tokens.append(("CommitUpdate", request.token.sequence))
        if request.policy.version != self._open_version:
            raise Conflict(f"update to {self._open_version} is open, asked to commit {request.policy.version}")
        await asyncio.sleep(self.commit_delay_seconds)
        self._open_version = None
        if self.commit_errors:
            self.state = tenant_pb2.WORKER_STATE_STALE
            raise self.commit_errors.pop(0)
        self.commits.append(request)
        if self.commits_take_effect:
            self.policy = request.policy
        self.asleep.clear()
        self.discarded = False
        self.state = tenant_pb2.WORKER_STATE_READY
        return rollout_pb2.CommitUpdateResponse(
            transfer_seconds=0.01, load_seconds=0.01, pause_seconds=0.02, probe_difference=1e-6, bytes=1000
        )
