"""One rank of a learner for benchmarks: the trainer's own parts around a model with random weights, made on the GPU."""

from __future__ import annotations

import gc
import math
import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from antiphon.learner.v1 import learner_pb2

from benchmarks.random_model import random_model
from services.common.digest import digest_messages
from services.learner.batching import Layout
from services.learner.config import OptimizerConfig
from services.learner.policy_model import PolicyModel, layout_of, make_policy_model
from services.learner.stepping import StepRunner
from services.learner.zero_engine import join_distributed, make_zero_engine

SHAPES: dict[str, dict[str, int]] = {
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
    "3b": {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "intermediate_size": 11008},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
}
"""Those of Qwen2.5: two key-value heads, 151,936 tokens, tied head; `tiny` is for trying a script out."""


@dataclass
class Rank:
    """A learner's rank without a service around it."""

    policy: PolicyModel
    engine: Any
    runner: StepRunner
    device: torch.device
    layout: Layout
    seconds_to_load: float
    seconds_to_start: float


def join() -> torch.device:
    """The one rank of a group of one."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    folder = tempfile.mkdtemp(prefix="antiphon-")
    backend = "nccl" if device.type == "cuda" else "gloo"
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group(backend, init_method=f"file://{Path(folder) / 'rendezvous'}", rank=0, world_size=1)
    join_distributed(backend)
    return device


def make_rank(shape: str, device: torch.device, *, checkpointing: bool, micro_batch_tokens: int) -> Rank:
    """Model, engine and runner as the trainer makes them; bfloat16 weights, float32 masters."""
    begin = time.monotonic()
    vocabulary = 151_936 if shape != "tiny" else 200
    config = transformers.Qwen2Config(
        **SHAPES[shape],
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
    )
    model = random_model(config, "bfloat16", device, seed=0)
    policy = make_policy_model(shape, model, gradient_checkpointing=checkpointing, device=device)
    loaded = time.monotonic()
    options = OptimizerConfig.model_validate({"learning_rate": 1e-6})
    engine = make_zero_engine(policy, options, "bfloat16", 1, device)
    layout = layout_of(policy.model, 32_768)
    runner = StepRunner(engine, options, rank=0, ranks=1, device=device, token_budget=micro_batch_tokens, layout=layout)
    gc.collect()  # as services/learner/rank_main.py does
    gc.freeze()
    return Rank(policy, engine, runner, device, layout, loaded - begin, time.monotonic() - loaded)


def make_batch(tokens: int, longest: int, vocabulary: int, seed: int = 0) -> list[learner_pb2.TrainTrajectory]:
    """Rows of about so many tokens in all, none longer than `longest`; benchmarks/learner_throughput.py, ROWS."""
    dice = random.Random(seed)
    batch: list[learner_pb2.TrainTrajectory] = []
    total = 0
    while total < tokens:
        prompt = dice.randint(64, 512)
        answer = min(max(round(dice.lognormvariate(math.log(512), 0.8)), 16), 4096)
        prompt = min(prompt, longest // 2)
        answer = min(answer, longest - prompt, max(tokens - total - prompt, 16))
        count = prompt + answer
        batch.append(
            learner_pb2.TrainTrajectory(
                trajectory_id=f"row-{len(batch)}",
                token_ids=[dice.randrange(vocabulary) for _ in range(count)],
                loss_mask=[False] * prompt + [True] * answer,
                advantages=[dice.gauss(0, 1) for _ in range(count)],
                behavior_logprobs=[-11.0] * count,
            )
        )
        total += count
    return batch


def make_header(step_id: int, batch: list[learner_pb2.TrainTrajectory]) -> learner_pb2.StepHeader:
    """One Update on all rows."""
    header = learner_pb2.StepHeader(step_id=step_id, batch_digest=digest_messages(batch), trajectory_count=len(batch))
    header.policy.loss = learner_pb2.POLICY_LOSS_PPO
    header.policy.aggregation = learner_pb2.AGGREGATION_TOKEN
    header.policy.clip_low = header.policy.clip_high = 0.2
    header.policy.temperature = 1.0
    header.updates.add(
        trajectory_ids=[row.trajectory_id for row in batch], token_count=sum(sum(row.loss_mask) for row in batch)
    )
    return header


def silent(phase: str, done: int, of: int) -> None:
    """A report that nobody hears."""
