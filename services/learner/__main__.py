"""The learner's process: `python -m services.learner --config FILE`. The parent; torch is in its children only."""

from __future__ import annotations

import sys

from antiphon.events.v1 import events_pb2
from antiphon.learner.v1 import learner_pb2, learner_pb2_grpc
from antiphon.tenant.v1 import tenant_pb2, tenant_pb2_grpc

from services.common.config import ProcessConfig
from services.common.worker import DRAIN_SECONDS, Worker, main
from services.learner.config import LearnerConfig
from services.learner.process import LearnerProcess
from services.learner.ranks import RANK_MODULE
from services.learner.service import LearnerServicer, TenantServicer


async def build(process: ProcessConfig[LearnerConfig], rank_module: str = RANK_MODULE) -> Worker:
    parent = LearnerProcess(process, rank_module)
    worker = Worker(
        process.service,
        events_pb2.WORKER_KIND_LEARNER,
        health_check=parent.health_check,
        describe=parent.fill_in,
        on_drain=parent.drain,
        drain_seconds=process.settings.save_grace_seconds + DRAIN_SECONDS,
    )
    parent.on_change = worker.changed
    learner = parent.under(worker.guard)
    worker.server.add(
        learner_pb2_grpc.add_LearnerServiceServicer_to_server,
        LearnerServicer(learner, worker.guard),
        learner_pb2.DESCRIPTOR.services_by_name["LearnerService"].full_name,
    )
    worker.server.add(
        tenant_pb2_grpc.add_TenantServiceServicer_to_server,
        TenantServicer(learner, worker.guard),
        tenant_pb2.DESCRIPTOR.services_by_name["TenantService"].full_name,
    )
    worker.beside("ranks", parent.run_ranks)
    return worker


if __name__ == "__main__":
    sys.exit(main("services.learner", LearnerConfig, build))
