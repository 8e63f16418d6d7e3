"""A NATS server for the simulated runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import NatsServer


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One for all of them; each run has an id of its own."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()
