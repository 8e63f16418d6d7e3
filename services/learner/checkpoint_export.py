"""A Hugging Face folder out of a checkpoint, without ranks, GPUs or DeepSpeed; one tensor at a time.

A process: `python -m services.learner.checkpoint_export --checkpoint DIR --model DIR --to DIR` prints JSON lines,
progress {"phase", "done", "of"} and then what was written {"path", "version", "digest", "dtype", "role"}. The model is
the folder that training began with: of it are the configuration and the tokenizer.

The weights are the masters in the model's dtype, as the trainer makes them, and their digest is that of the policy that
was saved, or nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from antiphon.learner.v1 import checkpoint_pb2

from services.common.errors import AntiphonError, Conflict, Unavailable
from services.common.weights.digest import RunningDigest
from services.learner import checkpoint
from services.learner.checkpoint import MASTER
from services.learner.checkpoint_slices import SavedSlices
from services.learner.exporting import write_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Report = Callable[[str, int, int], None]
"""report(phase, done, of)"""


def export(
    folder: Path, *, model: Path, to: Path, chat_template: str, report: Report
) -> checkpoint_pb2.CheckpointManifest:
    """Writes the folder `to`; answers what the checkpoint says of itself.

    Raises NotFound or InvalidRequest when the checkpoint is not whole or the path is taken, Conflict when its weights
    are not those of the policy that it names, Unavailable when the disk refuses; then there is nothing at `to`.
    """
    manifest, _ = checkpoint.read_manifest(folder)
    files = manifest.files
    checkpoint.check_contents(folder, files, lambda done: report("verify", done, len(files)))
    shapes = {tensor.name: tuple(tensor.shape) for tensor in manifest.tensors}
    dtype = DTYPES[manifest.dtype]
    digest = RunningDigest(torch.device("cpu"))
    with SavedSlices(folder, manifest) as slices:
        slices.check(shapes, [MASTER])

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, shape in shapes.items():
                flat = slices.master(name, torch.Size(shape).numel()).to(dtype)
                digest.add(name, flat, 0)
                yield name, flat.view(shape)
            if digest.value() != manifest.policy.digest:  # before the folder has its name
                raise Conflict(
                    f"checkpoint {folder}: its weights have the digest {digest.value():#x}, version "
                    f"{manifest.policy.version} has {manifest.policy.digest:#x}; nothing was written"
                )

        try:
            write_folder(
                to,
                source=model,
                tensors=tensors(),
                shapes=shapes,
                dtype_name=manifest.dtype,
                report=lambda done: report("export", done, len(shapes)),
                chat_template=chat_template,
            )
        except OSError as error:
            raise Unavailable(f"export to {to}: {error}; nothing was left there") from None
    return manifest


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="services.learner.checkpoint_export", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="the folder that training began with")
    parser.add_argument("--to", type=Path, required=True, help="absolute path that does not exist yet")
    parser.add_argument("--chat-template-file", type=Path, help="a chat template in place of the model's")
    given = parser.parse_args(arguments)
    try:
        template = given.chat_template_file.read_text(encoding="utf-8") if given.chat_template_file else ""
        made = export(given.checkpoint, model=given.model, to=given.to, chat_template=template, report=_tell)
    except AntiphonError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return 2
    what = {"path": str(given.to), "version": made.policy.version, "digest": f"{made.policy.digest:016x}"}
    sys.stdout.write(json.dumps({**what, "dtype": made.dtype, "role": made.role}) + "\n")
    return 0


def _tell(phase: str, done: int, of: int) -> None:
    sys.stdout.write(json.dumps({"phase": phase, "done": done, "of": of}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
