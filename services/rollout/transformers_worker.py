"""The process of the embedded engine: the model, the requests that are decoded with it, and the weights it is given.

One thread has the model: it does a step, looks for calls, does the next. Another hears the calls; waiting for weights
is done in threads of their own.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from antiphon.types.v1.chat_pb2 import Conversation
from antiphon.types.v1.transfer_pb2 import TransferManifest

from services.common import logs
from services.common.config import ProcessConfig
from services.common.errors import AntiphonError, ConfigError, Conflict, Expired, InvalidRequest, Unavailable
from services.rollout.config import RolloutConfig
from services.rollout.engine import EngineInfo, SampleRequest
from services.rollout.receiving import Bucket, Transfer
from services.rollout.stop_strings import StopStrings
from services.rollout.transformers_calls import BEAT_SECONDS, HELLO, Beat, Call, Reply
from services.rollout.transformers_decoding import Alone, Continuous, Decoding, Outcome, RunningRequest
from services.rollout.transformers_model import Model

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
GIB = 2**30
LATE_SECONDS = 10.0  # after a deadline that the transfer's thread keeps itself
# As vLLM has it, so that a recipe goes from one engine to the other.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
NOT_YET = object()
"""A call that is answered later."""


class EngineProcess:
    """The methods that the service calls, one at a time, in the thread that has the model."""

    def __init__(
        self,
        process: ProcessConfig[RolloutConfig],
        max_sequence_tokens: int,
        say: Callable[[Reply | Beat], None],
    ) -> None:
        settings = process.settings
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self._say = say
        self._model = Model(process.model.path, process.model.dtype)
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(process.model.path, local_files_only=True)
        self._decoding = _decoding(self._model, settings)
        self._answers: dict[str, int] = {}
        """Request under way → the call that asked for it."""
        self._version = -1
        self._transfer: Transfer | None = None
        self._staging: dict[str, torch.Tensor] = {}
        self._discarded = False
        self.info = EngineInfo(
            backend=f"transformers {transformers.__version__}",
            pids=(os.getpid(),),
            transfer_ranks=1,
            max_sequence_tokens=max_sequence_tokens,
            dtype=process.model.dtype,
            vocabulary_size=self._model.vocabulary_size,
            lowest_temperature=LOWEST_TEMPERATURE,
            highest_temperature=HIGHEST_TEMPERATURE,
            can_sleep=True,
        )

    @property
    def busy(self) -> bool:
        return self._decoding.busy

    def do(self, call: Call) -> None:
        """One call; its answer is said when it is there."""
        try:
            value = self._methods[call.method](self, call.id, *call.arguments)
        except Exception as error:
            self._say(failure(call.id, error))
            return
        if value is not NOT_YET:
            self._say(Reply(call.id, value))

    def step(self) -> None:
        """One forward for what is under way."""
        for outcome in self._decoding.step(self._version):
            self._finish(outcome)

    def _finish(self, outcome: Outcome) -> None:
        call_id = self._answers.pop(outcome.id)
        if outcome.error is not None:
            self._say(failure(call_id, outcome.error))
        else:
            self._say(Reply(call_id, outcome.sample))

    def _generate(self, call_id: int, request: SampleRequest) -> object:
        stop_strings = None
        if request.stop_strings:
            tokenizer = self._tokenizer.backend_tokenizer
            stop_strings = StopStrings(tokenizer, request.stop_strings, request.prompt_token_ids)
        self._answers[request.id] = call_id
        self._decoding.add(RunningRequest(request, stop_strings))
        return NOT_YET

    def _abort(self, call_id: int, ids: Collection[str]) -> None:
        for request_id in ids:
            sequence = self._decoding.remove(request_id)
            if sequence is not None:
                self._finish(Outcome(request_id, sequence.aborted()))

    def _drop(self, call_id: int, request_id: str) -> None:
        """As abort, for a request whose answer nobody wants."""
        if self._decoding.remove(request_id) is not None:
            del self._answers[request_id]

    def _encode(self, call_id: int, conversations: Iterable[bytes]) -> list[list[int]]:
        encoded = []
        for number, data in enumerate(conversations):
            messages = [{"role": m.role, "content": m.content} for m in Conversation.FromString(data).messages]
            try:
                # Without return_dict=False it answers a BatchEncoding, whose iteration gives keys.
                ids = self._tokenizer.apply_chat_template(
                    messages, tokenize=True, add_generation_prompt=True, return_dict=False
                )
            except Exception as error:  # the template is the model's own program: it may raise anything
                raise InvalidRequest(f"conversation {number}: the chat template refuses it: {error}") from None
            encoded.append([int(token_id) for token_id in ids])
        return encoded

    def _probe(self, call_id: int, token_ids: list[int]) -> list[float]:
        return self._model.logprobs(token_ids)

    def _unmatched(self, call_id: int, manifest: bytes) -> Any:
        return self._model.unmatched(TransferManifest.FromString(manifest))

    def _join(self, call_id: int, manifest: bytes, first_receiver_rank: int, deadline_seconds: float) -> object:
        self._leave()
        self._transfer = transfer = Transfer(
            TransferManifest.FromString(manifest),
            first_receiver_rank,
            device=CPU,
            take=self._stage,
            deadline_seconds=deadline_seconds,
        )
        self._answer_when_done(call_id, transfer, "joined", deadline_seconds)
        return NOT_YET

    def _begin_receive(self, call_id: int, deadline_seconds: float) -> None:
        self._staging = {}
        self._joined().receive(deadline_seconds)

    def _received(self, call_id: int, deadline_seconds: float) -> object:
        self._answer_when_done(call_id, self._joined(), "received", deadline_seconds)
        return NOT_YET

    def _load(self, call_id: int, policy_version: int) -> None:
        transfer = self._joined()
        if transfer.state()["phase"] != "received":
            raise Unavailable("nothing was loaded: nothing was received, or it was given up")
        if self._discarded:
            raise Unavailable("nothing was loaded: the weights sleep")
        self._model.fill(transfer.manifest, self._staging)
        self._staging = {}
        self._decoding.clear()
        self._version = policy_version

    def _give_up(self, call_id: int) -> None:
        self._leave()

    def _sleep(self, call_id: int, discard_weights: bool) -> None:
        if self.busy:
            raise Conflict("the engine was told to sleep while it samples")
        self._decoding.clear()
        if discard_weights and not self._discarded:
            self._model.discard()
            self._discarded = True

    def _wake(self, call_id: int, weights: bool) -> None:
        if weights and self._discarded:
            self._model.restore()
            self._discarded = False

    def _joined(self) -> Transfer:
        if self._transfer is None:
            raise Unavailable("no transfer group is joined")
        return self._transfer

    def _leave(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        self._staging = {}

    def _stage(self, buckets: Iterable[Bucket], reuses_memory: bool) -> None:
        staging: dict[str, torch.Tensor] = {}
        for bucket in buckets:
            for spec, tensor in bucket:
                staging[spec.name] = tensor.clone() if reuses_memory else tensor
        self._staging = staging

    def _answer_when_done(self, call_id: int, transfer: Transfer, phase: str, deadline_seconds: float) -> None:
        """Says the transfer's state, in a thread of its own, once there is nothing that it still does."""

        def wait() -> None:
            transfer.wait(deadline_seconds + LATE_SECONDS)
            state = transfer.state()
            if state["phase"] == "failed":
                self._say(Reply(call_id, error=state["error"], message=state["message"]))
            elif state["phase"] == phase:
                self._say(Reply(call_id, state))
            else:
                message = f"epoch {transfer.manifest.epoch}: not given up at its deadline: it stands still"
                self._say(failure(call_id, Expired(message)))

        threading.Thread(target=wait, name=f"until {phase}", daemon=True).start()

    _methods: dict[str, Callable[..., Any]] = {  # noqa: RUF012
        "generate": _generate,
        "abort": _abort,
        "drop": _drop,
        "encode": _encode,
        "probe": _probe,
        "unmatched": _unmatched,
        "join": _join,
        "begin_receive": _begin_receive,
        "received": _received,
        "load": _load,
        "give_up": _give_up,
        "sleep": _sleep,
        "wake": _wake,
    }


