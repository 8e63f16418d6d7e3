"""Which engine settings mean, and which of them cannot be had together."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from services.common.config import ConfigError, parse
from services.rollout import config
from services.rollout.config import RolloutConfig, chosen_engine, environment
from services.rollout.gpus import Gpu


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`machine(vllm=..., gpus=...)`: what is installed, and how many GPUs there are."""

    def make(*, vllm: bool, gpus: int) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if vllm and name == "vllm" else None)
        monkeypatch.setattr(config, "engine_gpus", lambda: [Gpu(n, f"GPU-{n}", 2, 1) for n in range(gpus)])

    return make


@pytest.mark.parametrize(
    ("vllm", "gpus", "settings", "engine"),
    [
        (True, 0, {}, "vllm"),
        (True, 1, {}, "vllm"),
        (False, 0, {}, "transformers"),
        (False, 1, {}, "transformers"),
        (True, 0, {"determinism": "exact"}, "transformers"),
        (True, 1, {"determinism": "exact"}, "vllm"),
        (False, 1, {"determinism": "exact"}, "transformers"),
        (True, 0, {"batching": "alone"}, "transformers"),
        (True, 1, {"batching": "continuous"}, "transformers"),
        (True, 1, {"engine": "transformers"}, "transformers"),
        (True, 1, {"engine": "vllm", "determinism": "exact", "prefix_cache": False}, "vllm"),
        (True, 2, {"tensor_parallel": 2, "gpus": [0, 1]}, "vllm"),
    ],
)
def test_what_is_chosen(machine: Any, vllm: bool, gpus: int, settings: dict[str, Any], engine: str) -> None:
    machine(vllm=vllm, gpus=gpus)
    assert chosen_engine(RolloutConfig(**settings)) == engine


@pytest.mark.parametrize(
    ("vllm", "gpus", "settings", "said"),
    [
        (False, 1, {"engine": "vllm"}, r"engine: vllm is not installed here; .*engine: transformers"),
        (True, 0, {"engine": "vllm", "determinism": "exact"}, r"vLLM on CPU.*set engine: transformers, or determinism"),
        (
            True,
            1,
            {"engine": "vllm", "batching": "alone"},
            r"batching: alone is of the transformers engine.*leave it out",
        ),
        (True, 2, {"engine": "transformers", "tensor_parallel": 2}, r"tensor_parallel: 2.*set 1, or engine: vllm"),
        (False, 2, {"tensor_parallel": 2, "gpus": [0, 1]}, r"tensor_parallel: 2.*; gpus: \[0, 1\].*remove it"),
    ],
)
def test_what_cannot_be_had_says_what_to_change(
    machine: Any, vllm: bool, gpus: int, settings: dict[str, Any], said: str
) -> None:
    machine(vllm=vllm, gpus=gpus)
    with pytest.raises(ConfigError, match=said):
        chosen_engine(RolloutConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"determinism": "exact", "prefix_cache": True}, "exact needs prefix_cache: false"),
        ({"determinism": "exact", "batching": "continuous"}, "exact needs batching: alone"),
    ],
)
def test_what_is_never_exact_is_refused_when_it_is_read(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(RolloutConfig, settings, "recipe")


def test_prefixes_are_shared_unless_it_is_exact() -> None:
    assert RolloutConfig().shares_prefixes
    assert not RolloutConfig(determinism="exact").shares_prefixes
    assert not RolloutConfig(prefix_cache=False).shares_prefixes


def test_the_environment_is_that_of_the_engine(machine: Any) -> None:
    machine(vllm=True, gpus=1)
    assert environment(RolloutConfig(determinism="exact"))["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in environment(RolloutConfig())
    machine(vllm=True, gpus=0)
    assert any(name.startswith("VLLM") for name in environment(RolloutConfig()))
    assert not any(name.startswith("VLLM") for name in environment(RolloutConfig(engine="transformers", threads=2)))
    assert environment(RolloutConfig(engine="transformers", threads=2))["OMP_NUM_THREADS"] == "2"
