"""A rank's share of a checkpoint: its slices in files of their own, and slices for any number of ranks out of them.

Tensors are called KIND/NAME (services/learner/checkpoint.py), and `rng/…` where they are a rank's own.
The slices of all ranks, in rank order, are the flattened parameter; so another number of ranks only cuts it elsewhere.
No file holds code: they are safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from antiphon.learner.v1 import checkpoint_pb2
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from services.common.errors import InvalidRequest
from services.learner import checkpoint
from services.learner.checkpoint import KINDS, MASTER

if TYPE_CHECKING:
    from services.learner.zero_state import ZeroState

FILE_BYTES = 1 << 30
"""A file is closed when it has so many: this much of a GPU's state is on the host at once."""

Report = Callable[[int, int], None]
"""report(done, of)"""


def write_slices(
    folder: Path, rank: int, state: ZeroState, others: Mapping[str, torch.Tensor], report: Report
) -> list[checkpoint_pb2.CheckpointFile]:
    """Writes and syncs this rank's files; `others` are tensors of its own. Raises OSError when the disk refuses."""
    files: list[checkpoint_pb2.CheckpointFile] = []
    held: dict[str, torch.Tensor] = {}

    def flush() -> None:
        path = folder / f"rank{rank:04d}-{len(files):04d}.safetensors"
        try:
            save_file(held, path)
        except SafetensorError as error:  # what it makes of a full disk
            raise OSError(str(error)) from None
        files.append(checkpoint.described(path, rank))
        held.clear()

    kinds = KINDS if state.optimizer_updates else (MASTER,)
    for done, name in enumerate(state.parameters, start=1):
        if state.extent(name)[1]:
            for kind in kinds:
                held[f"{kind}/{name}"] = state.slice_of(kind, name).to("cpu", copy=True)
        if sum(tensor.nbytes for tensor in held.values()) >= FILE_BYTES:
            flush()
        report(done, len(state.parameters))
    held.update(others)
    flush()
    return files


class SavedSlices:
    """The files of a checkpoint, open for reading. A context manager."""

    def __init__(self, folder: Path, manifest: checkpoint_pb2.CheckpointManifest) -> None:
        self._folder = folder
        self._files = sorted(manifest.files, key=lambda file: (file.rank, file.name))
        self._kinds = KINDS if manifest.position.optimizer_updates else (MASTER,)
        self._open = ExitStack()
        self._where: dict[str, list[Any]] = {}
        """Tensor → the readers of the files with its slices, in rank order."""

    def __enter__(self) -> SavedSlices:
        try:
            for file in self._files:
                try:
                    reader = self._open.enter_context(safe_open(self._folder / file.name, framework="pt"))
                except (OSError, SafetensorError) as error:
                    raise InvalidRequest(f"checkpoint {self._folder}: {file.name} cannot be read: {error}") from None
                for tensor in reader.keys():  # noqa: SIM118
                    own = f"rank{file.rank}/" if tensor.startswith("rng/") else ""
                    self._where.setdefault(own + tensor, []).append(reader)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def check(self, shapes: Mapping[str, Sequence[int]], kinds: Sequence[str] | None = None) -> None:
        """Raises InvalidRequest unless the slices of every tensor are as long together as it is.

        `kinds`: only these; default: all that were saved.
        """
        for name, shape in shapes.items():
            expected = torch.Size(shape).numel()
            for kind in kinds or self._kinds:
                found = sum(length for _, length in self._pieces(f"{kind}/{name}"))
                if found != expected:
                    raise InvalidRequest(
                        f"checkpoint {self._folder}: {kind}/{name} has {found} elements, {expected} are expected"
                    )

    def read(self, name: str, start: int, count: int) -> dict[str, torch.Tensor]:
        """Elements [start, start + count) of a flattened parameter, by kind; moments only where they were saved."""
        return {kind: self._read(f"{kind}/{name}", start, count) for kind in self._kinds}

    def master(self, name: str, count: int) -> torch.Tensor:
        """The first `count` elements of a flattened parameter, in float32."""
        return self._read(f"{MASTER}/{name}", 0, count)

    def own(self, rank: int) -> dict[str, torch.Tensor]:
        """What belongs to the rank of that number alone; nothing when fewer ranks wrote it."""
        begin = f"rank{rank}/"
        return {
            key.removeprefix(begin): readers[0].get_tensor(key.removeprefix(begin))
            for key, readers in self._where.items()
            if key.startswith(begin)
        }

    def _read(self, tensor: str, start: int, count: int) -> torch.Tensor:
        parts = [torch.empty(0)]
        begin = 0
        for reader, length in self._pieces(tensor):
            low, high = max(start, begin), min(start + count, begin + length)
            if low < high:
                parts.append(reader.get_slice(tensor)[low - begin : high - begin])
            begin += length
        return torch.cat(parts)

    def _pieces(self, tensor: str) -> Iterator[tuple[Any, int]]:
        for reader in self._where.get(tensor, []):
            yield reader, int(reader.get_slice(tensor).get_shape()[0])
