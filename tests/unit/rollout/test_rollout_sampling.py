"""One token: which, and with what log-probability, by hand; and stop strings in its text."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import tokenizers
import torch

from services.rollout.sampling import draw
from services.rollout.stop_strings import StopStrings
from tests.tiny.models import make_tokenizer

INFINITY = float("inf")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_logprob_is_of_the_scaled_logits() -> None:
    """M23: logits 2, 1, 0 at temperature 0.5; neither the raw one, -0.408, nor that over 0.5, -0.815."""
    logits = torch.tensor([2.0, 1.0, 0.0])
    by_hand = {token: math.log(math.exp(2 * x) / (math.exp(4) + math.exp(2) + 1)) for token, x in enumerate((2, 1, 0))}
    assert by_hand[0] == pytest.approx(-0.143, abs=5e-4)
    for seed in range(50):
        token, logprob = draw(logits, 0.5, generator(seed))
        assert logprob == pytest.approx(by_hand[token], abs=1e-12)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_they_should(temperature: float) -> None:
    logits = torch.tensor([1.0, -INFINITY, 0.0, -1.0, -INFINITY])
    one = generator()
    counts = Counter(draw(logits, temperature, one)[0] for _ in range(4000))
    weights = {token: math.exp(x / temperature) for token, x in ((0, 1), (2, 0), (3, -1))}
    assert set(counts) == set(weights)  # a token without probability is never drawn
    for token, weight in weights.items():
        expected = weight / sum(weights.values())
        assert counts[token] / 4000 == pytest.approx(expected, abs=4 * math.sqrt(expected / 4000))


def test_a_draw_depends_on_the_generator_only() -> None:
    logits = torch.randn(500, generator=generator(7))
    assert [draw(logits, 1.0, generator(s)) for s in range(9)] == [draw(logits, 1.0, generator(s)) for s in range(9)]
    assert len({draw(logits, 1.0, generator(s))[0] for s in range(20)}) > 10
    largest = 2**63 - 1
    assert draw(logits, 1.0, generator(largest)) == draw(logits, 1.0, generator(largest))


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    token, logprob = draw(torch.tensor([0.0, 3.0, 3.0]), 0.0, generator())
    assert (token, logprob) == (1, pytest.approx(3 - math.log(1 + 2 * math.exp(3))))


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_both_ends_of_the_unit_interval(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **words: torch.tensor(number, dtype=torch.float64))
    token, _ = draw(torch.tensor([-INFINITY, 0.1, 0.2, 0.3, -INFINITY]), 1.0, generator())
    assert token == (1 if number == 0 else 3)


@pytest.mark.parametrize("logits", [[math.nan, 1.0], [-INFINITY, -INFINITY], [INFINITY, 1.0]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_no_distribution_fails_loudly(logits: list[float], temperature: float) -> None:
    with pytest.raises(ValueError, match="no distribution"):
        draw(torch.tensor(logits), temperature, generator())


def fed(stops: StopStrings, ids: list[int]) -> list[str]:
    return [stops.found(token) for token in ids]


def test_a_stop_string_is_found_with_its_last_token() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("hello world").ids
    assert fed(StopStrings(tokenizer, ["lo w", "zz"], [1, 2]), ids) == [""] * 6 + ["lo w"] + [""] * 4
    assert fed(StopStrings(tokenizer, ["d"], ids), ids)[-1] == "d"


def test_of_two_the_one_that_is_complete_first() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("abcdef").ids
    assert fed(StopStrings(tokenizer, ["abcde", "cd"], []), ids)[3] == "cd"
    assert fed(StopStrings(tokenizer, ["bcd", "cd"], []), ids)[3] == "bcd"
    assert fed(StopStrings(tokenizer, ["cd", "bcd"], []), ids)[3] == "cd"


def test_special_tokens_are_part_of_the_text() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("a<eos>b").ids
    assert fed(StopStrings(tokenizer, ["a<eos>b", "ab"], []), ids) == ["", "", "a<eos>b"]


def test_half_a_character_matches_nothing() -> None:
    """Byte-level tokens: two to an é, four to a smile."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {character: number for number, character in enumerate(sorted(alphabet))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    ids = tokenizer.encode("né😀!").ids
    assert len(ids) == 1 + 2 + 4 + 1
    assert fed(StopStrings(tokenizer, ["é"], []), ids)[:3] == ["", "", "é"]
    assert fed(StopStrings(tokenizer, ["😀!", "\ufffd"], []), ids) == [""] * 7 + ["😀!"]
