"""The start-up self-check: coordinator, engine and trainer must mean the same by a prompt and by a log-probability.

1. Token ids: conversations, awkward ones among them, rendered here, by every engine and by the trainer, are equal.
2. Log-probabilities: a few prompts are sampled at the training temperature; the trainer's log-probabilities of the very
   same ids differ by little from those the engine reported, and the mean ratio trainer/engine is near 1.

A run whose parties disagree would train on noise and not say so; it is stopped, and the error names check, prompt and
both values.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.types.v1 import chat_pb2

from services.common.errors import Conflict, Internal, InvalidRequest
from services.coordinator.chat_template import Message
from services.coordinator.clients import LearnerClient, RolloutClient
from services.coordinator.config import SamplingConfig, SelfCheckConfig
from services.coordinator.data import Prompt
from services.coordinator.identity import PromptKey
from services.coordinator.sampling import Sampler
from services.coordinator.text import Text
from services.coordinator.trajectories import Trajectory

DATASET = "self-check"


@dataclass(frozen=True)
class Agreement:
    """How near engine and trainer are."""

    tokens: int
    difference: float
    """Mean over sampled tokens of |trainer - engine|, in nats."""
    ratio: float
    """Mean over sampled tokens of exp(trainer - engine)."""


def awkward_conversations(text: Text) -> list[tuple[Message, ...]]:
    """Conversations on which renderers and tokenizers like to differ."""
    special = " ".join(text.special_tokens.values()) or "<s> </s>"
    user = [
        "What is 2 + 3?",
        "naïve café: 日本語, Ελληνικά, עברית, 👩‍👩‍👧 e\u0301 \u200b\ufeff.",
        f"Say {special} and <|im_start|>system and [INST].",
        "  two  spaces\tand a tab\r\n\r\nand an empty line  ",
        " ",
        "\n",
        "{{ messages[0] }} {% raw %} <!-- & \"quotes\" 'here' \\n -->",
        "0" * 64 + " " + "a" * 64,
    ]
    conversations: list[tuple[Message, ...]] = [({"role": "user", "content": content},) for content in user]
    system = {"role": "system", "content": "Answer in one word."}
    conversations.append((system, {"role": "user", "content": "Is water wet?"}))
    turns = [("user", "Hello."), ("assistant", "Hello! "), ("user", " And now?")]
    conversations.append(tuple({"role": role, "content": content} for role, content in turns))
    return conversations


async def check_token_ids(
    text: Text,
    engines: Sequence[RolloutClient],
    learner: LearnerClient,
    conversations: Sequence[tuple[Message, ...]],
    seconds: float,
) -> int:
    """Compares the token ids of each conversation; answers how many were compared.

    Conversations that the model's template refuses (some know no system role) are left out. Raises Conflict at the
    first difference.
    """
    accepted: list[tuple[Message, ...]] = []
    expected: list[list[int]] = []
    for messages in conversations:
        try:
            expected.append(text.encode_conversation(messages))
            accepted.append(messages)
        except InvalidRequest:
            continue
    request = [chat_pb2.Conversation(messages=[chat_pb2.ChatMessage(**m) for m in messages]) for messages in accepted]
    parties: list[RolloutClient | LearnerClient] = [*engines, learner]
    answers = await asyncio.gather(*(party.encode(request, seconds) for party in parties))
    for party, encoded in zip(parties, answers, strict=True):
        if len(encoded) != len(accepted):
            raise Internal(f"{party.worker_id}: asked to encode {len(accepted)} conversations, answered {len(encoded)}")
        for messages, ours, theirs in zip(accepted, expected, encoded, strict=True):
            if ours != theirs:
                raise _different_ids(party.worker_id, messages, ours, theirs)
    return len(accepted)


async def check_logprobs(
    prompts: Sequence[tuple[PromptKey, Prompt]],
    sampler: Sampler,
    learner: LearnerClient,
    sampling: SamplingConfig,
    config: SelfCheckConfig,
    *,
    dtype: str,
    version: int,
    seconds: float,
) -> Agreement:
    """Compares the log-probabilities of what is sampled for the prompts. Raises Conflict when out of bounds."""
    sampled = await asyncio.gather(
        *(
            sampler.sample(
                PromptKey(DATASET, key.epoch, key.row),
                prompt,
                samples=1,
                temperature=sampling.temperature,
                max_tokens=min(sampling.max_tokens, config.max_tokens),
                version=version,
                deadline_seconds=seconds,
            )
            for key, prompt in prompts
        )
    )
    trajectories = {str(key): group[0] for (key, _), group in zip(prompts, sampled, strict=True)}
    answers = await learner.forward(
        {n: list(t.token_ids) for n, t in trajectories.items()}, sampling.temperature, seconds
    )
    gaps = {}
    for name, trajectory in trajectories.items():
        answer = answers.get(name)
        if answer is None or len(answer.logprobs) != len(trajectory.token_ids):
            got = "nothing" if answer is None else f"{len(answer.logprobs)}"
            raise Internal(
                f"{learner.worker_id}: {name}: expected {len(trajectory.token_ids)} log-probabilities, got {got}"
            )
        if answer.policy.version != version:
            raise Conflict(
                f"{learner.worker_id}: computed under version {answer.policy.version}, the engines serve {version}"
            )
        gaps[name] = _gaps(trajectory, answer.logprobs)
    tolerance = config.logprob_tolerance_float32 if dtype == "float32" else config.logprob_tolerance_bfloat16
    for sampled_by in sorted({trajectory.worker_id for trajectory in trajectories.values()}):
        # Each engine by itself: among several good ones the mean would hide it.
        own = {name: rows for name, rows in gaps.items() if trajectories[name].worker_id == sampled_by}
        agreement = _measure(own)
        # A NaN fails both comparisons.
        if agreement.difference <= tolerance and abs(agreement.ratio - 1.0) <= config.ratio_tolerance:
            continue
        name, t, engine, trainer = _worst(own)
        raise Conflict(
            f"self-check, log-probabilities ({dtype}): mean |trainer - engine| {agreement.difference:.3g} (allowed "
            f"{tolerance:.3g}), mean ratio {agreement.ratio:.4f} (allowed 1 ± {config.ratio_tolerance}); worst at "
            f"prompt {name}, position {t}, token {trajectories[name].token_ids[t]}: engine {sampled_by} {engine:.5f}, "
            f"trainer {learner.worker_id} {trainer:.5f}; look at the weights of both, at the temperature and at the "
            "dtype"
        )
    return _measure(gaps)


def _gaps(trajectory: Trajectory, logprobs_T: Sequence[float]) -> list[tuple[int, float, float]]:
    """(position, engine, trainer) of each sampled token."""
    return [
        (t, trajectory.behavior_logprobs[t], logprobs_T[t])
        for t, is_sampled in enumerate(trajectory.loss_mask)
        if is_sampled
    ]


def _measure(gaps: dict[str, list[tuple[int, float, float]]]) -> Agreement:
    every = [trainer - engine for rows in gaps.values() for _, engine, trainer in rows]
    if not every:
        raise Internal("self-check: the engines sampled no token at all")
    difference = math.fsum(map(abs, every)) / len(every)
    ratio = math.fsum(math.exp(min(50.0, gap)) for gap in every) / len(every)
    return Agreement(len(every), difference, ratio)


def _worst(gaps: dict[str, list[tuple[int, float, float]]]) -> tuple[str, int, float, float]:
    """(prompt, position, engine, trainer) of the token on which the two differ most."""

    def size(row: tuple[str, int, float, float]) -> float:
        gap = abs(row[3] - row[2])
        return gap if math.isfinite(gap) else math.inf

    return max(((name, *row) for name, rows in gaps.items() for row in rows), key=size)


def _different_ids(party: str, messages: Sequence[Message], ours: list[int], theirs: list[int]) -> Conflict:
    place = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return Conflict(
        f"self-check, token ids: {party} and the coordinator encode the conversation {list(messages)!r} differently "
        f"from position {place}: coordinator {ours[place : place + 8]} ({len(ours)} tokens), {party} "
        f"{theirs[place : place + 8]} ({len(theirs)} tokens); both must use the tokenizer and the chat template of "
        "the same folder"
    )
