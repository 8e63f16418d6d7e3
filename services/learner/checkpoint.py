"""A checkpoint as files: what a manifest says, and whether the folder is as it says. Knows no tensors.

manifest.json           CheckpointManifest (protos/antiphon/learner/v1/checkpoint.proto)
manifest.json.sha256    its digest, as `sha256sum -c` reads it
rank0000-0000.safetensors, …   the slices of each rank (services/learner/rank_checkpoint.py)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from antiphon.learner.v1 import checkpoint_pb2
from google.protobuf import json_format

from services.common.errors import InvalidRequest, NotFound
from services.learner import whole_folder

MANIFEST = "manifest.json"
MANIFEST_SUM = "manifest.json.sha256"
FORMAT = 1
MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (MASTER, *MOMENTS)
"""What is saved of a parameter, in float32: tensors are called KIND/NAME."""


def described(path: Path, rank: int) -> checkpoint_pb2.CheckpointFile:
    """What the manifest says of a file that was written: read back from the disk's point of view, after a sync."""
    whole_folder.sync(path)
    return checkpoint_pb2.CheckpointFile(
        name=path.name, bytes=path.stat().st_size, sha256=_sha256(path).hex(), rank=rank
    )


def write_manifest(folder: Path, manifest: checkpoint_pb2.CheckpointManifest) -> bytes:
    """Writes it, which makes the folder a checkpoint; answers its digest."""
    manifest.format = FORMAT
    text = json_format.MessageToJson(manifest, preserving_proto_field_name=True, indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).digest()
    (folder / MANIFEST).write_text(text)
    (folder / MANIFEST_SUM).write_text(f"{digest.hex()}  {MANIFEST}\n")
    return digest


def read_manifest(folder: Path) -> tuple[checkpoint_pb2.CheckpointManifest, bytes]:
    """The manifest and its digest; every file that it names is there and has its size.

    Raises NotFound where there is no checkpoint, InvalidRequest that names the file that is missing, cut or changed.
    """
    if not (folder / MANIFEST).is_file():
        raise NotFound(f"checkpoint {folder}: there is no {MANIFEST}, so no whole checkpoint; name another one")
    try:
        data = (folder / MANIFEST).read_bytes()
        said = (folder / MANIFEST_SUM).read_text().split()
    except OSError as error:
        raise InvalidRequest(f"checkpoint {folder}: {error}; name another one") from None
    digest = hashlib.sha256(data).digest()
    if said != [digest.hex(), MANIFEST]:
        raise InvalidRequest(
            f"checkpoint {folder}: {MANIFEST} is not what was written: its SHA-256 is {digest.hex()[:16]}…, "
            f"{MANIFEST_SUM} says {' '.join(said)[:16]}…; name another one"
        )
    manifest = checkpoint_pb2.CheckpointManifest()
    try:
        json_format.Parse(data, manifest)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"checkpoint {folder}: {MANIFEST} cannot be read by this build: {error}") from None
    if manifest.format != FORMAT:
        raise InvalidRequest(
            f"checkpoint {folder}: its format is {manifest.format}, this build reads {FORMAT}; load it with the build "
            f"that wrote it ({manifest.backend}, {manifest.written_at})"
        )
    for file in manifest.files:
        _check_size(folder, file)
    return manifest, digest


def check_contents(
    folder: Path, files: Iterable[checkpoint_pb2.CheckpointFile], report: Callable[[int], None] = lambda done: None
) -> None:
    """Reads the files, `report(files done)`. Raises InvalidRequest that names the first whose content is another."""
    for done, file in enumerate(files, start=1):
        _check_size(folder, file)
        try:
            found = _sha256(folder / file.name).hex()
        except OSError as error:
            raise InvalidRequest(f"checkpoint {folder}: {file.name} cannot be read: {error}") from None
        if found != file.sha256:
            raise InvalidRequest(
                f"checkpoint {folder}: {file.name} was changed or is damaged: its SHA-256 is {found[:16]}…, "
                f"{file.sha256[:16]}… was written; name another checkpoint"
            )
        report(done)


def delete(path: Path, role: str) -> bool:
    """Deletes a checkpoint of this role; False when it is not there.

    Raises InvalidRequest, and leaves it alone, when the folder does not say that it is one; OSError.
    """
    if not path.exists():
        return False
    try:
        found = read_manifest(path)[0].role
    except (NotFound, InvalidRequest) as error:
        raise InvalidRequest(f"not deleted: {error}") from None
    if found != role:
        raise InvalidRequest(f"not deleted: checkpoint {path}: it is of the {found}, not of the {role}")
    whole_folder.remove(path)
    return True


def _check_size(folder: Path, file: checkpoint_pb2.CheckpointFile) -> None:
    if Path(file.name).name != file.name:
        raise InvalidRequest(f"checkpoint {folder}: the manifest names {file.name!r}, which is no file of the folder")
    try:
        size = (folder / file.name).stat().st_size
    except OSError:
        raise InvalidRequest(f"checkpoint {folder}: {file.name} is missing; name another checkpoint") from None
    if size != file.bytes:
        raise InvalidRequest(
            f"checkpoint {folder}: {file.name} has {size} bytes, {file.bytes} were written; name another checkpoint"
        )


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
