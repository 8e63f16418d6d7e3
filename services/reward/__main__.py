"""`python -m services.reward --config FILE`: scores candidates until it is told to stop."""

from __future__ import annotations

import sys

from antiphon.events.v1 import events_pb2
from antiphon.reward.v1 import reward_pb2, reward_pb2_grpc

from services.common.config import ProcessConfig
from services.common.worker import Worker, main
from services.reward.assembly import make_reference, make_scorers
from services.reward.config import RewardConfig
from services.reward.readiness import Readiness
from services.reward.service import RewardService

FULL_NAME = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name


async def build(process: ProcessConfig[RewardConfig]) -> Worker:
    log_folder = process.service.run_dir / "logs"
    log_folder.mkdir(parents=True, exist_ok=True)
    scorers = make_scorers(process.settings, log_folder)
    reference = make_reference(process, log_folder)
    readiness = Readiness(scorers, reference)
    worker = Worker(
        process.service,
        events_pb2.WORKER_KIND_REWARD,
        health_check=readiness.check_health,
        describe=readiness.describe,
        on_drain=scorers.close,
    )
    servicer = RewardService(scorers, reference)
    worker.server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, servicer, FULL_NAME)
    if reference is not None:
        reference.process.on_change = worker.changed
        worker.beside("reference model", reference.process.run)
        worker.beside("reference log-probs", reference.run)
    await scorers.start()  # a file that does not import is refused before anything is announced
    return worker


if __name__ == "__main__":
    sys.exit(main("services.reward", RewardConfig, build))
