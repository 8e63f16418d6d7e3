"""Settings of the rollout service, and the environment its process needs. Imports no heavy library."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Literal

import pydantic

from services.common.config import Config
from services.common.errors import ConfigError
from services.rollout.gpus import engine_gpus


class RolloutConfig(Config):
    """How one engine samples."""

    engine: Literal["auto", "vllm", "transformers"] = pydantic.Field(
        "auto", description="auto: vLLM where it is installed, else transformers, which is embedded and needs no GPU"
    )
    determinism: Literal["none", "exact"] = pydantic.Field(
        "none", description="exact: a sample is bit for bit the same whatever else is sampled, and on every replica"
    )
    batching: Literal["alone", "continuous"] | None = pydantic.Field(
        None,
        description="of the transformers engine: each request alone, or all that run in one batch, which is "
        "faster; none: alone where determinism is exact or the model needs it",
    )
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
    prefix_cache: bool | None = pydantic.Field(
        None, description="siblings share the keys and values of their prompt; none: unless determinism is exact"
    )
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

    @property
    def shares_prefixes(self) -> bool:
        """What `prefix_cache` comes to."""
        return self.determinism == "none" if self.prefix_cache is None else self.prefix_cache

    @pydantic.model_validator(mode="after")
    def _exact_is_possible(self) -> RolloutConfig:
        if self.determinism == "exact" and self.prefix_cache:
            raise ValueError("determinism: exact needs prefix_cache: false; a prompt computed in parts has other bits")
        if self.determinism == "exact" and self.batching == "continuous":
            raise ValueError("determinism: exact needs batching: alone; in a batch a request has other bits")
        return self


def chosen_engine(settings: RolloutConfig) -> Literal["vllm", "transformers"]:
    """The engine that these settings mean on this machine.

    Raises ConfigError where they cannot be had together, saying what to change. Imports neither.
    """
    installed = importlib.util.find_spec("vllm") is not None
    exact = settings.determinism == "exact"
    if settings.engine == "auto":
        # vLLM gives a request the same bits alone and in a batch on GPUs only.
        by_vllm = installed and settings.batching is None and not (exact and not engine_gpus())
    else:
        by_vllm = settings.engine == "vllm"
    problems = _vllm_problems(settings, installed) if by_vllm else _transformers_problems(settings)
    if problems:
        raise ConfigError("rollout: " + "; ".join(problems))
    return "vllm" if by_vllm else "transformers"


def _vllm_problems(settings: RolloutConfig, installed: bool) -> list[str]:
    problems = []
    if not installed:
        problems.append("engine: vllm is not installed here; install it, or set engine: transformers")
    if settings.batching is not None:
        problems.append(
            f"batching: {settings.batching} is of the transformers engine, vLLM batches by itself; leave it out"
        )
    if settings.determinism == "exact" and installed and not engine_gpus():
        problems.append(
            "determinism: exact is not possible with vLLM on CPU, where a batch has other bits; set engine: "
            "transformers, or determinism: none"
        )
    return problems


def _transformers_problems(settings: RolloutConfig) -> list[str]:
    problems = []
    if settings.tensor_parallel > 1:
        problems.append(
            f"tensor_parallel: {settings.tensor_parallel}, and the transformers engine is one process; set 1, or "
            "engine: vllm"
        )
    if settings.gpus is not None:
        problems.append(
            f"gpus: {list(settings.gpus)}, and the transformers engine computes on CPU; remove it, or set engine: vllm"
        )
    return problems


def environment(settings: RolloutConfig) -> dict[str, str]:
    """Variables that the engine needs before it is imported, on GPUs or on CPU, by what is there; others stay as they
    are.

    The engine sets them itself for its child process. A launcher that sets them for the service's process, too, makes
    them visible in one place. Raises ConfigError as `chosen_engine` does.
    """
    variables = {
        "HF_HUB_OFFLINE": "1",  # the model is a local folder
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.threads is not None:
        variables["OMP_NUM_THREADS"] = str(settings.threads)
    if chosen_engine(settings) == "vllm":
        variables |= _vllm_environment(settings)
        if engine_gpus():
            return variables
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():  # with GNU's OpenMP fp32 decoding takes up to twice as long
        preloaded = [part for part in os.environ.get("LD_PRELOAD", "").split(":") if part and part != str(openmp)]
        variables["LD_PRELOAD"] = ":".join([str(openmp), *preloaded])
    return variables


def _vllm_environment(settings: RolloutConfig) -> dict[str, str]:
    variables = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy gRPC's threads half-way
        "VLLM_NO_USAGE_STATS": "1",
    }
    if engine_gpus():
        # The same kernels in the same order for a request, whatever is in the batch with it.
        return variables | ({"VLLM_BATCH_INVARIANT": "1"} if settings.determinism == "exact" else {})
    variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the learner's ranks use the same cores at other times
    variables["TORCH_COMPILE_DISABLE"] = "1"  # else the first batch waits 15 s for a compiler
    if settings.tensor_parallel == 1:
        # The engine core is a child in any case; 0 keeps its worker inside it instead of a third process.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return variables
