"""A real rollout service that writes down what its engine sampled to the end: `tests.faults.counting_engine`.

Each life appends to the file that SAMPLES_LOG names: one line for each finished answer, with its request's id and the
sample's number, and the policy version that was asked for. An update begins slowly: a kill shall find it under way.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os

from services.common.config import ProcessConfig
from services.common.worker import Worker, main
from services.rollout import __main__ as rollout_main
from services.rollout.config import RolloutConfig
from services.rollout.engine import Engine, Sample, SampleRequest
from services.rollout.start import start_engine

BEGIN_SECONDS = 0.3


async def start_counting(process: ProcessConfig[RolloutConfig]) -> Engine:
    engine = await start_engine(process)
    generate, begin_receive = engine.generate, engine.begin_receive

    async def counted(request: SampleRequest) -> Sample:
        sample = await generate(request)
        line = {"id": request.id.rpartition("#")[0], "version": request.policy_version, "pid": os.getpid()}
        _append(json.dumps(line))
        return sample

    async def begun_slowly(*, deadline_seconds: float) -> None:
        await asyncio.sleep(BEGIN_SECONDS)
        await begin_receive(deadline_seconds=deadline_seconds)

    engine.generate, engine.begin_receive = counted, begun_slowly  # type: ignore[method-assign]
    return engine


def _append(line: str) -> None:
    with open(os.environ["SAMPLES_LOG"], "a", encoding="utf-8") as log:
        log.write(line + "\n")


async def build(process: ProcessConfig[RolloutConfig]) -> Worker:
    rollout_main.start_engine = start_counting  # type: ignore[attr-defined]
    return await rollout_main.build(process)


if __name__ == "__main__":
    code = main("tests.faults.counting_engine", RolloutConfig, build)
    logging.shutdown()
    os._exit(code)
