"""A learner of one rank without training, for benchmarks: a model with random weights, and its publications.

The weights are drawn by seed on the device that sends them; the shapes are those of the folder's config.json.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon.rollout.v1 import rollout_pb2
from antiphon.types.v1 import grant_pb2, transfer_pb2
from antiphon.types.v1.policy_pb2 import Policy

from services.common.client import new_request_id
from services.coordinator.clients import RolloutClient
from tests.tiny.models import make_tokenizer

if TYPE_CHECKING:
    import torch

    from services.common.weights.sender import Sender

WAIT_SECONDS = 120.0
PROBE_TOKENS = 32
# Mean absolute difference of log-probabilities between transformers and vLLM, measured well below in each dtype.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
BUCKET_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}

# Llama-like, by the names of a Hugging Face config.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    # small, and divisible by two everywhere: for tensor parallelism
    "tp2": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    # SmolLM2-135M
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "rope_theta": 100000.0,
    },
    # Qwen2.5-3B without the biases of its projections: 3.1 billion parameters
    "3b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
    },
    # Qwen2.5-7B, likewise: 7.6 billion
    "7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "rope_theta": 1000000.0,
    },
}


def write_model(folder: Path, shape: str, dtype: str, max_positions: int = 4096) -> Path:
    """A folder that vLLM starts from with dummy weights: config.json and a small tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": max_positions,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
        **SHAPES[shape],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@dataclass(frozen=True)
class Publication:
    """One publication to one engine; seconds as this side saw them."""

    send_seconds: float
    total_seconds: float
    committed: rollout_pb2.CommitUpdateResponse


class OneRankLearner:
    """Holds the weights and sends them, over gloo from CPU and by CUDA IPC to an engine on its own GPU."""

    def __init__(self, folder: Path, *, dtype: str, device: str, seed: int) -> None:
        import torch

        from benchmarks.random_model import random_model

        self._dtype = dtype
        self._device = torch.device(device)
        self._model = random_model(str(folder), dtype, self._device, seed).eval()
        self._weights: dict[str, torch.Tensor] = dict(self._model.state_dict(keep_vars=True))
        self._epoch = 0
        self._vocabulary = self._model.config.vocab_size
        self.bytes = sum(p.numel() * p.element_size() for p in self._model.parameters())
        self._probe = [(7 * i + 3) % self._vocabulary for i in range(PROBE_TOKENS)]
        self._probe_logprobs = self._logprobs(self._probe)

    async def publish(
        self, engine: RolloutClient, version: int, token: grant_pb2.GrantToken | None = None
    ) -> Publication:
        """A whole publication, verified by the engine, over a group of its own."""
        begin = time.monotonic()
        epoch, sender = await self._join(engine, token)
        await engine.begin_update(
            rollout_pb2.BeginUpdateRequest(
                request_id=new_request_id(),
                epoch=epoch,
                policy_version=version,
                deadline_seconds=WAIT_SECONDS,
                token=token,
            ),
            WAIT_SECONDS,
        )
        sending = time.monotonic()
        report = await asyncio.to_thread(
            sender.send, lambda spec: self._weights[spec.name].detach().view(-1), deadline_seconds=WAIT_SECONDS
        )
        sent = time.monotonic()
        committed = await engine.commit_update(
            rollout_pb2.CommitUpdateRequest(
                request_id=new_request_id(),
                policy=Policy(version=version, digest=report.digest),
                probe_token_ids=self._probe,
                probe_logprobs=self._probe_logprobs,
                probe_tolerance=TOLERANCE[self._dtype],
                token=token,
            ),
            WAIT_SECONDS,
        )
        sender.close()
        return Publication(sent - sending, time.monotonic() - begin, committed)

    async def _join(self, engine: RolloutClient, token: grant_pb2.GrantToken | None) -> tuple[int, Sender]:
        from services.common.weights.sender import Sender
        from services.common.weights.store import bind_store

        self._epoch += 1
        store, address = bind_store()
        manifest = self._describe(address)
        join = rollout_pb2.JoinTransferRequest(request_id=new_request_id(), manifest=manifest, token=token)
        connecting = asyncio.create_task(
            asyncio.to_thread(Sender, manifest, 0, store=store, device=self._device, deadline_seconds=WAIT_SECONDS)
        )
        answer = await engine.join_transfer(join, WAIT_SECONDS)
        names = [*answer.unknown_tensors, *answer.missing_tensors, *answer.differing_tensors]
        if names:
            raise RuntimeError(f"tensors that do not match: {names[:10]}")
        return self._epoch, await connecting

    def _describe(self, address: str) -> transfer_pb2.TransferManifest:
        from services.common.weights.manifest import element_type

        on_gpu = self._device.type == "cuda"
        manifest = transfer_pb2.TransferManifest(
            epoch=self._epoch,
            address=address,
            transport=transfer_pb2.TRANSPORT_CUDA_IPC if on_gpu else transfer_pb2.TRANSPORT_GLOO,
            sender_ranks=1,
            receiver_ranks=1,
            bucket_bytes=BUCKET_BYTES[self._device.type],
        )
        first: dict[int, str] = {}
        for name, tensor in self._weights.items():
            alias = first.setdefault(tensor.data_ptr(), name)
            spec = manifest.tensors.add(name=name, shape=list(tensor.shape), element_type=element_type(tensor.dtype))
            if alias != name:
                spec.alias_of = alias
            else:
                spec.slice_numel.append(tensor.numel())
        return manifest

    def _logprobs(self, token_ids: list[int]) -> list[float]:
        """Of each token but the first, temperature 1."""
        import torch

        ids = torch.tensor([token_ids], device=self._device)
        with torch.inference_mode():
            logits = self._model(input_ids=ids).logits[0, :-1].float()
        return torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
