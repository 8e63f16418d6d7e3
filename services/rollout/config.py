"""Settings of the rollout service, and the environment its process needs. Imports no heavy library."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

import pydantic

from services.common.config import Config
from services.rollout.gpus import engine_gpus


class RolloutConfig(Config):
    """How one engine samples."""

    engine: Literal["vllm"] = "vllm"
    max_sequence_tokens: int = pydantic.Field(
        2048, ge=2, description="prompt and answer together; a model whose own limit is lower has the last word"
    )
    max_running: int = pydantic.Field(64, ge=1, description="sequences that the engine decodes at a time")
    max_outstanding: int = pydantic.Field(
        8192, ge=1, description="trajectories asked for and not finished, held ones included; more is Overloaded"
    )
    hold_trajectories: int = pydantic.Field(
        65536, ge=1, description="trajectories being sampled, or finished and not acknowledged; more is Overloaded"
    )
    hold_mib: int = pydantic.Field(
        1024,
        ge=1,
        description="memory of those, MiB: nine bytes a token, and what is asked for counts as if it were "
        "sampled to its limit",
    )
    hold_seconds: float = pydantic.Field(
        3600.0,
        gt=0,
        description="a call whose finished trajectories nobody asked for again or acknowledged for so "
        "long is forgotten",
    )
    kv_cache_gib: float = pydantic.Field(1.0, gt=0, description="memory for keys and values, GiB, of each GPU")
    prefix_cache: bool = pydantic.Field(True, description="siblings share the keys and values of their prompt")
    tensor_parallel: int = pydantic.Field(1, ge=1, description="GPUs that share the model")
    gpus: tuple[int, ...] | None = pydantic.Field(
        None, description="GPUs of the host that the launcher gives to the engines, tensor_parallel to each; none: all"
    )
    eager: bool = pydantic.Field(False, description="on GPUs: without CUDA graphs; up sooner, slower afterwards")
    threads: int | None = pydantic.Field(None, ge=1, description="CPU threads of the engine; none: all cores")
    grant_seconds: float = pydantic.Field(
        1800.0, gt=0, description="where GPUs are shared, longest wait for the grant under which the engine starts"
    )
    join_seconds: float = pydantic.Field(120.0, gt=0, description="longest wait for all members of a transfer group")
    commit_seconds: float = pydantic.Field(
        60.0, gt=0, description="an update that has arrived and is not committed within this time is given up"
    )
    probe_seconds: float = pydantic.Field(60.0, gt=0, description="longest wait for the probe after new weights")


def environment(settings: RolloutConfig) -> dict[str, str]:
    """Variables that vLLM needs before it is imported, on GPUs or on CPU, by what is there; others stay as they are.

    The engine sets them itself for its child process. A launcher that sets them for the service's process, too, makes
    them visible in one place.
    """
    variables = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy gRPC's threads half-way
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a local folder
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.threads is not None:
        variables["OMP_NUM_THREADS"] = str(settings.threads)
    if engine_gpus():
        return variables
    variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the learner's ranks use the same cores at other times
    variables["TORCH_COMPILE_DISABLE"] = "1"  # else the first batch waits 15 s for a compiler
    if settings.tensor_parallel == 1:
        # The engine core is a child in any case; 0 keeps its worker inside it instead of a third process.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():  # with GNU's OpenMP fp32 decoding takes up to twice as long
        preloaded = [part for part in os.environ.get("LD_PRELOAD", "").split(":") if part and part != str(openmp)]
        variables["LD_PRELOAD"] = ":".join([str(openmp), *preloaded])
    return variables
