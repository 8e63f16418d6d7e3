"""Checks of every field before it reaches the engine: an engine may crash on what it does not expect."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from antiphon.rollout.v1 import rollout_pb2

from services.common.errors import InvalidRequest
from services.rollout.engine import EngineInfo

MOST_SAMPLES = 1024  # of one call
MOST_STOP_TOKENS = 1024  # every sample carries them, and the call is remembered
MOST_STOP_STRINGS = 16
LONGEST_STOP_STRING = 1000  # characters
MOST_ACKNOWLEDGED = 65536  # calls named in one Acknowledge
LONGEST_ID = 1000  # characters
LAST_SAMPLE_NUMBER = 2**31 - 1  # int32 on the wire
LONGEST_DEADLINE_SECONDS = 7 * 24 * 3600.0


def check_generate(request: rollout_pb2.GenerateRequest, info: EngineInfo) -> None:
    """Raises InvalidRequest that names everything wrong with the request."""
    sampling = request.sampling
    prompt_tokens = len(request.prompt_token_ids)
    problems: list[str] = []
    problems.extend(_bad_id("request_id", request.request_id))
    problems.extend(_bad_id("prompt_id.dataset", request.prompt_id.dataset))
    if request.prompt_id.row < 0 or request.prompt_id.epoch < 0:
        problems.append(
            f"prompt_id: row {request.prompt_id.row} and epoch {request.prompt_id.epoch} must be at least 0"
        )
    if not 1 <= request.samples <= MOST_SAMPLES:
        problems.append(f"samples must be from 1 to {MOST_SAMPLES}, it is {request.samples}")
    if request.first_sample_number < 0:
        problems.append(f"first_sample_number must be at least 0, it is {request.first_sample_number}")
    elif request.first_sample_number + request.samples - 1 > LAST_SAMPLE_NUMBER:
        problems.append(f"first_sample_number {request.first_sample_number}: the last is beyond {LAST_SAMPLE_NUMBER}")
    if prompt_tokens == 0:
        problems.append("prompt_token_ids is empty")
    problems.extend(_outside("prompt_token_ids", request.prompt_token_ids, info.vocabulary_size))
    if len(sampling.stop_token_ids) > MOST_STOP_TOKENS:
        problems.append(f"{len(sampling.stop_token_ids)} stop_token_ids; at most {MOST_STOP_TOKENS} are taken")
    problems.extend(_outside("stop_token_ids", sampling.stop_token_ids, info.vocabulary_size))
    problems.extend(_bad_stop_strings(sampling.stop_strings))
    if sampling.max_tokens < 1:
        problems.append(f"max_tokens must be at least 1, it is {sampling.max_tokens}")
    elif prompt_tokens + sampling.max_tokens > info.max_sequence_tokens:
        problems.append(
            f"prompt of {prompt_tokens} + max_tokens of {sampling.max_tokens} = {prompt_tokens + sampling.max_tokens} "
            f"tokens; the engine takes {info.max_sequence_tokens}: with this prompt max_tokens can be at most "
            f"{max(info.max_sequence_tokens - prompt_tokens, 0)}"
        )
    problems.extend(_bad_temperature(sampling.temperature, info))
    if problems:
        raise InvalidRequest(f"Generate {request.request_id[:LONGEST_ID] or '(no id)'}: " + "; ".join(problems))


def check_acknowledge(request: rollout_pb2.AcknowledgeRequest) -> None:
    """Raises InvalidRequest for more than one call can be about."""
    if len(request.calls) > MOST_ACKNOWLEDGED:
        raise InvalidRequest(
            f"Acknowledge: {len(request.calls)} calls are named; at most {MOST_ACKNOWLEDGED} are taken"
        )


def check_begin_update(request: rollout_pb2.BeginUpdateRequest) -> None:
    """Raises InvalidRequest unless the request makes sense by itself."""
    check_request("BeginUpdate", request.request_id, request.deadline_seconds)
    if request.policy_version < 0:
        raise InvalidRequest(f"BeginUpdate: policy_version must be at least 0, it is {request.policy_version}")


def check_request(call: str, request_id: str, deadline_seconds: float) -> None:
    """Raises InvalidRequest unless the request has an id and a deadline."""
    if not request_id:
        raise InvalidRequest(f"{call}: request_id is empty")
    if not 0 < deadline_seconds <= LONGEST_DEADLINE_SECONDS:
        raise InvalidRequest(
            f"{call}: deadline_seconds must be above 0 and at most {LONGEST_DEADLINE_SECONDS:.0f}, "
            f"it is {deadline_seconds}"
        )


def check_commit_update(request: rollout_pb2.CommitUpdateRequest, info: EngineInfo) -> None:
    """Raises InvalidRequest unless the request makes sense by itself; the update stays open."""
    probe_tokens = len(request.probe_token_ids)
    problems: list[str] = []
    if not request.request_id:
        problems.append("request_id is empty")
    if probe_tokens < 2 or probe_tokens >= info.max_sequence_tokens:  # the engine samples one token after it
        problems.append(f"the probe must have 2 to {info.max_sequence_tokens - 1} tokens, it has {probe_tokens}")
    problems.extend(_outside("probe_token_ids", request.probe_token_ids, info.vocabulary_size))
    if len(request.probe_logprobs) != max(probe_tokens - 1, 0):
        problems.append(f"{len(request.probe_logprobs)} probe_logprobs for {probe_tokens} tokens; expected one less")
    if not all(math.isfinite(value) for value in request.probe_logprobs):
        problems.append("probe_logprobs must be finite")
    if not 0 < request.probe_tolerance < math.inf:
        problems.append(f"probe_tolerance must be above 0 and finite, it is {request.probe_tolerance}")
    if problems:
        raise InvalidRequest("CommitUpdate: " + "; ".join(problems))


def _bad_id(field: str, text: str) -> list[str]:
    if not text:
        return [f"{field} is empty"]
    return [f"{field} has {len(text)} characters; at most {LONGEST_ID} are taken"] if len(text) > LONGEST_ID else []


def _outside(field: str, token_ids: Iterable[int], vocabulary_size: int) -> list[str]:
    bad = [token_id for token_id in token_ids if not 0 <= token_id < vocabulary_size]
    if not bad:
        return []
    return [f"{field}: {bad[:5]} not in the vocabulary of {vocabulary_size} ({len(bad)} such ids)"]


def _bad_stop_strings(strings: Collection[str]) -> list[str]:
    if len(strings) > MOST_STOP_STRINGS:
        return [f"{len(strings)} stop_strings; at most {MOST_STOP_STRINGS} are taken"]
    return [
        f"stop_strings: {number} has {len(text)} characters; 1 to {LONGEST_STOP_STRING} are taken"
        for number, text in enumerate(strings)
        if not 1 <= len(text) <= LONGEST_STOP_STRING
    ]


def _bad_temperature(temperature: float, info: EngineInfo) -> list[str]:
    low, high = info.lowest_temperature, info.highest_temperature
    # Half a step of float32 is allowed: 0.01 does not arrive as 0.01.
    if temperature == 0 or low * (1 - 1e-6) <= temperature <= high * (1 + 1e-6):
        return []
    return [f"temperature must be 0 (greedy) or from {low} to {high}, it is {temperature}"]
