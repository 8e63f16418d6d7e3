"""The worker side of a publication, inside vLLM's own process.

vLLM loads this module in each worker because `worker_extension_cls` names `WorkerExtension`; loading it registers the
receiver with vLLM's weight-transfer factory. Where the layers leave weights as they come (vllm_in_place.py), each
bucket is written over the model's own while the next one travels; nothing is served until the whole is verified.
Elsewhere, on CPU always, a whole publication is staged, and until it is verified the old policy stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from antiphon.types.v1.transfer_pb2 import TensorSpec, TransferManifest
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from services.common.errors import InvalidRequest
from services.common.weights.manifest import sent
from services.rollout.receiving import Bucket, Transfer
from services.rollout.vllm_copies import NotedCopies, NotPlain
from services.rollout.vllm_in_place import layers_that_repack
from services.rollout.vllm_memory import MemoryExtension
from services.rollout.vllm_names import expected_shapes, tied_heads, unmatched
from services.rollout.vllm_start import TRANSFER_BACKEND

logger = logging.getLogger(__name__)


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """Where and as whom to join; `manifest` is a serialised TransferManifest."""

    manifest: bytes
    first_receiver_rank: int
    deadline_seconds: float


@dataclass
class LoadInfo(WeightTransferUpdateInfo):
    """Nothing: what is loaded is what was received."""


class AntiphonWeightTransferEngine(WeightTransferEngine[JoinInfo, LoadInfo]):
    """vLLM's life cycle of an update, after the receiving: start, update and finish all run at the commit."""

    init_info_cls = JoinInfo
    update_info_cls = LoadInfo
    supports_draft_weight_update: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.transfer: Transfer | None = None
        self._aliases: dict[str, list[str]] = {}
        self._copies: NotedCopies | None = None
        self._staging: dict[str, torch.Tensor] = {}
        self._loaded: set[str] = set()
        repacking = layers_that_repack(self.model, self.device)
        self._in_place = not repacking
        if repacking and self.device.type == "cuda":
            logger.warning("publications are staged, which takes the model's memory once more: %s", repacking[0])
        # Taken now: during a reload the layers are rebuilt apart, and nothing shows that a head is tied.
        self._shapes = expected_shapes(self.model)
        self._tied = tied_heads(self.model)

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Starts to join; `transfer.state()` says when it is done."""
        self.shutdown()
        manifest = TransferManifest.FromString(init_info.manifest)
        self._aliases = {}
        for spec in manifest.tensors:
            if spec.alias_of and spec.name in self._shapes:
                self._aliases.setdefault(spec.alias_of, []).append(spec.name)
        if self._in_place:
            self._copies = self._noted_copies(manifest)
        rank = init_info.first_receiver_rank + self.parallel_config.rank
        self.transfer = Transfer(
            manifest,
            rank,
            device=self.device,
            take=self._load_in_place if self._in_place else self._stage,
            deadline_seconds=init_info.deadline_seconds,
        )

    def start_weight_update(self) -> None:
        if not self._in_place:
            self._loaded = set()
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class waits for an accelerator here, which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: LoadInfo) -> None:
        if not self._in_place:
            self._loaded |= set(self.model.load_weights(self._staged()))
            self._staging.clear()

    def finish_weight_update(self) -> None:
        if not self._in_place:
            finalize_layerwise_reload(self.model, self.model_config)
        for head in self._tied:
            # vLLM 0.32 on CPU: a reload packs the new embedding, and leaves the tied head with its packed copy of the
            # old one, without an error.
            if self.device.type == "cpu":
                dispatch_cpu_unquantized_gemm(
                    self.model.get_submodule(head.removesuffix(".weight")), remove_weight=False
                )
        unfilled = {name for name, _ in self.model.named_parameters()} - self._loaded - set(self._tied)
        if unfilled:
            raise RuntimeError(f"parameters that the load did not fill: {sorted(unfilled)[:10]}")

    def shutdown(self) -> None:
        if self.transfer is not None:
            self.transfer.close()
            self.transfer = None
        self._staging.clear()

    def _load_in_place(self, buckets: Iterable[Bucket], reuses_memory: bool) -> None:
        self._loaded = set()
        if self._copies is not None:
            for bucket in buckets:
                self._copies.make(bucket)
            self._copies.fill()
            self._loaded = self._copies.loaded
            return
        for bucket in buckets:
            # A bucket at a time: some models look at all of the weights they are given before they copy any.
            tensors = [(name, tensor) for spec, tensor in bucket for name in self._names(spec)]
            self._loaded |= set(self.model.load_weights(tensors))

    def _noted_copies(self, manifest: TransferManifest) -> NotedCopies | None:
        try:
            return NotedCopies(self.model, [(spec, self._names(spec)) for spec in sent(manifest)])
        except NotPlain as error:
            logger.warning("each bucket goes through the model's own loader, which takes time: %s", error)
            return None

    def _stage(self, buckets: Iterable[Bucket], reuses_memory: bool) -> None:
        self._staging.clear()
        for bucket in buckets:
            for spec, tensor in bucket:
                self._staging[spec.name] = tensor.clone() if reuses_memory else tensor

    def _names(self, spec: TensorSpec) -> list[str]:
        """Where a tensor goes: what the learner aliases and this model holds apart is given to both."""
        return [spec.name, *self._aliases.get(spec.name, ())]

    def _staged(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.transfer is not None
        for spec in sent(self.transfer.manifest):
            for name in self._names(spec):
                yield name, self._staging[spec.name]


class WorkerExtension(MemoryExtension):
    """Methods that the service calls on every worker. They answer at once, with plain values."""

    def antiphon_unmatched(self, manifest: bytes) -> dict[str, Any]:
        """Unmatched names, or {"invalid": message}."""
        engine = _engine_of(self)
        try:
            found = unmatched(TransferManifest.FromString(manifest), engine.model, engine.model_config.dtype)
        except InvalidRequest as error:
            return {"invalid": str(error)}
        return {"unknown": list(found.unknown), "missing": list(found.missing), "differing": list(found.differing)}

    def antiphon_transfer_state(self, wait_seconds: float) -> dict[str, Any]:
        """Of the transfer; waits so long for the end of what it does now, in which the engine does nothing else."""
        transfer = _engine_of(self).transfer
        if transfer is None:
            return {"phase": "failed", "error": "Unavailable", "message": "no transfer group is joined"}
        transfer.wait(wait_seconds)
        return transfer.state()

    def antiphon_receive(self, deadline_seconds: float) -> None:
        transfer = _engine_of(self).transfer
        if transfer is not None:
            transfer.receive(deadline_seconds)

    def antiphon_give_up(self) -> None:
        _engine_of(self).shutdown()

    def antiphon_load(self) -> str:
        """Loads what was staged, in one piece: no other call comes between; sees that everything was filled.

        Answers "", or why there is nothing to load.

        Whatever is raised leaves the model torn.
        """
        engine = _engine_of(self)
        if engine.transfer is None or engine.transfer.state()["phase"] != "received":
            return "nothing was received, or it was given up"
        self.start_weight_update()  # type: ignore[attr-defined]
        self.update_weights({})  # type: ignore[attr-defined]
        self.finish_weight_update()  # type: ignore[attr-defined]
        return ""


def _engine_of(worker: Any) -> AntiphonWeightTransferEngine:
    engine = worker.weight_transfer_engine
    assert isinstance(engine, AntiphonWeightTransferEngine)
    return engine


WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, AntiphonWeightTransferEngine)
