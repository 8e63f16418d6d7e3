"""What one rank can do. `rank_main` drives it; services/learner/deepspeed_trainer.py is the one that trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from antiphon.learner.v1 import learner_pb2, ranks_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import chat_pb2, grant_pb2, transfer_pb2

Report = Callable[[str, int, int], None]
"""report(phase, done, of)"""


class Trainer(Protocol):
    """Every rank is given the same commands in the same order and takes part in the collectives of each.

    Answers with data come from rank 0; the other ranks return None or an empty list. An error of
    services/common/errors.py leaves the rank able to go on, and every rank must come to the end of that command; any
    other exception means that the rank is lost.
    """

    def hello(self) -> ranks_pb2.RankHello:
        """What the parent needs to know of it."""
        ...

    def forward(self, work: ranks_pb2.RankForward, report: Report) -> list[learner_pb2.ForwardResponse]:
        """Log-probs of every token of each sequence; nothing changes."""
        ...

    def train_step(self, work: ranks_pb2.RankTrainStep, report: Report) -> learner_pb2.StepResult | None:
        """Applies a checked Step; the weights are those of version `step_id` afterwards.

        A dry run computes the largest micro-batch of each Update and changes nothing; every rank answers it, each with
        its own peak of memory.
        """
        ...

    def encode(self, work: ranks_pb2.RankEncode) -> list[chat_pb2.TokenIds]:
        """Token ids of conversations, rendered for generation."""
        ...

    def join_transfer(self, request: learner_pb2.JoinTransferRequest) -> transfer_pb2.TransferManifest | None:
        """Leaves the transfer group there was; rank 0 binds a store and describes the weights."""
        ...

    def connect_transfer(self, work: ranks_pb2.RankConnectTransfer) -> None:
        """Waits for the receivers and warms the group. Runs in a thread of its own, beside other commands."""
        ...

    def publish(self, request: learner_pb2.PublishRequest, report: Report) -> learner_pb2.PublishResult | None:
        """Sends the weights over the connected group."""
        ...

    def export(self, request: learner_pb2.ExportRequest, report: Report) -> learner_pb2.ExportResult | None:
        """Writes a Hugging Face folder."""
        ...

    def save(self, work: ranks_pb2.RankSave, report: Report) -> ranks_pb2.RankSaved:
        """Writes this rank's share of a checkpoint. Raises Unavailable when the disk is full or refuses."""
        ...

    def check_load(self, work: ranks_pb2.RankCheckLoad, report: Report) -> None:
        """Raises InvalidRequest unless this rank's share of the files is whole and of this model. Nothing changes."""
        ...

    def load(self, work: ranks_pb2.RankLoad, report: Report) -> ranks_pb2.RankLoaded:
        """Takes over a checkpoint that every rank has checked. An error in the middle means that the rank is lost."""
        ...

    def sleep(self, tags: Sequence[grant_pb2.MemoryTag]) -> ranks_pb2.RankMemoryChange | None:
        """Gives the memory of these tags back; each rank measures its own GPU. None where there is no GPU."""
        ...

    def wake(self, tags: Sequence[grant_pb2.MemoryTag]) -> ranks_pb2.RankMemoryChange | None:
        """Takes it again, with what was in it. Raises Overloaded, and has taken nothing, when it does not fit."""
        ...

    def memory(self) -> tenant_pb2.DeviceMemory | None:
        """What this rank's GPU holds now. Runs in a thread of its own, beside other commands."""
        ...
