"""Settings of the reward service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from services.common.config import Config


def _whole_number_as_text(value: Any) -> Any:
    """`version: 1` means "1"; a fraction is left to be refused, since YAML reads 1.10 as 1.1."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class FunctionScorer(Config):
    """A Python function in a file of the user's; services/reward/functions.py says how it is called."""

    type: Literal["function"] = "function"
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
    version: Annotated[str | None, pydantic.BeforeValidator(_whole_number_as_text)] = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$",
        description="None: a short digest of the file, so that a changed file is another version",
    )
    path: Path = Field(description="the Python file")
    function: str = "score"
    timeout_seconds: float = Field(10.0, gt=0, description="wall clock for one candidate; then the child is killed")
    memory_mib: int = Field(1024, ge=64, description="address space of each child process (RLIMIT_AS)")
    processes: int = Field(1, ge=1, description="children that score at the same time")
    allow_network: bool = Field(False, description="let the function open sockets other than Unix ones")
    allow_processes: bool = Field(False, description="let the function start processes; they die with the child")
    start_seconds: float = Field(60.0, gt=0, description="for a child to start and import the file")


class RewardConfig(Config):
    """What this worker can score with."""

    scorers: list[FunctionScorer] = Field(min_length=1)

    @pydantic.model_validator(mode="after")
    def _distinct(self) -> RewardConfig:
        seen: set[tuple[str, str | None]] = set()
        for scorer in self.scorers:
            key = (scorer.name, scorer.version)
            if key in seen:
                raise ValueError(f"scorer {scorer.name!r} is listed twice with version {scorer.version!r}")
            seen.add(key)
        return self
