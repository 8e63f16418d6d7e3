from __future__ import annotations

import json
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.common.config import ModelConfig, ProcessConfig, ServiceConfig
from services.common.errors import ConfigError
from services.rollout import vllm_start
from services.rollout.config import RolloutConfig
from services.rollout.gpus import Gpu
from services.rollout.vllm_start import memory_share, require_safe, weight_bytes_of, without_expandable_segments

GIB = 2**30


def process_of(folder: Path, **settings: Any) -> ProcessConfig[RolloutConfig]:
    return ProcessConfig[RolloutConfig](
        service=ServiceConfig(run_id="test", worker_id="rollout-0", run_dir=folder, nats_url="nats://127.0.0.1:1"),
        model=ModelConfig(path=str(folder), dtype="bfloat16"),
        settings=RolloutConfig(**settings),
    )


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    header |= {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_weights_are_counted_by_the_headers(tmp_path: Path) -> None:
    assert weight_bytes_of(tmp_path, "bfloat16") == 0
    write_safetensors(tmp_path / "a.safetensors", {"x": [3, 5], "scalar": []})
    write_safetensors(tmp_path / "b.safetensors", {"y": [7]})
    assert weight_bytes_of(tmp_path, "bfloat16") == 2 * (15 + 1 + 7)
    assert weight_bytes_of(tmp_path, "float32") == 4 * (15 + 1 + 7)


def test_the_share_is_what_is_wanted_of_what_there_is(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"x": [GIB]})  # 2 GiB in bf16
    gpu = Gpu(0, "GPU-a", 40 * GIB, 15 * GIB)
    process = process_of(tmp_path, kv_cache_gib=10)
    assert memory_share([gpu], process) == pytest.approx(14 / 40)
    with pytest.raises(ConfigError, match=r"GPU 0 \(GPU-a\): 14\.0 GiB are wanted .* 13\.0 of 40\.0 are free"):
        memory_share([Gpu(0, "GPU-a", 40 * GIB, 13 * GIB)], process)
    with pytest.raises(ConfigError, match="2 GPUs are wanted, 1 are visible"):
        memory_share([gpu], process_of(tmp_path, tensor_parallel=2))
    halves = process_of(tmp_path, kv_cache_gib=10, tensor_parallel=2)
    assert memory_share([gpu, Gpu(1, "GPU-b", 40 * GIB, 13 * GIB)], halves) == pytest.approx(13 / 40)
    with pytest.raises(ConfigError, match="GPU 1"):
        memory_share([gpu, Gpu(1, "GPU-b", 40 * GIB, 12 * GIB)], halves)


async def test_it_does_not_start_with_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(vllm_start, "engine_gpus", lambda: [Gpu(0, "GPU-a", 40 * GIB, GIB)])
    with pytest.raises(ConfigError, match=r"3\.0 GiB are wanted .* 1\.0 of 40\.0 are free"):
        await vllm_start.start_llm(process_of(tmp_path))


def test_expandable_segments_are_taken_out_alone() -> None:
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True, max_split_size_mb:512",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "OTHER": "expandable_segments:True",
    }
    assert without_expandable_segments(environment) == {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512",
        "PYTORCH_ALLOC_CONF": "",
    }
    assert without_expandable_segments({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}) == {}


@pytest.mark.parametrize("value", ["1", "true"])
def test_a_vllm_that_would_unpickle_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="VLLM_ALLOW_INSECURE_SERIALIZATION is set"):
        require_safe({"VLLM_ALLOW_INSECURE_SERIALIZATION": value})
    require_safe({"VLLM_ALLOW_INSECURE_SERIALIZATION": "0"})
    require_safe({})


# As vLLM does with a tensor-parallel engine: the service makes the core, the core makes workers.
SERVICE = """
import importlib.util, multiprocessing, os, sys, time
from services.rollout.child import PARENT_VARIABLE
from tests.unit.rollout.test_rollout_start import core
if __name__ == "__main__":
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("services.rollout.child")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=core, args=(theirs,), daemon=False).start()
    print(os.getpid(), *ours.recv(), flush=True)
    time.sleep(600)
"""


def core(pipe: Any) -> None:
    """Makes a worker, tells both pids, and stays."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=time.sleep, args=(600,))
    process.start()
    pipe.send((os.getpid(), process.pid))
    time.sleep(600)


@pytest.mark.parametrize("victim", [0, 1])
def test_workers_of_the_core_die_with_the_service_and_with_the_core(victim: int, tmp_path: Path) -> None:
    script = tmp_path / "service.py"
    script.write_text(SERVICE)
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'protos'}"}
    service = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert service.stdout is not None
    try:
        pids = [int(word) for word in service.stdout.readline().split()]
        assert len(pids) == 3 and pids[0] == service.pid
        processes = [psutil.Process(pid) for pid in pids]
        os.kill(pids[victim], signal.SIGKILL)
        if victim == 0:
            service.wait(10)
        _, alive = psutil.wait_procs(processes[victim + 1 :], timeout=10)
        assert not alive
    finally:
        service.kill()
        service.wait(10)
        service.stdout.close()
