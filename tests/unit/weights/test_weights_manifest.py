from __future__ import annotations

import pytest
import torch
from antiphon.types.v1 import transfer_pb2
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.common.weights.manifest import ALIGNMENT, buckets, element_type, layout, slice_range, validate, view

FP32, BF16 = transfer_pb2.ELEMENT_TYPE_FLOAT32, transfer_pb2.ELEMENT_TYPE_BFLOAT16


def manifest(*sizes: tuple[str, int, int], bucket_bytes: int = 100, ranks: int = 1) -> transfer_pb2.TransferManifest:
    made = transfer_pb2.TransferManifest(
        epoch=1,
        address="h:1",
        transport=transfer_pb2.TRANSPORT_GLOO,
        sender_ranks=ranks,
        receiver_ranks=1,
        bucket_bytes=bucket_bytes,
    )
    for name, count, kind in sizes:
        share = -(-count // ranks)
        counts = [max(0, min(share, count - rank * share)) for rank in range(ranks)]
        made.tensors.add(name=name, shape=[count], element_type=kind, slice_numel=counts)
    return made


def names(made: transfer_pb2.TransferManifest) -> list[list[str]]:
    return [[spec.name for spec in bucket] for bucket in buckets(made)]


def test_buckets_are_cut_by_bytes_in_order() -> None:
    #        a: 40 B          b: 60 B          c: 1 KB            d: 2 B          e: 98 B           f: 4 B
    made = manifest(("a", 10, FP32), ("b", 30, BF16), ("c", 256, FP32), ("d", 1, BF16), ("e", 49, BF16), ("f", 1, FP32))
    assert names(made) == [["a", "b"], ["c"], ["d", "e"], ["f"]]


def test_aliases_are_in_no_bucket() -> None:
    made = manifest(("a", 10, FP32), ("b", 10, FP32))
    made.tensors[1].alias_of = "a"
    assert names(made) == [["a"]]


def test_nothing_to_send_is_no_bucket() -> None:
    assert names(manifest()) == []


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(1, 200), st.integers(1, 5))
def test_layout_places_every_slice_once_without_overlap(counts: list[int], bucket_bytes: int, ranks: int) -> None:
    sizes = [(f"t{i}", count, FP32 if i % 2 else BF16) for i, count in enumerate(counts)]
    made = manifest(*sizes, bucket_bytes=bucket_bytes, ranks=ranks)
    validate(made)
    covered = {spec.name: [0] * spec.shape[0] for spec in made.tensors}
    for bucket in buckets(made):
        for rank in range(ranks):
            placements, size = layout(bucket, rank)
            end = 0
            for it in placements:
                assert it.offset % ALIGNMENT == 0 and it.offset >= end
                end = it.offset + it.bytes
                assert (it.start, it.stop) == slice_range(it.spec, rank)
                for i in range(it.start, it.stop):
                    covered[it.spec.name][i] += 1
            assert size == end
    assert all(set(hits) <= {1} for hits in covered.values())


def test_view_is_the_bytes_of_the_slice() -> None:
    made = manifest(("a", 3, BF16), ("b", 2, FP32))
    (bucket,) = buckets(made)
    placements, size = layout(bucket, 0)
    assert [(it.offset, it.bytes) for it in placements] == [(0, 6), (16, 8)] and size == 24
    message = torch.zeros(size, dtype=torch.uint8)
    view(message, placements[1]).copy_(torch.tensor([1.0, -2.0]))
    assert bytes(message[16:24].tolist()) == b"\x00\x00\x80\x3f\x00\x00\x00\xc0"


def test_validate_names_everything_that_is_wrong() -> None:
    made = manifest(("a", 4, FP32), ("a", 4, FP32), ("c", 4, FP32), ("d", 4, FP32), ("e", 4, 0), ranks=2)
    made.bucket_bytes = 0
    made.transport = 0
    made.tensors[2].slice_numel[:] = [4]
    made.tensors[3].slice_numel[:] = [2, 1]
    made.tensors[4].element_type = 0
    made.tensors.add(name="head", alias_of="nobody", shape=[4])
    with pytest.raises(InvalidRequest) as caught:
        validate(made)
    for part in (
        "transport 0",
        "bucket_bytes must be at least 1",
        "a: named twice",
        "c: 1 slices for 2 sender ranks",
        r"d: slices of [2, 1] elements do not make up shape [4]",
        "e: element type 0",
        "head: alias of 'nobody'",
    ):
        assert part in str(caught.value)


def test_only_known_element_types_are_sent() -> None:
    assert element_type(torch.bfloat16) == BF16
    with pytest.raises(InvalidRequest, match="float64"):
        element_type(torch.float64)


def test_an_alias_of_an_alias_and_an_address_without_a_port_are_refused() -> None:
    made = manifest()
    made.tensors.add(name="x", alias_of="y", shape=[4])
    made.tensors.add(name="y", alias_of="x", shape=[4])
    made.address = "h"
    with pytest.raises(InvalidRequest, match=r"host:port.*x: alias of 'y'.*y: alias of 'x'"):
        validate(made)


@pytest.mark.parametrize("field", ["sender_ranks", "receiver_ranks"])
def test_more_ranks_than_there_can_be_are_refused(field: str) -> None:
    """What is kept for each of them would not fit into memory."""
    made = manifest()
    setattr(made, field, 2**31 - 1)
    with pytest.raises(InvalidRequest, match=f"{field} must be at most 4096"):
        validate(made)
