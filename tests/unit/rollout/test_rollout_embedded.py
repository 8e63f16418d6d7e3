"""The embedded engine: its numbers against a float64 model of our own and the learner's, its bits, its batches."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from services.common.errors import ConfigError, InvalidRequest
from services.coordinator.config import SelfCheckConfig
from services.learner.batching import Layout, Row, plan_micro_batches
from services.learner.packing import pack
from services.learner.policy_model import load_policy_model
from services.rollout.engine import Sample, SampleRequest
from services.rollout.seeds import sample_seed
from services.rollout.transformers_cache import RowCache
from services.rollout.transformers_decoding import Alone, RunningRequest
from services.rollout.transformers_model import Model
from tests.system.vllm_publications import describe, shaken
from tests.tiny.float64_llama import Float64Llama, log_softmax
from tests.tiny.models import make_tiny_model
from tests.unit.rollout.embedded import MAKERS, ask, continuous, decoded, filled, publish

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two heads to a key, an untied output, sharp enough that tokens differ; with sampling defaults of its own."""
    path = make_tiny_model(tmp_path_factory.mktemp("model"), tied=False, kv_heads=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    shaken(model, seed=5, scale=0.1)
    model.save_pretrained(path)
    defaults = {"do_sample": True, "temperature": 0.3, "top_k": 3, "top_p": 0.5, "repetition_penalty": 1.5}
    (path / "generation_config.json").write_text(json.dumps({**defaults, "eos_token_id": [2, 9]}))
    return path


@pytest.fixture(scope="module")
def source(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(folder: Path, source: Any) -> Model:
    return filled(folder, source)


def requests(count: int = 9, **fields: Any) -> list[SampleRequest]:
    """Prompts of several lengths, some of them equal, and answers of several lengths."""
    chooser = random.Random(3)
    prompts = [[chooser.randrange(6, 80) for _ in range(length)] for length in (3, 9, 30)]
    return [
        ask(f"r{n}", prompts[n % 4 % 3], seed=1000 + n, **{"max_tokens": 5 + 3 * (n % 4), **fields})
        for n in range(count)
    ]


@pytest.mark.parametrize("how", [*MAKERS])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 2.0])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    folder: Path, model: Model, how: str, temperature: float
) -> None:
    """M23, M25, M26: after the temperature, of the sampled token also where it is not the likeliest, and with no
    sampling defaults of the model's folder; against float64 arithmetic of our own.
    """
    exact = Float64Llama(folder)
    asked = requests(5, temperature=temperature)
    found = decoded(MAKERS[how](model), asked)
    unlikely = 0
    for request in asked:
        sample = found[request.id]
        ids = [*request.prompt_token_ids, *sample.token_ids]
        logits = exact.logits(ids)[len(request.prompt_token_ids) - 1 : -1]
        expected = log_softmax(logits / (temperature or 1.0))[np.arange(len(logits)), list(sample.token_ids)]
        np.testing.assert_allclose(sample.logprobs, expected, atol=2e-5)
        assert np.exp(expected - sample.logprobs).mean() == pytest.approx(1.0, abs=1e-4)
        unlikely += int((logits.argmax(-1) != sample.token_ids).sum())
    assert (unlikely == 0) == (temperature == 0)


def test_the_probe_is_exact(folder: Path, model: Model) -> None:
    ids = [1, 40, 41, 42, 50, 60, 12, 33, 7, 80]
    np.testing.assert_allclose(model.logprobs(ids), Float64Llama(folder).logprobs(ids), atol=1e-5)


def test_engine_and_learner_agree(folder: Path, model: Model) -> None:
    """Within what the start-up self-check of a run allows, by far."""
    policy = load_policy_model(str(folder), "float32", gradient_checkpointing=False)
    asked = requests(temperature=0.7)
    samples = [decoded(continuous(model), asked)[request.id] for request in asked]
    rows = []
    for request, sample in zip(asked, samples, strict=True):
        start = len(request.prompt_token_ids)
        ids = [*request.prompt_token_ids, *sample.token_ids]
        rows.append(Row(ids, list(range(start, len(ids)))))
    ((micro_batch,),) = plan_micro_batches(rows, ranks=1, token_budget=10_000, layout=Layout.PADDED)
    packed = pack(micro_batch, rows, Layout.PADDED, CPU)
    with torch.no_grad():
        logprobs, _ = policy(packed, 0.7)
    theirs = dict(zip(packed.rows, logprobs.split(packed.counts), strict=True))
    differences = np.concatenate([np.abs(theirs[n].numpy() - sample.logprobs) for n, sample in enumerate(samples)])
    assert differences.mean() < SelfCheckConfig().logprob_tolerance_float32 / 10


