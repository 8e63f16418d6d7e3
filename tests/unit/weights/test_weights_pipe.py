"""The pipe between processes: two learner ranks that send slices, engines' workers that assemble them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from services.common.errors import Conflict, Expired, InvalidRequest, Unavailable
from services.common.weights.digest import add_digests, tensor_digest
from services.common.weights.manifest import buckets, tensor_bytes
from services.common.weights.receiver import Receiver
from services.common.weights.sender import Sender
from services.common.weights.store import bind_store
from tests.unit.weights.pipe_processes import Fate, assert_same, join, learner, make_manifest, make_model, take

ONE_TENSOR, TEN_KIB, ALL = 1, 10 * 1024, 1 << 30


@pytest.mark.parametrize(
    ("senders", "bucket_bytes", "dtype", "receivers"),
    [
        (1, ALL, torch.float32, 2),
        (2, ONE_TENSOR, torch.float32, 1),
        (2, TEN_KIB, torch.bfloat16, 2),
        (2, ALL, torch.float32, 1),
        (3, TEN_KIB, torch.float32, 1),
        (4, ALL, torch.bfloat16, 1),
    ],
)
def test_the_slices_of_all_ranks_make_the_whole_model(
    senders: int, bucket_bytes: int, dtype: torch.dtype, receivers: int
) -> None:
    expected = make_model(1, dtype)
    with learner(senders, dtype=dtype) as ranks:
        manifest = make_manifest(
            ranks.address, sender_ranks=senders, receiver_ranks=receivers, bucket_bytes=bucket_bytes, dtype=dtype
        )
        ranks.tell(manifest.SerializeToString())
        ends = join(manifest, receivers)
        for _ in range(2):  # a group serves more than one publication
            ranks.tell("send")
            with ThreadPoolExecutor() as threads:
                results = list(threads.map(take, ends))
            reports = [ranks.answer(rank) for rank in range(senders)]
            whole = add_digests(*(tensor_digest(n, t.reshape(-1), 0) for n, t in expected.items()))
            for end, got in zip(ends, results, strict=True):
                assert_same(got, expected)  # the alias lm_head.weight is not among them
                assert end.digest == whole == add_digests(*(digest for digest, _ in reports))
                assert end.bytes == sum(tensor_bytes(s) for s in manifest.tensors if not s.alias_of)
                assert end.bytes == sum(size for _, size in reports)
        for end in ends:
            end.close()


def test_what_was_received_is_the_consumers_own() -> None:
    """A later publication must not change tensors that are kept, e.g. in staging."""
    with learner(ranks=1) as ranks:
        manifest = make_manifest(ranks.address, bucket_bytes=TEN_KIB)
        ranks.tell(manifest.SerializeToString())
        (end,) = join(manifest)
        ranks.tell("send")
        first = take(end)
        kept = {name: tensor.clone() for name, tensor in first.items()}
        for tensor in first.values():
            tensor.add_(1)
        ranks.tell("send")
        assert_same(take(end), kept)


@pytest.mark.parametrize(("rank", "die_at"), [(0, 0), (1, 3), (0, 6)])  # of 8 buckets; two travel at a time
def test_a_sender_killed_at_any_bucket_ends_the_receive_with_an_error(rank: int, die_at: int) -> None:
    with learner(fates={rank: Fate(die_at_bucket=die_at)}) as ranks:
        manifest = make_manifest(ranks.address, sender_ranks=2, bucket_bytes=ONE_TENSOR)
        assert len(buckets(manifest)) == 8
        ranks.tell(manifest.SerializeToString())
        (end,) = join(manifest)
        ranks.tell("send")
        begin = time.monotonic()
        where = rf"group 1/{rank}, rank 1 of 2: .*bucket \d of 8 from learner rank {rank}"
        with pytest.raises(Unavailable, match=where):
            take(end, deadline_seconds=10)
        assert time.monotonic() - begin < 5  # it notices, it does not wait for the deadline
        with pytest.raises(Conflict):
            _ = end.digest


def test_a_sender_that_stands_still_is_given_up_at_the_deadline() -> None:
    with learner(ranks=1, fates={0: Fate(stop_at_bucket=2)}) as ranks:
        manifest = make_manifest(ranks.address, bucket_bytes=ONE_TENSOR)
        ranks.tell(manifest.SerializeToString())
        (end,) = join(manifest)
        ranks.tell("send")
        begin = time.monotonic()
        with pytest.raises(Expired, match="bucket"):
            take(end, deadline_seconds=1)
        assert 0.9 < time.monotonic() - begin < 3


def test_close_from_another_thread_ends_a_receive() -> None:
    with learner(ranks=1) as ranks:
        manifest = make_manifest(ranks.address)
        ranks.tell(manifest.SerializeToString())
        (end,) = join(manifest)
        timer = threading.Timer(0.3, end.close)
        timer.start()
        begin = time.monotonic()
        with pytest.raises(Unavailable):
            take(end, deadline_seconds=15)  # nobody sends
        assert time.monotonic() - begin < 5


def test_a_receiver_that_dies_ends_the_send_with_an_error() -> None:
    store, address = bind_store()
    manifest = make_manifest(address, receiver_ranks=2, bucket_bytes=ONE_TENSOR)
    ends: list[Any] = []
    thread = threading.Thread(target=lambda: ends.extend(join(manifest, 2)))
    thread.start()
    sender = Sender(manifest, 0, store=store, deadline_seconds=20)
    thread.join(20)
    ends[1].close()
    model = make_model(1, torch.float32)
    begin = time.monotonic()
    with pytest.raises((Unavailable, Expired), match="transfer group 1/0"):
        for _ in range(3):  # small messages fit into the sockets' buffers at first
            sender.send(lambda spec: model[spec.name].view(-1), deadline_seconds=3)
    assert time.monotonic() - begin < 5
    with pytest.raises(Unavailable):
        take(ends[0], deadline_seconds=3)


def test_who_comes_alone_gives_up_at_the_deadline() -> None:
    store, address = bind_store()
    manifest = make_manifest(address)
    begin = time.monotonic()
    with pytest.raises(Unavailable, match="not everybody came within 1"):
        Receiver(manifest, 0, deadline_seconds=1)
    with pytest.raises(Unavailable, match="not everybody came within 1"):
        Sender(make_manifest(address, epoch=2), 0, store=store, deadline_seconds=1)
    assert time.monotonic() - begin < 5


def test_who_leaves_while_the_others_are_awaited_leaves_at_once() -> None:
    store, address = bind_store()
    left = threading.Event()
    timer = threading.Timer(0.3, left.set)
    timer.start()
    begin = time.monotonic()
    with pytest.raises(Unavailable, match="it was left during coming together"):
        Sender(make_manifest(address), 0, store=store, left=left, deadline_seconds=15)
    assert time.monotonic() - begin < 3
    with pytest.raises(Unavailable, match="rank 0 of 2: it was left"):  # the other end hears of it, too
        Receiver(make_manifest(address), 0, deadline_seconds=15)
    assert time.monotonic() - begin < 6


def test_no_store_is_unavailable() -> None:
    store, address = bind_store()
    del store
    with pytest.raises(Unavailable, match=address):
        Receiver(make_manifest(address), 0, deadline_seconds=0.5)


def test_ends_with_different_manifests_refuse_each_other() -> None:
    store, address = bind_store()
    ours = make_manifest(address)
    theirs = make_manifest(address, bucket_bytes=TEN_KIB)
    failures: list[BaseException] = []

    def other() -> None:
        try:
            join(theirs)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises((InvalidRequest, Unavailable), match="transfer group 1/0, rank 0 of 2"):
        Sender(ours, 0, store=store, deadline_seconds=3)
    thread.join(20)
    assert isinstance(failures[0], InvalidRequest | Unavailable)
    assert "manifest is another one" in str(failures[0])  # its own words, or those of the other end


def test_a_slice_that_does_not_fit_is_refused_and_frees_the_receiver() -> None:
    store, address = bind_store()
    manifest = make_manifest(address)
    ends: list[Any] = []
    thread = threading.Thread(target=lambda: ends.extend(join(manifest)))
    thread.start()
    sender = Sender(manifest, 0, store=store, deadline_seconds=20)
    thread.join(20)
    with pytest.raises(ValueError, match=r"embed\.weight: rank 0 must send 5709"):
        sender.send(lambda spec: torch.zeros(3), deadline_seconds=5)
    begin = time.monotonic()
    with pytest.raises(Unavailable):
        take(ends[0], deadline_seconds=10)
    assert time.monotonic() - begin < 5
