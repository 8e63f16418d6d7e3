"""Starts the engine that the settings mean."""

from __future__ import annotations

from services.common.config import ProcessConfig
from services.rollout.config import RolloutConfig, chosen_engine
from services.rollout.engine import Engine
from services.rollout.transformers_engine import TransformersEngine
from services.rollout.vllm_engine import VllmEngine


async def start_engine(process: ProcessConfig[RolloutConfig]) -> Engine:
    """Raises ConfigError for settings or a model folder that it cannot start with, Unavailable when it does not."""
    if chosen_engine(process.settings) == "vllm":
        return await VllmEngine.start(process)
    return await TransformersEngine.start(process)
