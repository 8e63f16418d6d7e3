"""A rank without a model, `python -m tests.unit.learner.fake_rank`: it does what the conversations of Encode tell it.

Each message: role = the rank meant, or "all"; content = what it does (see `FakeTrainer.encode`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from antiphon.learner.v1 import learner_pb2, ranks_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import chat_pb2, transfer_pb2

from services.common.errors import InvalidRequest, Overloaded, Unavailable
from services.learner import checkpoint
from services.learner.rank_main import main

HANG_SECONDS = 60.0


class FakeTrainer:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def hello(self):
        return ranks_pb2.RankHello(
            rank=self._rank, pid=os.getpid(), backend="fake", dtype="float32", max_sequence_tokens=10 + self._rank
        )

    def encode(self, work):
        for message in (m for c in work.conversations for m in c.messages):
            if message.role in ("all", str(self._rank)):
                self._do(*message.content.split())
        return [chat_pb2.TokenIds(ids=[100 + self._rank])]

    def _do(self, what: str, *arguments: str) -> None:
        match what:
            case "refuse":
                raise InvalidRequest(f"rank {self._rank} refuses")
            case "raise":
                raise RuntimeError(f"a bug in rank {self._rank}")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(HANG_SECONDS)
            case "sleep":
                time.sleep(float(arguments[0]))
            case "echo":  # what gloo does when a peer is gone
                end = time.monotonic() + HANG_SECONDS
                while os.path.exists(arguments[0]) and time.monotonic() < end:
                    time.sleep(0.005)
                raise RuntimeError("Connection closed by peer")
            case "kill_after":  # makes a file vanish first
                os.unlink(arguments[0])
                time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)

    def forward(self, work, report):
        for done in range(1, 4):
            report(f"rank {self._rank}", done, 3)
        return [learner_pb2.ForwardResponse(id=s.id, logprobs=[self._rank]) for s in work.sequences]

    def train_step(self, work, report):
        return learner_pb2.StepResult(step_id=work.header.step_id) if self._rank == 0 else None

    def join_transfer(self, request):
        return transfer_pb2.TransferManifest(epoch=request.epoch) if self._rank == 0 else None

    def connect_transfer(self, work):
        time.sleep(work.deadline_seconds)
        if work.manifest.epoch == 13:
            raise Unavailable(f"rank {self._rank}: nobody came")

    def publish(self, request, report):
        return learner_pb2.PublishResult() if self._rank == 0 else None

    def save(self, work, report):
        """Goes on when the file `hold` beside the checkpoint is gone."""
        folder = Path(work.folder)
        report("write", 0, 1)
        while (folder.parent / "hold").exists():
            time.sleep(0.01)
        path = folder / f"rank{self._rank}"
        path.write_text("slices")
        return ranks_pb2.RankSaved(files=[checkpoint.described(path, self._rank)])

    def check_load(self, work, report):
        if self._rank == 1 and work.folder == "/torn":
            raise InvalidRequest("rank 1: torn")

    def load(self, work, report):
        return ranks_pb2.RankLoaded(digest=self._rank + 1)

    def sleep(self, tags):
        change = ranks_pb2.RankMemoryChange(tag_bytes=10 + self._rank)
        change.device.uuid = f"GPU-{self._rank}"
        return change

    def wake(self, tags):
        if self._rank == 1:
            raise Overloaded("rank 1 has no room")

    def memory(self):
        return tenant_pb2.DeviceMemory(uuid=f"GPU-{self._rank}")

    def export(self, request, report):
        return learner_pb2.ExportResult(path=request.path) if self._rank == 0 else None


def make_fake_trainer(process, placement):
    if process.model.path == "broken":
        raise InvalidRequest("no such model") if placement.rank == 1 else time.sleep(HANG_SECONDS)
    if process.model.path == "slow":
        time.sleep(HANG_SECONDS)
    return FakeTrainer(placement.rank)


if __name__ == "__main__":
    sys.exit(main(make_fake_trainer))
