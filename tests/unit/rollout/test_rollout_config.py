from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.common.config import ConfigError, parse
from services.rollout import config
from services.rollout.config import RolloutConfig, environment
from services.rollout.gpus import Gpu
from services.rollout.model_folder import max_sequence_tokens_of


def test_environment_preloads_openmp_once_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert "LD_PRELOAD" not in environment(RolloutConfig())  # a host without it
    openmp = tmp_path / "lib" / "libiomp5.so"
    openmp.parent.mkdir()
    openmp.touch()
    assert environment(RolloutConfig())["LD_PRELOAD"] == str(openmp)
    monkeypatch.setenv("LD_PRELOAD", f"/other.so:{openmp}")
    assert environment(RolloutConfig())["LD_PRELOAD"] == f"{openmp}:/other.so"


def test_environment_on_gpus_leaves_out_what_is_for_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "engine_gpus", lambda: [Gpu(0, "GPU-a", 2, 1)])
    assert set(environment(RolloutConfig())) == {
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_NO_USAGE_STATS",
        "HF_HUB_OFFLINE",
        "TOKENIZERS_PARALLELISM",
    }


def test_environment_of_threads() -> None:
    assert "OMP_NUM_THREADS" not in environment(RolloutConfig())
    assert environment(RolloutConfig(threads=3))["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("bad", [{"engine": "other"}, {"max_running": 0}, {"kv_cache_gib": 0}, {"max_runing": 3}])
def test_wrong_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        parse(RolloutConfig, dict(bad), "test")


def test_the_models_own_limit_has_the_last_word(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 256}')
    assert max_sequence_tokens_of(tmp_path, RolloutConfig(max_sequence_tokens=2048)) == 256
    assert max_sequence_tokens_of(tmp_path, RolloutConfig(max_sequence_tokens=100)) == 100
    with pytest.raises(ConfigError, match=r"no Hugging Face folder: config\.json"):
        max_sequence_tokens_of(tmp_path / "nowhere", RolloutConfig())


def test_the_process_imports_no_heavy_library_before_the_engine_starts() -> None:
    code = (
        "import sys, services.rollout.__main__, services.rollout.child\n"
        "heavy = {'torch', 'vllm', 'transformers', 'deepspeed', 'numba', 'ray', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
