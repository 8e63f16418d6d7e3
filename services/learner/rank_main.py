"""One rank of a learner, a child of the service: `python -m services.learner.rank_main`. Torch is loaded in here only.

It connects to its parent's Unix socket, says hello when the model is loaded, and does the commands it is sent, one
after the other (services/learner/framing.py, protos/antiphon/learner/v1/ranks.proto). It ends when the socket closes;
the kernel kills it when the parent dies (services/common/processes.py).
"""

from __future__ import annotations

import argparse
import gc
import logging
import queue
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from antiphon.learner.v1 import ranks_pb2
from antiphon.types.v1 import progress_pb2
from google.protobuf.message import Message

from services.common import logs
from services.common.config import ProcessConfig, load_process_config
from services.common.errors import AntiphonError
from services.learner.config import LearnerConfig
from services.learner.framing import BESIDE_OTHER_WORK, framed, receive_message
from services.learner.trainer import Report, Trainer

logger = logging.getLogger(__name__)

START_COMMAND = 0
"""Command id of what is said before the first command: the hello, or why there is none."""
PROGRESS_PERIOD_SECONDS = 0.2


class Parent:
    """The parent's end of the socket, as a rank sees it. Replies may come from more than one thread."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._lock = threading.Lock()

    def next_command(self) -> ranks_pb2.RankCommand | None:
        return receive_message(self._connection, ranks_pb2.RankCommand)

    def reply(self, reply: ranks_pb2.RankReply) -> None:
        reply.rank = self._rank
        with self._lock:
            self._connection.sendall(framed(reply))

    def fail(self, command_id: int, error: Exception) -> None:
        known = isinstance(error, AntiphonError)
        if not known:
            logger.error("command %d: lost", command_id, exc_info=error)
        failure = ranks_pb2.RankFailure(
            error=type(error).__name__ if known else "Internal",
            message=str(error) if known else f"{type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
        )
        self.reply(ranks_pb2.RankReply(id=command_id, failure=failure))

    def reporter(self, command_id: int) -> Report:
        """A `Report` for one command; says a new phase at once, and steps within a phase a few times a second."""
        said = ("", 0.0)

        def report(phase: str, done: int, of: int) -> None:
            nonlocal said
            now = time.monotonic()
            if phase != said[0] or done == of or now >= said[1] + PROGRESS_PERIOD_SECONDS:
                said = (phase, now)
                progress = progress_pb2.Progress(phase=phase, done=done, of=of)
                self.reply(ranks_pb2.RankReply(id=command_id, progress=progress))

        return report


def serve(parent: Parent, trainer: Trainer) -> None:
    """Says hello and does commands, in this thread and in the order sent, until told to stop or the parent is gone."""
    parent.reply(ranks_pb2.RankReply(id=START_COMMAND, hello=trainer.hello()))
    work: queue.SimpleQueue[ranks_pb2.RankCommand | None] = queue.SimpleQueue()

    def hear() -> None:
        while (command := parent.next_command()) is not None and not command.HasField("shutdown"):
            if command.WhichOneof("work") in BESIDE_OTHER_WORK:
                threading.Thread(target=_answer, args=(parent, trainer, command), daemon=True).start()
            else:
                work.put(command)
        work.put(None)

    threading.Thread(target=hear, daemon=True, name="commands").start()
    while (command := work.get()) is not None:
        _answer(parent, trainer, command)


def _answer(parent: Parent, trainer: Trainer, command: ranks_pb2.RankCommand) -> None:
    try:
        reply = _done(trainer, command, parent.reporter(command.id))
    except Exception as error:  # the parent decides what it means
        parent.fail(command.id, error)
        return
    reply.id = command.id
    if reply.WhichOneof("part") is None:
        reply.done.SetInParent()
    parent.reply(reply)


_Do = Callable[[Trainer, ranks_pb2.RankCommand, Report], Message | None]
_WORK: dict[str, tuple[str, _Do]] = {
    "train_step": ("step", lambda trainer, command, report: trainer.train_step(command.train_step, report)),
    "join_transfer": ("manifest", lambda trainer, command, _: trainer.join_transfer(command.join_transfer.request)),
    "connect_transfer": ("done", lambda trainer, command, _: trainer.connect_transfer(command.connect_transfer)),
    "publish": ("publish", lambda trainer, command, report: trainer.publish(command.publish.request, report)),
    "export": ("export", lambda trainer, command, report: trainer.export(command.export.request, report)),
    "save": ("saved", lambda trainer, command, report: trainer.save(command.save, report)),
    "check_load": ("done", lambda trainer, command, report: trainer.check_load(command.check_load, report)),
    "load": ("loaded", lambda trainer, command, report: trainer.load(command.load, report)),
    "sleep": ("memory_change", lambda trainer, command, _: trainer.sleep(command.sleep.tags)),
    "wake": ("memory_change", lambda trainer, command, _: trainer.wake(command.wake.tags)),
    "memory": ("memory", lambda trainer, command, _: trainer.memory()),
}
"""Work whose answer is one message or none: the part of the reply that it goes into, and what does it."""


def _done(trainer: Trainer, command: ranks_pb2.RankCommand, report: Report) -> ranks_pb2.RankReply:
    reply = ranks_pb2.RankReply()
    work = command.WhichOneof("work")
    if work == "forward":
        reply.forward.responses.extend(trainer.forward(command.forward, report))
    elif work == "encode":
        reply.encode.encoded.extend(trainer.encode(command.encode))
    elif work in _WORK:
        part, do = _WORK[work]
        _set(getattr(reply, part), do(trainer, command, report))
    else:
        raise ValueError(f"command {command.id}: {work!r} is not known to this build")
    return reply


def _set(field: Message, value: Message | None) -> None:
    if value is not None:
        field.SetInParent()
        field.CopyFrom(value)


@dataclass(frozen=True)
class Placement:
    """Where a rank stands among the others."""

    rank: int
    ranks: int
    rendezvous: Path
    """File at which the ranks find one another."""


MakeTrainer = Callable[[ProcessConfig[LearnerConfig], Placement], Trainer]


def make_deepspeed_trainer(process: ProcessConfig[LearnerConfig], placement: Placement) -> Trainer:
    from services.learner.deepspeed_trainer import DeepSpeedTrainer

    return DeepSpeedTrainer(process, placement.rank, placement.ranks, placement.rendezvous)


def main(make_trainer: MakeTrainer = make_deepspeed_trainer) -> int:
    parser = argparse.ArgumentParser(prog="python -m services.learner.rank_main")
    parser.add_argument("--config", type=Path, required=True, help="the learner's ProcessConfig")
    parser.add_argument("--socket", type=Path, required=True, help="the parent listens there")
    parser.add_argument("--rendezvous", type=Path, required=True, help="file at which the ranks find one another")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    arguments = parser.parse_args()
    process = load_process_config(LearnerConfig, arguments.config)
    logs.configure(f"{process.service.worker_id}-rank{arguments.rank}", process.service.log_level)
    # DeepSpeed calls what torch is about to rename; nobody who reads this log can change that.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(arguments.socket))
    parent = Parent(connection, arguments.rank)
    try:
        trainer = make_trainer(process, Placement(arguments.rank, arguments.ranks, arguments.rendezvous))
    except Exception as error:
        parent.fail(START_COMMAND, error)
        return 1
    # What is there now stays: the collector need not look at a million objects of the libraries again and again.
    gc.collect()
    gc.freeze()
    serve(parent, trainer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