def test_alone_has_the_same_bits_whatever_else_is_asked_for(model: Model) -> None:
    asked = requests()
    one_by_one = {request.id: decoded(Alone(model), [request])[request.id] for request in asked}
    assert decoded(Alone(model), asked) == one_by_one
    assert decoded(Alone(model), asked[::-1]) == one_by_one


def test_replicas_give_the_same_samples(folder: Path, source: Any, model: Model) -> None:
    """M28: four siblings, one on each of four replicas, or all on one: equal, and each another answer."""
    from antiphon.types.v1.trajectory_pb2 import PromptId

    seeds = [sample_seed(7, PromptId(dataset="train", row=1), number, 3) for number in range(4)]
    asked = [ask(f"s{n}", [1, 20, 21, 22], seed) for n, seed in enumerate(seeds)]
    together = decoded(Alone(model), asked)
    for request in asked:
        replica = filled(folder, source)
        assert decoded(Alone(replica), [*requests(2), request])[request.id] == together[request.id]
    assert len({sample.token_ids for sample in together.values()}) == 4


def test_a_batch_gives_what_alone_gives_but_for_rounding(model: Model) -> None:
    asked = requests(24)
    alone, batch = decoded(Alone(model), asked), decoded(continuous(model, running=5), asked)
    for request in asked:
        assert batch[request.id].token_ids == alone[request.id].token_ids
        np.testing.assert_allclose(batch[request.id].logprobs, alone[request.id].logprobs, atol=1e-4)


@pytest.mark.parametrize("how", [*MAKERS])
def test_who_is_taken_out_has_a_beginning_and_disturbs_nobody(model: Model, how: str) -> None:
    asked = requests(6)
    whole = decoded(MAKERS[how](model), asked)
    decoding = MAKERS[how](model)
    taken: dict[str, Sample] = {}

    def take(step: int) -> None:
        name = {3: "r0", 10: "r1"}.get(step)
        running = decoding.remove(name) if name else None
        if name and running is not None:
            taken[name] = running.aborted()

    left = decoded(decoding, asked, before_step=take)
    assert {**left, **taken}.keys() == whole.keys() and taken.keys() == {"r0", "r1"}
    for name, sample in left.items():
        assert sample.token_ids == whole[name].token_ids
    for name, sample in taken.items():
        assert sample.token_ids == whole[name].token_ids[: len(sample.token_ids)]
        assert sample.finish_reason == "aborted" and len(sample.logprobs) == len(sample.token_ids)
    assert decoding.remove("unknown") is None and not decoding.busy


def test_spans_say_which_weights_each_token_is_from(folder: Path, source: Any) -> None:
    """A01: stamped when it is sampled, also where weights change in the middle of an answer."""
    model = filled(folder, source)
    for decoding in (Alone(model), continuous(model)):
        decoding.add(RunningRequest(ask("a", [1, 20, 21], 5, max_tokens=6), None))
        samples = [decoding.step(version)[:] for version in (3, 3, 4, 4, 4, 9)]
        (outcome,) = samples[-1]
        assert outcome.sample is not None
        assert [(s.start, s.end, s.policy_version) for s in outcome.sample.spans] == [(0, 2, 3), (2, 5, 4), (5, 6, 9)]


def test_new_weights_are_not_mixed_with_what_was_cached(folder: Path, source: Any) -> None:
    """W05: the prompt that was computed last is computed again after a publication."""
    model = filled(folder, source)
    decoding = continuous(model)
    decoded(decoding, [ask("a", [1, 20, 21], 5)])
    changed = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    shaken(changed, seed=9)
    publish(model, changed)
    decoding.clear()
    after = decoded(decoding, [ask("b", [1, 20, 21], 5)])["b"]
    assert after == decoded(continuous(filled(folder, changed)), [ask("b", [1, 20, 21], 5)])["b"]


def test_the_memory_of_keys_and_values_is_bounded(model: Model) -> None:
    """Requests wait for room; one alone always has it."""
    asked = requests(12)
    row_bytes = 2 * 2 * 2 * 32 * 4 * 64  # keys and values, layers, heads, size, float32, 64 tokens
    decoding = continuous(model, running=12, cache_bytes=3 * row_bytes)
    most = 0

    def look(_: int) -> None:
        nonlocal most
        most = max(most, decoding._cache.count)
        held = sum(t.numel() * 4 for layer in decoding._cache.layers for t in (layer.keys, layer.values))
        assert held <= 3 * row_bytes

    assert len(decoded(decoding, asked, before_step=look)) == 12
    assert most == 3
    assert len(decoded(continuous(model, cache_bytes=1), asked)) == 12


