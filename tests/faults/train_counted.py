"""`antiphon train` with a rollout service that counts: `python -m tests.faults.train_counted RECIPE key=value…`."""

from __future__ import annotations

import sys
from pathlib import Path

from services.cli.train import train

if __name__ == "__main__":
    sys.exit(train(Path(sys.argv[1]), sys.argv[2:], {"rollout": "tests.faults.counting_engine"}))
