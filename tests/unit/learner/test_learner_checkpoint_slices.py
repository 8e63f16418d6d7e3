"""Slices that some ranks wrote, read by any other number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from antiphon.learner.v1 import checkpoint_pb2
from safetensors.torch import load_file

from services.common.errors import InvalidRequest
from services.learner import checkpoint, checkpoint_slices
from services.learner.checkpoint_slices import SavedSlices, write_slices

SHAPES = {"a": (5, 2), "norm": (3,), "one": (1,)}
WHOLE = {
    kind: {name: np.arange(np.prod(shape)) + 100.0 * number for name, shape in SHAPES.items()}
    for number, kind in enumerate(("master", "exp_avg", "exp_avg_sq"), start=1)
}


class RankState:
    """What ZeRO-3 gives rank `rank` of `ranks`: ceil(n / ranks) elements, the last ones what is left."""

    def __init__(self, rank: int, ranks: int, updates: int = 4) -> None:
        self.rank, self.ranks, self.optimizer_updates = rank, ranks, updates
        self.parameters = dict.fromkeys(SHAPES)

    def extent(self, name: str) -> tuple[int, int]:
        numel = int(np.prod(SHAPES[name]))
        each = -(-numel // self.ranks)
        start = min(self.rank * each, numel)
        return start, min(each, numel - start)

    def slice_of(self, kind: str, name: str) -> torch.Tensor:
        start, count = self.extent(name)
        return torch.tensor(WHOLE[kind][name][start : start + count], dtype=torch.float32)


def write(folder: Path, ranks: int, updates: int = 4) -> checkpoint_pb2.CheckpointManifest:
    folder.mkdir()
    manifest = checkpoint_pb2.CheckpointManifest(ranks=ranks)
    manifest.position.optimizer_updates = updates
    for rank in range(ranks):
        own = {"rng/cpu": torch.tensor([rank], dtype=torch.uint8)}
        manifest.files.extend(write_slices(folder, rank, RankState(rank, ranks, updates), own, lambda done, of: None))
    return manifest


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
@pytest.mark.parametrize("file_bytes", [1, 1 << 30])
def test_any_number_of_ranks_reads_what_any_number_wrote(monkeypatch, tmp_path, saved, file_bytes):
    monkeypatch.setattr(checkpoint_slices, "FILE_BYTES", file_bytes)
    manifest = write(tmp_path / "ck", saved)
    checkpoint.check_contents(tmp_path / "ck", manifest.files)
    assert (len(manifest.files) == saved) == (file_bytes > 1)
    with SavedSlices(tmp_path / "ck", manifest) as slices:
        slices.check(SHAPES)
        for ranks in (1, 2, 3, 4, 7):
            for rank in range(ranks):
                state = RankState(rank, ranks)
                for name in SHAPES:
                    found = slices.read(name, *state.extent(name))
                    assert list(found) == list(WHOLE)
                    for kind, tensor in found.items():
                        assert torch.equal(tensor, state.slice_of(kind, name)), (ranks, rank, name, kind)
        assert [slices.own(rank)["rng/cpu"].item() for rank in range(saved)] == list(range(saved))
        assert slices.own(saved) == {}


def test_nothing_empty_is_written_and_no_moments_before_the_first_update(tmp_path):
    manifest = write(tmp_path / "ck", 4, updates=0)
    names = [set(load_file(tmp_path / "ck" / file.name)) for file in manifest.files]
    assert names[0] == {"master/a", "master/norm", "master/one", "rng/cpu"}
    assert names[3] == {"master/a", "rng/cpu"}  # of three elements, four ranks hold one each, the last none
    for file in manifest.files:
        assert all(tensor.numel() for tensor in load_file(tmp_path / "ck" / file.name).values())
    with SavedSlices(tmp_path / "ck", manifest) as slices:
        assert list(slices.read("a", 0, 10)) == ["master"]


def test_a_slice_that_is_not_there_is_named(tmp_path):
    manifest = write(tmp_path / "ck", 2)
    del manifest.files[1]
    with (
        SavedSlices(tmp_path / "ck", manifest) as slices,
        pytest.raises(InvalidRequest, match="master/a has 5 elements, 10 are expected"),
    ):
        slices.check(SHAPES)
    (tmp_path / "ck" / manifest.files[0].name).write_bytes(b"no safetensors")
    with (
        pytest.raises(InvalidRequest, match=r"rank0000-0000.safetensors cannot be read"),
        SavedSlices(tmp_path / "ck", manifest),
    ):
        pass
