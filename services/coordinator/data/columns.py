"""Which column holds what: by the names that others use, or by `columns`. Ambiguity is refused, never guessed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import ConfigError
from services.coordinator.config import FOUND, ColumnsConfig
from services.coordinator.data.rows import Row

# Our own name first: where it is there it is meant. Of the others exactly one may be there. The names are those of TRL,
# verl, SkyRL, OpenRLHF, verifiers, LLaMA-Factory (alpaca, sharegpt), NeMo-RL, GSM8K, MATH.
PROMPTS = ("prompt", "question", "problem", "messages", "conversations", "instruction", "input")
REFERENCES = (
    "reference",
    "answer",
    "solution",
    "ground_truth",
    "label",
    "reward_model.ground_truth",
    "reward_spec.ground_truth",
)
OWN_REFERENCE = REFERENCES[0]
SYSTEMS = ("system", "system_prompt")
TOOLS = ("tools",)
# Conversations of SFT data, whose last message may be the answer; elsewhere that is a mistake.
CONVERSATIONS = ("messages", "conversations")


@dataclass(frozen=True)
class Columns:
    """The columns of one data set. Example: prompt "question", reference "answer", the others None."""

    prompt: str
    reference: str | None
    """None: the last answer of the conversation when `last_answer`, else nothing."""
    system: str | None = None
    tools: str | None = None
    input: str | None = None
    """alpaca: what the instruction is about, written below it."""
    history: str | None = None
    """alpaca: earlier [question, answer] pairs."""
    last_answer: bool = False
    unused: tuple[str, ...] = ()
    """Columns that others use for the same, and that are not used here."""

    @property
    def taken(self) -> set[str]:
        """Columns that scorers do not get by name. They get a reference of another name, too: reward functions made for
        such data ask for it. One inside of another leaves that one to them.
        """
        named = (self.prompt, self.system, self.tools, self.input, self.history, OWN_REFERENCE)
        return {name for name in named if name is not None}

    def describe(self) -> str:
        """For the user: what was picked."""
        prompt = f"{self.prompt!r} and {self.input!r}" if self.input else repr(self.prompt)
        reference = "the last answer" if self.last_answer else repr(self.reference) if self.reference else "nothing"
        parts = [f"prompt from {prompt}", f"reference from {reference}"]
        others = {"system": self.system, "tools": self.tools, "history": self.history}
        parts += [f"{role} from {column!r}" for role, column in others.items() if column]
        if self.unused:
            parts.append(f"not used for these: {', '.join(map(repr, self.unused))}")
        return ", ".join(parts)


def pick(rows: Sequence[Row], config: ColumnsConfig, where: str) -> Columns:
    """The columns of a data set; one counts as there when some row has a value in it. Raises ConfigError."""
    readable = [row for row in rows if not row.problem]
    if not readable:
        raise ConfigError(f"{where}: not one of {len(rows)} row(s) can be read; {rows[0].place}: {rows[0].problem}")
    there = _There(readable, where)
    prompt = there.one("prompt", config.prompt, PROMPTS)
    if prompt is None:
        raise ConfigError(
            f"{where}: no column holds a prompt; expected one of {', '.join(PROMPTS)}, found {there.listed}; name it "
            "by columns: {prompt: …}"
        )
    alpaca = config.prompt == FOUND and prompt == "instruction"
    conversation = config.reference == FOUND and prompt in CONVERSATIONS
    reference = there.one("reference", config.reference, REFERENCES)
    if reference is None and config.reference is not None and not conversation:
        raise ConfigError(
            f"{where}: no column holds a reference; expected one of {', '.join(REFERENCES)}, found {there.listed}; "
            "name it by columns: {reference: …}, or say that no row has one by columns: {reference: null}"
        )
    joined = alpaca and "input" in there.filled
    picked = {prompt, reference, "input" if joined else None}
    return Columns(
        prompt,
        reference,
        system=there.one("system", config.system, SYSTEMS),
        tools=there.one("tools", config.tools, TOOLS),
        input="input" if joined else None,
        history="history" if alpaca and "history" in there.filled else None,
        last_answer=conversation and reference is None,
        unused=tuple(name for name in (*PROMPTS, *REFERENCES) if name in there.filled and name not in picked),
    )


def value_of(columns: Mapping[str, Any], name: str) -> Any:
    """A column's value; a.b is b inside of a, which may be an object or JSON text. None where there is none."""
    if name in columns or "." not in name:
        return columns.get(name)
    outer, _, inner = name.partition(".")
    value = columns.get(outer)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value_of(value, inner) if isinstance(value, Mapping) else None


class _There:
    """What columns there are: their names in order of appearance, and those that some row fills."""

    def __init__(self, rows: Sequence[Row], where: str) -> None:
        self._where = where
        names: dict[str, None] = {}
        self.filled: set[str] = set()
        nested = [name for name in REFERENCES if "." in name]
        for row in rows:
            names.update(dict.fromkeys(row.columns))
            self.filled.update(name for name, value in row.columns.items() if value is not None)
            for name in nested:
                if name not in self.filled and value_of(row.columns, name) is not None:
                    self.filled.add(name)
        self._names = list(names)
        self.listed = ", ".join(map(repr, names)) or "no column"

    def one(self, role: str, wanted: str | None, candidates: Sequence[str]) -> str | None:
        """The column of a role, None where there is none. Raises ConfigError when several, or none of that name."""
        if wanted is None:
            return None
        if wanted != FOUND:
            if wanted in self._names or wanted.partition(".")[0] in self._names:
                return wanted
            near = difflib.get_close_matches(wanted, self._names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"{self._where}: columns.{role}: no column {wanted!r}; {hint}there is {self.listed}")
        there = [name for name in candidates if name in self.filled]
        if len(there) <= 1 or there[0] == candidates[0] or there == ["instruction", "input"]:
            return there[0] if there else None
        raise ConfigError(
            f"{self._where}: {', '.join(map(repr, there))} may each hold the {role}; choose by columns: "
            f"{{{role}: {there[0]}}}"
        )
