"""Requests to a rollout worker that are right unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from antiphon.rollout.v1 import rollout_pb2
from antiphon.types.v1 import transfer_pb2
from antiphon.types.v1.policy_pb2 import Policy
from antiphon.types.v1.trajectory_pb2 import PromptId


def join_request(epoch: int, *, rank: int = 0, receivers: int = 1, names: tuple[str, ...] = ("w",)) -> Any:
    manifest = transfer_pb2.TransferManifest(epoch=epoch, address="127.0.0.1:1", receiver_ranks=receivers)
    for name in names:
        manifest.tensors.add(name=name, shape=[1])
    return rollout_pb2.JoinTransferRequest(request_id="j", manifest=manifest, first_receiver_rank=rank)


def commit_request(version: int, *, digest: int = 77, request_id: str = "c", **fields: Any) -> Any:
    return rollout_pb2.CommitUpdateRequest(
        **{
            "request_id": request_id,
            "policy": Policy(version=version, digest=digest),
            "probe_token_ids": [1, 2, 3],
            "probe_logprobs": [-1.0, -2.0],
            "probe_tolerance": 1e-3,
            **fields,
        }
    )


def ask(request_id: str = "r", **fields: Any) -> rollout_pb2.GenerateRequest:
    """Three trajectories of four tokens for a prompt of two."""
    temperature = fields.pop("temperature", 1.0)
    max_tokens = fields.pop("max_tokens", 4)
    stop_token_ids = fields.pop("stop_token_ids", [2])
    stop_strings = fields.pop("stop_strings", [])
    return rollout_pb2.GenerateRequest(
        **{
            "request_id": request_id,
            "prompt_id": PromptId(dataset="train", row=5, epoch=1),
            "prompt_token_ids": [10, 11],
            "samples": 3,
            "run_seed": 9,
            "sampling": rollout_pb2.Sampling(
                temperature=temperature,
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
                stop_strings=stop_strings,
            ),
            **fields,
        }
    )
