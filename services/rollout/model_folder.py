"""What a model's folder says of it, read without a model library."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from services.common.errors import ConfigError
from services.rollout.config import RolloutConfig

logger = logging.getLogger(__name__)


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
