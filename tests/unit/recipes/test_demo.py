"""The demo's parts: data that do not leak, an exact reward, and a report that is right and can say no."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recipes.demo import make_data, report, reward

REPORT = Path(report.__file__)


def numbers(row: dict[str, str]) -> tuple[int, int]:
    a, b = re.findall(r"[0-9]+", row["prompt"])
    return int(a), int(b)


def test_no_heldout_sum_is_trained_in_either_order() -> None:
    training, heldout = make_data.make()
    assert len(heldout) == len({row["prompt"] for row in heldout}) == 256
    assert len(training) == len({row["prompt"] for row in training})
    trained = {frozenset(numbers(row)) for row in training}
    assert not trained & {frozenset(numbers(row)) for row in heldout}


def test_references_are_the_sums() -> None:
    for rows in make_data.make():
        assert all(sum(numbers(row)) == int(row["reference"]) for row in rows)
        assert all(11 <= number <= 59 for row in rows for number in numbers(row))
    assert make_data.make() == make_data.make()
    assert make_data.make(seed=1) != make_data.make()


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (" 50 + 14 = 64\n", 1.0),
        ("64", 1.0),
        ("64 is 50 + 14", 0.0),
        ("50 + 14 = 6", 0.0),
        ("50 + 14 = 164", 0.0),
        ("no number", 0.0),
        ("", 0.0),
        ("it is 64.", 1.0),
    ],
)
def test_reward_is_the_last_whole_number(response: str, expected: float) -> None:
    assert reward.score("Question: What is 50 + 14?\nAnswer:", response, "64") == expected


def test_bootstrap_agrees_with_the_normal_approximation() -> None:
    """For many prompts the resampled mean is normal: bounds at 1.96 standard errors (a formula, not the code)."""
    generator = np.random.default_rng(1)
    before = (generator.random(2000) < 0.3).astype(float)
    after = (generator.random(2000) < 0.36).astype(float)
    gain = report.paired_bootstrap(before.tolist(), after.tolist())
    difference = after - before
    error = difference.std() / np.sqrt(2000)
    assert gain.mean == pytest.approx(difference.mean())
    assert gain.low == pytest.approx(difference.mean() - 1.96 * error, abs=0.1 * error)
    assert gain.high == pytest.approx(difference.mean() + 1.96 * error, abs=0.1 * error)


def test_bootstrap_p_of_a_case_counted_by_hand() -> None:
    """Two prompts, differences +1 and -1: the four resamples have means 1, 0, 0, -1, so 3 of 4 are 0 or less."""
    gain = report.paired_bootstrap([0.0, 1.0], [1.0, 0.0], resamples=40_000)
    assert gain.mean == 0.0
    assert gain.p == pytest.approx(0.75, abs=0.01)
    assert report.paired_bootstrap([0.0] * 9, [1.0] * 9, resamples=999).p == 1 / 1000


def test_bootstrap_is_paired() -> None:
    """The same two means: one prompt in ten always better is sure, the same among unrelated scores is not."""
    base = [float(n % 2) for n in range(200)]
    better = [1.0 if n % 20 == 0 else score for n, score in enumerate(base)]
    shuffled = better[37:] + better[:37]
    assert report.paired_bootstrap(base, better).p < 0.01
    assert report.paired_bootstrap(base, shuffled).p > 0.1


def test_bootstrap_refuses_unequal_lists() -> None:
    with pytest.raises(ValueError, match="two scores for each prompt, got 1 and 2"):
        report.paired_bootstrap([0.0], [0.0, 1.0])


def make_run(folder: Path, before: list[float | None], after: list[float | None]) -> Path:
    """The files of a run that the report reads."""
    (folder / "evaluations").mkdir(parents=True)
    for version, scores in ((0, before), (3, [None] * len(after)), (12, after)):
        lines = [json.dumps({"row": row, "score": score}) for row, score in enumerate(scores)]
        (folder / "evaluations" / f"heldout-v{version}.jsonl").write_text("\n".join(lines) + "\n")
    samples = [(100.0, 10.0), (130.0, 2048.0), (165.0, 20.0)]
    memory = [json.dumps({"time": t, "total_mib": mib, "workers": {"learner-0": mib}}) for t, mib in samples]
    (folder / "memory.jsonl").write_text("\n".join(memory) + "\n")
    (folder / "export" / "policy-12").mkdir(parents=True)
    return folder


def run_report(run_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPORT), str(run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_report_compares_first_and_last_version(tmp_path: Path) -> None:
    outcome = report.read_outcome(make_run(tmp_path, [0.0, 1.0, None, 0.0], [1.0, 1.0, 1.0, None]))
    assert outcome.versions == (0, 12)
    assert (outcome.before, outcome.after, outcome.unscored) == ([0.0, 1.0], [1.0, 1.0], 2)
    assert outcome.run_seconds == 65.0
    assert outcome.peak_memory_mib == 2048.0
    assert outcome.export == tmp_path / "export" / "policy-12"


@pytest.mark.parametrize(
    ("gained", "code"),
    [
        pytest.param(40, 0, id="enough"),
        pytest.param(25, 1, id="too little"),
    ],
)
def test_report_fails_a_gain_that_is_too_small(tmp_path: Path, gained: int, code: int) -> None:
    """200 prompts, 40 right before; 40 more are a gain of 0.20, 25 more of 0.125."""
    before: list[float | None] = [1.0] * 40 + [0.0] * 160
    after: list[float | None] = [1.0] * (40 + gained) + [0.0] * (160 - gained)
    done = run_report(make_run(tmp_path, before, after))
    assert done.returncode == code, done.stderr
    assert "heldout" not in done.stderr
    assert f"gain                      {gained / 200:+.3f}" in done.stdout
    assert "1 min 05 s" in done.stdout
    assert "2.0 GiB at its peak" in done.stdout


def test_report_fails_a_gain_that_may_be_chance(tmp_path: Path) -> None:
    done = run_report(make_run(tmp_path, [0.0, 1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0, 0.0]))
    assert done.returncode == 1
    assert "+0.200" in done.stdout


def test_report_says_what_is_missing(tmp_path: Path) -> None:
    done = run_report(tmp_path)
    assert done.returncode == 1
    assert "expected heldout at the start and at the end" in done.stderr
