"""Keys and values of all requests that are decoded in one batch: a row each, as long as what it has seen."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

TOKENS_STEP = 64
"""Capacities are multiples of it, so that they seldom grow."""


class _Layer(CacheLayerMixin):
    """Keys and values of one layer: [rows, heads, tokens, size]."""

    def __init__(self, owner: RowCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self._owner = owner
        self.lazy_initialization(keys, values)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        # Zeros: what is masked has no weight, and no weight times NaN would be NaN.
        self.keys = key_states.new_zeros((0, key_states.shape[1], 0, key_states.shape[3]))
        self.values = value_states.new_zeros((0, value_states.shape[1], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts one token of each row, [rows, heads, 1, size], behind what it has; answers all that may be looked at."""
        count, seen = self._owner.count, self._owner.longest + 1
        rows = torch.arange(count)
        self.keys[rows, :, self._owner.lengths] = key_states[:, :, 0]
        self.values[rows, :, self._owner.lengths] = value_states[:, :, 0]
        return self.keys[:count, :, :seen], self.values[:count, :, :seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.longest + query_length, 0

    def get_seq_length(self) -> int:
        return self._owner.longest

    def get_max_length(self) -> int:
        return -1

    def resize(self, rows: int, tokens: int) -> None:
        """Room for so many rows of so many tokens; rows out of use may be given up."""
        count = self._owner.count
        for name in ("keys", "values"):
            old: torch.Tensor = getattr(self, name)
            new = old.new_zeros((rows, old.shape[1], tokens, old.shape[3]))
            new[:count, :, : old.shape[2]] = old[:count]
            setattr(self, name, new)


class RowCache(Cache):
    """Rows 0 .. count-1 are in use. Takes at most `most_bytes`, one row excepted."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(layers=[])
        self.layers: list[_Layer] = []
        self._most_bytes = most_bytes
        self._rows = self._tokens = 0
        self.count = 0
        self.lengths = torch.zeros(0, dtype=torch.int64)
        """Tokens that each row in use has seen."""

    @property
    def longest(self) -> int:
        return int(self.lengths.max()) if self.count else 0

    def fits(self, tokens: int) -> bool:
        """Whether a row of so many tokens may be added now."""
        if self.count == 0 or not self.layers:
            return True
        return (self.count + 1) * max(self._tokens, _rounded(tokens)) * self._token_bytes() <= self._most_bytes

    def add(self, prefilled: Cache, tokens: int) -> None:
        """Adds a row that starts with what a cache of one sequence holds and may grow to so many tokens."""
        if not self.layers:
            self.layers = [_Layer(self, layer.keys, layer.values) for layer in prefilled.layers]
        if self.count == 0 and self._tokens > _rounded(tokens):
            self.clear()
            self.add(prefilled, tokens)
            return
        wanted = max(self._tokens, _rounded(tokens))
        if self.count == self._rows or wanted > self._tokens:
            affordable = self._most_bytes // (wanted * self._token_bytes())
            rows = max(self.count + 1, min(2 * self.count, affordable))
            for layer in self.layers:
                layer.resize(rows, wanted)
            self._rows, self._tokens = rows, wanted
        seen = prefilled.get_seq_length()
        for layer, source in zip(self.layers, prefilled.layers, strict=True):
            layer.keys[self.count, :, :seen] = source.keys[0]
            layer.values[self.count, :, :seen] = source.values[0]
        self.lengths = torch.cat([self.lengths, torch.tensor([seen])])
        self.count += 1

    def mask(self) -> torch.Tensor:
        """What each row may look at in the next step: bool, [rows, 1, 1, longest + 1]."""
        return (torch.arange(self.longest + 1)[None, :] <= self.lengths[:, None])[:, None, None, :]

    def advance(self) -> None:
        """Every row has seen one token more."""
        self.lengths = self.lengths + 1

    def remove(self, row: int) -> None:
        """The last row takes the place of this one."""
        last = self.count - 1
        if row != last:
            for layer in self.layers:
                layer.keys[row] = layer.keys[last]
                layer.values[row] = layer.values[last]
            self.lengths[row] = self.lengths[last]
        self.lengths = self.lengths[:last].clone()
        self.count = last

    def clear(self) -> None:
        """Forgets all rows and gives their memory up."""
        self.layers = []
        self._rows = self._tokens = self.count = 0
        self.lengths = torch.zeros(0, dtype=torch.int64)

    def _token_bytes(self) -> int:
        return sum(
            tensor.shape[1] * tensor.shape[3] * tensor.element_size()
            for layer in self.layers
            for tensor in (layer.keys, layer.values)
        )


def _rounded(tokens: int) -> int:
    return -(-tokens // TOKENS_STEP) * TOKENS_STEP
