"""The learner's service with ranks that hold random weights and do not train (benchmarks/random_rank.py)."""

from __future__ import annotations

import functools
import sys

from services.common.worker import main
from services.learner.__main__ import build
from services.learner.config import LearnerConfig

if __name__ == "__main__":
    sys.exit(
        main("benchmarks.random_learner", LearnerConfig, functools.partial(build, rank_module="benchmarks.random_rank"))
    )
