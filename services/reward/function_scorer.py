"""A scorer that is a Python function, the user's or a built-in one, called in a sandbox."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.reward.v1 import reward_pb2
from antiphon.types.v1 import trajectory_pb2

from services.common.errors import ConfigError, InvalidRequest
from services.reward import config
from services.reward.builtin import registry
from services.reward.sandbox import Died, Limits, Refused, Sandbox, TimedOut
from services.reward.scorer import DATA, INFRA, Outcome, failed
from services.reward.signature import signature_of

REASONS = ("none", "not_finite", "wrong_type", "wrong_length", "exception")
FINISH_REASONS = {
    trajectory_pb2.FINISH_REASON_STOP: "stop",
    trajectory_pb2.FINISH_REASON_LENGTH: "length",
    trajectory_pb2.FINISH_REASON_ABORTED: "aborted",
}


class FunctionScorer:
    """Calls the function once per candidate, or once per group."""

    signature = "antiphon"

    def __init__(self, settings: config.FunctionScorer | config.BuiltinScorer, log_folder: Path) -> None:
        """Reads the user's file. Raises ConfigError when it cannot."""
        self.name = settings.name
        self.whole_groups = isinstance(settings, config.FunctionScorer) and settings.whole_groups
        self.concurrency = settings.processes
        self._settings = settings
        allow_network = allow_processes = False
        if isinstance(settings, config.FunctionScorer):
            self._what, program, determined_by = _of_file(settings)
            allow_network, allow_processes = settings.allow_network, settings.allow_processes
        else:
            self._what, program, determined_by = _of_builtin(settings)
        text = json.dumps(determined_by, sort_keys=True)
        self.version = settings.version or hashlib.sha256(text.encode()).hexdigest()[:8]
        limits = Limits(
            timeout_seconds=settings.timeout_seconds,
            start_seconds=settings.start_seconds,
            memory_mib=settings.memory_mib,
            processes=settings.processes,
            allow_network=allow_network,
            allow_processes=allow_processes,
        )
        log = log_folder / f"scorer-{self.name}-{self.version}.out"
        start = {"program": program, "whole_groups": self.whole_groups}
        self._sandbox = Sandbox(f"{self.name}@{self.version}", start, limits, log)

    async def start(self) -> None:
        """Starts the children. Raises ConfigError when the file does not import or lacks the function."""
        try:
            await self._sandbox.start()
        except (Refused, Died, TimedOut) as error:
            await self.close()
            raise ConfigError(
                f"scorer {self.name}: {self._what} cannot be used: {error}\n"
                f"(limits while importing: {self._settings.memory_mib} MiB of address space, "
                f"{self._settings.start_seconds:g} s)"
            ) from None

    async def score(self, candidates: Sequence[reward_pb2.Candidate]) -> list[Outcome]:
        """One outcome per candidate, in their order. With `whole_groups` they are one group."""
        if self.whole_groups:
            return await self._call(candidates)
        return [outcome for (outcome,) in await asyncio.gather(*(self._call([one]) for one in candidates))]

    def problem(self) -> str | None:
        return self._sandbox.problem()

    async def close(self) -> None:
        await self._sandbox.close()

    async def _call(self, candidates: Sequence[reward_pb2.Candidate]) -> list[Outcome]:
        """One call of the function."""
        count = len(candidates)
        task = {"given": self._given(candidates), "columns": _columns(candidates[0]), "count": count}
        try:
            answer = await self._sandbox.call(task, count)
        except TimedOut:
            what = f"{self.name} ({self._what}) did not return within {self._settings.timeout_seconds:g} s"
            return [failed(DATA, "timeout", f"{what}; its process was killed")] * count
        except Died as error:
            return [failed(INFRA, "killed", str(error))] * count
        outcomes = answer.get("outcomes")
        if not isinstance(outcomes, list) or len(outcomes) != count:
            return [failed(INFRA, "killed", f"the child's answer makes no sense: {answer!r}"[:500])] * count
        return [_outcome(outcome) for outcome in outcomes]

    def _given(self, candidates: Sequence[reward_pb2.Candidate]) -> dict[str, Any]:
        """What the function is told; of an answer alone, or lists over the answers of a group."""
        told = [_told(candidate) for candidate in candidates]
        first, signature = candidates[0], signature_of(whole_groups=self.whole_groups)
        given: dict[str, Any] = {"prompt": first.prompt_text, "reference": first.reference}
        if "conversation" in self._sandbox.wants:
            messages = first.conversation.messages
            given["conversation"] = [{"role": message.role, "content": message.content} for message in messages]
        for name in (*signature.always, *self._sandbox.wants):
            if name not in given and name in signature.names:
                singular = _SINGULAR.get(name, name)
                given[name] = [each[singular]() for each in told] if self.whole_groups else told[0][singular]()
        return given


_SINGULAR = {
    "responses": "response",
    "responses_raw": "response_raw",
    "responses_token_ids": "response_token_ids",
    "finish_reasons": "finish_reason",
}


def _told(candidate: reward_pb2.Candidate) -> dict[str, Any]:
    """What may be asked about one answer; made when it is asked."""
    return {
        "response": lambda: candidate.response_text,
        "response_raw": lambda: candidate.response_text_raw,
        "response_token_ids": lambda: list(candidate.response_token_ids),
        "finish_reason": lambda: FINISH_REASONS.get(candidate.finish_reason, "unknown"),
    }


def _of_file(settings: config.FunctionScorer) -> tuple[str, dict[str, Any], Any]:
    """What it is in words, what a child loads, and what determines its scores."""
    path = settings.path.resolve()
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"scorer {settings.name}: {path} cannot be read: {error}") from None
    file = {"source": source, "path": str(path), "function": settings.function, "arguments": settings.arguments}
    determined_by = [source, settings.function, settings.arguments, settings.whole_groups]
    return f"{settings.function} in {path}", {"file": file}, determined_by


def _of_builtin(settings: config.BuiltinScorer) -> tuple[str, dict[str, Any], Any]:
    program = settings.model_dump(mode="json")
    determined_by = [registry.source(settings.type), {k: v for k, v in program.items() if k not in registry.LIMITS}]
    return f"built-in {settings.type}", {"builtin": program}, determined_by


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


def _outcome(said: Any) -> Outcome:
    """What the child says of one candidate, checked again: user code shares a process with what wrote it."""
    answer = said if isinstance(said, dict) else {}
    if answer.get("reason") in REASONS:
        return failed(DATA, answer["reason"], str(answer.get("message", "")))
    score, parts = answer.get("score"), answer.get("parts")
    if not isinstance(score, float) or not math.isfinite(score) or not isinstance(parts, dict):
        return failed(INFRA, "killed", f"the child's answer makes no sense: {said!r}"[:500])
    try:
        named = [reward_pb2.ScorePart(name=name, value=value) for name, value in parts.items()]
    except UnicodeEncodeError:
        return failed(DATA, "wrong_type", f"the name of a part is not valid Unicode: {list(parts)!r}"[:500])
    except (TypeError, ValueError) as error:
        return failed(INFRA, "killed", f"the child's answer makes no sense: {error}")
    return reward_pb2.Score(value=score, parts=named)
