"""The n-th prompt of a run is a function of its seed and n alone, for one data set and for several by weight."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.coordinator.data import Dataset, Order, Prompt
from services.coordinator.identity import PromptKey


def dataset(rows: int, name: str = "train", weight: float = 1.0) -> Dataset:
    prompts = [Prompt(n, (), "", (n,), "", "{}") for n in range(rows)]
    return Dataset(name, tuple(prompts), weight=weight)


def keys(order: Order, count: int) -> list[PromptKey]:
    return [order.at(n)[0] for n in range(count)]


def test_every_epoch_visits_every_row_once_in_an_order_of_its_own() -> None:
    order = Order(dataset(10), seed=3, shuffle=True)
    visited = keys(order, 30)
    assert [key.epoch for key in visited] == [0] * 10 + [1] * 10 + [2] * 10
    epochs = [[key.row for key in visited[n : n + 10]] for n in (0, 10, 20)]
    assert all(sorted(rows) == list(range(10)) for rows in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_is_a_function_of_seed_and_position() -> None:
    visited = keys(Order(dataset(10), seed=3, shuffle=True), 30)
    assert [Order(dataset(10), seed=3, shuffle=True).at(n)[0] for n in reversed(range(30))] == visited[::-1]
    assert keys(Order(dataset(10), seed=4, shuffle=True), 30) != visited
    key, prompt = Order(dataset(10), seed=3, shuffle=True).at(17)
    assert prompt.row == key.row


def test_without_shuffling_rows_come_as_in_the_file() -> None:
    assert [key.row for key in keys(Order(dataset(4), seed=3, shuffle=False), 6)] == [0, 1, 2, 3, 0, 1]


PINNED = [
    "train/0/3",
    "train/0/0",
    "train/0/4",
    "train/0/1",
    "train/0/2",
    "train/1/4",
    "train/1/3",
    "train/1/0",
    "train/1/1",
    "train/1/2",
    "train/2/1",
    "train/2/2",
]


# Once written, a run must be found again by later versions: the order is part of what a seed means.
def test_the_order_of_a_seed_does_not_change() -> None:
    assert [str(key) for key in keys(Order(dataset(5), seed=7, shuffle=True), 12)] == PINNED


def mixture() -> Order:
    parts = [dataset(4, "a", 3.0), dataset(10, "b", 1.0)]
    return Order(*parts, seed=3, shuffle=True)


def test_several_data_sets_are_interleaved_by_weight() -> None:
    """Due at (k + 1/2) / weight: a at 1/6, 3/6, 5/6, 7/6, …; b at 1/2, 3/2, …; of equals the first listed is first."""
    visited = keys(mixture(), 40)
    assert "".join(key.dataset for key in visited[:8]) == "aabaaaba"
    assert sum(key.dataset == "a" for key in visited) == 30


def test_each_data_set_has_epochs_and_an_order_of_its_own() -> None:
    visited = keys(mixture(), 40)
    for name, rows in (("a", 4), ("b", 10)):
        own = [key for key in visited if key.dataset == name]
        alone = Order(dataset(rows, name), seed=3, shuffle=True)
        assert own == [alone.at(n)[0] for n in range(len(own))]
        assert len(set(own)) == len(own)


def test_any_position_is_found_again_at_an_epoch_border_too() -> None:
    """cases.md C01, C02: the position is all of the state."""
    visited = keys(mixture(), 120)
    for position in (0, 1, 5, 6, 39, 40, 41, 119):
        resumed = mixture()
        assert [resumed.at(n)[0] for n in range(position, min(position + 9, 120))] == visited[position : position + 9]
    assert [mixture().at(n)[0] for n in reversed(range(120))] == visited[::-1]
    one = Order(dataset(64), seed=3, shuffle=True)
    assert [key.epoch for key, _ in (one.at(n) for n in (63, 64, 127, 128))] == [0, 1, 1, 2]


def test_a_far_position_costs_no_more() -> None:
    key, prompt = mixture().at(10**12)
    assert key.row == prompt.row
    assert key == mixture().at(10**12)[0]


@given(st.lists(st.sampled_from([0.1, 0.3, 1.0, 2.5, 7.0]), min_size=2, max_size=4))
@settings(max_examples=25, deadline=None)
def test_shares_hold_after_any_number_of_prompts(weights: list[float]) -> None:
    order = Order(*(dataset(7, f"d{n}", weight) for n, weight in enumerate(weights)), seed=1, shuffle=False)
    total = sum(Fraction(str(weight)) for weight in weights)
    counts = [0] * len(weights)
    for position in range(60):
        key, _ = order.at(position)
        number = int(key.dataset[1:])
        assert (key.epoch, key.row) == divmod(counts[number], 7)
        counts[number] += 1
        for count, weight in zip(counts, weights, strict=True):
            share = Fraction(str(weight)) / total
            assert abs(count - share * (position + 1)) <= (1 + len(weights) * share) / 2


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 2.0)])
def test_equal_weights_take_turns(weights: tuple[float, float]) -> None:
    order = Order(
        *(dataset(3, name, weight) for name, weight in zip("ab", weights, strict=True)), seed=1, shuffle=False
    )
    assert [str(key) for key in keys(order, 8)] == [
        "a/0/0", "b/0/0", "a/0/1", "b/0/1", "a/0/2", "b/0/2", "a/1/0", "b/1/0",
    ]  # fmt: skip
