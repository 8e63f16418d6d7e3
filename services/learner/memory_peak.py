"""The most memory that a rank holds during a call."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import torch
from antiphon.learner.v1 import learner_pb2

KIBIBYTE = 1024


class MemoryWatch:
    """From now on: of the rank's GPU by torch's allocator, or of its process on a host without one."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError):  # where the kernel refuses, the peak is that of the process's whole life
                Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> learner_pb2.MemoryPeak:
        if self._device.type == "cuda":
            return learner_pb2.MemoryPeak(
                rank=self._rank,
                device=f"GPU-{torch.cuda.get_device_properties(self._device).uuid}",
                bytes=torch.cuda.max_memory_reserved(self._device),
                total_bytes=torch.cuda.mem_get_info(self._device)[1],
            )
        whole_life = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE
        return learner_pb2.MemoryPeak(
            rank=self._rank,
            device="host",
            bytes=_bytes_in("/proc/self/status", "VmHWM") or whole_life,
            total_bytes=_bytes_in("/proc/meminfo", "MemTotal"),
        )


def _bytes_in(path: str, name: str) -> int:
    """A line `Name: 12 kB` of a file of /proc, in bytes; 0 where it is not there."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIBIBYTE
    return 0
