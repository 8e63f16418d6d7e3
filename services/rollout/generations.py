"""The Generate calls: each samples some trajectories and is remembered by request id, so that a repeat attaches."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence

from antiphon.rollout.v1 import rollout_pb2
from antiphon.types.v1 import trajectory_pb2
from antiphon.types.v1.policy_pb2 import VersionSpan
from antiphon.types.v1.trajectory_pb2 import Trajectory

from services.common.errors import AntiphonError, Conflict, Internal, Unavailable
from services.rollout.engine import Engine, Sample, SampleRequest
from services.rollout.gate import Gate
from services.rollout.seeds import sample_seed

logger = logging.getLogger(__name__)

# Stated in the contract of Generate.
KEEP_CALLS = 4096
KEEP_SECONDS = 3600.0

_FINISH_REASONS = {
    "stop": trajectory_pb2.FINISH_REASON_STOP,
    "length": trajectory_pb2.FINISH_REASON_LENGTH,
    "aborted": trajectory_pb2.FINISH_REASON_ABORTED,
}


class Generation:
    """One call: what was asked, what is finished, and who listens."""

    def __init__(self, request: rollout_pb2.GenerateRequest, fingerprint: bytes) -> None:
        self.request = request
        self.fingerprint = fingerprint
        self.finished: list[Trajectory] = []
        self.error: BaseException | None = None
        self.callers = 0
        self.ended_at: float | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.aborted = False
        self.in_engine: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def done(self) -> bool:
        return self.ended_at is not None

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self) -> None:
        await self._changed.wait()


class Generations:
    """All calls under way, and those remembered."""

    def __init__(self, engine: Engine, gate: Gate, worker_id: str) -> None:
        self._engine = engine
        self._gate = gate
        self._worker_id = worker_id
        self._known: dict[str, Generation] = {}
        self._ended: OrderedDict[str, Generation] = OrderedDict()  # those of them that ended well, the oldest end first
        self._attempts = itertools.count()  # engine ids stay unique when a call is cancelled and asked again
        self._supervisors: set[asyncio.Task[None]] = set()

    async def stream(self, request: rollout_pb2.GenerateRequest) -> AsyncGenerator[Trajectory, None]:
        """Trajectories of a checked request in order of finishing, those of an earlier equal call at once.

        Leaving the loop aborts what is unfinished, unless another caller is attached. Raises Conflict (the id with
        other content; another policy version), Unavailable, Overloaded.
        """
        generation = self._start_or_attach(request)
        generation.callers += 1
        sent = 0
        try:
            while True:
                while sent < len(generation.finished):
                    sent += 1
                    yield generation.finished[sent - 1]
                if generation.done:
                    break
                await generation.wait_change()
            if generation.error is not None:
                raise generation.error
        finally:
            generation.callers -= 1
            if generation.callers == 0 and not generation.done:
                self._cancel(generation, Unavailable(f"Generate {request.request_id}: nobody waits for it any more"))

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Ends the named calls with what was sampled so far; answers how many trajectories were unfinished."""
        aborted = 0
        in_engine: list[str] = []
        for request_id in dict.fromkeys(request_ids):
            generation = self._known.get(request_id)
            if generation is None or generation.done:
                continue
            generation.aborted = True
            aborted += generation.request.samples - len(generation.finished)
            in_engine.extend(generation.in_engine)
            for task in generation.tasks:
                if task.get_name() not in generation.in_engine:
                    task.cancel()  # held: it has sampled nothing
        if in_engine:
            await self._engine.abort(in_engine)
        return aborted

    async def close(self, error: AntiphonError) -> None:
        """Ends all calls with the error, and waits for the end of their work."""
        for generation in list(self._known.values()):
            if not generation.done:
                self._cancel(generation, error)
        if self._supervisors:
            await asyncio.wait(set(self._supervisors))

    def _start_or_attach(self, request: rollout_pb2.GenerateRequest) -> Generation:
        self._forget(KEEP_CALLS)
        fingerprint = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        known = self._known.get(request.request_id)
        if known is not None:
            if known.fingerprint != fingerprint:
                raise Conflict(
                    f"Generate {request.request_id}: asked before with other content; use a new id for a new request"
                )
            return known
        self._gate.reserve(request.samples)
        self._forget(KEEP_CALLS - 1)
        generation = Generation(request, fingerprint)
        self._known[request.request_id] = generation
        attempt = next(self._attempts)
        for number in range(request.first_sample_number, request.first_sample_number + request.samples):
            name = f"{request.request_id}/{number}#{attempt}"
            generation.tasks.append(asyncio.create_task(self._finish_one(generation, number, name), name=name))
        supervisor = asyncio.create_task(self._supervise(generation), name=f"Generate {request.request_id}")
        self._supervisors.add(supervisor)
        supervisor.add_done_callback(self._supervisors.discard)
        return generation

    async def _supervise(self, generation: Generation) -> None:
        """Ends the call when all its trajectories are there, or at the first error."""
        try:
            done, _ = await asyncio.wait(generation.tasks, return_when=asyncio.FIRST_EXCEPTION)
            errors = [task.exception() for task in done if not task.cancelled()]
            generation.error = generation.error or next((error for error in errors if error is not None), None)
            for task in generation.tasks:
                task.cancel()
            await asyncio.wait(generation.tasks)
            if generation.error is None and generation.aborted:
                self._add_unstarted(generation)
        finally:
            self._gate.release(generation.request.samples)
            generation.ended_at = time.monotonic()
            if generation.error is not None:  # a repeat tries again
                self._drop(generation)
            else:
                self._ended[generation.request.request_id] = generation
            generation.notify()

    def _add_unstarted(self, generation: Generation) -> None:
        """What was still held when the call was aborted: the prompt, and nothing sampled."""
        request = generation.request
        finished = {trajectory.sample_number for trajectory in generation.finished}
        for number in range(request.first_sample_number, request.first_sample_number + request.samples):
            if number not in finished:
                generation.finished.append(self._trajectory(request, number, 0, Sample((), (), "aborted", ())))

    def _cancel(self, generation: Generation, error: AntiphonError) -> None:
        generation.error = generation.error or error
        self._drop(generation)
        for task in generation.tasks:
            task.cancel()

    def _drop(self, generation: Generation) -> None:
        if self._known.get(generation.request.request_id) is generation:
            del self._known[generation.request.request_id]

    async def _finish_one(self, generation: Generation, number: int, name: str) -> None:
        generation.finished.append(await self._sampled(generation, number, name))
        generation.notify()

    async def _sampled(self, generation: Generation, number: int, name: str) -> Trajectory:
        request = generation.request
        wanted = request.policy_version if request.HasField("policy_version") else None
        policy = await self._gate.enter(wanted)
        try:
            seed = sample_seed(request.run_seed, request.prompt_id, number, policy.version)
            generation.in_engine.add(name)
            sample = await self._engine.generate(
                SampleRequest(
                    id=name,
                    prompt_token_ids=request.prompt_token_ids,
                    seed=seed,
                    temperature=request.sampling.temperature,
                    max_tokens=request.sampling.max_tokens,
                    stop_token_ids=request.sampling.stop_token_ids,
                    policy_version=policy.version,
                )
            )
        finally:
            generation.in_engine.discard(name)
            self._gate.leave()
        return self._trajectory(request, number, seed, sample)

    def _trajectory(self, request: rollout_pb2.GenerateRequest, number: int, seed: int, sample: Sample) -> Trajectory:
        prompt_tokens = len(request.prompt_token_ids)
        _check_sample(sample, f"{request.request_id}/{number}")
        return Trajectory(
            prompt_id=request.prompt_id,
            sample_number=number,
            token_ids=[*request.prompt_token_ids, *sample.token_ids],
            loss_mask=[False] * prompt_tokens + [True] * len(sample.token_ids),
            behavior_logprobs=[0.0] * prompt_tokens + list(sample.logprobs),
            finish_reason=_FINISH_REASONS[sample.finish_reason],
            version_spans=[
                VersionSpan(
                    start=prompt_tokens + span.start, end=prompt_tokens + span.end, policy_version=span.policy_version
                )
                for span in sample.spans
            ],
            seed=seed,
            worker_id=self._worker_id,
        )

    def _forget(self, keep: int) -> None:
        """Those that ended first, until all that is left is young enough and few enough."""
        horizon = time.monotonic() - KEEP_SECONDS
        while self._ended:
            request_id, oldest = next(iter(self._ended.items()))
            assert oldest.ended_at is not None
            if oldest.ended_at >= horizon and len(self._known) <= keep:
                break
            del self._ended[request_id], self._known[request_id]


def _check_sample(sample: Sample, what: str) -> None:
    """Raises Internal when the engine's answer is not whole: it would be trained on."""
    tokens = len(sample.token_ids)
    if len(sample.logprobs) != tokens or not math.isfinite(sum(sample.logprobs)):  # one that is not makes the sum so
        raise Internal(
            f"{what}: {tokens} tokens need as many finite log-probabilities, got {list(sample.logprobs)[:8]}"
        )
    ends = [0, *(span.end for span in sample.spans)]
    starts = [*(span.start for span in sample.spans), tokens]
    if starts != ends:
        raise Internal(f"{what}: version spans {list(sample.spans)} do not cover {tokens} sampled tokens")
