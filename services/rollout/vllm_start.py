"""How vLLM is started: its settings on GPUs and on CPU, its environment, and children that die with this process."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.config import ProcessConfig
from services.common.errors import AntiphonError, ConfigError, Unavailable
from services.rollout.child import children_begin_here
from services.rollout.config import RolloutConfig, environment
from services.rollout.gpus import Gpu, engine_gpus
from services.rollout.model_folder import max_sequence_tokens_of

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

TRANSFER_BACKEND = "antiphon"  # vllm_weights.py registers it
GIB = 2**30
WORKSPACE_BYTES = 2 * GIB  # the context, activations and graphs of a small model; a large one takes more


async def start_llm(process: ProcessConfig[RolloutConfig]) -> AsyncLLM:
    """Starts vLLM with dummy weights: nothing is served before a publication, which fills every parameter.

    vLLM is imported and built in a thread of its own, so the service answers meanwhile. That thread stays: the engine
    core dies with the thread that made it. Raises ConfigError for a folder that holds no model and for an environment
    or GPUs that it cannot start with, Unavailable else.
    """
    max_sequence_tokens = max_sequence_tokens_of(Path(process.model.path), process.settings)
    require_safe(os.environ)
    gpus = engine_gpus()
    share = memory_share(gpus, process) if gpus else 0.0
    loop = asyncio.get_running_loop()
    built: asyncio.Future[AsyncLLM] = loop.create_future()

    def settle(llm: AsyncLLM | None, error: BaseException | None) -> None:
        if built.cancelled():
            return
        if llm is not None:
            built.set_result(llm)
        elif error is not None:
            built.set_exception(error)

    def build() -> None:
        try:
            llm, error = _build(process, max_sequence_tokens, share), None
        except BaseException as caught:
            llm, error = None, caught
        try:
            loop.call_soon_threadsafe(settle, llm, error)
        except RuntimeError:  # the loop is closed: the service was stopped meanwhile
            pass
        threading.Event().wait()  # for ever

    threading.Thread(target=build, name="vllm", daemon=True).start()
    try:
        return await built
    except AntiphonError:
        raise
    except Exception as error:
        raise Unavailable(f"vLLM did not start with {process.model.path}: {error!r}") from error


def require_safe(environment: Mapping[str, str]) -> None:
    """Raises ConfigError when vLLM would unpickle what it is sent."""
    if environment.get("VLLM_ALLOW_INSECURE_SERIALIZATION", "0") not in ("", "0"):
        raise ConfigError(
            "VLLM_ALLOW_INSECURE_SERIALIZATION is set: vLLM would unpickle what it is sent. Nothing here needs it; "
            "unset it"
        )


def memory_share(gpus: Sequence[Gpu], process: ProcessConfig[RolloutConfig]) -> float:
    """The share of each GPU that vLLM may fill, from what is free now.

    Raises ConfigError, with numbers, where there are too few GPUs or too little is free on one of them.
    """
    settings = process.settings
    if len(gpus) < settings.tensor_parallel:
        raise ConfigError(f"tensor_parallel: {settings.tensor_parallel} GPUs are wanted, {len(gpus)} are visible")
    weights = weight_bytes_of(Path(process.model.path), process.model.dtype) // settings.tensor_parallel
    kv = int(settings.kv_cache_gib * GIB)
    wanted = kv + weights + WORKSPACE_BYTES
    used = gpus[: settings.tensor_parallel]
    for gpu in used:
        if gpu.free_bytes < wanted:
            raise ConfigError(
                f"GPU {gpu.index} ({gpu.uuid}): {wanted / GIB:.1f} GiB are wanted (keys and values {kv / GIB:.1f}, "
                f"weights {weights / GIB:.1f}, workspaces {WORKSPACE_BYTES / GIB:.1f}), {gpu.free_bytes / GIB:.1f} of "
                f"{gpu.total_bytes / GIB:.1f} are free; lower kv_cache_gib, or start the engine before others fill it"
            )
    return max(wanted / gpu.total_bytes for gpu in used)


def weight_bytes_of(model: Path, dtype: str) -> int:
    """Bytes of the model's weights in `dtype`, by the headers of its safetensors files; 0 where there are none."""
    elements = 0
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        elements += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return elements * {"float32": 4, "bfloat16": 2}[dtype]


def without_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """The allocator's variables that have to change: memory in expandable segments does not go to sleep."""
    changed = {}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        options = [option.strip() for option in environment.get(name, "").split(",") if option.strip()]
        kept = [option for option in options if option.partition(":")[0].strip() != "expandable_segments"]
        if kept != options:
            changed[name] = ",".join(kept)
    return changed


def _build(process: ProcessConfig[RolloutConfig], max_sequence_tokens: int, share: float) -> AsyncLLM:
    """Imports and starts vLLM; the environment is inherited by the children in which the model lives.

    `share` is 0 on CPU.
    """
    settings = process.settings
    os.environ.update(environment(settings))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    sleeps = bool(share) and process.service.shares_gpus
    if sleeps and (changed := without_expandable_segments(os.environ)):
        logger.warning("the engine shares its GPUs: expandable_segments is taken out of %s", ", ".join(changed))
        os.environ.update(changed)

    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    if current_platform.is_cpu() != (share == 0):
        raise ConfigError(
            f"this vLLM computes on {current_platform.device_type}, and the GPUs that this process may use are "
            f"{'none' if share == 0 else 'some'}: see CUDA_VISIBLE_DEVICES, or install the other build of vLLM"
        )
    arguments: dict[str, Any] = {
        "model": process.model.path,
        "dtype": process.model.dtype,
        "load_format": "dummy",
        "generation_config": "vllm",  # the model folder's sampling defaults have no say
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        "max_model_len": max_sequence_tokens,
        "max_num_seqs": settings.max_running,
        "kv_cache_memory_bytes": int(settings.kv_cache_gib * GIB),
        "enable_prefix_caching": settings.shares_prefixes,
        "enforce_eager": settings.eager or share == 0,
        "tensor_parallel_size": settings.tensor_parallel,
        "distributed_executor_backend": "uni" if settings.tensor_parallel == 1 else "mp",
        "weight_transfer_config": WeightTransferConfig(backend=TRANSFER_BACKEND),
        "worker_extension_cls": "services.rollout.vllm_weights.WorkerExtension",
        "disable_log_stats": True,
        "seed": 0,
    }
    if share:
        # vLLM refuses to start unless this share is free; what it fills is kv_cache_memory_bytes.
        arguments |= {"gpu_memory_utilization": share, "enable_sleep_mode": sleeps}
    else:
        # vLLM 0.32 on CPU: a prompt cut in two by the size of a step, and a seed, end the engine core.
        arguments["enable_chunked_prefill"] = False
    with children_begin_here():
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
