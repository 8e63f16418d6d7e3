"""The weighted sum of scorers, and how the third state of a part becomes that of the whole (cases.md R01, U10)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from antiphon.reward.v1 import reward_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config import parse
from services.reward.assembly import make_scorers
from services.reward.composite import combined
from services.reward.config import RewardConfig
from services.reward.scorer import DATA, INFRA, Outcome, failed

NONE = failed(DATA, "none", "does not apply")
NAN = failed(DATA, "not_finite", "got nan")
DEAD = failed(INFRA, "killed", "SIGKILL")


def score(value: float, **parts: float) -> reward_pb2.Score:
    return reward_pb2.Score(value=value, parts=[reward_pb2.ScorePart(name=n, value=v) for n, v in parts.items()])


def test_the_sum_is_weighted_and_the_parts_keep_their_names() -> None:
    outcome = combined({"right": score(1.0, parsed=1.0), "form": score(0.5)}, {"right": 2.0, "form": -0.5})
    assert isinstance(outcome, reward_pb2.Score)
    assert outcome.value == 2.0 * 1.0 - 0.5 * 0.5
    assert {p.name: p.value for p in outcome.parts} == {"right": 1.0, "right/parsed": 1.0, "form": 0.5}


def test_a_part_that_does_not_apply_is_left_out_of_sum_and_parts() -> None:
    outcome = combined({"right": score(1.0), "form": NONE}, {"right": 2.0, "form": 1.0})
    assert isinstance(outcome, reward_pb2.Score)
    assert outcome.value == 2.0 and [p.name for p in outcome.parts] == ["right"]


@pytest.mark.parametrize(
    ("outcomes", "kind", "reason", "text"),
    [
        ([NONE, NONE], DATA, "none", "a, b answered None"),
        ([NONE, NAN], DATA, "not_finite", "part 'b': got nan"),
        ([score(1.0), NAN], DATA, "not_finite", "part 'b'"),
        ([NONE, DEAD], INFRA, "killed", "part 'b': SIGKILL"),
        ([NAN, DEAD], INFRA, "killed", "part 'b': SIGKILL\n(other parts that failed: a (not_finite))"),
        ([score(1e308), score(1e308)], DATA, "not_finite", "the weighted sum is not finite: 4 x 1e+308"),
    ],
)
def test_a_failed_part_fails_the_whole_and_is_never_zero(
    outcomes: list[Outcome], kind: int, reason: str, text: str
) -> None:
    outcome = combined(dict(zip("ab", outcomes, strict=True)), {"a": 4.0, "b": 4.0})
    assert isinstance(outcome, reward_pb2.ScoreFailure)
    assert (outcome.kind, outcome.reason) == (kind, reason)
    assert text in outcome.message


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.text("abcdef", min_size=1, max_size=3),
        st.tuples(st.floats(-1e6, 1e6), st.none() | st.floats(-1e6, 1e6)),
        min_size=1,
    )
)
def test_the_sum_is_that_of_the_parts_that_apply(parts: dict[str, tuple[float, float | None]]) -> None:
    outcomes: dict[str, Outcome] = {n: NONE if v is None else score(v) for n, (_, v) in parts.items()}
    outcome = combined(outcomes, {n: weight for n, (weight, _) in parts.items()})
    applies = [weight * value for weight, value in parts.values() if value is not None]
    if applies:
        assert isinstance(outcome, reward_pb2.Score)
        assert math.isclose(outcome.value, sum(applies), rel_tol=1e-9, abs_tol=1e-3)
    else:
        assert isinstance(outcome, reward_pb2.ScoreFailure)


def test_versions_follow_what_determines_the_scores(tmp_path: Path) -> None:
    def versions(weight: float = 1.0, tolerance: float = 0.0, timeout: float = 10.0) -> tuple[str, str]:
        tree = [
            {"name": "n", "type": "number", "absolute_tolerance": tolerance, "timeout_seconds": timeout},
            {"name": "c", "type": "composite", "parts": {"n": weight}},
        ]
        simple, composite = make_scorers(parse(RewardConfig, {"scorers": tree}, "test"), tmp_path)
        return simple.version, composite.version

    first = versions()
    assert versions(timeout=99.0) == first  # a limit changes no score
    heavier = versions(weight=2.0)
    assert heavier[0] == first[0] and heavier[1] != first[1]
    wider = versions(tolerance=0.1)
    assert wider[0] != first[0] and wider[1] != first[1]
