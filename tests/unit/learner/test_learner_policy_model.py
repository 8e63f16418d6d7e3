"""What is loaded, what is refused, and bfloat16 weights computed in float32."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from services.common.errors import ConfigError
from services.learner.batching import Layout, Row, plan_micro_batches
from services.learner.packing import pack
from services.learner.policy_model import PolicyModel, compute_in_float32, load_policy_model, may_share_contexts
from tests.tiny.models import make_tiny_model

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=64)


def rows() -> list[Row]:
    prompt = [7, 8, 9, 10]
    return [Row([*prompt, 20 + i, 30, 31][: 7 - i], list(range(4, 7 - i))) for i in range(3)]


def logprobs_of(policy: PolicyModel, layout: Layout):
    ((micro_batch,),) = plan_micro_batches(rows(), ranks=1, token_budget=1000, layout=layout)
    packed = pack(micro_batch, rows(), layout, torch.device("cpu"))
    logprobs, entropies = policy(packed, 0.8)
    order = torch.tensor(packed.rows).argsort()
    parts = [logprobs.split(packed.counts)[i] for i in order]
    return torch.cat(parts), entropies


def test_shared_prompts_give_the_same_log_probs_and_gradient(tiny):
    policy = load_policy_model(str(tiny), "float32", gradient_checkpointing=False)
    results = []
    for layout in (Layout.PADDED, Layout.SHARED):
        policy.zero_grad()
        logprobs, _ = logprobs_of(policy, layout)
        (logprobs * torch.arange(1.0, len(logprobs) + 1)).sum().backward()
        results.append((logprobs.detach(), {n: p.grad.clone() for n, p in policy.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], rtol=1e-4, atol=1e-4)


def test_gradient_checkpointing_changes_nothing(tiny):
    plain = load_policy_model(str(tiny), "float32", gradient_checkpointing=False)
    saving = load_policy_model(str(tiny), "float32", gradient_checkpointing=True)
    for policy in (plain, saving):
        logprobs_of(policy, Layout.SHARED)[0].sum().backward()
    for (name, left), (_, right) in zip(plain.named_parameters(), saving.named_parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-5, atol=1e-5, msg=name)


def test_bfloat16_weights_computed_in_float32_are_the_function_of_the_rounded_weights(tiny):
    policy = load_policy_model(str(tiny), "bfloat16", gradient_checkpointing=False)
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    assert all(b.dtype == torch.float32 for n, b in policy.named_buffers() if n.endswith("inv_freq"))
    exact = copy.deepcopy(policy).float()
    compute_in_float32(policy.model)
    found, _ = logprobs_of(policy, Layout.SHARED)
    expected, _ = logprobs_of(exact, Layout.SHARED)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    found.sum().backward()
    expected.sum().backward()
    for (name, ours), (_, theirs) in zip(policy.named_parameters(), exact.named_parameters(), strict=True):
        assert ours.grad.dtype == torch.bfloat16, name
        worst = (ours.grad.float() - theirs.grad).abs().max()
        assert worst <= 0.01 * theirs.grad.abs().max(), name  # rounded to bfloat16 where it is stored


def save(folder, model) -> str:
    model.save_pretrained(folder)
    return str(folder)


def test_models_whose_logits_are_changed_on_the_way_are_refused(tmp_path):
    config = transformers.Gemma2Config(**SMALL, final_logit_softcapping=0.5, sliding_window=8)
    torch.manual_seed(0)
    path = save(tmp_path, transformers.Gemma2ForCausalLM(config))
    with pytest.raises(ConfigError, match="gemma2 changes them on the way"):
        load_policy_model(path, "float32", gradient_checkpointing=False)


def test_an_output_layer_with_a_bias_is_refused(tmp_path):
    config = transformers.PhiConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"})
    path = save(tmp_path, transformers.PhiForCausalLM(config))
    with pytest.raises(ConfigError, match="expected a linear layer without bias"):
        load_policy_model(path, "float32", gradient_checkpointing=False)


def test_a_folder_without_a_model_says_so(tmp_path):
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_policy_model(str(tmp_path), "float32", gradient_checkpointing=False)


def test_dropout_is_switched_off_and_named(tmp_path, caplog):
    path = save(tmp_path, transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, attention_dropout=0.5)))
    policy = load_policy_model(path, "float32", gradient_checkpointing=True)
    assert "dropout is switched off: model.layers.0.self_attn.attention_dropout" in caplog.text
    assert policy.training
    torch.testing.assert_close(
        logprobs_of(policy, Layout.PADDED)[0], logprobs_of(policy, Layout.PADDED)[0], rtol=0, atol=0
    )


def test_windowed_attention_is_not_shared(tmp_path):
    windowed = transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=16))
    whole = transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=None))
    assert not may_share_contexts(windowed, 64)
    assert may_share_contexts(windowed, 16)
    assert may_share_contexts(whole, 64)
