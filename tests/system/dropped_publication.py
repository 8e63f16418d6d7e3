"""A coordinator that claims to publish and does not, for tests/system/test_learns.py: started in place of the real one.

Version 0 is published, so that the engines serve. Every later version only seems to be: no RPC is made, and what the
engines go on sampling with version 0 is relabelled, so that no check downstream sees it. The policy that is trained
then never reaches the engines, which is what the test must notice by its effect.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator

from antiphon.rollout.v1 import rollout_pb2
from antiphon.types.v1 import policy_pb2, trajectory_pb2

from services.common.worker import main
from services.coordinator import run
from services.coordinator.__main__ import build
from services.coordinator.clients import OnProgress, RolloutClient
from services.coordinator.config import CoordinatorConfig
from services.coordinator.publication import Publication, Published


class DroppedPublication(Publication):
    """Sends version 0 alone."""

    async def publish(self, version: int, on_progress: OnProgress | None = None) -> Published:
        if version == 0:
            return await super().publish(version, on_progress)
        policy = policy_pb2.Policy(version=version, digest=version)
        return Published(
            policy,
            engines=1,
            bytes=0,
            transfer_seconds=0.0,
            load_seconds=0.0,
            probe_seconds=0.0,
            pause_seconds=0.0,
            extra_bytes=0,
            probe_difference=0.0,
        )


_generate = RolloutClient.generate


async def _generate_with_version_0(
    self: RolloutClient, request: rollout_pb2.GenerateRequest, seconds: float
) -> AsyncGenerator[trajectory_pb2.Trajectory, None]:
    claimed = request.policy_version
    asked = rollout_pb2.GenerateRequest()
    asked.CopyFrom(request)
    asked.policy_version = 0
    async for trajectory in _generate(self, asked, seconds):
        for span in trajectory.version_spans:
            span.policy_version = claimed
        yield trajectory


if __name__ == "__main__":
    run.Publication = DroppedPublication  # type: ignore[misc]
    RolloutClient.generate = _generate_with_version_0  # type: ignore[method-assign]
    sys.exit(main("services.coordinator", CoordinatorConfig, build))
