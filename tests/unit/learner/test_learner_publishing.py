"""What each rank sends, and the probe."""

from __future__ import annotations

import pytest

from services.learner.publishing import PROBE_TOKENS, probe_token_ids, slice_sizes


@pytest.mark.parametrize(
    ("numel", "held", "ranks", "sizes"),
    [
        (10, 10, 1, [10]),
        (10, 5, 2, [5, 5]),
        (9, 5, 2, [5, 4]),  # the last rank's fifth element is padding
        (10, 4, 3, [4, 4, 2]),
        (2, 1, 4, [1, 1, 0, 0]),
        (3, 2, 4, [2, 1, 0, 0]),
        (1, 1, 3, [1, 0, 0]),
    ],
)
def test_slices_fill_the_ranks_in_order(numel, held, ranks, sizes):
    assert slice_sizes(numel, held, ranks) == sizes


def test_slices_that_do_not_hold_the_tensor_are_a_bug():
    with pytest.raises(ValueError, match="2 ranks with 4 elements each do not hold 9"):
        slice_sizes(9, 4, 2)


def test_the_probe_is_fixed_and_has_no_special_token():
    ids = probe_token_ids(50, [0, 1, 2, 49])
    assert ids == probe_token_ids(50, [2, 1, 0, 49])
    assert len(ids) == PROBE_TOKENS == 32
    assert set(ids) <= set(range(3, 49))
    assert len(set(ids)) > 10
    assert set(probe_token_ids(5, [0, 1, 3, 4])) == {2}
