"""`antiphon` with stand-ins for the services: the command line as it is, other modules for the processes."""

from __future__ import annotations

from services.cli.__main__ import main
from services.cli.launch import local

STANDINS = "tests.unit.cli.standins"
MODULES = {kind: f"{STANDINS}.idle" for kind in ("rollout", "reward", "learner")} | {
    "coordinator": f"{STANDINS}.coordinator"
}

if __name__ == "__main__":
    local.MODULES = MODULES
    main()
