"""The memory of a rank on its GPU, by tag: moved to the host and back under the very tensors that are in use.

A tensor's storage gives its memory up and takes other memory later; the tensor, and every view of it that DeepSpeed
keeps, stays what it is. So nothing here knows how ZeRO-3 hangs together, only which tensors are which:

    weights     the slices of the parameters (`ds_tensor`), and the whole parameters that are resident
    optimizer   float32 master weights, moments, and buffers of gradients, whose content is of no use between Steps

What is kept lies in page-locked memory of exactly its size, allocated once.
"""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from antiphon.learner.v1 import ranks_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import grant_pb2

from services.common.errors import Overloaded
from services.common.weights.digest import RunningDigest

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES = 4096
MOMENTS = 2  # AdamW's, of the size of the master weights each; they are made by the first Update
TAGS = (grant_pb2.MEMORY_TAG_WEIGHTS, grant_pb2.MEMORY_TAG_OPTIMIZER)


class PinnedArena:
    """Page-locked host memory. torch's own allocator rounds a block up to a power of two; this takes what it says."""

    def __init__(self, size_bytes: int) -> None:
        self._map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes.zero_()  # by many threads: locking pages that are there is faster than making them one by one
        cudart = torch.cuda.cudart()
        code = cudart.cudaHostRegister(self.bytes.data_ptr(), size_bytes, 0)
        if code != cudart.cudaError.success:
            raise RuntimeError(
                f"{size_bytes} bytes of host memory cannot be page-locked ({cudart.cudaGetErrorString(code)}); "
                "raise the limit of locked memory (ulimit -l) or the memory of the container"
            )
        # Else the driver takes what lies at these addresses next for the pages that lay there, and copies those.
        unlock = weakref.finalize(self, _unlock, cudart, self.bytes, self._map)
        unlock.atexit = False  # the pages go with the process


@dataclass
class _Block:
    """One storage: its size while it is awake, and where it is kept while it sleeps; None: its content is not kept."""

    storage: torch.UntypedStorage
    size_bytes: int
    kept_at: int | None


