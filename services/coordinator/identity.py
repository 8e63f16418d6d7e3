"""Names of prompts and trajectories. Their tuple order is the canonical order of a Batch (docs/design.md §1, law 3)."""

from __future__ import annotations

from typing import NamedTuple

from antiphon.types.v1 import trajectory_pb2


class PromptKey(NamedTuple):
    """A task input of the run; a row is a new prompt in each epoch. Example: ("train", 0, 17), written train/0/17."""

    dataset: str
    epoch: int
    row: int

    @classmethod
    def of(cls, message: trajectory_pb2.PromptId) -> PromptKey:
        return cls(message.dataset, message.epoch, message.row)

    def message(self) -> trajectory_pb2.PromptId:
        return trajectory_pb2.PromptId(dataset=self.dataset, row=self.row, epoch=self.epoch)

    def __str__(self) -> str:
        return f"{self.dataset}/{self.epoch}/{self.row}"


class TrajectoryKey(NamedTuple):
    """One attempt at a prompt. Example: train/0/17/3."""

    prompt: PromptKey
    sample: int

    def __str__(self) -> str:
        return f"{self.prompt}/{self.sample}"
