"""A DeepSpeed engine whose memory sleeps and wakes between two Steps, against one whose does not.

`python -m tests.system.sleeping_engine MODEL DTYPE RANKS RANK FOLDER DEVICE`: prints what it saw as JSON. On a CPU the
driver's part is played: storages are given up and taken again as on a GPU, page-locking and numbers are not real.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from services.common.errors import Overloaded
from services.common.weights.digest import add_digests, digest_with_torch
from services.learner import device_memory
from services.learner.config import OptimizerConfig
from services.learner.device_memory import TAGS, DeviceMemory
from services.learner.policy_model import layout_of, load_policy_model
from services.learner.stepping import StepRunner
from services.learner.zero_engine import join_distributed, make_zero_engine
from tests.unit.learner.batches import make_batch, make_header

WEIGHTS, OPTIMIZER = TAGS


def main() -> None:
    model, dtype, ranks, rank, folder, kind = sys.argv[1:]
    device = torch.device(kind, int(rank)) if kind == "cuda" else torch.device("cpu")
    if kind == "cpu":
        play_the_driver()
    else:
        torch.cuda.set_device(device)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks)
    backend = "nccl" if kind == "cuda" else "gloo"
    rendezvous = f"file://{Path(folder) / 'rendezvous'}"
    dist.init_process_group(backend, init_method=rendezvous, rank=int(rank), world_size=int(ranks))
    join_distributed(backend)
    seen = {"slept": run(model, dtype, int(ranks), int(rank), device, sleeping=True)}
    seen["awake"] = run(model, dtype, int(ranks), int(rank), device, sleeping=False)
    print(json.dumps(seen), flush=True)
    os._exit(0)  # NCCL and DeepSpeed take seconds to leave


def run(model: str, dtype: str, ranks: int, rank: int, device: torch.device, *, sleeping: bool) -> dict:
    policy = load_policy_model(model, dtype, gradient_checkpointing=False, device=device)
    options = OptimizerConfig.model_validate({"learning_rate": 1e-3})
    engine = make_zero_engine(policy, options, dtype, ranks, device)
    layout = layout_of(policy.model, 64)
    steps = StepRunner(engine, options, rank=rank, ranks=ranks, device=device, token_budget=64, layout=layout)
    batch = make_batch(policy.model.config.vocab_size)

    def step(number: int) -> list[float]:
        metrics = steps.run(make_header(number, batch), batch, lambda phase, done, of: None).updates[0]
        return [metrics.loss, metrics.gradient_norm, metrics.entropy, metrics.ratio_max]

    found: dict = {"metrics": [step(1)]}
    if sleeping:
        memory = DeviceMemory(engine, device)
        found |= sleep_and_wake(memory, policy, device)
    found["metrics"] += [step(2), step(3)]
    if sleeping:
        memory.sleep(TAGS)
        memory.wake(TAGS)
    found["metrics"].append(step(4))
    slices = [p.ds_tensor.detach().cpu().view(torch.uint8).numpy().tobytes() for p in policy.parameters()]
    found["weights"] = hashlib.sha256(b"".join(slices)).hexdigest()
    return found


def sleep_and_wake(memory: DeviceMemory, policy: torch.nn.Module, device: torch.device) -> dict:
    """Each tag apart, both together, one that does not fit; what each held and where it was."""
    before = {part.tag: part.bytes for part in memory.held().held}
    parameter = next(iter(policy.parameters()))
    change = memory.sleep([OPTIMIZER])
    told = {"held": [before[WEIGHTS], before[OPTIMIZER]], "optimizer_bytes": change.tag_bytes}
    assert parameter.ds_tensor.untyped_storage().nbytes() > 0
    told["asleep"] = [part.bytes for part in memory.held().held]
    memory.sleep([OPTIMIZER, WEIGHTS])  # the first sleeps already
    assert parameter.ds_tensor.untyped_storage().nbytes() == 0
    memory.wake([WEIGHTS])
    assert parameter.ds_tensor.untyped_storage().nbytes() > 0
    memory.wake([WEIGHTS, OPTIMIZER])
    memory.sleep(TAGS)
    with too_little_memory(device):
        try:
            memory.wake(TAGS)
        except Overloaded as error:
            told["overloaded"] = str(error)
    assert parameter.ds_tensor.untyped_storage().nbytes() == 0
    memory.wake(TAGS)
    told["arenas"] = {str(tag): arena.bytes.numel() for tag, arena in memory._arenas.items()}
    assert {part.tag: part.bytes for part in memory.held().held} == before
    return told


@contextmanager
def too_little_memory(device: torch.device) -> Iterator[None]:
    """Somebody else holds what is free; on a CPU the fourth allocation fails."""
    if device.type == "cuda":
        others: list[torch.Tensor] = []
        for size in (1 << 30, 1 << 26, 1 << 21, 1 << 18):
            with suppress(torch.OutOfMemoryError):
                while True:
                    others.append(torch.empty(size, dtype=torch.uint8, device=device))
        yield
        others.clear()
        torch.cuda.empty_cache()
        return
    usual, left = torch.UntypedStorage.resize_, 3

    def resize(storage: torch.UntypedStorage, size: int) -> None:
        nonlocal left
        left -= size > 0
        if left < 0 < size:
            raise torch.OutOfMemoryError("CUDA out of memory")
        usual(storage, size)

    torch.UntypedStorage.resize_ = resize
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = usual


def play_the_driver() -> None:
    cuda = torch.cuda
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    cuda.mem_get_info = lambda *_: (7, 70)
    cuda.memory_reserved = cuda.memory_allocated = lambda *_: 5
    cuda.get_device_properties = lambda *_: SimpleNamespace(uuid="played")
    success = SimpleNamespace(success=0)
    cuda.cudart = lambda: SimpleNamespace(
        cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0, cudaError=success
    )
    device_memory.RunningDigest = TorchDigest


class TorchDigest:
    """The digest without numpy, which fixes the size of any storage that it has seen."""

    def __init__(self, device: torch.device) -> None:
        self._sum = 0

    def add(self, name: str, slice_flat: torch.Tensor, start: int) -> None:
        self._sum = add_digests(self._sum, digest_with_torch(name, slice_flat, start))

    def value(self) -> int:
        return self._sum


if __name__ == "__main__":
    main()
