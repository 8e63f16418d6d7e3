"""Commands under way, and what the ranks answer to each: it is over when every rank has answered."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from antiphon.learner.v1 import ranks_pb2

from services.common import errors
from services.common.errors import AntiphonError, Internal, Unavailable
from services.common.operations import Report
from services.learner.framing import BESIDE_OTHER_WORK


@dataclass
class Command:
    """A command under way."""

    report: Report | None
    is_beside: bool
    """It runs beside the ranks' work, and may wait for others: silence is no sign of death."""
    result: asyncio.Future[list[ranks_pb2.RankReply]]
    """Every rank's reply, in rank order; or the error of the first that failed."""
    replies: dict[int, ranks_pb2.RankReply] = field(default_factory=dict)
    first_error: AntiphonError | None = None


class Answers:
    """What `ranks` ranks were asked and have not all answered."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._commands: dict[int, Command] = {}
        self._next_id = 1

    def begin(self, message: ranks_pb2.RankCommand, report: Report | None) -> Command:
        """Gives the message an id. `enter` the command once it can be sent."""
        message.id = self._next_id
        self._next_id += 1
        is_beside = message.WhichOneof("work") in BESIDE_OTHER_WORK
        return Command(report, is_beside, asyncio.get_running_loop().create_future())

    def enter(self, message: ranks_pb2.RankCommand, command: Command) -> None:
        """From now on it waits for its answers."""
        self._commands[message.id] = command

    @property
    def are_awaited(self) -> bool:
        """Whether the ranks are at work, so that their silence means something."""
        return any(not command.is_beside for command in self._commands.values())

    def knows(self, command_id: int) -> bool:
        return command_id in self._commands

    def heard(self, reply: ranks_pb2.RankReply) -> None:
        """Takes progress, of rank 0, or a rank's end of a command; what answers nothing known is dropped."""
        command = self._commands.get(reply.id)
        if command is None:
            return
        if reply.HasField("progress"):
            if reply.rank == 0 and command.report is not None:
                command.report(reply.progress.phase, reply.progress.done, reply.progress.of)
            return
        command.replies[reply.rank] = reply
        if reply.HasField("failure") and command.first_error is None:
            command.first_error = (error_class(reply.failure) or Internal)(reply.failure.message)
        if len(command.replies) == self._ranks and not command.result.done():
            del self._commands[reply.id]
            if command.first_error is not None:
                command.result.set_exception(command.first_error)
            else:
                command.result.set_result([command.replies[number] for number in range(self._ranks)])

    def fail_all(self, problem: str) -> None:
        """No answer will come any more: whoever waits gets Unavailable with the reason."""
        commands, self._commands = self._commands, {}
        for command in commands.values():
            if not command.result.done():
                command.result.set_exception(Unavailable(problem))
                command.result.exception()  # its caller may be gone


def error_class(failure: ranks_pb2.RankFailure) -> type[AntiphonError] | None:
    """The error that a rank which goes on has raised; None when it is lost."""
    known = getattr(errors, failure.error, None)
    if isinstance(known, type) and issubclass(known, AntiphonError) and known is not Internal:
        return known
    return None
