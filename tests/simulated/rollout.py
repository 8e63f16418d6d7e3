"""A rollout service without a model: keeps the contract, with switches for what may go wrong."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from antiphon.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from antiphon.types.v1 import chat_pb2, grant_pb2, policy_pb2, trajectory_pb2

from services.common.errors import AntiphonError, Conflict, InvalidRequest, Unavailable
from tests.simulated.policy import logprobs

Encode = Callable[[Sequence[dict[str, str]]], list[int]]


class SimulatedRollout(rollout_pb2_grpc.RolloutServiceServicer, tenant_pb2_grpc.TenantServiceServicer):
    """Starts STALE. The answers are letters and digits drawn from a hash of (seed, prompt, sample, version), without
    end but for the stop token, which comes after at most four of them.

    What is finished is held until it is acknowledged; who asks again for what is not has it sampled again.
    """

    def __init__(
        self,
        worker_id: str,
        encode: Encode,
        alphabet: Sequence[int],
        stop_id: int,
        decode: Callable[[Sequence[int]], str] = lambda ids: "".join(map(chr, ids)),
    ) -> None:
        self.worker_id = worker_id
        self.encode = encode
        self.decode = decode
        self.alphabet = list(alphabet)
        self.stop_id = stop_id
        self.state = tenant_pb2.WORKER_STATE_STALE
        self.policy = policy_pb2.Policy(version=-1)
        self.max_sequence_tokens = 256
        self.requests: list[rollout_pb2.GenerateRequest] = []
        self.held: dict[str, dict[int, trajectory_pb2.Trajectory]] = {}
        """By request id and sample number."""
        self.acknowledged: dict[str, set[int]] = {}
        self.on_acknowledge: Callable[[rollout_pb2.AcknowledgeRequest], None] = lambda request: None
        self.sampled: collections.Counter[tuple[str, int, int, int]] = collections.Counter()
        """How often each (data set, row, epoch, sample number) was sampled."""
        self._contents: dict[str, bytes] = {}
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
        # Seconds from the call to the end of one trajectory of it, by sample number.
        self.sample_seconds: Callable[[rollout_pb2.GenerateRequest, int], float] = lambda request, number: 0.0
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
        self._check_id(request)
        held = self.held.setdefault(request.request_id, {})
        for trajectory in list(held.values()):
            yield rollout_pb2.GenerateResponse(trajectory=trajectory)
        # In an order that is not that of the sample numbers.
        numbers = reversed(range(request.first_sample_number, request.first_sample_number + request.samples))
        missing = [n for n in numbers if n not in held and n not in self.acknowledged.get(request.request_id, ())]
        if not missing:
            return
        if self.state != tenant_pb2.WORKER_STATE_READY:
            raise Unavailable(f"{self.worker_id} is STALE")
        if request.HasField("policy_version") and request.policy_version != self.policy.version:
            raise Conflict(f"{self.worker_id} serves version {self.policy.version}, asked for {request.policy_version}")
        began = time.monotonic() + self.delay_seconds(request)
        for number in sorted(missing, key=lambda n: self.sample_seconds(request, n)):
            try:
                await asyncio.sleep(max(0.0, began + self.sample_seconds(request, number) - time.monotonic()))
            except asyncio.CancelledError:
                self.aborted += 1
                self._abort_seen.set()
                raise
            held[number] = self._sample(request, number)
            yield rollout_pb2.GenerateResponse(trajectory=held[number])
            if self.generate_errors:
                raise self.generate_errors.pop(0)

    async def Acknowledge(
        self, request: rollout_pb2.AcknowledgeRequest, context: Any
    ) -> rollout_pb2.AcknowledgeResponse:
        forgotten = 0
        self.on_acknowledge(request)  # while it still holds them
        for call in request.calls:
            held = self.held.get(call.request_id, {})
            for number in list(call.sample_numbers) or list(held):
                if held.pop(number, None) is not None:
                    self.acknowledged.setdefault(call.request_id, set()).add(number)
                    forgotten += 1
        return rollout_pb2.AcknowledgeResponse(forgotten=forgotten)

    async def Abort(self, request: rollout_pb2.AbortRequest, context: Any) -> rollout_pb2.AbortResponse:
        return rollout_pb2.AbortResponse()  # every answer is there at once

    def _check_id(self, request: rollout_pb2.GenerateRequest) -> None:
        content = rollout_pb2.GenerateRequest()
        content.CopyFrom(request)
        content.ClearField("token")
        known = self._contents.setdefault(request.request_id, content.SerializeToString(deterministic=True))
        if known != content.SerializeToString(deterministic=True):
            raise Conflict(f"Generate {request.request_id}: asked before with other content")
        if len(self.acknowledged.get(request.request_id, ())) == request.samples:
            raise Conflict(f"Generate {request.request_id}: every trajectory of it was acknowledged")

    def _sample(self, request: rollout_pb2.GenerateRequest, number: int) -> trajectory_pb2.Trajectory:
        version = self.policy.version
        prompt = list(request.prompt_token_ids)
        p = request.prompt_id
        self.sampled[(p.dataset, p.row, p.epoch, number)] += 1
        key = f"{request.run_seed}/{p.dataset}/{p.row}/{p.epoch}/{number}/{version}"
        seed = hashlib.sha256(key.encode()).digest()
        answer, reason, stop_string = self._answer(request.sampling, seed)
        ids = prompt + answer
        mask = [False] * len(prompt) + [True] * len(answer)
        values = [v + self.logprob_shift if m else 0.0 for v, m in zip(logprobs(ids, version), mask, strict=True)]
        trajectory = trajectory_pb2.Trajectory(
            prompt_id=request.prompt_id,
            sample_number=number,
            token_ids=ids,
            loss_mask=mask,
            behavior_logprobs=values,
            finish_reason=reason,
            stop_string=stop_string,
            seed=int.from_bytes(seed[:7], "big"),
            worker_id=self.worker_id,
        )
        trajectory.version_spans.add(start=len(prompt), end=len(ids), policy_version=version + self.stamp_shift)
        self.change_trajectory(trajectory)
        return trajectory

    def _answer(
        self, sampling: rollout_pb2.Sampling, seed: bytes
    ) -> tuple[list[int], trajectory_pb2.FinishReason, str]:
        """Token ids, why they end, and the stop string that ended them."""
        stop_at = 1 + seed[0] % 4
        ids: list[int] = []
        while len(ids) < sampling.max_tokens:
            at = len(ids)
            letter = hashlib.sha256(seed + at.to_bytes(4, "big")).digest()[0]
            ids.append(self.stop_id if at == stop_at else self.alphabet[letter % len(self.alphabet)])
            found = [string for string in sampling.stop_strings if string in self.decode(ids)]
            if found or ids[-1] in sampling.stop_token_ids:
                return ids, trajectory_pb2.FINISH_REASON_STOP, found[0] if found else ""
        return ids, trajectory_pb2.FINISH_REASON_LENGTH, ""

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
        if not self._epoch <= request.manifest.epoch <= self._epoch + 2**44:
            raise Conflict(f"epoch {request.manifest.epoch} does not follow {self._epoch}")
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
