"""Which version the weights are, and which Steps made them: each is applied once, and its answer is remembered."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from antiphon.learner.v1 import checkpoint_pb2, learner_pb2
from antiphon.types.v1 import policy_pb2
from google.protobuf.message import Message

from services.common.errors import Conflict
from services.common.operations import Operation, Operations, Report

STEPS_REMEMBERED = 1024
STEPS_REMEMBERED_SECONDS = 24 * 3600.0
"""The answers of so many Steps, at most so old, are kept for a repeat; after that a repeat is a Conflict."""
STEPS_IN_A_CHECKPOINT = 32

StepWork = Callable[[Report], Awaitable[learner_pb2.StepResult]]


class History:
    """Version 0 is the model that was loaded at the start; a Step makes the next one, a checkpoint replaces it."""

    def __init__(self) -> None:
        self._policy = policy_pb2.Policy(version=0)
        self._loaded_from = ""
        self._steps = _steps()
        self._newest: deque[checkpoint_pb2.RememberedStep] = deque(maxlen=STEPS_IN_A_CHECKPOINT)

    @property
    def policy(self) -> policy_pb2.Policy:
        """A copy; its digest is known after a publication, a Save or a Load."""
        copy = policy_pb2.Policy()
        copy.CopyFrom(self._policy)
        return copy

    @property
    def version(self) -> int:
        return int(self._policy.version)

    def know_digest(self, digest: int) -> None:
        """That of the current version."""
        self._policy.digest = digest

    def step(self, header: learner_pb2.StepHeader, work: StepWork) -> Operation[learner_pb2.StepResult]:
        """The Step of that id, under way, done or begun now. Raises Conflict for the same id with other content."""
        fingerprint = hashlib.sha256(settings_of(header)).digest()  # holds the batch's digest

        async def remembered(report: Report) -> learner_pb2.StepResult:
            result = await work(report)
            self._newest.append(checkpoint_pb2.RememberedStep(fingerprint=fingerprint, result=result))
            return result

        return self._steps.start_or_attach(str(header.step_id), fingerprint, remembered)

    def require_next(self, step_id: int) -> None:
        """Raises Conflict, which says what to do, for any id but the next. Call it when the turn has come."""
        expected = self.version + 1
        if step_id == expected:
            return
        text = f"step {step_id}: the policy is version {self.version}; expected {expected}"
        if step_id < expected:
            source = f", loaded from {self._loaded_from}," if self._loaded_from else ""
            text += (
                f". Step {step_id} is in these weights{source} and its answer is not remembered: do not send it again, "
                f"go on with step {expected}, or load an older checkpoint first"
            )
        else:
            text += f": send the Steps from {expected} on, in order, or load a checkpoint of version {step_id - 1}"
        raise Conflict(text)

    def applied(self, step_id: int) -> policy_pb2.Policy:
        """The weights are those of `step_id` now."""
        self._policy = policy_pb2.Policy(version=step_id)
        return self.policy

    def newest_steps(self) -> list[checkpoint_pb2.RememberedStep]:
        """What a checkpoint keeps of the answers, the oldest first."""
        return list(self._newest)

    def restore(
        self, policy: policy_pb2.Policy, steps: Iterable[checkpoint_pb2.RememberedStep], loaded_from: str
    ) -> None:
        """The weights are those of a checkpoint now; what was applied since it was saved is forgotten."""
        self._policy = policy_pb2.Policy(version=policy.version, digest=policy.digest)
        self._loaded_from = loaded_from
        self._steps = _steps()
        self._newest.clear()
        for step in steps:
            self._newest.append(step)
            self._steps.start_or_attach(str(step.result.step_id), step.fingerprint, _answering(step.result))


def settings_of(request: Message) -> bytes:
    """What makes two requests the same request: everything but how it is called, under what and for how long."""
    copy = type(request)()
    copy.CopyFrom(request)
    for name in ("request_id", "deadline_seconds", "token"):
        if name in copy.DESCRIPTOR.fields_by_name:
            copy.ClearField(name)
    return copy.SerializeToString(deterministic=True)


def _steps() -> Operations[learner_pb2.StepResult]:
    return Operations("step", STEPS_REMEMBERED, STEPS_REMEMBERED_SECONDS)


def _answering(result: learner_pb2.StepResult) -> StepWork:
    async def work(report: Report) -> learner_pb2.StepResult:
        return result

    return work
