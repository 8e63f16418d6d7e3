"""Prompts and the data sets they are in."""

from __future__ import annotations

from dataclasses import dataclass

from services.coordinator.chat_template import Message


@dataclass(frozen=True)
class Prompt:
    """One row, ready to be sampled from. Example: row 0 of line 1, "What is 2 + 3?", 12 token ids, reference "5"."""

    row: int
    """Its number in the data set, rows that were left out included."""
    messages: tuple[Message, ...]
    """The conversation; empty when the prompt is plain text."""
    text: str
    """The rendered prompt, special tokens included."""
    token_ids: tuple[int, ...]
    reference: str
    columns_json: str
    """Every column that is no part of the prompt, as one JSON object; not `reference`, which is above."""


@dataclass(frozen=True)
class LeftOut:
    """A row that is no prompt of the run."""

    row: int
    place: str
    reason: str


@dataclass(frozen=True)
class Dataset:
    """The prompts of one data set, in the order of their rows."""

    name: str
    prompts: tuple[Prompt, ...]
    weight: float = 1.0
    """Its share of the prompts that a run visits, relative to other data sets."""
    picked: str = ""
    """How many rows there are and which column is what, for the user."""
    left_out: tuple[LeftOut, ...] = ()
    remarks: tuple[str, ...] = ()
    """What is allowed and may not be meant."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.token_ids) for prompt in self.prompts)
