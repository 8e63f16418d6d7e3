"""The reference model's settings with nothing left open, and what its folder must have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.common.config import ModelConfig, ServiceConfig
from services.common.errors import ConfigError
from services.reward.config import ReferenceConfig

NEEDED = ("config.json", "tokenizer.json")


@dataclass(frozen=True)
class ReferenceSettings:
    """See ReferenceConfig."""

    path: str
    dtype: str
    device: str
    micro_batch_tokens: int
    max_sequence_tokens: int | None
    threads: int | None
    start_seconds: float
    batch_seconds: float


def settled(config: ReferenceConfig, model: ModelConfig, service: ServiceConfig) -> ReferenceSettings:
    """Raises ConfigError for a folder that cannot be a model, and for a GPU that others take turns with."""
    if service.shares_gpus and config.device != "cpu":
        raise ConfigError(
            "reward.reference: this worker shares its GPUs, and a reference model gives its memory to nobody else: "
            "take reference.device=cpu, or a GPU of its own"
        )
    path = config.path or model.path
    folder = Path(path)
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        there = "no such folder" if not folder.is_dir() else f"has no {', '.join(missing)}"
        raise ConfigError(f"reward.reference.path: {path}: {there}; expected a Hugging Face model folder")
    values = config.model_dump(exclude={"path", "dtype"})
    return ReferenceSettings(path=path, dtype=config.dtype or model.dtype, **values)