class DeviceMemory:
    """What one rank's DeepSpeed engine holds on its GPU."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        self._engine = engine
        self._device = device
        self._asleep: dict[grant_pb2.MemoryTag, list[_Block]] = {}
        self._sizes: dict[grant_pb2.MemoryTag, int] = {}
        self._arenas: dict[grant_pb2.MemoryTag, PinnedArena] = {}
        self._digest = 0
        """Of the weights, when they went to sleep."""
        self.note_sizes()

    def prepare(self) -> None:
        """Allocates the host memory now, so that the first Sleep need not."""
        for tag in TAGS:
            self._arena(tag, self._blocks(tag))

    def note_sizes(self) -> None:
        """Looks what the tags hold; to be called when that has changed, between two pieces of work."""
        for tag in TAGS:
            size = 0 if tag in self._asleep else sum(block.size_bytes for block in self._blocks(tag))
            self._sizes[tag] = size

    def held(self) -> tenant_pb2.DeviceMemory:
        """By the driver, and by tag. May be called from another thread."""
        free, total = torch.cuda.mem_get_info(self._device)
        state = tenant_pb2.DeviceMemory(uuid=self._uuid(), total_bytes=total, free_bytes=free)
        for tag in TAGS:
            state.held.add(tag=tag, bytes=self._sizes[tag])
        return state

    def sleep(self, tags: Sequence[grant_pb2.MemoryTag]) -> ranks_pb2.RankMemoryChange:
        """Moves what these tags hold to the host, and measures what became free."""
        going = {tag: self._blocks(tag) for tag in tags if tag not in self._asleep}
        if grant_pb2.MEMORY_TAG_WEIGHTS in going:
            self._digest = self._weights_digest()
        arenas = {tag: self._arena(tag, blocks) for tag, blocks in going.items()}
        before = self._free_bytes()
        begin = time.monotonic()
        for tag, blocks in going.items():
            arena = arenas[tag]
            for block in blocks:
                if block.kept_at is not None:
                    _part(arena, block).copy_(self._bytes_of(block), non_blocking=True)
        torch.cuda.synchronize(self._device)
        for tag, blocks in going.items():
            _give_up(blocks)
            self._asleep[tag] = blocks
        # Pages in torch's cache are invisible to the others on this GPU.
        torch.cuda.empty_cache()
        self.note_sizes()
        size = sum(block.size_bytes for blocks in going.values() for block in blocks)
        return self._change(before, size, begin)

    def wake(self, tags: Sequence[grant_pb2.MemoryTag]) -> ranks_pb2.RankMemoryChange:
        """Takes the memory of these tags again, with what was in it.

        Raises Overloaded when it does not fit; then all of it sleeps as before. The weights are checked by their
        digest: another one than before is a bug, RuntimeError.
        """
        before = self._free_bytes()
        begin = time.monotonic()
        coming = {tag: self._asleep[tag] for tag in tags if tag in self._asleep}
        everything = [block for blocks in coming.values() for block in blocks]
        size = sum(block.size_bytes for block in everything)
        try:
            for block in everything:
                block.storage.resize_(block.size_bytes)
        except torch.OutOfMemoryError:
            reserved, allocated = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
            _give_up(everything)
            torch.cuda.empty_cache()
            raise Overloaded(
                f"wake: {size} bytes are wanted on {self._uuid()}, the driver has {before} free of "
                f"{torch.cuda.mem_get_info(self._device)[1]}; this process has {reserved} reserved, {allocated} of "
                "them in use; nothing was taken: let others on this GPU sleep first"
            ) from None
        for tag, blocks in coming.items():
            for block in blocks:
                if block.kept_at is not None:
                    self._bytes_of(block).copy_(_part(self._arenas[tag], block), non_blocking=True)
                else:
                    self._bytes_of(block).zero_()
            del self._asleep[tag]
            if tag == grant_pb2.MEMORY_TAG_WEIGHTS:
                self._fill_whole_parameters(blocks)
        torch.cuda.synchronize(self._device)
        self.note_sizes()
        change = self._change(before, size, begin)
        if grant_pb2.MEMORY_TAG_WEIGHTS in coming and (found := self._weights_digest()) != self._digest:
            raise RuntimeError(f"the weights came back with digest {found:#x}; they slept with {self._digest:#x}")
        return change

    def _blocks(self, tag: grant_pb2.MemoryTag) -> list[_Block]:
        """The storages of a tag that is awake, each once."""
        kept, not_kept = self._weights() if tag == grant_pb2.MEMORY_TAG_WEIGHTS else self._optimizer_state()
        found: dict[int, _Block] = {}
        place = 0
        for tensors, is_kept in ((kept, True), (not_kept, False)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if tensor.device != self._device or not storage.nbytes() or storage.data_ptr() in found:
                    continue
                found[storage.data_ptr()] = _Block(storage, storage.nbytes(), place if is_kept else None)
                if is_kept:
                    place += -(-storage.nbytes() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return list(found.values())

    def _weights(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        parameters = list(self._engine.module.parameters())
        slices = [parameter.ds_tensor.data for parameter in parameters]
        whole = [parameter.data for parameter in parameters]
        # One rank's slice is the whole parameter: it need not travel twice.
        return (slices, whole) if dist.get_world_size() == 1 else (slices + whole, [])

    def _optimizer_state(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        zero = self._engine.optimizer
        kept: list[torch.Tensor] = list(zero.fp32_partitioned_groups_flat)
        for state in zero.optimizer.state.values():
            kept += [value for value in state.values() if torch.is_tensor(value)]
        buffers = [zero.grad_partitions_flat_buffer]
        buffers += [bucket.buffer for bucket in zero.ipg_buckets.values() if bucket.buffer is not None]
        return kept, buffers

    def _fill_whole_parameters(self, blocks: Iterable[_Block]) -> None:
        """Whole parameters whose memory was given up without being kept, from this rank's slice of them."""
        empty = {block.storage.data_ptr() for block in blocks if block.kept_at is None}
        for parameter in self._engine.module.parameters():
            if parameter.data.untyped_storage().data_ptr() in empty:
                whole = parameter.ds_tensor.data.narrow(0, 0, parameter.ds_numel)
                parameter.data.copy_(whole.view(parameter.ds_shape))

    def _weights_digest(self) -> int:
        """Of this rank's slices, one after the other; whole parameters are compared with nothing, they are copies."""
        digest = RunningDigest(self._device)
        for number, parameter in enumerate(self._engine.module.parameters()):
            digest.add(str(number), parameter.ds_tensor.data, 0)
        return digest.value()

    def _arena(self, tag: grant_pb2.MemoryTag, blocks: Sequence[_Block]) -> PinnedArena:
        wanted = max((b.kept_at + b.size_bytes for b in blocks if b.kept_at is not None), default=0)
        if tag == grant_pb2.MEMORY_TAG_OPTIMIZER:
            masters = self._engine.optimizer.fp32_partitioned_groups_flat
            sizes = [-(-m.untyped_storage().nbytes() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for m in masters]
            # Each with its moments and the page of their step count.
            wanted = max(wanted, (1 + MOMENTS) * sum(sizes) + len(sizes) * ALIGNMENT_BYTES)
        known = self._arenas.get(tag)
        if known is None:
            known = self._arenas[tag] = PinnedArena(max(wanted, ALIGNMENT_BYTES))
        if known.bytes.numel() < wanted:
            raise RuntimeError(f"{wanted} bytes are to be kept, {known.bytes.numel()} were reserved for it")
        return known

    def _bytes_of(self, block: _Block) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(block.storage)

    def _free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0])

    def _change(self, before: int, tag_bytes: int, begin: float) -> ranks_pb2.RankMemoryChange:
        after = self._free_bytes()
        change = ranks_pb2.RankMemoryChange(tag_bytes=tag_bytes, seconds=time.monotonic() - begin)
        change.device.uuid = self._uuid()
        change.device.free_bytes_before, change.device.free_bytes_after = before, after
        return change

    def _uuid(self) -> str:
        return f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"


def _unlock(cudart: Any, kept: torch.Tensor, pages: mmap.mmap) -> None:
    """`pages` are given so that they stay until here."""
    cudart.cudaHostUnregister(kept.data_ptr())


def _part(arena: PinnedArena, block: _Block) -> torch.Tensor:
    assert block.kept_at is not None
    return arena.bytes.narrow(0, block.kept_at, block.size_bytes)


def _give_up(blocks: Iterable[_Block]) -> None:
    for block in blocks:
        block.storage.resize_(0)
