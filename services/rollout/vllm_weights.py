"""The worker side of a publication, inside vLLM's own process: receives into staging, touches the model at the commit.

vLLM loads this module in each worker because `worker_extension_cls` names `WorkerExtension`; loading it registers the
receiver with vLLM's weight-transfer factory. On CPU vLLM repacks the weights of its layers, so a model cannot be
written in place: a whole publication is staged, and until it is verified the old policy stays as it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from antiphon.types.v1.transfer_pb2 import TransferManifest
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from services.common.errors import AntiphonError, Conflict, InvalidRequest, Unavailable
from services.common.weights.manifest import sent
from services.common.weights.receiver import Receiver
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
    """Nothing: what is loaded is what was staged."""


class Transfer:
    """One membership epoch on this worker: a thread joins, then receives when it is told to.

    vLLM's own loop must not wait for others, so all waiting is done in the thread and `state` is asked for.
    """

    def __init__(self, manifest: TransferManifest, receiver_rank: int, deadline_seconds: float) -> None:
        self.manifest = manifest
        self.staging: dict[str, torch.Tensor] = {}
        self._receiver: Receiver | None = None
        self._closed = False
        self._state: dict[str, Any] = {}
        self._thread = threading.Thread()
        self._start("joined", lambda: self._join(receiver_rank, deadline_seconds))

    def receive(self, deadline_seconds: float) -> None:
        """Starts to receive one publication into staging."""
        if self._state["phase"] == "failed" or self._thread.is_alive():
            raise Conflict(f"transfer epoch {self.manifest.epoch}: not ready to receive, it is {self._state}")
        self.staging.clear()
        self._start("received", lambda: self._receive(deadline_seconds))

    def state(self) -> dict[str, Any]:
        """{"phase": "working" | "joined" | "received" (digest, bytes, seconds) | "failed" (error, message)}."""
        return self._state

    def close(self) -> None:
        """Leaves the group; a thread that waits for others ends by itself, soon or at its deadline."""
        self._closed = True
        self._state = {"phase": "failed", "error": "Unavailable", "message": "the transfer group was left"}
        if self._receiver is not None:
            self._receiver.close()
        self.staging.clear()

    def _start(self, phase: str, work: Callable[[], dict[str, Any]]) -> None:
        def run() -> None:
            try:
                result = {"phase": phase, **work()}
            except AntiphonError as error:
                result = {"phase": "failed", "error": type(error).__name__, "message": str(error)}
            except Exception as error:
                logger.exception("transfer epoch %d", self.manifest.epoch)
                result = {"phase": "failed", "error": "Internal", "message": repr(error)}
            if not self._closed:
                self._state = result

        self._state = {"phase": "working"}
        self._thread = threading.Thread(target=run, name=f"transfer epoch {self.manifest.epoch}", daemon=True)
        self._thread.start()

    def _join(self, receiver_rank: int, deadline_seconds: float) -> dict[str, Any]:
        receiver = Receiver(self.manifest, receiver_rank, deadline_seconds=deadline_seconds)
        if self._closed:
            receiver.close()
        self._receiver = receiver
        return {}

    def _receive(self, deadline_seconds: float) -> dict[str, Any]:
        assert self._receiver is not None
        begin = time.monotonic()
        staging: dict[str, torch.Tensor] = {}
        for spec, tensor in self._receiver.receive(deadline_seconds=deadline_seconds):
            staging[spec.name] = tensor
        expected = {spec.name for spec in sent(self.manifest)}
        if staging.keys() != expected:
            raise Unavailable(f"received other tensors than announced: {sorted(staging.keys() ^ expected)[:10]}")
        self.staging = staging
        return {
            "digest": self._receiver.digest,
            "bytes": self._receiver.bytes,
            "seconds": time.monotonic() - begin,
        }


class AntiphonWeightTransferEngine(WeightTransferEngine[JoinInfo, LoadInfo]):
    """vLLM's life cycle of an update, after the receiving: start, update and finish all run at the commit."""

    init_info_cls = JoinInfo
    update_info_cls = LoadInfo
    supports_draft_weight_update: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.transfer: Transfer | None = None
        self._loaded: set[str] = set()
        # Taken now: during a reload the layers are rebuilt apart, and nothing shows that a head is tied.
        self._shapes = expected_shapes(self.model)
        self._tied = tied_heads(self.model)

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Starts to join; `transfer.state()` says when it is done."""
        self.shutdown()
        manifest = TransferManifest.FromString(init_info.manifest)
        rank = init_info.first_receiver_rank + self.parallel_config.rank
        self.transfer = Transfer(manifest, rank, init_info.deadline_seconds)

    def start_weight_update(self) -> None:
        self._loaded = set()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class waits for an accelerator here, which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: LoadInfo) -> None:
        self._loaded |= set(self.model.load_weights(self._staged()))

    def finish_weight_update(self) -> None:
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

    def _staged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors by name; what the learner aliases and this model holds apart is given to both."""
        assert self.transfer is not None
        staging = self.transfer.staging
        for spec in self.transfer.manifest.tensors:
            if not spec.alias_of:
                yield spec.name, staging[spec.name]
            elif spec.name in self._shapes:
                yield spec.name, staging[spec.alias_of]


class WorkerExtension:
    """Methods that the service calls on every worker. They answer at once, with plain values."""

    def antiphon_unmatched(self, manifest: bytes) -> dict[str, Any]:
        """Unmatched names, or {"invalid": message}."""
        engine = _engine_of(self)
        try:
            found = unmatched(TransferManifest.FromString(manifest), engine.model, engine.model_config.dtype)
        except InvalidRequest as error:
            return {"invalid": str(error)}
        return {"unknown": list(found.unknown), "missing": list(found.missing), "differing": list(found.differing)}

    def antiphon_transfer_state(self) -> dict[str, Any]:
        transfer = _engine_of(self).transfer
        if transfer is None:
            return {"phase": "failed", "error": "Unavailable", "message": "no transfer group is joined"}
        return transfer.state()

    def antiphon_receive(self, deadline_seconds: float) -> None:
        transfer = _engine_of(self).transfer
        if transfer is not None:
            transfer.receive(deadline_seconds)

    def antiphon_give_up(self) -> None:
        _engine_of(self).shutdown()

    def antiphon_load(self) -> str:
        """Loads what was staged, in one piece: no other call comes between. Answers "" or why nothing was touched.

        Whatever is raised leaves the model torn.
        """
        engine = _engine_of(self)
        if engine.transfer is None or engine.transfer.state()["phase"] != "received":
            return "nothing was received, or it was given up"
        self.start_weight_update()  # type: ignore[attr-defined]
        self.update_weights({})  # type: ignore[attr-defined]
        self.finish_weight_update()  # type: ignore[attr-defined]
        engine.transfer.staging.clear()
        return ""


def _engine_of(worker: Any) -> AntiphonWeightTransferEngine:
    engine = worker.weight_transfer_engine
    assert isinstance(engine, AntiphonWeightTransferEngine)
    return engine


WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, AntiphonWeightTransferEngine)
