"""A learner's rank for benchmarks of publications: the product's trainer over ZeRO-3 slices of random weights.

Only two things are not the product's: the weights are drawn by seed on the device, not read from a folder, and there is
no optimizer, whose state would not fit beside an engine. Faults come by a file, one word and one number, used once:

    kill 5         this rank kills itself when bucket 5 is through
    raise 5        it raises there
    stand 5        it stands still there
    kill-pid 1234  it kills that process at bucket 2
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch

from benchmarks.random_model import random_model
from services.learner import deepspeed_trainer, device_memory, rank_main
from services.learner.config import OptimizerConfig
from services.learner.policy_model import PolicyModel, make_policy_model
from services.learner.publishing import WeightTransfer
from services.learner.zero_engine import zero_config

FAULT_FILE = "ANTIPHON_BENCHMARK_FAULT"
KILL_OTHERS_AT_BUCKET = 2


def load_random(path: str, dtype_name: str, *, gradient_checkpointing: bool, device: torch.device) -> PolicyModel:
    """In place of `load_policy_model`. torch's seed is the run's."""
    model = random_model(path, dtype_name, device, torch.initial_seed())
    return make_policy_model(path, model, gradient_checkpointing=gradient_checkpointing, device=device)


def slices_only(
    policy: PolicyModel, options: OptimizerConfig, dtype_name: str, ranks: int, device: torch.device
) -> Any:
    """In place of `make_zero_engine`: partitioned parameters, no optimizer."""
    config = zero_config(options, dtype_name, ranks, device)
    engine, *_ = deepspeed.initialize(model=policy, config=config)
    return engine


class SlicesMemory(device_memory.DeviceMemory):
    """Of an engine without an optimizer."""

    def _optimizer_state(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [], []


class FaultyTransfer(WeightTransfer):
    """Does what the fault file says, once."""

    def send(self, epoch: int, deadline_seconds: float, on_bucket: Any) -> Any:
        word, _, number = _take_fault(self._rank).partition(" ")

        def watched(done: int, of: int) -> None:
            on_bucket(done, of)
            if word == "kill-pid" and done == KILL_OTHERS_AT_BUCKET:
                os.kill(int(number), signal.SIGKILL)
            elif word and word != "kill-pid" and done == int(number):
                if word == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif word == "raise":
                    raise RuntimeError(f"a fault was ordered at bucket {done}")
                elif word == "stand":
                    time.sleep(600)

        return super().send(epoch, deadline_seconds, watched)


def _take_fault(rank: int) -> str:
    """The last rank commits it: a fault of rank 0 takes the store with it, which is the easy case."""
    path = Path(os.environ.get(FAULT_FILE, "/nonexistent"))
    if rank != int(os.environ["WORLD_SIZE"]) - 1 or not path.exists():
        return ""
    text = path.read_text().strip()
    path.unlink()
    return text


if __name__ == "__main__":
    deepspeed_trainer.load_policy_model = load_random  # type: ignore[assignment]
    deepspeed_trainer.make_zero_engine = slices_only
    deepspeed_trainer.DeviceMemory = SlicesMemory  # type: ignore[misc]
    deepspeed_trainer.WeightTransfer = FaultyTransfer  # type: ignore[misc]
    sys.exit(rank_main.main())
