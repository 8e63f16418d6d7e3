"""A NATS server, and simulations on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NatsServer
from tests.contract.coordinator.coordinator_setup import Setup
from tests.simulated.services import simulated_services


@pytest.fixture
async def make_setup(
    tmp_path: Path, nats: NatsServer, request: pytest.FixtureRequest
) -> AsyncIterator[Callable[..., Any]]:
    stack = []

    async def make(rollouts: int = 1, **states: Any) -> Setup:
        run_id = f"run-{abs(hash(request.node.nodeid)) % 10**9}-{len(stack)}"
        services = simulated_services(nats.url, run_id, rollouts=rollouts, **states)
        simulation = await services.__aenter__()
        stack.append(services)
        return Setup(tmp_path, nats, run_id, simulation)

    yield make
    for services in stack:
        await services.__aexit__(None, None, None)


@pytest.fixture
async def setup(make_setup: Callable[..., Any]) -> Setup:
    made: Setup = await make_setup()
    return made
