"""The embedded engine's model and decoding in the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from services.rollout.engine import Sample, SampleRequest
from services.rollout.stop_strings import StopStrings
from services.rollout.transformers_decoding import Alone, Continuous, Decoding, RunningRequest
from services.rollout.transformers_model import Model
from tests.system.vllm_publications import describe


def filled(folder: Path, source: Any, dtype: str = "float32") -> Model:
    """The model of the folder, with the weights of a transformers model."""
    model = Model(str(folder), dtype)
    publish(model, source)
    return model


def publish(model: Model, source: Any) -> None:
    manifest = describe(source, "127.0.0.1:1", 1)
    assert not model.unmatched(manifest)
    model.fill(manifest, source.state_dict())


def continuous(model: Model, *, running: int = 8, cache_bytes: int = 2**30, shares: bool = True) -> Continuous:
    return Continuous(model, most_running=running, cache_bytes=cache_bytes, shares_prefixes=shares)


MAKERS: dict[str, Callable[[Model], Decoding]] = {"alone": Alone, "continuous": continuous}


def ask(name: str, prompt: Sequence[int], seed: int, **fields: Any) -> SampleRequest:
    fields = {"temperature": 1.0, "max_tokens": 10, "stop_token_ids": (), "policy_version": 0, **fields}
    return SampleRequest(id=name, prompt_token_ids=prompt, seed=seed, **fields)


def decoded(
    decoding: Decoding,
    requests: Sequence[SampleRequest],
    *,
    tokenizer: Any = None,
    before_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Sample]:
    """All of them, asked for at once."""
    for request in requests:
        stops = StopStrings(tokenizer, request.stop_strings, request.prompt_token_ids) if request.stop_strings else None
        decoding.add(RunningRequest(request, stops))
    samples: dict[str, Sample] = {}
    step = 0
    while decoding.busy:
        before_step(step)
        step += 1
        for outcome in decoding.step(0) if decoding.busy else ():
            if outcome.error is not None:
                raise outcome.error
            assert outcome.sample is not None
            samples[outcome.id] = outcome.sample
    return samples
