"""A Hugging Face folder of the current weights: written aside, synced, checked, and only then given its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from services.learner.whole_folder import WholeFolder

SHARD_BYTES = 4 << 30
# What is in a model folder and is not copied: weights in any format, and the text that describes the original.
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json", "README.md")

Tensors = Iterator[tuple[str, torch.Tensor]]


def write_folder(
    path: Path,
    *,
    source: Path,
    tensors: Tensors,
    shapes: dict[str, tuple[int, ...]],
    dtype_name: str,
    report: Callable[[int], None],
    chat_template: str = "",
) -> None:
    """Makes the folder `path` from whole tensors by Hugging Face name, in the model's dtype, aliases left out.

    `shapes`: what must be in it at the end, name → shape. Weights come first, then config.json with the dtype set, then
    every other file of `source` as it is, byte for byte: tokenizer, chat template, generation defaults. Nothing here
    reads those, so a mistake in one of them cannot lose the weights. `report(done)` hears of each tensor.
    `chat_template`, where it is not empty, stands in place of the source's: the policy was trained on what it renders.
    Raises InvalidRequest when the path exists, OSError when it cannot be written; then nothing is left at `path`.
    """
    folder = WholeFolder("export to", path)
    aside = folder.aside
    try:
        _write_weights(aside, tensors, report)
        _verify(aside, shapes)
        _write_config(aside, source, dtype_name)
        for file in sorted(source.iterdir()):
            if file.is_file() and file.name != "config.json" and not file.name.endswith(NOT_COPIED):
                shutil.copyfile(file, aside / file.name)
        if chat_template:
            _write_template(aside, chat_template)
        folder.publish()
    except BaseException:
        folder.discard()
        raise


def _write_weights(folder: Path, tensors: Tensors, report: Callable[[int], None]) -> None:
    """One file, or numbered shards with an index when they are larger than SHARD_BYTES."""
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        if shard:
            try:
                save_file(shard, folder / f"{len(shards)}.part", metadata={"format": "pt"})
            except SafetensorError as error:  # what it makes of a full disk
                raise OSError(str(error)) from None
            shards.append(list(shard))
            shard.clear()

    for done, (name, tensor) in enumerate(tensors, start=1):
        tensor_bytes = tensor.numel() * tensor.element_size()
        if shard and size + tensor_bytes > SHARD_BYTES:
            flush()
            size = 0
        shard[name] = tensor
        size += tensor_bytes
        total += tensor_bytes
        report(done)
    flush()
    if len(shards) == 1:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        where.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _verify(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Reads back what was written. A tensor that is missing, or of another shape, is a bug: RuntimeError."""
    found: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                found[name] = tuple(opened.get_slice(name).get_shape())
    wrong = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
    if wrong:
        detail = "; ".join(f"{name}: expected {shapes.get(name)}, written {found.get(name)}" for name in wrong[:10])
        raise RuntimeError(f"export: {len(wrong)} tensors are not as the model has them: {detail}")


def _write_config(folder: Path, source: Path, dtype_name: str) -> None:
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    # transformers 5 writes "dtype", older ones "torch_dtype"; both are read.
    for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
        config[key] = dtype_name
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_template(folder: Path, chat_template: str) -> None:
    """chat_template.jinja, which has the last word wherever it is read; and no other one beside it."""
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.pop("chat_template", None) is not None:
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
