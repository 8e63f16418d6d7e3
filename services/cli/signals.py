"""The signals that ask a command to end: the first is remembered, the second says that it is urgent."""

from __future__ import annotations

import asyncio
import signal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Made inside of the running loop, whose handlers it takes."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in ENDING:
            loop.add_signal_handler(number, self._take, number)

    @property
    def exit_code(self) -> int:
        """128 + the number of the first."""
        assert self.number is not None
        return 128 + self.number

    def _take(self, number: signal.Signals) -> None:
        if self.number is None:
            self.number = signal.Signals(number)
            self.first.set()
        else:
            self.second.set()
