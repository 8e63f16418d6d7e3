"""A scorer that is the user's Python function, called in a sandbox."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.reward.v1 import reward_pb2

from services.common.errors import ConfigError, InvalidRequest
from services.reward import config
from services.reward.sandbox import Died, Limits, Program, Refused, Sandbox, TimedOut
from services.reward.scorer import DATA, INFRA, Outcome, failed

REASONS = ("none", "not_finite", "wrong_type", "exception")


class FunctionScorer:
    """Calls the function once per candidate."""

    whole_groups = False
    signature = "antiphon"

    def __init__(self, settings: config.FunctionScorer, log_folder: Path) -> None:
        """Reads the file. Raises ConfigError when it cannot."""
        path = settings.path.resolve()
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"scorer {settings.name}: {path} cannot be read: {error}") from None
        self.name = settings.name
        self.version = settings.version or hashlib.sha256(source.encode()).hexdigest()[:8]
        self.concurrency = settings.processes
        self._settings = settings
        self._path = path
        limits = Limits(
            timeout_seconds=settings.timeout_seconds,
            start_seconds=settings.start_seconds,
            memory_mib=settings.memory_mib,
            processes=settings.processes,
            allow_network=settings.allow_network,
            allow_processes=settings.allow_processes,
        )
        log = log_folder / f"scorer-{self.name}-{self.version}.out"
        program = Program(source, str(path), settings.function)
        self._sandbox = Sandbox(f"{self.name}@{self.version}", program, limits, log)

    async def start(self) -> None:
        """Starts the children. Raises ConfigError when the file does not import or lacks the function."""
        try:
            await self._sandbox.start()
        except (Refused, Died, TimedOut) as error:
            await self.close()
            raise ConfigError(
                f"scorer {self.name}: {self._path} cannot be used: {error}\n"
                f"(limits while importing: {self._settings.memory_mib} MiB of address space, "
                f"{self._settings.start_seconds:g} s)"
            ) from None

    async def score(self, candidates: Sequence[reward_pb2.Candidate]) -> list[Outcome]:
        """One outcome per candidate, in their order."""
        return list(await asyncio.gather(*(self._score_one(candidate) for candidate in candidates)))

    def problem(self) -> str | None:
        return self._sandbox.problem()

    async def close(self) -> None:
        await self._sandbox.close()

    async def _score_one(self, candidate: reward_pb2.Candidate) -> Outcome:
        task = {
            "given": {
                "prompt": candidate.prompt_text,
                "response": candidate.response_text,
                "reference": candidate.reference,
            },
            "columns": _columns(candidate),
        }
        try:
            return _outcome(await self._sandbox.call(task))
        except TimedOut:
            what = f"{self._settings.function} did not return within {self._settings.timeout_seconds:g} s"
            return failed(DATA, "timeout", f"{what}; its process was killed")
        except Died as error:
            return failed(INFRA, "killed", str(error))


def _columns(candidate: reward_pb2.Candidate) -> dict[str, Any]:
    """Raises InvalidRequest when columns_json is not one JSON object."""
    if not candidate.columns_json:
        return {}
    what = f"columns_json of {candidate.prompt_id.dataset} row {candidate.prompt_id.row}"
    try:
        columns = json.loads(candidate.columns_json)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what}: not JSON that can be read: {error}") from None
    if not isinstance(columns, dict):
        raise InvalidRequest(f"{what}: expected an object, got {type(columns).__name__}")
    return columns


def _outcome(answer: dict[str, Any]) -> Outcome:
    """The child's answer, checked again: user code shares a process with what wrote it."""
    if answer.get("reason") in REASONS:
        return failed(DATA, answer["reason"], str(answer.get("message", "")))
    score, parts = answer.get("score"), answer.get("parts")
    if not isinstance(score, float) or not math.isfinite(score) or not isinstance(parts, dict):
        return failed(INFRA, "killed", f"the child's answer makes no sense: {answer!r}"[:500])
    try:
        named = [reward_pb2.ScorePart(name=name, value=value) for name, value in parts.items()]
    except UnicodeEncodeError:
        return failed(DATA, "wrong_type", f"the name of a part is not valid Unicode: {list(parts)!r}"[:500])
    except (TypeError, ValueError) as error:
        return failed(INFRA, "killed", f"the child's answer makes no sense: {error}")
    return reward_pb2.Score(value=score, parts=named)
