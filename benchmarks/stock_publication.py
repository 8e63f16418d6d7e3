"""vLLM's own sender and receiver, for comparison: packed, and one call per tensor; printed as one JSON line.

    python -m benchmarks.stock_publication FOLDER DTYPE PUSHES GO

Run by benchmarks/publication.py in a process of its own, while that starts its services; it begins when the file GO is
there, so that the two never measure at the same time. A plain model with random weights on GPU 0, vLLM with dummy
weights on GPU 1, vLLM's trainer half between them, as its documentation has it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

GPU_OF_MODEL, GPU_OF_ENGINE = "0", "1"
GO_SECONDS = 240.0


class Client:
    """vLLM's control calls, in process, with a clock around `update_weights`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.update_seconds: list[float] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        begin = time.monotonic()
        self._llm.update_weights({"update_info": update_info})
        self.update_seconds.append(time.monotonic() - begin)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update()


def main() -> None:
    folder, dtype, pushes, go = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    os.environ["CUDA_VISIBLE_DEVICES"] = GPU_OF_ENGINE
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    llm = LLM(
        model=folder,
        dtype=dtype,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=2048,
        kv_cache_memory_bytes=2 * 2**30,
        skip_tokenizer_init=True,
        weight_transfer_config=WeightTransferConfig(backend="nccl"),
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = GPU_OF_MODEL  # the engine core is a process of its own, and is up

    import torch
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    from benchmarks.random_model import random_model

    model = random_model(folder, dtype, torch.device("cuda", 0), seed=1)
    end = time.monotonic() + GO_SECONDS
    while not go.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{go} did not come within {GO_SECONDS:.0f} s")
        time.sleep(0.05)
    result: dict[str, Any] = {"bytes": sum(p.numel() * p.element_size() for p in model.parameters())}
    for name, packed in (("packed", True), ("per_tensor", False)):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        client = Client(llm)
        info = NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=port, world_size=2, packed=packed)
        sender = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=ModuleSource(model))
        whole: list[float] = []
        for _ in range(pushes):
            torch.cuda.synchronize()
            begin = time.monotonic()
            sender.send_weights()
            whole.append(time.monotonic() - begin)
        result[name] = {"update_call_seconds": client.update_seconds, "whole_seconds": whole}
        sender.shutdown()
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)  # vLLM's engine core ends with this process


if __name__ == "__main__":
    main()
