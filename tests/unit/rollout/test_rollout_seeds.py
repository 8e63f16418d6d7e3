from __future__ import annotations

import hashlib

from antiphon.types.v1.trajectory_pb2 import PromptId

from services.rollout.seeds import sample_seed


def test_is_the_documented_hash() -> None:
    text = b"7\x1ftrain\x1f12\x1f3\x1f4\x1f5"
    expected = int(hashlib.sha256(text).hexdigest()[:16], 16) // 2
    assert sample_seed(7, PromptId(dataset="train", row=12, epoch=3), 4, 5) == expected


def test_every_argument_counts_and_fits_63_bits() -> None:
    seeds = [
        sample_seed(run, PromptId(dataset=dataset, row=row, epoch=epoch), number, version)
        for run in (0, 1, -1)
        for dataset in ("train", "heldout", "")
        for row in (0, 1, 10)
        for epoch in (0, 1)
        for number in (0, 1, 10)
        for version in (0, 1)
    ]
    assert len(set(seeds)) == len(seeds) == 324
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_digits_do_not_run_into_each_other() -> None:
    assert sample_seed(0, PromptId(row=1, epoch=11), 0, 0) != sample_seed(0, PromptId(row=11, epoch=1), 0, 0)
    assert sample_seed(0, PromptId(row=1), 11, 0) != sample_seed(0, PromptId(row=1), 1, 10)
