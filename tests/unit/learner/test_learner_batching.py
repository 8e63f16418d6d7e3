"""Rows → lines → micro-batches → tensors. What a token may attend to is checked by brute force."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

from services.learner.batching import Layout, Line, Row, plan_micro_batches
from services.learner.packing import pack

CPU = torch.device("cpu")


def ragged(count: int, seed: int = 0, groups: int = 3) -> list[Row]:
    dice = random.Random(seed)
    prompts = [[dice.randrange(100) for _ in range(dice.randint(1, 8))] for _ in range(groups)]
    rows = []
    for index in range(count):
        prompt = prompts[index % groups]
        answer = [dice.randrange(100) for _ in range(dice.randint(1, 12))]
        predicted = [len(prompt) + i for i in range(len(answer)) if i == 0 or dice.random() < 0.8]
        rows.append(Row(prompt + answer, predicted))
    return rows


def members(plan) -> list[int]:
    return [row for micro_batches in plan for micro_batch in micro_batches for line in micro_batch for row in line.rows]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("budget", [1, 17, 40, 10_000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 17])
def test_every_row_once_equal_counts_within_budget(count, ranks, budget, layout):
    rows = ragged(count)
    plan = plan_micro_batches(rows, ranks=ranks, token_budget=budget, layout=layout)
    assert plan == plan_micro_batches(rows, ranks=ranks, token_budget=budget, layout=layout)
    assert len(plan) == ranks
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    assert sorted(members(plan)) == list(range(count))
    for micro_batch in (m for micro_batches in plan for m in micro_batches if m):
        lengths = [line.length for line in micro_batch]
        tokens = sum(lengths) if layout is Layout.ONE_LINE else max(lengths) * len(lengths)
        assert tokens <= budget or len(micro_batch) == 1
        for line in micro_batch:
            assert line.length <= budget or len(line.rows) == 1
    if count >= ranks:
        assert all(any(micro_batches) for micro_batches in plan), "a rank is idle though there are rows for all"


@pytest.mark.parametrize(("count", "ranks"), [(512, 6), (17, 2), (8, 16), (1, 4)])
def test_sizes_that_do_not_divide_are_spread(count, ranks):
    """Ranks without a row of their own take part with empty micro-batches; nobody gets a size of 0 to loop over."""
    rows = ragged(count)
    plan = plan_micro_batches(rows, ranks=ranks, token_budget=64, layout=Layout.PADDED)
    assert sorted(members(plan)) == list(range(count))
    assert len({len(micro_batches) for micro_batches in plan}) == 1 and len(plan[0]) >= 1
    load = [sum(len(rows[row].token_ids) for row in members([part])) for part in plan]
    longest = max(len(row.token_ids) for row in rows)
    assert max(load) - min(load) <= longest


def test_work_is_spread_evenly():
    rows = [Row(list(range(length)), [length - 1]) for length in (50, 50, 50, 50, 30, 30, 20, 20)]
    plan = plan_micro_batches(rows, ranks=2, token_budget=100, layout=Layout.PADDED)
    assert [sum(line.length for m in part for line in m) for part in plan] == [150, 150]


def test_a_shared_line_by_hand():
    rows = [Row([1, 2, 3, 7, 8], [3, 4]), Row([1, 2, 3, 9], [3]), Row([1, 2, 4, 9], [3])]
    ((micro_batch,),) = plan_micro_batches(rows, ranks=1, token_budget=100, layout=Layout.SHARED)
    assert set(micro_batch) == {Line((0, 1), 3, 6), Line((2,), 0, 4)}
    packed = pack(micro_batch, rows, Layout.SHARED, CPU)
    assert packed.token_ids.tolist() == [[1, 2, 3, 7, 8, 9], [1, 2, 4, 9, 0, 0]]
    assert packed.position_ids is not None and packed.position_ids[0].tolist() == [0, 1, 2, 3, 4, 3]
    assert packed.sources.tolist() == [2, 3, 2, 6 + 2]
    assert packed.targets.tolist() == [7, 8, 9, 9]
    assert packed.attends is not None and packed.attends[0, 0, 5].tolist() == [True, True, True, False, False, True]


def test_one_line_by_hand():
    rows = [Row([1, 2, 3], [1, 2]), Row([4, 5, 6, 7, 8], [4]), Row([9, 1], [1]), Row([5, 5, 5, 5], [2, 3])]
    ((first, second),) = plan_micro_batches(rows, ranks=1, token_budget=8, layout=Layout.ONE_LINE)
    # The longest first; the next one has no room there; the third just fits.
    assert [line.rows for line in first] == [(1,), (0,)] and [line.rows for line in second] == [(3,), (2,)]
    packed = pack(first, rows, Layout.ONE_LINE, CPU)
    assert packed.token_ids.tolist() == [[4, 5, 6, 7, 8, 1, 2, 3]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert packed.boundaries.tolist() == [0, 5, 8] and packed.boundaries.dtype == torch.int32
    assert packed.longest == 5 and packed.attends is None
    assert packed.sources.tolist() == [3, 5, 6] and packed.targets.tolist() == [8, 2, 3]
    assert packed.rows == (1, 0) and packed.counts == (1, 2)
    assert packed.numbers.tolist() == [2, 0, 1]
    assert pack(first, rows, Layout.ONE_LINE, CPU, [100, 200, 300, 400]).numbers.tolist() == [200, 100, 101]
    empty = pack((), rows, Layout.ONE_LINE, CPU)
    assert empty.is_empty and empty.boundaries.tolist() == [0, 2]


def test_a_large_update_is_planned_and_packed_in_milliseconds():
    dice = random.Random(0)
    rows = []
    while sum(len(row.token_ids) for row in rows) < 65_536:
        length = dice.randint(64, 2048)
        rows.append(Row(np.arange(length), np.arange(length // 4, length)))
    begin = time.process_time()
    ((*micro_batches,),) = plan_micro_batches(rows, ranks=1, token_budget=8192, layout=Layout.ONE_LINE)
    for micro_batch in micro_batches:
        pack(micro_batch, rows, Layout.ONE_LINE, CPU)
    seconds = time.process_time() - begin
    assert len(micro_batches) <= 9
    assert seconds < 0.2, f"{seconds * 1000:.0f} ms; a few ms are expected on a free machine"


def test_rows_with_nothing_to_predict_are_left_out():
    rows = [Row([1, 2, 3], []), Row([1, 2, 3], [2])]
    for ranks in (1, 2):
        assert members(plan_micro_batches(rows, ranks=ranks, token_budget=9, layout=Layout.SHARED)) == [1]
    nothing = plan_micro_batches(rows[:1], ranks=2, token_budget=9, layout=Layout.SHARED)
    assert nothing == [[()], [()]]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("seed", range(5))
def test_each_predicted_token_sees_exactly_what_came_before_it_in_its_row(seed, layout):
    rows = ragged(9, seed)
    seen: dict[tuple[int, int], int] = {}
    every = [(index, position) for index, row in enumerate(rows) for position in row.predicted]
    numbers = {where: number for number, where in enumerate(every)}
    for micro_batches in plan_micro_batches(rows, ranks=2, token_budget=60, layout=layout):
        for micro_batch in micro_batches:
            packed = pack(micro_batch, rows, layout, CPU)
            if packed.is_empty:
                assert packed.sources.numel() == 1
                continue
            width = packed.token_ids.shape[1]
            wanted = [(row, position) for row in packed.rows for position in rows[row].predicted]
            assert len(wanted) == packed.sources.numel() == sum(packed.counts)
            assert packed.numbers.tolist() == [numbers[w] for w in wanted]
            for (row, position), source, target in zip(wanted, packed.sources, packed.targets, strict=True):
                line, place = divmod(source.item(), width)
                if packed.boundaries is not None:
                    begin = max(b for b in packed.boundaries.tolist() if b <= place)
                    keys = list(range(begin, place + 1))
                    places = packed.position_ids[line, keys].tolist()
                elif packed.attends is None:
                    keys = list(range(place + 1))
                    places = keys
                else:
                    keys = packed.attends[line, 0, place].nonzero().flatten().tolist()
                    places = packed.position_ids[line, keys].tolist()
                before = list(rows[row].token_ids[:position])
                assert packed.token_ids[line, keys].tolist() == before
                assert places == list(range(position))
                assert target.item() == rows[row].token_ids[position]
                seen[row, position] = seen.get((row, position), 0) + 1
    assert seen == {(i, position): 1 for i, row in enumerate(rows) for position in row.predicted}


def test_what_would_save_little_is_not_shared():
    rows = [Row([1, 2, *range(30)], list(range(2, 32))) for _ in range(8)]
    ((alone,),) = plan_micro_batches(rows, ranks=1, token_budget=5000, layout=Layout.SHARED)
    assert [len(line.rows) for line in alone] == [1] * 8


def test_sharing_saves_the_repeated_prompts():
    prompt = list(range(40))
    rows = [Row([*prompt, 50 + i, 60 + i], [40, 41]) for i in range(8)]
    ((shared,),) = plan_micro_batches(rows, ranks=1, token_budget=500, layout=Layout.SHARED)
    assert [line.length for line in shared] == [40 + 8 * 2]
    on_two = plan_micro_batches(rows, ranks=2, token_budget=500, layout=Layout.SHARED)
    assert [[line.length for line in part[0]] for part in on_two] == [[48], [48]]
