"""`antiphon train` with stand-ins for the services."""

from __future__ import annotations

import sys
from pathlib import Path

from services.cli.train import CONFIG, train
from services.common.errors import ConfigError

STANDINS = "tests.unit.cli.standins"
MODULES = {kind: f"{STANDINS}.idle" for kind in ("rollout", "reward", "learner")} | {
    "coordinator": f"{STANDINS}.coordinator"
}

if __name__ == "__main__":
    try:
        sys.exit(train(Path(sys.argv[1]), sys.argv[2:], MODULES))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(CONFIG)
