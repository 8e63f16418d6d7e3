"""Memory of all processes of a run: proportional set size (a page that n processes share counts 1/n for each)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from services.cli.run_processes import find_processes, parent_of

PERIOD_SECONDS = 3.0
OTHER = "other"


class MemorySampler:
    """Samples into memory.jsonl, {"time", "total_mib", "workers": {worker: MiB}}, and keeps the highest total.

    `owners` answers the worker of each process that the launcher made; their descendants count with them.
    """

    def __init__(self, run_id: str, owners: Callable[[], Mapping[int, str]], path: Path) -> None:
        self._run_id = run_id
        self._owners = owners
        self._path = path
        self.peak_mib = 0.0
        self.at_peak: dict[str, float] = {}

    async def run(self) -> None:
        """Samples until cancelled."""
        while True:
            owners = dict(self._owners())
            await asyncio.to_thread(self.sample, owners)
            await asyncio.sleep(PERIOD_SECONDS)

    def sample(self, owners: Mapping[int, str]) -> None:
        workers: dict[str, float] = {}
        for pid in {*find_processes(self._run_id), *owners}:
            size = pss_mib(pid)
            if size is not None:
                worker = _owner(pid, owners)
                workers[worker] = workers.get(worker, 0.0) + size
        total = sum(workers.values())
        if total > self.peak_mib:
            self.peak_mib, self.at_peak = total, workers
        rounded = {worker: round(mib, 1) for worker, mib in workers.items()}
        line = {"time": time.time(), "total_mib": round(total, 1), "workers": rounded}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def summary(self) -> str:
        """The highest total and whose it was."""
        shares = sorted(self.at_peak.items(), key=lambda item: -item[1])
        return f"{self.peak_mib / 1024:.2f} GiB ({', '.join(f'{name} {mib / 1024:.2f}' for name, mib in shares)})"


def pss_mib(pid: int) -> float | None:
    """None when the process has ended, or the kernel has no smaps_rollup."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), None)


def _owner(pid: int, owners: Mapping[int, str]) -> str:
    while pid > 1:
        if pid in owners:
            return owners[pid]
        pid = parent_of(pid)
    return OTHER
