"""A checkpoint's files while processes are killed in the middle of writing and deleting them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from antiphon.learner.v1 import checkpoint_pb2

from services.common.errors import AntiphonError, InvalidRequest
from services.learner import checkpoint
from services.learner.whole_folder import WholeFolder, remove_leftovers

KINDS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "fcntl.flock")


def save(path: Path, content: bytes = b"x" * 5000) -> None:
    """What a learner with two ranks does to the disk."""
    folder = WholeFolder("save to", path)
    manifest = checkpoint_pb2.CheckpointManifest(request_id=path.name, role="actor")
    for rank in range(2):
        file = folder.aside / f"rank{rank}.safetensors"
        file.write_bytes(content)
        manifest.files.append(checkpoint.described(file, rank))
    checkpoint.write_manifest(folder.aside, manifest)
    folder.publish()


def is_whole(path: Path) -> bool:
    try:
        manifest, _ = checkpoint.read_manifest(path)
        checkpoint.check_contents(path, manifest.files)
    except AntiphonError:
        return False
    return len(manifest.files) == 2


def killed_at(count: int, work) -> bool:
    """Does `work` in a child that gets SIGKILL when it is about to touch the disk for the `count`-th time."""
    pid = os.fork()
    if pid == 0:
        left = count

        def hear(event: str, arguments: tuple) -> None:
            nonlocal left
            if event in KINDS:  # the kill is an event, too
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sync = os.fsync

        def fsync(descriptor: int) -> None:
            hear("open", ())  # not audited by the interpreter
            sync(descriptor)

        os.fsync = fsync
        try:
            sys.addaudithook(hear)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0, status
    return os.WIFSIGNALED(status)


def test_killed_anywhere_the_old_one_is_there_or_the_new_one_and_no_half_one_counts(tmp_path):
    """At every single touch of the disk, in Save and in the deletion of the older checkpoint that follows it."""
    old, new, later = tmp_path / "old", tmp_path / "new", tmp_path / "later"

    def replace() -> None:
        save(new, b"y" * 5000)
        checkpoint.delete(old, "actor")

    count = 0
    seen = set()
    while True:
        count += 1
        save(old)
        was_killed = killed_at(count, replace)
        state = (is_whole(old), is_whole(new))
        seen.add(state)
        assert any(state)
        for folder in tmp_path.iterdir():
            assert folder.name.startswith(".") or is_whole(folder), (count, folder)
        save(later)  # the next Save works, and cleans up
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == [], count
        for path in (old, new, later):
            checkpoint.delete(path, "actor")
        assert list(tmp_path.iterdir()) == []
        if not was_killed:
            break
    assert count > 30
    assert seen == {(True, False), (True, True), (False, True)}


def test_what_another_process_is_writing_is_no_leftover(tmp_path):
    writing = WholeFolder("save to", tmp_path / "one")
    pid = os.fork()
    if pid == 0:
        remove_leftovers(tmp_path)
        os._exit(0)
    os.waitpid(pid, 0)
    assert writing.aside.is_dir()
    writing.discard()
    assert list(tmp_path.iterdir()) == []


def test_strangers_are_left_alone(tmp_path):
    for name in (".git", ".cache.partial.d", "x.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / ".file.partial").touch()
    (tmp_path / ".link.partial").symlink_to(tmp_path / "x.partial")
    save(tmp_path / "ck")
    assert len(list(tmp_path.iterdir())) == 6


def test_a_name_that_is_taken_meanwhile_is_not_replaced(tmp_path):
    folder = WholeFolder("save to", tmp_path / "ck")
    (tmp_path / "ck").mkdir()
    with pytest.raises(InvalidRequest, match="it exists"):
        folder.publish()
    folder.discard()
    assert [p.name for p in tmp_path.iterdir()] == ["ck"]


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    save(tmp_path / "ck")
    manifest, _ = checkpoint.read_manifest(tmp_path / "ck")
    manifest.files[0].name = "../ck/rank0.safetensors"
    checkpoint.write_manifest(tmp_path / "ck", manifest)
    with pytest.raises(InvalidRequest, match="which is no file of the folder"):
        checkpoint.read_manifest(tmp_path / "ck")
