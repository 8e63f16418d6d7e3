"""The policy objective in float64 numpy, from docs/math.md alone: one sequence and one token at a time.

Values and their derivatives by log π_θ are written by hand; nothing here is the project's code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Sequence:
    """Each [n]: what is masked may hold anything."""

    new: np.ndarray
    old: np.ndarray
    behavior: np.ndarray
    reference: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    trained: list[int] = field(init=False)

    def __post_init__(self):
        self.trained = [t for t in range(len(self.mask)) if self.mask[t]]


def ragged(seed, *, rows=6, longest=9, one_advantage=False, masked_rows=1):
    """Sequences of all lengths from 1, with holes in their masks; everything masked holds NaN or infinity."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(rows):
        n = int(random.integers(1, longest + 1))
        mask = random.random(n) < 0.7
        mask[0] = True
        if number < masked_rows:
            mask[:] = False
        new = random.normal(-2.0, 1.0, n)
        old = new + random.normal(0.0, 0.4, n)
        behavior = old + random.normal(0.0, 0.6, n)
        reference = new + random.normal(0.0, 0.5, n)
        advantages = random.normal(0.0, 1.5, n)
        if one_advantage:
            advantages[:] = advantages[0]
        for values, junk in (
            (new, np.nan),
            (old, -np.inf),
            (behavior, np.inf),
            (reference, np.nan),
            (advantages, np.nan),
        ):
            values[~mask] = junk
        found.append(Sequence(new, old, behavior, reference, advantages, mask))
    return found


def ppo(sequence, *, low, high, dual=None):
    """{t: (loss, slope by log π_θ(t), clipped)}"""
    found = {}
    for t in sequence.trained:
        ratio, a = np.exp(sequence.new[t] - sequence.old[t]), sequence.advantages[t]
        bounded = min(max(ratio, 1 - low), 1 + high)
        gain, clipped = min(ratio * a, bounded * a), bounded * a < ratio * a
        if dual is not None and a < 0 and gain < dual * a:
            gain, clipped = dual * a, True
        found[t] = (-gain, 0.0 if clipped else -ratio * a, clipped)
    return found


def cispo(sequence, *, high):
    found = {}
    for t in sequence.trained:
        ratio, a = np.exp(sequence.new[t] - sequence.old[t]), sequence.advantages[t]
        weight = min(ratio, 1 + high)
        found[t] = (-weight * a * sequence.new[t], -weight * a, ratio > 1 + high)
    return found


def gspo(sequence, *, low, high):
    """The loss stands at every token of the sequence; the slope is that of their mean times their number."""
    if not sequence.trained:
        return {}
    n = len(sequence.trained)
    s = np.exp(np.mean([sequence.new[t] - sequence.old[t] for t in sequence.trained]))
    a = sequence.advantages[sequence.trained[0]]
    bounded = min(max(s, 1 - low), 1 + high)
    clipped = bounded * a < s * a
    # d mean(loss)/d log π(t) = −s·a/n; at n equal tokens the sum of the losses has n times that.
    return {t: (-min(s * a, bounded * a), 0.0 if clipped else -s * a / n * n, clipped) for t in sequence.trained}


def correction(sequence, kind, low=None, high=None):
    """{t: weight}"""
    logs = {t: sequence.old[t] - sequence.behavior[t] for t in sequence.trained}
    if not logs:
        return {}
    w = {t: np.exp(value) for t, value in logs.items()}
    if kind == "tis":
        return {t: min(value, high) for t, value in w.items()}
    if kind == "icepop":
        return {t: value if low <= value <= high else 0.0 for t, value in w.items()}
    if kind == "seq_tis":
        return dict.fromkeys(w, min(np.exp(sum(logs.values())), high))
    if kind == "seq_mask":
        mean = np.exp(np.mean(list(logs.values())))
        return {t: value if low <= mean <= high else 0.0 for t, value in w.items()}
    assert kind == "decoupled"
    return w


def kl(sequence, estimator, cap=None):
    """{t: (estimate, weighted loss, its slope)}"""
    found = {}
    for t in sequence.trained:
        d = sequence.new[t] - sequence.reference[t]
        value, slope = (d * d / 2, d) if estimator == "k2" else (np.exp(-d) - 1 + d, 1 - np.exp(-d))
        c = 1.0 if cap is None else min(np.exp(sequence.new[t] - sequence.behavior[t]), cap)
        found[t] = (value, c * value, c * slope)
    return found


def aggregate(values, sequences, how, constant=None):
    """Σ over tokens of values[i][t], divided as `how` says; `values[i]` is {t: number} of sequence i."""
    lengths = [len(sequence.trained) for sequence in sequences]
    present = [i for i, n in enumerate(lengths) if n]
    if how == "token":
        return sum(sum(v.values()) for v in values) / sum(lengths)
    if how == "sequence":
        return sum(sum(values[i].values()) / lengths[i] for i in present) / len(present)
    assert how == "constant"
    return sum(sum(v.values()) for v in values) / (len(present) * constant)
