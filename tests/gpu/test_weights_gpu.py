"""The pipe between GPUs, by NCCL and by CUDA IPC: the bodies of tests/unit/weights on devices, and the digest there."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest
import torch
from antiphon.types.v1 import transfer_pb2

from services.common.errors import Expired, InvalidRequest, Unavailable
from services.common.weights.digest import RunningDigest, add_digests, digest_with_torch, tensor_digest
from services.common.weights.manifest import tensor_bytes
from services.common.weights.receiver import Receiver
from services.common.weights.store import bind_store
from tests.unit.weights.pipe_processes import Fate, assert_same, join, learner, make_manifest, make_model, take

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


@dataclass(frozen=True)
class Way:
    """A transport, and where its two ends are."""

    transport: transfer_pb2.Transport
    sender: str
    receiver: str


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
WAYS = [
    pytest.param(Way(transfer_pb2.TRANSPORT_NCCL, "cuda:0", "cuda:1"), id="nccl", marks=two_gpus),
    pytest.param(Way(transfer_pb2.TRANSPORT_CUDA_IPC, "cuda:0", "cuda:0"), id="ipc"),
    pytest.param(Way(transfer_pb2.TRANSPORT_CUDA_IPC, "cuda:0", "cuda:1"), id="ipc-across", marks=two_gpus),
]
every_way = pytest.mark.parametrize("way", WAYS)
ONE_TENSOR, TEN_KIB, ALL = 1, 10 * 1024, 1 << 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_digest_on_the_device_is_that_on_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    running = RunningDigest(torch.device("cuda:0"))
    parts = []
    for name, count, start in (("a", 1, 0), ("b", 5000, 3), ("c", 1_000_003, (1 << 33) + 5), ("d", 0, 0)):
        flat = torch.randn(count, generator=generator).to(dtype)
        running.add(name, flat.cuda(), start)
        parts.append(tensor_digest(name, flat, start))
        assert digest_with_torch(name, flat.cuda(), start) == parts[-1]
    assert running.value() == add_digests(*parts)


@every_way
@pytest.mark.parametrize(
    ("bucket_bytes", "dtype"), [(ONE_TENSOR, torch.float32), (TEN_KIB, torch.bfloat16), (ALL, torch.bfloat16)]
)
def test_slices_of_two_ranks_make_the_whole_model(way: Way, bucket_bytes: int, dtype: torch.dtype) -> None:
    expected = make_model(1, dtype)
    whole = add_digests(*(tensor_digest(n, t.reshape(-1), 0) for n, t in expected.items()))
    with learner(dtype=dtype, device=way.sender) as ranks:
        manifest = make_manifest(
            ranks.address, sender_ranks=2, bucket_bytes=bucket_bytes, dtype=dtype, transport=way.transport
        )
        ranks.tell(manifest.SerializeToString())
        (end,) = join(manifest, device=way.receiver)
        for _ in range(3):  # a group serves more than one publication
            ranks.tell("send")
            got = take(end)
            reports = [ranks.answer(rank) for rank in range(2)]
            assert_same(got, expected)
            assert end.digest == whole == add_digests(*(digest for digest, _ in reports))
            assert end.bytes == sum(tensor_bytes(s) for s in manifest.tensors if not s.alias_of)
        end.close()


@every_way
@pytest.mark.parametrize(("rank", "die_at"), [(0, 0), (1, 3), (0, 6)])  # of 8 buckets; two travel at a time
def test_a_sender_killed_at_any_bucket_ends_the_receive_and_the_next_epoch_works(
    way: Way, rank: int, die_at: int
) -> None:
    with learner(fates={rank: Fate(die_at_bucket=die_at)}, device=way.sender) as ranks:
        manifest = make_manifest(ranks.address, sender_ranks=2, bucket_bytes=ONE_TENSOR, transport=way.transport)
        ranks.tell(manifest.SerializeToString())
        (end,) = join(manifest, device=way.receiver)
        ranks.tell("send")
        begin = time.monotonic()
        with pytest.raises((Unavailable, Expired), match=r"bucket \d of 8 from learner rank"):
            take(end, deadline_seconds=4)
        # Rank 0 takes the store with it, so its death is noticed; that of another at the deadline, or by its parent.
        assert time.monotonic() - begin < (2 if rank == 0 else 6)
    assert torch.ones(8, device=way.receiver).sum().item() == 8  # the device answers
    with learner(device=way.sender) as ranks:
        manifest = make_manifest(ranks.address, epoch=2, sender_ranks=2, transport=way.transport)
        ranks.tell(manifest.SerializeToString())
        (end,) = join(manifest, device=way.receiver)
        ranks.tell("send")
        assert_same(take(end), make_model(1, torch.float32))
        end.close()


@every_way
def test_a_sender_that_stands_still_is_given_up_at_the_deadline(way: Way) -> None:
    with learner(ranks=1, fates={0: Fate(stop_at_bucket=2)}, device=way.sender) as ranks:
        manifest = make_manifest(ranks.address, bucket_bytes=ONE_TENSOR, transport=way.transport)
        ranks.tell(manifest.SerializeToString())
        (end,) = join(manifest, device=way.receiver)
        ranks.tell("send")
        begin = time.monotonic()
        with pytest.raises(Expired, match="bucket"):
            take(end, deadline_seconds=1)
        assert 0.9 < time.monotonic() - begin < 4


@every_way
def test_close_from_another_thread_ends_a_receive(way: Way) -> None:
    with learner(ranks=1, device=way.sender) as ranks:
        manifest = make_manifest(ranks.address, transport=way.transport)
        ranks.tell(manifest.SerializeToString())
        (end,) = join(manifest, device=way.receiver)
        timer = threading.Timer(0.3, end.close)
        timer.start()
        begin = time.monotonic()
        with pytest.raises(Unavailable):
            take(end, deadline_seconds=15)  # nobody sends
        assert time.monotonic() - begin < 5


@every_way
def test_a_receiver_that_leaves_ends_the_send_with_its_words(way: Way) -> None:
    with learner(ranks=1, device=way.sender) as ranks:
        manifest = make_manifest(ranks.address, bucket_bytes=ONE_TENSOR, transport=way.transport)
        ranks.tell(manifest.SerializeToString())
        (end,) = join(manifest, device=way.receiver)
        end.close("this receiver was told to")
        ranks.tell("send")
        assert ranks.pipes[0].poll(10)  # well before its deadline of 20 s
        assert "this receiver was told to" in ranks.answer(0)
        ranks.processes[0].join(10)  # counted from the error: a process with NCCL takes seconds to leave
        assert ranks.processes[0].exitcode == 1


def test_a_transport_that_does_not_fit_the_device_is_refused() -> None:
    store, address = bind_store()
    manifest = make_manifest(address, transport=transfer_pb2.TRANSPORT_NCCL)
    with pytest.raises(InvalidRequest, match="on a GPU, here they are on cpu"):
        Receiver(manifest, 0, deadline_seconds=2)
    del store
