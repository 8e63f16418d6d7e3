"""How vLLM is started: its settings on CPU, its environment, and a child that dies with this process."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.config import ProcessConfig
from services.common.errors import ConfigError, Unavailable
from services.rollout.child import PARENT_VARIABLE
from services.rollout.config import RolloutConfig, environment

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

TRANSFER_BACKEND = "antiphon"  # vllm_weights.py registers it


async def start_llm(process: ProcessConfig[RolloutConfig]) -> AsyncLLM:
    """Starts vLLM with dummy weights: nothing is served before a publication, which fills every parameter.

    vLLM is imported and built in a thread of its own, so the service answers meanwhile. That thread stays: the engine
    core dies with the thread that made it. Raises ConfigError for a folder that holds no model, Unavailable else.
    """
    max_sequence_tokens = max_sequence_tokens_of(Path(process.model.path), process.settings)
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
            llm, error = _build(process, max_sequence_tokens), None
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
    except Exception as error:
        raise Unavailable(f"vLLM did not start with {process.model.path}: {error!r}") from error


def max_sequence_tokens_of(model: Path, settings: RolloutConfig) -> int:
    """The smaller of the setting and the model's own limit. Raises ConfigError for a folder that holds no model."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {model} is no Hugging Face folder: config.json: {error}") from None
    own = config.get("max_position_embeddings", settings.max_sequence_tokens)
    if own < settings.max_sequence_tokens:
        logger.warning(
            "max_sequence_tokens: %d, the model's own limit, instead of %d", own, settings.max_sequence_tokens
        )
    return min(int(own), settings.max_sequence_tokens)


def _build(process: ProcessConfig[RolloutConfig], max_sequence_tokens: int) -> AsyncLLM:
    """Imports and starts vLLM; the environment is inherited by the child in which the model lives."""
    os.environ.update(environment(process.settings))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ[PARENT_VARIABLE] = str(os.getpid())

    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings = process.settings
    arguments = AsyncEngineArgs(
        model=process.model.path,
        dtype=process.model.dtype,
        load_format="dummy",
        generation_config="vllm",  # the model folder's sampling defaults have no say
        logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
        max_model_len=max_sequence_tokens,
        max_num_seqs=settings.max_running,
        kv_cache_memory_bytes=int(settings.kv_cache_gib * 2**30),
        enable_prefix_caching=settings.prefix_cache,
        enforce_eager=True,
        distributed_executor_backend="uni",
        weight_transfer_config=WeightTransferConfig(backend=TRANSFER_BACKEND),
        worker_extension_cls="services.rollout.vllm_weights.WorkerExtension",
        disable_log_stats=True,
        seed=0,
    )
    main = sys.modules["__main__"]
    own = main.__spec__
    main.__spec__ = importlib.util.find_spec("services.rollout.child")
    try:
        return AsyncLLM.from_engine_args(arguments)
    finally:
        main.__spec__ = own
