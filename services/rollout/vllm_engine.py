"""The engine on vLLM's AsyncLLM. This file and vllm_start.py are what imports vllm in the service's process."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from antiphon.types.v1.chat_pb2 import Conversation
from antiphon.types.v1.grant_pb2 import MEMORY_TAG_KV, MEMORY_TAG_WEIGHTS, MemoryTag
from antiphon.types.v1.transfer_pb2 import TransferManifest

from services.common import errors
from services.common.config import ProcessConfig
from services.common.errors import Internal, InvalidRequest, Unavailable
from services.rollout.config import RolloutConfig
from services.rollout.engine import (
    DeviceMemory,
    EngineDead,
    EngineInfo,
    Received,
    Sample,
    SampleRequest,
    Span,
    Unmatched,
)
from services.rollout.vllm_start import start_llm

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.02
RECEIVED_WAIT_SECONDS = 0.1
ABORT_SECONDS = 10.0
# The engine core answers between two forward passes; one that is silent for longer is taken for dead.
ANSWER_SECONDS = 60.0
LOAD_SECONDS = 300.0
SLEEP_SECONDS = 120.0  # the first time the copy in host memory is pinned: 13 s for 15 GB
SHUTDOWN_SECONDS = 2.0
LATE_SECONDS = 5.0  # after a deadline that the workers keep themselves
# vLLM raises a temperature between 0 and 0.01 to 0.01, and refuses more than 2.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
# What vLLM calls them.
TAGS = {"weights": MEMORY_TAG_WEIGHTS, "kv_cache": MEMORY_TAG_KV}


class VllmEngine:
    """One AsyncLLM with its engine core in a child process. Made by `start`."""

    def __init__(self, llm: AsyncLLM, info: EngineInfo) -> None:
        self._llm = llm
        self._info = info
        self._running: set[str] = set()
        self._torn: str | None = None
        self._busy_until = 0.0
        """Of time.monotonic: when the longest call that was begun must have ended."""

    @classmethod
    async def start(cls, process: ProcessConfig[RolloutConfig]) -> VllmEngine:
        """Raises ConfigError for a folder that holds no model, Unavailable when vLLM does not start."""
        begin = time.monotonic()
        llm = await start_llm(process)
        workers = await llm.collective_rpc("antiphon_memory")
        devices = [answer["uuid"] for answer in workers if "uuid" in answer]
        logger.info("vLLM is up after %.1f s on %s", time.monotonic() - begin, ", ".join(devices) or "CPU")
        # What is there now stays: the collector need not look at a million objects of the libraries again and again.
        gc.collect()
        gc.freeze()
        info = _info(llm, [answer["pid"] for answer in workers], on_gpus=bool(devices))
        return cls(llm, info)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def problem(self) -> str | None:
        if self._torn is not None:
            return self._torn
        pids = ", ".join(str(pid) for pid in self._info.pids)
        return f"vLLM's engine core (pid {pids}) is dead" if self._llm.errored else None

    async def generate(self, request: SampleRequest) -> Sample:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        stop_strings = list(request.stop_strings)
        # Everything that decides the distribution is named; the rest of vLLM's defaults are neutral.
        parameters = SamplingParams(
            temperature=max(request.temperature, LOWEST_TEMPERATURE) if request.temperature > 0 else 0.0,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # only the stop tokens of the request count
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            stop=stop_strings,
            detokenize=bool(stop_strings),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        prompt = tokens_input(list(request.prompt_token_ids), cache_salt=f"version {request.policy_version}")
        self._running.add(request.id)
        try:
            output = await self._last_output(prompt, parameters, request.id)
        finally:
            self._running.discard(request.id)
        return _sample(output, request.id)

    async def abort(self, ids: Sequence[str]) -> None:
        # vLLM ignores ids that it has not registered yet, so those are named again until they have ended.
        end = time.monotonic() + ABORT_SECONDS
        while waiting := self._running.intersection(ids):
            if time.monotonic() > end:
                raise Internal(f"vLLM did not end {sorted(waiting)[:5]} within {ABORT_SECONDS:.0f} s of being told to")
            await self._llm.abort(list(waiting))
            await asyncio.sleep(POLL_SECONDS)

    async def encode(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        return await asyncio.to_thread(self._encode, conversations)

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=1.0,
            max_tokens=1,
            prompt_logprobs=0,  # such requests read no cached keys and values
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._last_output(tokens_input(list(token_ids)), parameters, f"probe {time.monotonic_ns()}")
        rows = output.prompt_logprobs
        if rows is None or len(rows) != len(token_ids):
            raise Internal(f"vLLM answered {rows and len(rows)} prompt log-probabilities for {len(token_ids)} tokens")
        return [_of_token(row, token_id) for row, token_id in zip(rows[1:], token_ids[1:], strict=True)]

    async def unmatched(self, manifest: TransferManifest) -> Unmatched:
        found = (await self._on_workers("antiphon_unmatched", manifest.SerializeToString()))[0]
        if "invalid" in found:
            raise InvalidRequest(found["invalid"])
        return Unmatched(tuple(found["unknown"]), tuple(found["missing"]), tuple(found["differing"]))

    async def join(self, manifest: TransferManifest, first_receiver_rank: int, *, deadline_seconds: float) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._guarded(
            self._llm.init_weight_transfer_engine(
                WeightTransferInitRequest(
                    init_info={
                        "manifest": manifest.SerializeToString(),
                        "first_receiver_rank": first_receiver_rank,
                        "deadline_seconds": deadline_seconds,
                    }
                )
            )
        )
        try:
            async with asyncio.timeout(deadline_seconds + LATE_SECONDS):
                await self._reached("joined", 0.0)
        except TimeoutError:
            raise Unavailable(
                f"epoch {manifest.epoch}: joining was not given up at its deadline: it stands still"
            ) from None

    async def begin_receive(self, *, deadline_seconds: float) -> None:
        await self._on_workers("antiphon_receive", deadline_seconds)

    async def received(self) -> Received:
        # The engine is idle, so the workers may wait for the end; asking again and again would take time from it.
        states = await self._reached("received", RECEIVED_WAIT_SECONDS)
        digests = {state["digest"] for state in states}
        if len(digests) != 1:
            raise Unavailable(f"the engine's workers received different weights: digests {sorted(digests)}")
        return Received(
            digest=digests.pop(),
            bytes=sum(state["bytes"] for state in states),
            seconds=max(state["seconds"] for state in states),
            extra_bytes=max(state.get("extra_bytes", 0) for state in states),
        )

    async def load(self, policy_version: int) -> None:
        # The core does them in this order; sent at once they cost one round trip.
        calls = (
            self._on_workers("antiphon_load", limit_seconds=LOAD_SECONDS),
            self._guarded(self._llm.reset_prefix_cache(), LOAD_SECONDS),
            self._guarded(self._llm.update_weight_version(str(policy_version)), LOAD_SECONDS),
        )
        try:
            refusals, dropped, _ = await asyncio.gather(*calls)
        except Internal as error:
            raise self._dead(f"the model is torn, loading version {policy_version} broke: {error}") from error
        if any(refusals):
            raise Unavailable(f"nothing was loaded: {next(filter(None, refusals))}")
        if not dropped:
            raise Unavailable("vLLM did not drop its prefix cache: something still runs")

    async def give_up_receive(self) -> None:
        await self._on_workers("antiphon_give_up")

    async def memory(self) -> list[DeviceMemory]:
        answers = await self._on_workers("antiphon_memory")
        return [_device(answer) for answer in answers if "uuid" in answer]

    async def sleep(self, *, discard_weights: bool) -> None:
        level = 2 if discard_weights else 1
        try:
            # "wait" aborts nothing: it would wait for what runs, and nothing does. Caches are dropped.
            await self._guarded(self._llm.sleep(level, "wait"), SLEEP_SECONDS)
        except Internal as error:
            raise self._dead(f"falling asleep broke: {error}") from error

    async def wake(self, tags: Collection[MemoryTag], *, deadline_seconds: float) -> None:
        names = [name for name, tag in TAGS.items() if tag in tags]
        try:
            await self._guarded(self._llm.wake_up(names), deadline_seconds)
        except Internal as error:
            raise self._dead(f"waking {', '.join(names)} broke, they may be half awake: {error}") from error

    async def close(self) -> None:
        await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_SECONDS)

    def _encode(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        tokenizer: Any = self._llm.get_tokenizer()
        encoded = []
        for number, conversation in enumerate(conversations):
            messages = [{"role": message.role, "content": message.content} for message in conversation.messages]
            try:
                # Without return_dict=False it answers a BatchEncoding, whose iteration gives keys.
                ids = tokenizer.apply_chat_template(
                    messages, tokenize=True, add_generation_prompt=True, return_dict=False
                )
            except Exception as error:  # the template is the model's own program: it may raise anything
                raise InvalidRequest(f"conversation {number}: the chat template refuses it: {error}") from None
            encoded.append([int(token_id) for token_id in ids])
        return encoded

    async def _last_output(self, prompt: Any, parameters: Any, request_id: str) -> RequestOutput:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        last = None
        try:
            async for output in self._llm.generate(prompt, parameters, request_id):
                last = output
        except EngineDeadError as error:
            raise EngineDead(f"{request_id}: {self.problem() or error}") from error
        except EngineGenerateError as error:
            raise Internal(f"{request_id}: vLLM failed: {error.__cause__!r}") from error
        if last is None:
            raise Internal(f"{request_id}: vLLM answered nothing")
        return last

    async def _on_workers(self, method: str, *args: Any, limit_seconds: float = ANSWER_SECONDS) -> list[Any]:
        answers: list[Any] = await self._guarded(self._llm.collective_rpc(method, args=args), limit_seconds)
        return answers

    async def _guarded(self, call: Awaitable[Any], limit_seconds: float = ANSWER_SECONDS) -> Any:
        """A call to the engine core, with its errors as ours: EngineDead, or Internal for what it raised."""
        from vllm.v1.engine.exceptions import EngineDeadError

        begin = time.monotonic()
        # The core does one thing after the other: who asks during a long load waits for its end first.
        limit = max(0.0, self._busy_until - begin) + limit_seconds
        if limit_seconds > ANSWER_SECONDS:
            self._busy_until = begin + limit
        try:
            async with asyncio.timeout(limit):
                return await call
        except TimeoutError:
            raise self._dead(f"vLLM's engine core did not answer within {limit:.0f} s") from None
        except EngineDeadError as error:
            raise EngineDead(self.problem() or str(error)) from error
        except Exception as error:
            raise Internal(f"vLLM's engine core failed: {error}") from error
        finally:
            if limit_seconds > ANSWER_SECONDS:
                self._busy_until = 0.0

    async def _reached(self, phase: str, wait_seconds: float) -> list[dict[str, Any]]:
        """The states of all workers once they are in `phase`; they wait with deadlines of their own."""
        while True:
            states = await self._on_workers("antiphon_transfer_state", wait_seconds)
            for state in states:
                if state["phase"] == "failed":
                    raise getattr(errors, state["error"])(state["message"])
            if all(state["phase"] == phase for state in states):
                return states
            await asyncio.sleep(0.0 if wait_seconds else POLL_SECONDS)

    def _dead(self, reason: str) -> EngineDead:
        self._torn = reason
        return EngineDead(reason)


def _info(llm: AsyncLLM, worker_pids: list[int], *, on_gpus: bool) -> EngineInfo:
    import vllm

    cores = [child.pid for child in llm.engine_core.resources.engine_manager.processes]
    return EngineInfo(
        backend=f"vllm {vllm.__version__}",
        pids=tuple(dict.fromkeys([*cores, *worker_pids])),  # one GPU's worker is in the core
        transfer_ranks=llm.vllm_config.parallel_config.world_size,
        max_sequence_tokens=llm.model_config.max_model_len,
        dtype=str(llm.model_config.dtype).removeprefix("torch."),
        vocabulary_size=llm.model_config.get_vocab_size(),
        lowest_temperature=LOWEST_TEMPERATURE,
        highest_temperature=HIGHEST_TEMPERATURE,
        can_sleep=llm.model_config.enable_sleep_mode or not on_gpus,
    )


def _device(answer: dict[str, Any]) -> DeviceMemory:
    """Of what `antiphon_memory` answers. vLLM wakes whatever has another tag with any of the two."""

    def tagged(sizes: dict[str, int]) -> dict[MemoryTag, int]:
        return {tag: sizes[name] for name, tag in TAGS.items() if name in sizes}

    def untagged(sizes: dict[str, int]) -> int:
        return sum(size for name, size in sizes.items() if name not in TAGS)

    return DeviceMemory(
        uuid=answer["uuid"],
        total_bytes=answer["total"],
        free_bytes=answer["free"],
        held=tagged(answer["held"]),
        held_untagged=untagged(answer["held"]),
        asleep=tagged(answer["asleep"]),
        asleep_untagged=untagged(answer["asleep"]),
    )


def _sample(output: RequestOutput, request_id: str) -> Sample:
    (completion,) = output.outputs
    token_ids = list(completion.token_ids)
    rows = completion.logprobs
    if rows is None or len(rows) != len(token_ids):
        raise Internal(
            f"{request_id}: vLLM answered {rows and len(rows)} log-probabilities for {len(token_ids)} tokens"
        )
    reasons = {"stop": "stop", "length": "length", "abort": "aborted"}
    reason = reasons.get(completion.finish_reason or "")
    if reason is None:
        raise Internal(f"{request_id}: vLLM ended with {completion.finish_reason!r}")
    return Sample(
        token_ids=token_ids,
        logprobs=_logprobs(rows, token_ids),
        finish_reason=reason,  # type: ignore[arg-type]
        spans=tuple(Span(span.start, span.end, int(span.version)) for span in completion.weight_versions or ()),
        stop_string=completion.stop_reason if isinstance(completion.stop_reason, str) else "",
    )


def _logprobs(rows: Any, token_ids: list[int]) -> list[float]:
    """Of each sampled token. `rows` is flat, and of one entry each: then the two lists are the answer as they are."""
    if getattr(rows, "token_ids", None) == token_ids:
        return list(rows.logprobs)
    return [_of_token(row, token_id) for row, token_id in zip(rows, token_ids, strict=True)]


def _of_token(row: Any, token_id: int) -> float:
    """The log-probability of that very token in one row of vLLM's answer, never merely the first entry."""
    if row is None or token_id not in row:
        raise Internal(f"vLLM answered no log-probability for token {token_id}, only for {list(row or ())}")
    return float(row[token_id].logprob)