def serve(pipe: Connection, process: ProcessConfig[RolloutConfig], max_sequence_tokens: int) -> None:
    """Says hello and does what it is asked, until the pipe closes."""
    logs.configure(f"{process.service.worker_id}-engine", process.service.log_level)
    lock = threading.Lock()

    def say(message: Reply | Beat) -> None:
        with lock:
            pipe.send(message)

    try:
        engine = EngineProcess(process, max_sequence_tokens, say)
    except Exception as error:
        say(failure(HELLO, error))
        return
    say(Reply(HELLO, engine.info))
    calls: queue.SimpleQueue[Call] = queue.SimpleQueue()

    def hear() -> None:
        try:
            while True:
                calls.put(pipe.recv())
        except (EOFError, OSError):  # the service is gone or wants no more
            os._exit(0)

    threading.Thread(target=hear, name="calls", daemon=True).start()
    beat = 0.0
    while True:
        if not engine.busy:
            engine.do(calls.get())
        while not calls.empty():
            engine.do(calls.get())
        if engine.busy:
            engine.step()
            if time.monotonic() >= beat + BEAT_SECONDS:
                beat = time.monotonic()
                say(Beat())


def failure(call_id: int, error: Exception) -> Reply:
    if isinstance(error, AntiphonError):
        return Reply(call_id, error=type(error).__name__, message=str(error))
    logger.error("call %d", call_id, exc_info=error)
    return Reply(call_id, error="Internal", message=f"{type(error).__name__}: {error}")


def _decoding(model: Model, settings: RolloutConfig) -> Decoding:
    batching = settings.batching
    if batching == "continuous" and not model.batches_rows:
        raise ConfigError(
            "batching: continuous is not possible with this model, whose layers look back over a window; set alone"
        )
    if batching is None:
        alone = settings.determinism == "exact" or not model.batches_rows
        batching = "alone" if alone else "continuous"
    logger.info("requests are decoded %s", "each alone" if batching == "alone" else "in one batch")
    if batching == "alone":
        return Alone(model)
    return Continuous(
        model,
        most_running=settings.max_running,
        cache_bytes=int(settings.kv_cache_gib * GIB),
        shares_prefixes=settings.shares_prefixes,
    )
