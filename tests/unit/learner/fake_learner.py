"""The learner's process with ranks that have no model: `python -m tests.unit.learner.fake_learner --config FILE`."""

from __future__ import annotations

import functools
import sys

from services.common.worker import main
from services.learner.__main__ import build
from services.learner.config import LearnerConfig

if __name__ == "__main__":
    fake = functools.partial(build, rank_module="tests.unit.learner.fake_rank")
    sys.exit(main("fake_learner", LearnerConfig, fake))
