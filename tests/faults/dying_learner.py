"""A real learner of which one process kills itself at a chosen touch of the disk: `tests.faults.dying_learner`.

The environment variable DIES says where: WHO EVENT TEXT, with WHO `parent` or `rank1`, EVENT of sys.audit (`open`,
`os.rename`), TEXT at the end of the path that it is about. Without it nobody dies. The ranks run this module, too.
"""

from __future__ import annotations

import functools
import os
import signal
import sys

from services.learner.config import LearnerConfig

MODULE = "tests.faults.dying_learner"


def die_when_told(who: str) -> None:
    dies = os.environ.get("DIES", "").split()
    if not dies or dies[0] != who:
        return
    _, event, text = dies

    def hear(heard: str, arguments: tuple) -> None:
        if heard == event and str(arguments[0]).endswith(text):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)


def main() -> int:
    if "--rank" in sys.argv:
        from services.learner import rank_main

        die_when_told(f"rank{sys.argv[sys.argv.index('--rank') + 1]}")
        return rank_main.main()
    from services.common import worker
    from services.learner.__main__ import build

    die_when_told("parent")
    return worker.main(MODULE, LearnerConfig, functools.partial(build, rank_module=MODULE))


if __name__ == "__main__":
    sys.exit(main())