def test_rows_of_the_cache_move_up_when_one_leaves(model: Model) -> None:
    rows = RowCache(2**30)
    caches = [model.prefill(prompt)[1] for prompt in ([1, 2, 3], [4, 5], [6, 7, 8, 9])]
    for cache in caches:
        rows.add(cache, 10)
    assert rows.lengths.tolist() == [3, 2, 4] and rows.longest == 4
    assert rows.mask()[:, 0, 0].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    rows.remove(0)
    assert rows.lengths.tolist() == [4, 2]
    assert torch.equal(rows.layers[1].keys[0, :, :4], caches[2].layers[1].keys[0])
    rows.remove(1)
    rows.remove(0)
    assert (rows.count, rows.longest) == (0, 0)


@pytest.mark.parametrize("leave", [0, 3, 5])
def test_a_longer_request_after_shorter_ones_have_left(model: Model, leave: int) -> None:
    """The cache grows in tokens while it has more rows than are in use: rows in use are kept, the others go."""
    rows = RowCache(2**30)
    caches = [model.prefill([1 + n, 2 + n, 3 + n])[1] for n in range(5)]
    for cache in caches:
        rows.add(cache, 10)
    for row in reversed(range(leave)):
        rows.remove(row)
    kept = [layer.keys[: rows.count, :, :3].clone() for layer in rows.layers]
    longer = model.prefill(list(range(70)))[1]
    rows.add(longer, 100)
    assert rows.count == 6 - leave and rows.longest == 70
    for layer, before, source in zip(rows.layers, kept, longer.layers, strict=True):
        assert torch.equal(layer.keys[: len(before), :, :3], before)
        assert torch.equal(layer.keys[rows.count - 1, :, :70], source.keys[0])


def test_what_no_publication_filled_is_never_served(folder: Path) -> None:
    decoding = Alone(Model(str(folder), "float32"))
    decoding.add(RunningRequest(ask("a", [1, 2], 5), None))
    (outcome,) = decoding.step(0)
    assert "no distribution" in str(outcome.error) and not decoding.busy


@pytest.mark.parametrize("how", [*MAKERS])
def test_one_that_fails_takes_no_other_with_it(model: Model, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = MAKERS[how](model)
    asked = requests(3)
    for request in asked:
        decoding.add(RunningRequest(request, None))
    forward = model.prefill
    monkeypatch.setattr(
        model, "prefill", lambda ids: 1 / 0 if list(ids) == list(asked[1].prompt_token_ids) else forward(ids)
    )
    outcomes = {}
    while decoding.busy:
        outcomes |= {outcome.id: outcome for outcome in decoding.step(0)}
    assert {name for name, outcome in outcomes.items() if outcome.error is not None} == {"r1"}
    assert outcomes["r0"].sample is not None and outcomes["r2"].sample is not None


def test_names_that_do_not_match_are_all_named(folder: Path, source: Any) -> None:
    model = Model(str(folder), "float32")
    manifest = describe(source, "127.0.0.1:1", 1)
    by_name = {spec.name: spec for spec in manifest.tensors}
    by_name["model.norm.weight"].name = "model.norm_of.weight"
    by_name["model.layers.1.self_attn.k_proj.weight"].shape[:] = [32, 256]
    found = model.unmatched(manifest)
    assert found.unknown == ("model.norm_of.weight",) and found.missing == ("model.norm.weight",)
    assert found.differing == ("model.layers.1.self_attn.k_proj.weight: expected shape [64, 128], got [32, 256]",)
    with pytest.raises(InvalidRequest, match=r"does not fill the model: \['model\.norm\.weight', 'model\.norm_of"):
        model.fill(manifest, source.state_dict())
    tied = make_tiny_model(folder.parent / "tied", tied=True)
    found = Model(str(tied), "float32").unmatched(describe(source, "127.0.0.1:1", 1))
    assert any("lm_head.weight: expected an alias of model.embed_tokens.weight" in text for text in found.differing)


def test_weights_that_slept_come_back_empty_and_are_filled_again(folder: Path, source: Any) -> None:
    model = filled(folder, source)
    before = model.logprobs([1, 2, 3])
    model.discard()
    assert sum(parameter.numel() for parameter in model._model.parameters()) == 0
    model.restore()
    assert all(np.isnan(model.logprobs([1, 2, 3])))
    publish(model, source)
    assert model.logprobs([1, 2, 3]) == before


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .* cannot be loaded by transformers"):
        Model(str(tmp_path), "float32")


def test_layers_that_look_back_over_a_window_are_not_batched(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    wanted = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    (path / "config.json").write_text(json.dumps({**config, **wanted}))
    model = Model(str(path), "float32")
    assert not model.batches_rows
