"""trackio: a local database that `trackio show` displays, or a server of your own (TRACKIO_SERVER_URL)."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from services.coordinator.sinks import Origin


class Trackio:
    """One run there for each run here, whatever its lives."""

    def __init__(self, project: str, origin: Origin) -> None:
        self._run = trackio.init(
            project=project,
            name=origin.run_id,
            config=dict(origin.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, numbers: Mapping[str, float], at: float) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()
