"""What a child process of this service runs before anything else: it asks to die with its parent.

multiprocessing makes a spawned child run the module that `__main__.__spec__` names, except a package's `__main__`; so
this module is named while an engine starts its child. A hook inside vLLM would come too late: a child whose parent is
killed while it imports or shakes hands waits for minutes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.processes import die_with_parent

PARENT_VARIABLE = "ANTIPHON_PARENT_PID"


@contextmanager
def children_begin_here() -> Iterator[None]:
    """Children that multiprocessing spawns meanwhile run this module first, instead of the main one."""
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    main = sys.modules["__main__"]
    own = main.__spec__
    main.__spec__ = importlib.util.find_spec("services.rollout.child")
    try:
        yield
    finally:
        main.__spec__ = own


if __name__ == "__mp_main__" and PARENT_VARIABLE in os.environ:
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for children of its own
