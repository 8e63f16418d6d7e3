"""The Generate calls, by request id: each samples some trajectories, and holds them until they are acknowledged.

A call is known as long as it holds anything; who asks again gets what is held, in any state of the worker, and only
what is missing is sampled. A run is one go at that: it ends with the last trajectory, with the first error, or when
nobody listens any more.
"""

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
from services.rollout.holding import Holding, trajectory_bytes
from services.rollout.seeds import sample_seed

logger = logging.getLogger(__name__)

KEEP_ACKNOWLEDGED = 16384  # ids; stated in the contract of Acknowledge

_FINISH_REASONS = {
    "stop": trajectory_pb2.FINISH_REASON_STOP,
    "length": trajectory_pb2.FINISH_REASON_LENGTH,
    "aborted": trajectory_pb2.FINISH_REASON_ABORTED,
}


class Run:
    """One go at the missing trajectories of a call."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.tasks: list[asyncio.Task[None]] = []
        self.in_engine: set[str] = set()
        self.callers = 0
        self.aborted = False
        self.error: BaseException | None = None
        self.ended = False


class Generation:
    """One call: what was asked, what is finished and held, and the run under way."""

    def __init__(self, request: rollout_pb2.GenerateRequest, fingerprint: bytes) -> None:
        self.request = request
        self.fingerprint = fingerprint
        self.order: list[int] = []
        """Sample numbers in order of finishing."""
        self.held: dict[int, Trajectory] = {}
        """Those of them that were not acknowledged."""
        self.run: Run | None = None
        self.listeners = 0
        self.rested_at = 0.0
        """Of time.monotonic: when the last run ended."""
        self._changed = asyncio.Event()

    @property
    def missing(self) -> list[int]:
        """Sample numbers that are not finished."""
        first, finished = self.request.first_sample_number, set(self.order)
        return [number for number in range(first, first + self.request.samples) if number not in finished]

    @property
    def complete(self) -> bool:
        return len(self.order) == self.request.samples

    @property
    def most_bytes(self) -> int:
        """Of one of its trajectories."""
        return trajectory_bytes(len(self.request.prompt_token_ids) + self.request.sampling.max_tokens)

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self) -> None:
        await self._changed.wait()


class Generations:
    """All calls that run or hold anything."""

    def __init__(self, engine: Engine, gate: Gate, holding: Holding, worker_id: str, hold_seconds: float) -> None:
        self._engine = engine
        self._gate = gate
        self._holding = holding
        self._worker_id = worker_id
        self._hold_seconds = hold_seconds
        self._known: dict[str, Generation] = {}
        self._resting: OrderedDict[str, Generation] = OrderedDict()  # those without a run, the oldest first
        self._acknowledged: OrderedDict[str, None] = OrderedDict()  # ids of calls that are wholly acknowledged
        self._attempts = itertools.count()  # engine ids stay unique when a call is cancelled and asked again
        self._supervisors: set[asyncio.Task[None]] = set()

    async def stream(self, request: rollout_pb2.GenerateRequest) -> AsyncGenerator[Trajectory, None]:
        """Trajectories of a checked request: what is held at once, the rest in order of finishing.

        Leaving the loop aborts what is unfinished, unless another caller is attached. Raises Conflict (the id with
        other content, or acknowledged; another policy version), Unavailable, Overloaded, and InvalidRequest for more
        than this worker ever holds; what is held is delivered before that.
        """
        generation = self._find_or_add(request)
        generation.listeners += 1
        sent = 0
        run: Run | None = None
        try:
            while True:
                while sent < len(generation.order):
                    sent += 1
                    trajectory = generation.held.get(generation.order[sent - 1])
                    if trajectory is not None:
                        yield trajectory
                if generation.complete:
                    return
                if run is None and (generation.run is None or generation.run.error is None):
                    run = generation.run or self._start(generation)
                    run.callers += 1
                elif run is not None and run.ended:
                    raise run.error or Internal(f"Generate {request.request_id}: ended without all its trajectories")
                else:
                    await generation.wait_change()
        finally:
            generation.listeners -= 1
            if run is not None:
                run.callers -= 1
                if run.callers == 0 and not run.ended:
                    _cancel(run, Unavailable(f"Generate {request.request_id}: nobody waits for it any more"))
            self._drop_if_empty(generation)

    def acknowledge(self, calls: Sequence[rollout_pb2.AcknowledgedCall]) -> int:
        """Forgets the named trajectories, those that are unfinished or unknown excepted; answers how many."""
        forgotten = 0
        for call in calls:
            generation = self._known.get(call.request_id)
            if generation is None:
                continue
            for number in list(call.sample_numbers) or list(generation.held):
                trajectory = generation.held.pop(number, None)
                if trajectory is not None:
                    forgotten += 1
                    self._holding.release(1, trajectory_bytes(len(trajectory.token_ids)))
            if generation.complete and not generation.held:
                self._forget(generation)
                self._acknowledged[call.request_id] = None
                while len(self._acknowledged) > KEEP_ACKNOWLEDGED:
                    self._acknowledged.popitem(last=False)
        return forgotten

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Ends the named calls with what was sampled so far; answers how many trajectories were unfinished."""
        aborted = 0
        in_engine: list[str] = []
        for request_id in dict.fromkeys(request_ids):
            generation = self._known.get(request_id)
            if generation is None or generation.run is None:
                continue
            run = generation.run
            run.aborted = True
            aborted += len(generation.missing)
            in_engine.extend(run.in_engine)
            for task in run.tasks:
                if task.get_name() not in run.in_engine:
                    task.cancel()  # held back: it has sampled nothing
        if in_engine:
            await self._engine.abort(in_engine)
        return aborted

    async def close(self, error: AntiphonError) -> None:
        """Ends all runs with the error, and waits for the end of their work."""
        for generation in list(self._known.values()):
            if generation.run is not None:
                _cancel(generation.run, error)
        if self._supervisors:
            await asyncio.wait(set(self._supervisors))

    def _find_or_add(self, request: rollout_pb2.GenerateRequest) -> Generation:
        self._forget_old()
        request_id = request.request_id
        if request_id in self._acknowledged:
            raise Conflict(
                f"Generate {request_id}: every trajectory of it was acknowledged and is forgotten; use a new id for a "
                "new request"
            )
        fingerprint = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        known = self._known.get(request_id)
        if known is None:
            known = self._known[request_id] = Generation(request, fingerprint)
        elif known.fingerprint != fingerprint:
            raise Conflict(f"Generate {request_id}: asked before with other content; use a new id for a new request")
        return known

    def _start(self, generation: Generation) -> Run:
        """A run for what is missing. Raises Overloaded, Unavailable or InvalidRequest when it may not begin."""
        request = generation.request
        numbers = generation.missing
        self._gate.reserve(len(numbers))
        try:
            self._holding.reserve(len(numbers), len(numbers) * generation.most_bytes)
        except AntiphonError:
            self._gate.release(len(numbers))
            raise
        self._resting.pop(request.request_id, None)
        generation.run = run = Run(numbers)
        attempt = next(self._attempts)
        for number in numbers:
            name = f"{request.request_id}/{number}#{attempt}"
            run.tasks.append(asyncio.create_task(self._finish_one(generation, run, number, name), name=name))
        supervisor = asyncio.create_task(self._supervise(generation, run), name=f"Generate {request.request_id}")
        self._supervisors.add(supervisor)
        supervisor.add_done_callback(self._supervisors.discard)
        return run

    async def _supervise(self, generation: Generation, run: Run) -> None:
        """Ends the run when all its trajectories are there, or at the first error."""
        try:
            done, _ = await asyncio.wait(run.tasks, return_when=asyncio.FIRST_EXCEPTION)
            errors = [task.exception() for task in done if not task.cancelled()]
            run.error = run.error or next((error for error in errors if error is not None), None)
            for task in run.tasks:
                task.cancel()
            await asyncio.wait(run.tasks)
            if run.error is None and run.aborted:
                for number in generation.missing:  # held back when it was aborted: the prompt, and nothing sampled
                    sample = Sample((), (), "aborted", ())
                    self._keep(generation, self._trajectory(generation.request, number, 0, sample))
        finally:
            unfinished = len(generation.missing)
            self._gate.release(len(run.numbers))
            self._holding.release(unfinished, unfinished * generation.most_bytes)
            run.ended = True
            generation.run = None
            generation.rested_at = time.monotonic()
            if self._known.get(generation.request.request_id) is generation:  # not all acknowledged by now
                self._resting[generation.request.request_id] = generation
            self._drop_if_empty(generation)
            generation.notify()

    async def _finish_one(self, generation: Generation, run: Run, number: int, name: str) -> None:
        self._keep(generation, await self._sampled(generation.request, run, number, name))
        generation.notify()

    def _keep(self, generation: Generation, trajectory: Trajectory) -> None:
        generation.order.append(trajectory.sample_number)
        generation.held[trajectory.sample_number] = trajectory
        self._holding.release(0, generation.most_bytes - trajectory_bytes(len(trajectory.token_ids)))

    async def _sampled(self, request: rollout_pb2.GenerateRequest, run: Run, number: int, name: str) -> Trajectory:
        wanted = request.policy_version if request.HasField("policy_version") else None
        policy = await self._gate.enter(wanted)
        try:
            seed = sample_seed(request.run_seed, request.prompt_id, number, policy.version)
            run.in_engine.add(name)
            sample = await self._engine.generate(
                SampleRequest(
                    id=name,
                    prompt_token_ids=request.prompt_token_ids,
                    seed=seed,
                    temperature=request.sampling.temperature,
                    max_tokens=request.sampling.max_tokens,
                    stop_token_ids=request.sampling.stop_token_ids,
                    stop_strings=request.sampling.stop_strings,
                    policy_version=policy.version,
                )
            )
        finally:
            run.in_engine.discard(name)
            self._gate.leave()
        return self._trajectory(request, number, seed, sample)

    def _trajectory(self, request: rollout_pb2.GenerateRequest, number: int, seed: int, sample: Sample) -> Trajectory:
        prompt_tokens = len(request.prompt_token_ids)
        _check_sample(sample, f"{request.request_id}/{number}", request.sampling.max_tokens)
        return Trajectory(
            prompt_id=request.prompt_id,
            sample_number=number,
            token_ids=[*request.prompt_token_ids, *sample.token_ids],
            loss_mask=[False] * prompt_tokens + [True] * len(sample.token_ids),
            behavior_logprobs=[0.0] * prompt_tokens + list(sample.logprobs),
            finish_reason=_FINISH_REASONS[sample.finish_reason],
            stop_string=sample.stop_string,
            version_spans=[
                VersionSpan(
                    start=prompt_tokens + span.start, end=prompt_tokens + span.end, policy_version=span.policy_version
                )
                for span in sample.spans
            ],
            seed=seed,
            worker_id=self._worker_id,
        )

    def _forget_old(self) -> None:
        """What nobody acknowledged or asked for within the time that things are held."""
        horizon = time.monotonic() - self._hold_seconds
        while self._resting:
            generation = next(iter(self._resting.values()))
            if generation.rested_at >= horizon:
                break
            logger.warning(
                "Generate %s: %d finished trajectories were not acknowledged within %.0f s and are forgotten",
                generation.request.request_id,
                len(generation.held),
                self._hold_seconds,
            )
            self._forget(generation)

    def _forget(self, generation: Generation) -> None:
        for trajectory in generation.held.values():
            self._holding.release(1, trajectory_bytes(len(trajectory.token_ids)))
        generation.held.clear()
        self._resting.pop(generation.request.request_id, None)
        if self._known.get(generation.request.request_id) is generation:
            del self._known[generation.request.request_id]

    def _drop_if_empty(self, generation: Generation) -> None:
        """A call that has come to nothing leaves its id free."""
        if generation.run is None and not generation.order and not generation.listeners:
            self._forget(generation)


def _cancel(run: Run, error: AntiphonError) -> None:
    run.error = run.error or error
    for task in run.tasks:
        task.cancel()


def _check_sample(sample: Sample, what: str, max_tokens: int) -> None:
    """Raises Internal when the engine's answer is not whole: it would be trained on."""
    tokens = len(sample.token_ids)
    if tokens > max_tokens:
        raise Internal(f"{what}: {tokens} tokens were sampled, at most {max_tokens} were asked for")
    if len(sample.logprobs) != tokens or not math.isfinite(sum(sample.logprobs)):  # one that is not makes the sum so
        raise Internal(
            f"{what}: {tokens} tokens need as many finite log-probabilities, got {list(sample.logprobs)[:8]}"
        )
    ends = [0, *(span.end for span in sample.spans)]
    starts = [*(span.start for span in sample.spans), tokens]
    if starts != ends:
        raise Internal(f"{what}: version spans {list(sample.spans)} do not cover {tokens} sampled tokens")
