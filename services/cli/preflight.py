"""What a recipe asks of this machine and it has not: looked at before anything is started. `plan` does not: it may be
made elsewhere.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from services.cli.doctor import gpu_lines
from services.cli.recipe import Recipe
from services.common.errors import ConfigError
from services.rollout.config import chosen_engine

NATS_PORT = 4222
CONNECT_SECONDS = 3.0


def lacks(recipe: Recipe) -> list[str]:
    """Each with what to do; empty when the services may be started."""
    return [*_engine(recipe), *_gpus(recipe), *_nats(recipe)]


def _engine(recipe: Recipe) -> list[str]:
    try:
        chosen_engine(recipe.rollout)
    except ConfigError as error:
        return [str(error)]
    return []


def _gpus(recipe: Recipe) -> list[str]:
    named = {"learner.gpus": recipe.learner.gpus, "rollout.gpus": recipe.rollout.gpus}
    if not any(named.values()):
        return []
    lines = gpu_lines()
    if lines is None:
        return ["gpus: nvidia-smi fails, so no process sees a GPU; run `antiphon doctor`"]
    found = []
    for key, gpus in named.items():
        missing = sorted({gpu for gpu in gpus or () if not 0 <= gpu < len(lines)})
        if missing:
            there = f"0 to {len(lines) - 1}" if lines else "none"
            found.append(
                f"{key}: {missing}: this machine has {len(lines)} GPU(s), {there}; name those, or remove {key}"
            )
    return found


def _nats(recipe: Recipe) -> list[str]:
    """A server of one's own is to listen already."""
    url = recipe.nats.url
    if url is None:
        return []
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or NATS_PORT
    except ValueError as error:
        return [f"nats.url: {url}: {error}; expected nats://host:port"]
    if host is None:
        return [f"nats.url: {url}: expected nats://host:port"]
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return [
            f"nats.url: nothing listens at {host}:{port} ({error.strerror or error}); start a server there, or remove "
            "nats.url: then one is started for the run"
        ]
    return []
