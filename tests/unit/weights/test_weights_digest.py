from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.weights.digest import add_digests, digest_with_torch, fnv64, tensor_digest

MASK = 2**64 - 1


def by_hand(name: str, words: list[int], start: int = 0) -> int:
    """docs/design.md §6 in plain integers."""
    h = 0xCBF29CE484222325
    for byte in name.encode("utf-8"):
        h = ((h ^ byte) * 0x100000001B3) % 2**64
    total = 0
    for i, word in enumerate(words, start):
        z = h ^ i
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        total += word * (z ^ (z >> 31))
    return total % 2**64


def words_of(tensor: torch.Tensor) -> list[int]:
    """Bits of each element by the struct module; bfloat16 is the upper half of a float32."""
    values = tensor.float().tolist()
    if tensor.dtype == torch.float32:
        return [struct.unpack("<I", struct.pack("<f", value))[0] for value in values]
    if tensor.dtype == torch.bfloat16:
        return [struct.unpack("<I", struct.pack("<f", value))[0] >> 16 for value in values]
    return [struct.unpack("<H", struct.pack("<e", value))[0] for value in values]


def test_fnv64_is_fnv_1a() -> None:
    # Test vectors of the FNV authors.
    assert fnv64("") == 0xCBF29CE484222325
    assert fnv64("a") == 0xAF63DC4C8601EC8C
    assert fnv64("foobar") == 0x85944171F73967E8


def test_mix64_is_the_finaliser_of_splitmix64() -> None:
    # One word of value 1 at position i gives mix64(fnv64(name) ^ i). With the state that makes the argument
    # 0x9e3779b97f4a7c15, splitmix64 seeded with 0 answers 0xe220a8397b1dcdaf first.
    one = torch.tensor([1], dtype=torch.int16).view(torch.float16)
    position = fnv64("x") ^ 0x9E3779B97F4A7C15
    assert by_hand("x", [1], position) == 0xE220A8397B1DCDAF
    assert tensor_digest("x", one, position) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("start", [0, 12345, 2**33])
def test_equals_the_definition(dtype: torch.dtype, start: int) -> None:
    tensor = torch.randn(1003, generator=torch.Generator().manual_seed(3)).to(dtype)
    tensor[:3] = torch.tensor([0.0, -0.0, float("inf")]).to(dtype)
    expected = by_hand("model.layers.0.é", words_of(tensor), start)
    assert tensor_digest("model.layers.0.é", tensor, start) == expected
    assert digest_with_torch("model.layers.0.é", tensor, start) == expected


def test_pieces_of_a_large_tensor_are_added_up_right() -> None:
    tensor = torch.arange(5_000_001, dtype=torch.int32).view(torch.float32)
    assert tensor_digest("big", tensor, 7) == digest_with_torch("big", tensor, 7)
    assert tensor_digest("big", tensor[:1000], 7) == by_hand("big", list(range(1000)), 7)


@given(cut=st.lists(st.integers(0, 200), max_size=4), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_slices_add_up(cut: list[int], seed: int) -> None:
    tensor = torch.randn(200, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    ends = [*sorted(cut), 200]
    parts = [tensor_digest("w", tensor[start:end], start) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    assert add_digests(*parts) == tensor_digest("w", tensor, 0)


def test_what_changes_it() -> None:
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(0))
    swapped = tensor.clone()
    swapped[[3, 40]] = swapped[[40, 3]]
    nudged = tensor.clone()
    nudged[9] = torch.nextafter(nudged[9], torch.tensor(10.0))
    seen = {
        tensor_digest("a", tensor, 0),
        tensor_digest("a", swapped, 0),
        tensor_digest("a", nudged, 0),
        tensor_digest("b", tensor, 0),
        tensor_digest("a", tensor, 1),
    }
    assert len(seen) == 5
    other = torch.randn(64, generator=torch.Generator().manual_seed(1))
    right = add_digests(tensor_digest("a", tensor, 0), tensor_digest("b", other, 0))
    names_swapped = add_digests(tensor_digest("b", tensor, 0), tensor_digest("a", other, 0))
    assert right != names_swapped


def test_wraps_at_64_bits() -> None:
    assert add_digests(MASK, 2) == 1
    assert add_digests() == 0
    assert tensor_digest("a", torch.empty(0), 5) == 0


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(2, 2),
        torch.zeros(8)[::2],
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(4, dtype=torch.uint8),
    ],
)
def test_refuses_what_has_no_words(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="w: expected a flat contiguous slice"):
        tensor_digest("w", bad, 0)
