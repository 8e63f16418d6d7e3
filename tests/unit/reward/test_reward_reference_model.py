"""The frozen model: its log-probs, what it may not depend on, and the folders that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from services.common.config import ModelConfig, ServiceConfig
from services.common.errors import ConfigError
from services.common.weights.digest import add_digests, digest_with_torch
from services.reward import reference_model
from services.reward.config import ReferenceConfig
from services.reward.reference import fill
from services.reward.reference_model import ReferenceModel
from services.reward.reference_settings import settled
from tests.tiny.models import make_tiny_model

ROWS = [[5, 9, 2, 40, 7, 7, 31], [3], [60, 1, 22], [8, 8]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("reference"), seed=11)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_are_those_of_plain_transformers(folder: Path, dtype: str, temperature: float) -> None:
    """In numpy's float64 from the logits of the model's own forward, row by row; M23's temperatures."""
    model = ReferenceModel(str(folder), dtype, "cpu")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=reference_model.DTYPES[dtype]).float()
    for row, found in zip(ROWS, model.logprobs(ROWS, temperature), strict=True):
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([row])).logits[0].double().numpy() / temperature
        normalisers = np.log(np.exp(logits).sum(-1))
        wanted = [0.0, *(logits[t, row[t + 1]] - normalisers[t] for t in range(len(row) - 1))]
        assert found == pytest.approx(wanted, abs=1e-5 if dtype == "float32" else 0.02)


def test_a_row_is_the_same_alone_and_beside_any_other(folder: Path) -> None:
    model = ReferenceModel(str(folder), "float32", "cpu")
    together, other = model.logprobs(ROWS, 1.0), model.logprobs([ROWS[0], [1, 1], [2] * 3, [44] * 2], 1.0)
    assert together[0] == other[0]
    for row, found in zip(ROWS, together, strict=True):
        assert found == pytest.approx(model.logprobs([row], 1.0)[0], abs=1e-5)


def test_the_table_of_logits_is_never_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ReferenceModel(str(folder), "float32", "cpu")
    whole = model.logprobs(ROWS, 0.7)
    monkeypatch.setattr(reference_model, "CHUNK_LOGITS", 2 * model.vocabulary_size)
    shapes: list[torch.Size] = []
    linear = torch.nn.functional.linear

    def watched(inputs: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        output = linear(inputs, weight, bias)
        if output.shape[-1] == model.vocabulary_size:
            shapes.append(output.shape)
        return output

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    chunked = model.logprobs(ROWS, 0.7)
    assert [shape[0] for shape in shapes] == [2, 2, 2, 2, 1]  # 6 + 0 + 2 + 1 predicted tokens
    for a, b in zip(whole, chunked, strict=True):
        assert a == pytest.approx(b, abs=1e-6)


def test_the_digest_is_that_of_a_policy_with_these_weights(folder: Path) -> None:
    """From the file, by the formula of docs/design.md §6; the tied head is in it once."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for dtype, kind in reference_model.DTYPES.items():
        parts = [digest_with_torch(name, t.to(kind).reshape(-1), 0) for name, t in tensors.items()]
        assert ReferenceModel(str(folder), dtype, "cpu").digest == add_digests(*parts)


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        (transformers.Gemma2Config, {"final_logit_softcapping": 0.5, "head_dim": 8}, "changes its logits on the way"),
        (transformers.GraniteConfig, {"logits_scaling": 4.0}, "changes its logits on the way"),
        (transformers.PhiConfig, {}, "expected a linear layer without bias"),
    ],
)
def test_a_model_whose_logits_are_not_its_head_is_refused(
    tmp_path: Path, folder: Path, architecture: Any, change: dict[str, Any], message: str
) -> None:
    size = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = architecture(**size, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, **change)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(model.get_output_embeddings().weight)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    with pytest.raises(ConfigError, match=message):
        ReferenceModel(str(tmp_path), "float32", "cpu")


def test_a_broken_folder_is_refused_with_the_reason(tmp_path: Path, folder: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        ReferenceModel(str(tmp_path), "float32", "cpu")
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        ReferenceModel(str(tmp_path), "float32", "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no GPU"):
            ReferenceModel(str(folder), "float32", "cuda")


def service_config(folder: Path, **changes: Any) -> ServiceConfig:
    return ServiceConfig(run_id="run-1", worker_id="reward-0", run_dir=folder, nats_url="nats://none", **changes)


def test_settings_are_settled_from_the_runs_model(tmp_path: Path, folder: Path) -> None:
    run = ModelConfig(path=str(folder), dtype="bfloat16")
    found = settled(ReferenceConfig(), run, service_config(tmp_path))
    assert (found.path, found.dtype, found.device) == (str(folder), "bfloat16", "auto")
    elsewhere = ReferenceConfig(path=str(folder), dtype="float32", device="cpu")
    found = settled(elsewhere, ModelConfig(path="nowhere"), service_config(tmp_path, shares_gpus=True))
    assert (found.path, found.dtype) == (str(folder), "float32")
    with pytest.raises(ConfigError, match=r"reference\.device=cpu"):
        settled(ReferenceConfig(), run, service_config(tmp_path, shares_gpus=True))
    with pytest.raises(ConfigError, match="nowhere: no such folder"):
        settled(ReferenceConfig(path="nowhere"), run, service_config(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json, \*\.safetensors"):
        settled(ReferenceConfig(path=str(tmp_path)), run, service_config(tmp_path))


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([5], 4, [0]),  # longer than the budget: alone
        ([5, 5, 5], 10, [0, 1]),
        ([5, 9, 4, 5], 15, [0, 3, 2]),  # the nearest in length first
        ([2, 8], 10, [0]),  # 2 x 8 with padding
        ([1, 1, 1, 1], 100, [0, 1, 2, 3]),
    ],
)
def test_a_micro_batch_is_the_oldest_row_and_what_fits_beside_it(
    lengths: list[int], budget: int, expected: list[int]
) -> None:
    assert fill(lengths, budget) == expected
