"""`python -m services.rollout --config FILE`: one rollout worker. Imports no engine; starting it does."""

from __future__ import annotations

import functools
import logging
import os

from antiphon.events.v1 import events_pb2

from services.common.config import ProcessConfig
from services.common.worker import Worker, main
from services.rollout import service
from services.rollout.config import RolloutConfig
from services.rollout.rollout import Rollout
from services.rollout.start import start_engine


async def build(process: ProcessConfig[RolloutConfig]) -> Worker:
    rollout = Rollout(process, start_engine)
    worker = Worker(
        process.service,
        events_pb2.WORKER_KIND_ROLLOUT,
        health_check=rollout.health_check,
        describe=rollout.describe,
        on_drain=rollout.drain,
    )
    rollout.life.on_change = worker.changed
    service.add_to(worker.server, rollout, worker.guard)
    worker.beside("engine", functools.partial(rollout.run, worker.guard))
    return worker


if __name__ == "__main__":
    code = main("services.rollout", RolloutConfig, build)
    logging.shutdown()
    os._exit(code)  # the interpreter takes seconds to unload vLLM, and nothing is left to do
