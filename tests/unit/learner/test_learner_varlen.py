"""Rows one after the other in one line: the log-probs and the gradient of each row alone, through transformers."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from torch.nn.attention import varlen

from services.common.errors import ConfigError
from services.learner import varlen_attention
from services.learner.batching import Layout, Row, plan_micro_batches
from services.learner.packing import pack
from services.learner.policy_model import layout_of, load_policy_model
from tests.unit.learner.cpu_varlen import cpu_kernel
from tests.unit.learner.plain_policy import token_logprobs
from tests.unit.learner.test_learner_policy_model import SMALL, save

CPU = torch.device("cpu")


def rows_of(seed: int = 0, count: int = 5) -> list[Row]:
    dice = random.Random(seed)
    return [
        Row([dice.randrange(40) for _ in range(length)], list(range(1 + number % 3, length)))
        for number, length in enumerate(dice.sample(range(4, 30), count))
    ]


def model_of(kind: str) -> torch.nn.Module:
    torch.manual_seed(1)
    match kind:
        case "qwen2":
            return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL, initializer_range=0.3))
        case "window":
            config = transformers.MistralConfig(**SMALL, initializer_range=0.3, sliding_window=6)
            return transformers.MistralForCausalLM(config)
        case "qwen3":
            return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, initializer_range=0.3))
    raise ValueError(kind)


def load(folder, model, *, checkpointing=False, kernel=cpu_kernel):
    return load_policy_model(save(folder, model), "float32", gradient_checkpointing=checkpointing, kernel=kernel)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "window"])
def test_a_row_in_the_line_has_the_log_probs_and_the_gradient_of_the_row_alone(tmp_path, kind, checkpointing):
    plain = model_of(kind)
    plain.set_attn_implementation("eager")
    policy = load(tmp_path, plain, checkpointing=checkpointing)
    assert layout_of(policy.model, 64) is Layout.ONE_LINE
    rows = rows_of()
    expected = [token_logprobs(plain, list(row.token_ids), 0.8)[list(row.predicted)] for row in rows]
    weights = [torch.arange(1.0, len(part) + 1) for part in expected]
    plain.zero_grad()
    sum((part * weight).sum() for part, weight in zip(expected, weights, strict=True)).backward()

    ((first, *rest),) = plan_micro_batches(rows, ranks=1, token_budget=60, layout=Layout.ONE_LINE)
    assert len(first) > 1 and rest
    for micro_batch in (first, *rest):
        packed = pack(micro_batch, rows, Layout.ONE_LINE, CPU)
        logprobs, _ = policy(packed, 0.8)
        for row, part in zip(packed.rows, logprobs.split(packed.counts), strict=True):
            torch.testing.assert_close(part, expected[row], rtol=1e-4, atol=1e-4)
        (logprobs * torch.cat([weights[row] for row in packed.rows])).sum().backward()
    ours = dict(policy.model.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=2e-3, atol=2e-3, msg=name)


def test_what_a_neighbour_says_changes_nothing(tmp_path):
    policy = load(tmp_path, model_of("qwen2"))
    rows = rows_of()
    ((line,),) = plan_micro_batches(rows, ranks=1, token_budget=1000, layout=Layout.ONE_LINE)
    found = []
    for _ in range(2):
        with torch.no_grad():
            found.append(policy(pack(line, rows, Layout.ONE_LINE, CPU), 1.0)[0])
        rows[line[0].rows[0]] = Row([7] * line[0].length, rows[line[0].rows[0]].predicted)  # the first in the line
    mine = len(rows[line[0].rows[0]].predicted)
    assert torch.equal(found[0][mine:], found[1][mine:]) and not torch.equal(found[0][:mine], found[1][:mine])


def test_a_model_class_whose_layers_hear_of_no_boundary_is_refused(tmp_path):
    """LFM2's convolutions look at the tokens before, whatever row they are of."""
    kinds = ["conv", "full_attention"]
    config = transformers.Lfm2Config(**SMALL, layer_types=kinds, block_multiple_of=8, initializer_range=0.3)
    torch.manual_seed(0)
    path = save(tmp_path, transformers.Lfm2ForCausalLM(config))
    with pytest.raises(ConfigError, match=r"rows that lie in one line see each other.* a layer of lfm2 does not hear"):
        load_policy_model(path, "float32", gradient_checkpointing=False, kernel=cpu_kernel)
    load_policy_model(path, "float32", gradient_checkpointing=False)  # side by side it can be trained


def test_a_kernel_that_knows_no_boundary_is_refused(tmp_path):
    def deaf(query, key, value, boundaries, longest, *, scale, window):
        everything = torch.tensor([0, query.shape[0]], dtype=torch.int32)
        return cpu_kernel(query, key, value, everything, query.shape[0], scale=scale, window=window)

    with pytest.raises(ConfigError, match="rows that lie in one line see each other"):
        load(tmp_path, model_of("qwen2"), kernel=deaf)


def test_a_layer_that_drops_the_words_is_refused(tmp_path, monkeypatch):
    forward = transformers.models.qwen2.modeling_qwen2.Qwen2Attention.forward

    def forgetful(self, *arguments, **words):
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            words.pop(name, None)
        return forward(self, *arguments, **words)

    monkeypatch.setattr(transformers.models.qwen2.modeling_qwen2.Qwen2Attention, "forward", forgetful)
    with pytest.raises(ConfigError, match="Qwen2Attention hands no row boundaries to its attention"):
        load(tmp_path, model_of("qwen2"))


def test_attention_that_is_not_built_in_is_refused(tmp_path):
    config = transformers.Gemma2Config(**SMALL, final_logit_softcapping=None, attn_logit_softcapping=1.0)
    with pytest.raises(ConfigError, match="wants attention with softcap"):
        load(tmp_path, transformers.Gemma2ForCausalLM(config))


def call(query, key, value, cu, longest, *, scale=None, window=None, gqa=False):
    assert query.shape[1] == key.shape[1] or gqa
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return cpu_kernel(query, key, value, cu, longest, scale=scale, window=window)


def of_2_10(  # noqa: PLR0917
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False
):  # fmt: skip
    assert is_causal
    return call(query, key, value, cu_seq_q, max_q)


def of_2_13(  # noqa: PLR0917
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):  # fmt: skip
    back, forward = window_size
    assert forward == 0
    return call(query, key, value, cu_seq_q, max_q, scale=scale, window=None if back < 0 else back + 1, gqa=enable_gqa)


@pytest.mark.parametrize("function", [of_2_10, of_2_13])
@pytest.mark.parametrize("window", [None, 3])
def test_torchs_kernel_is_called_as_its_version_wants(monkeypatch, function, window):
    monkeypatch.setattr(varlen, "varlen_attn", function)
    varlen_attention._parameters_of_varlen_attn.cache_clear()
    torch.manual_seed(0)
    query, key, value = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    cu = torch.tensor([0, 5, 9], dtype=torch.int32)
    try:
        if function is of_2_10 and window:
            with pytest.raises(ValueError, match="attention over a window of 3 tokens"):
                varlen_attention.torch_kernel(query, key, value, cu, 5, scale=0.7, window=window)
            return
        found = varlen_attention.torch_kernel(query, key, value, cu, 5, scale=0.7, window=window)
    finally:
        varlen_attention._parameters_of_varlen_attn.cache_clear()
    torch.testing.assert_close(found, cpu_kernel(query, key, value, cu, 5, scale=0.7, window=window))
