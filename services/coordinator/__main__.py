"""`python -m services.coordinator --config FILE`: one process, one run; ends when the run has ended and was told."""

from __future__ import annotations

import sys

from antiphon.coordinator.v1 import coordinator_pb2_grpc
from antiphon.events.v1 import events_pb2

from services.common.announcements import Registry
from services.common.config import ProcessConfig, ServiceConfig
from services.common.worker import Worker, main
from services.coordinator.config import CoordinatorConfig
from services.coordinator.run import Run
from services.coordinator.service import FULL_NAME, CoordinatorServicer

# So long somebody has to come and hear how the run ended.
TELL_SECONDS = 10.0


async def build(process: ProcessConfig[CoordinatorConfig]) -> Worker:
    return serve(process.service, Run(process))


def serve(service: ServiceConfig, run: Run) -> Worker:
    """The worker around a run; it ends when the run has ended and was told."""
    worker = Worker(
        service,
        events_pb2.WORKER_KIND_COORDINATOR,
        describe=run.describe,
        on_drain=run.drain,
        drain_seconds=run.drain_seconds,
    )
    worker.server.add(
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, CoordinatorServicer(run), FULL_NAME
    )

    async def live() -> None:
        well = await run.run(Registry(worker.bus, service.run_id))
        await run.events.wait_until_told(TELL_SECONDS)
        worker.stop(0 if well else 1)

    worker.beside("run", live)
    return worker


if __name__ == "__main__":
    sys.exit(main("services.coordinator", CoordinatorConfig, build))
