"""A learner service without a model: keeps the contract, checks what it is sent, with switches for faults."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from antiphon.learner.v1 import learner_pb2, learner_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc
from antiphon.types.v1 import chat_pb2, progress_pb2, transfer_pb2

from services.common.digest import digest_messages
from services.common.errors import AntiphonError, Conflict, InvalidRequest, NotFound, Unavailable
from tests.simulated.policy import PROBE, WEIGHTS, logprobs, policy
from tests.simulated.rollout import Encode

Batch = tuple[learner_pb2.StepHeader, list[learner_pb2.TrainTrajectory]]


class SimulatedLearner(learner_pb2_grpc.LearnerServiceServicer, tenant_pb2_grpc.TenantServiceServicer):
    """Version 0 at start; a Step makes the next one, once per step id."""

    def __init__(self, worker_id: str, encode: Encode) -> None:
        self.worker_id = worker_id
        self.encode = encode
        self.state = tenant_pb2.WORKER_STATE_READY
        self.version = 0
        self.max_sequence_tokens = 256
        self.batches: list[Batch] = []
        self.published: list[tuple[int, int]] = []  # (epoch, version)
        self.exported: list[str] = []
        self.saved: list[str] = []
        self.loaded: list[str] = []
        self.dry_runs: list[Batch] = []
        self._digests: dict[int, bytes] = {}
        self._epoch = 0
        self._applying = asyncio.Lock()
        # Switches.
        self.on_train: Callable[[learner_pb2.StepHeader], None] = lambda header: None  # before the Step is applied
        self.train_delay_seconds = 0.0
        self.train_errors: list[AntiphonError] = []
        self.lost_answers = 0  # Steps that are applied, whose first call then breaks
        self.publish_delay_seconds = 0.0
        self.publish_errors: list[AntiphonError] = []
        self.on_save: Callable[[learner_pb2.SaveRequest], None] = lambda request: None  # before anything is written
        self.save_delay_seconds = 0.0
        self.save_errors: list[AntiphonError] = []
        self.load_errors: list[AntiphonError] = []
        self.logprob_shift = 0.0
        self.skip_updates = False

    async def GetState(self, request: Any, context: Any) -> tenant_pb2.GetStateResponse:
        return tenant_pb2.GetStateResponse(
            state=self.state,
            policy=policy(self.version),
            backend="simulated",
            transfer_ranks=1,
            max_sequence_tokens=self.max_sequence_tokens,
            dtype="float32",
        )

    async def Encode(self, request: learner_pb2.EncodeRequest, context: Any) -> learner_pb2.EncodeResponse:
        encoded = [
            chat_pb2.TokenIds(ids=self.encode([{"role": m.role, "content": m.content} for m in conversation.messages]))
            for conversation in request.conversations
        ]
        return learner_pb2.EncodeResponse(encoded=encoded)

    async def Forward(
        self, requests: AsyncIterator[learner_pb2.ForwardRequest], context: Any
    ) -> AsyncIterator[learner_pb2.ForwardResponse]:
        async for request in requests:
            if request.WhichOneof("part") == "sequence":
                values = [v + self.logprob_shift for v in logprobs(request.sequence.token_ids, self.version)]
                yield learner_pb2.ForwardResponse(id=request.sequence.id, logprobs=values, policy=policy(self.version))

    async def TrainStep(
        self, requests: AsyncIterator[learner_pb2.TrainStepRequest], context: Any
    ) -> AsyncIterator[learner_pb2.TrainStepResponse]:
        header, rows = None, []
        async for request in requests:
            if request.WhichOneof("part") == "header":
                header = request.header
            else:
                rows.append(request.trajectory)
        assert header is not None
        self._check(header, rows)
        if header.dry_run:
            self.dry_runs.append((header, rows))
            peak = learner_pb2.MemoryPeak(device="host", bytes=1 << 30, total_bytes=1 << 34)
            result = learner_pb2.StepResult(step_id=header.step_id, policy=policy(self.version), peaks=[peak])
            yield learner_pb2.TrainStepResponse(result=result)
            return
        yield learner_pb2.TrainStepResponse(progress=progress_pb2.Progress(phase="forward", done=0, of=len(rows)))
        if self.train_errors:
            raise self.train_errors.pop(0)
        # Applied in a task of its own, as in the real one: a call that is cancelled does not undo it.
        result = await asyncio.shield(asyncio.ensure_future(self._apply(header, rows)))
        if self.lost_answers:
            self.lost_answers -= 1
            raise Unavailable("the answer is lost on the way")
        yield learner_pb2.TrainStepResponse(result=result)

    async def _apply(
        self, header: learner_pb2.StepHeader, rows: list[learner_pb2.TrainTrajectory]
    ) -> learner_pb2.StepResult:
        async with self._applying:
            if self._digests.get(header.step_id) != header.batch_digest:
                if header.step_id != self.version + 1:
                    raise Conflict(f"step {header.step_id} after version {self.version}")
                self.on_train(header)
                await asyncio.sleep(self.train_delay_seconds)
                self._digests[header.step_id] = header.batch_digest
                self.batches.append((header, rows))
                self.version = header.step_id
        updates = [
            learner_pb2.UpdateMetrics(
                loss=0.5 + number,
                gradient_norm=1.0 + number,
                learning_rate=1e-3,
                entropy=2.0,
                ratio_mean=1.0,
                ratio_max=1.0,
                tokens=update.token_count,
                skipped=self.skip_updates,
            )
            for number, update in enumerate(header.updates)
        ]
        return learner_pb2.StepResult(
            step_id=header.step_id, policy=policy(header.step_id), updates=updates, seconds=0.01
        )

    @staticmethod
    def _check(header: learner_pb2.StepHeader, rows: list[learner_pb2.TrainTrajectory]) -> None:
        if header.batch_digest != digest_messages(rows):
            raise InvalidRequest(f"step {header.step_id}: the digest is not that of the trajectories")
        if header.trajectory_count != len(rows):
            raise InvalidRequest(f"step {header.step_id}: {header.trajectory_count} announced, {len(rows)} came")
        tokens = {row.trajectory_id: sum(row.loss_mask) for row in rows}
        for update in header.updates:
            if sum(tokens[i] for i in update.trajectory_ids) != update.token_count or not update.token_count:
                raise InvalidRequest(f"step {header.step_id}: N is not the count of the unmasked tokens")

    async def JoinTransfer(
        self, request: learner_pb2.JoinTransferRequest, context: Any
    ) -> learner_pb2.JoinTransferResponse:
        if request.epoch < self._epoch:
            raise Conflict(f"epoch {request.epoch} is over")
        self._epoch = request.epoch
        manifest = transfer_pb2.TransferManifest(
            epoch=request.epoch,
            address="127.0.0.1:1",
            transport=request.transport,
            sender_ranks=1,
            receiver_ranks=request.receiver_ranks,
            bucket_bytes=request.bucket_bytes,
        )
        for name in WEIGHTS:
            manifest.tensors.add(
                name=name, shape=[4, 4], element_type=transfer_pb2.ELEMENT_TYPE_FLOAT32, slice_numel=[16]
            )
        return learner_pb2.JoinTransferResponse(manifest=manifest)

    async def Publish(
        self, request: learner_pb2.PublishRequest, context: Any
    ) -> AsyncIterator[learner_pb2.PublishResponse]:
        yield learner_pb2.PublishResponse(progress=progress_pb2.Progress(phase="transfer", done=0, of=1))
        await asyncio.sleep(self.publish_delay_seconds)
        if self.publish_errors:
            raise self.publish_errors.pop(0)
        if (request.epoch, request.policy_version) != (self._epoch, self.version):
            raise Conflict(f"epoch {self._epoch}, version {self.version}: asked for {request.policy_version}")
        self.published.append((request.epoch, request.policy_version))
        result = learner_pb2.PublishResult(
            policy=policy(self.version),
            probe_token_ids=PROBE,
            probe_logprobs=logprobs(PROBE, self.version)[1:],
            bytes=192,
            seconds=0.01,
        )
        yield learner_pb2.PublishResponse(result=result)

    async def Export(
        self, request: learner_pb2.ExportRequest, context: Any
    ) -> AsyncIterator[learner_pb2.ExportResponse]:
        await asyncio.to_thread(_write_folder, Path(request.path))
        self.exported.append(request.path)
        yield learner_pb2.ExportResponse(
            result=learner_pb2.ExportResult(path=request.path, policy=policy(self.version))
        )

    async def Save(self, request: learner_pb2.SaveRequest, context: Any) -> AsyncIterator[learner_pb2.SaveResponse]:
        yield learner_pb2.SaveResponse(progress=progress_pb2.Progress(phase="write", done=0, of=1))
        self.on_save(request)
        await asyncio.sleep(self.save_delay_seconds)
        if self.save_errors:
            raise self.save_errors.pop(0)
        if request.policy_version != self.version:
            raise Conflict(f"save version {request.policy_version}: the policy is at {self.version}")
        digests = {step: digest.hex() for step, digest in self._digests.items()}
        text = json.dumps({"version": self.version, "digests": digests})
        await asyncio.to_thread(_write_checkpoint, Path(request.path), text)
        self.saved.append(request.path)
        result = learner_pb2.SaveResult(path=request.path, policy=policy(self.version), digest=_sha256(text), bytes=9)
        for older in request.delete_paths:
            if await asyncio.to_thread(_delete_checkpoint, Path(older)):
                result.deleted_paths.append(older)
        yield learner_pb2.SaveResponse(result=result)

    async def Load(self, request: learner_pb2.LoadRequest, context: Any) -> AsyncIterator[learner_pb2.LoadResponse]:
        yield learner_pb2.LoadResponse(progress=progress_pb2.Progress(phase="verify", done=0, of=1))
        if self.load_errors:
            raise self.load_errors.pop(0)
        try:
            text = await asyncio.to_thread((Path(request.path) / "manifest.json").read_text)
        except OSError:
            raise NotFound(f"checkpoint {request.path}: there is no manifest.json") from None
        if request.digest and request.digest != _sha256(text):
            raise Conflict(f"load {request.path}: it is another checkpoint than the one that was meant")
        tree = json.loads(text)
        self.version = tree["version"]
        self._digests = {int(step): bytes.fromhex(digest) for step, digest in tree["digests"].items()}
        self.loaded.append(request.path)
        result = learner_pb2.LoadResult(path=request.path, policy=policy(self.version), next_step_id=self.version + 1)
        for name in ("weights", "optimizer", "schedule", "random numbers", "answers"):
            result.parts.add(name=name, restored=True)
        yield learner_pb2.LoadResponse(result=result)


def _write_folder(path: Path) -> None:
    if path.exists():
        raise InvalidRequest(f"{path} exists")
    path.mkdir()
    (path / "config.json").write_text("{}")


def _write_checkpoint(path: Path, text: str) -> None:
    if path.exists():
        raise InvalidRequest(f"save to {path}: it exists")
    path.mkdir()
    (path / "manifest.json").write_text(text)


def _delete_checkpoint(path: Path) -> bool:
    if not (path / "manifest.json").exists():
        return False
    shutil.rmtree(path)
    return True


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
