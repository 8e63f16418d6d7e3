"""Rollout workers in the states that tests begin with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.rollout.rollout_client import Client, make_client
from tests.unit.rollout.memory_engine import MemoryEngine


@pytest.fixture
async def stale(tmp_path: Path) -> AsyncIterator[Client]:
    async with make_client(MemoryEngine(), tmp_path) as client:
        yield client


@pytest.fixture
async def ready(stale: Client) -> Client:
    await stale.publish(1, 0)
    return stale


@pytest.fixture
async def on_gpus(tmp_path: Path) -> AsyncIterator[Client]:
    """A worker on two devices, READY with version 0."""
    async with make_client(MemoryEngine(gpus=2), tmp_path) as client:
        await client.publish(1, 0)
        client.guard.told.clear()
        yield client
