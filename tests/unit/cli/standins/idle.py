"""A worker that does nothing. `STANDIN_<KIND>` says how: "", "die", "stubborn", "daemon"."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

config = Path(sys.argv[sys.argv.index("--config") + 1])
worker_id = config.stem
run_dir = config.parent.parent
how = os.environ.get(f"STANDIN_{worker_id.rpartition('-')[0].upper()}", "")
STUBBORN = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(600)"


def main() -> None:
    print(f"{worker_id} is here", flush=True)
    (run_dir / f"{worker_id}.environment").write_text("\n".join(f"{k}={v}" for k, v in os.environ.items()))
    if how == "die":
        while not (run_dir / "die").exists():  # the test says when
            time.sleep(0.02)
        for number in range(40):
            print(f"line {number}", flush=True)
        print("the disk is on fire", file=sys.stderr, flush=True)
        os._exit(23)
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how == "daemon":  # a grandchild in a session of its own that asks no kernel to die with anybody
        subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
    (run_dir / f"{worker_id}.ready").touch()
    time.sleep(600)


if __name__ == "__main__":
    main()
