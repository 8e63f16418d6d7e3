"""Progress of one piece of work on stderr: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def reporter(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """report(phase, done, of)"""
    if quiet or not sys.stderr.isatty():
        yield lambda phase, done, of: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        tasks = {}

        def report(phase: str, done: int, of: int) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=of)
            progress.update(tasks[phase], completed=done, total=of)

        yield report
