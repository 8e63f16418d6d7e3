"""`antiphon export`: the Hugging Face folder of a checkpoint, or of the newest policy of a run. Needs no service.

The learner's own module reads the checkpoint, as a process: this one loads no heavy library.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from services.cli.recipe import Recipe, read_recipe
from services.cli.subject import Subject, find_subject, weights_of_run
from services.cli.told import NoModel, said_by_process
from services.common.errors import AntiphonError, ConfigError, InvalidRequest, NotFound, Unavailable

MODULE = "services.learner.checkpoint_export"
TRIES = 3

Report = Callable[[str, int, int], None]
"""report(phase, done, of)"""


@dataclass(frozen=True)
class Exported:
    """Example: version 20 in /w/runs/first/export/policy-20, out of /w/runs/first/checkpoints/step-20."""

    path: str
    version: int
    source: str
    made: bool
    """False: it was there already."""


def export(
    named: Path, to: Path | None, *, step: int | None = None, model: Path | None = None, report: Report
) -> Exported:
    """Raises ConfigError for what cannot be exported, and what the learner's module says."""
    subject = find_subject(named)
    if step is not None and subject.kind != "run":
        raise ConfigError(f"--step: it is for a run, {subject.path} is a {subject.kind}")
    target = _target(to)
    for attempt in range(TRIES):
        try:
            return _export(subject, target, step=step, model=model, report=report)
        except (NotFound, InvalidRequest):
            # A run that is alive deletes what is no longer among the newest, even while it is read.
            if subject.kind != "run" or attempt == TRIES - 1:
                raise
    raise AssertionError("unreachable")


def _export(subject: Subject, target: Path | None, *, step: int | None, model: Path | None, report: Report) -> Exported:
    if subject.kind == "run":
        weights = weights_of_run(subject.path, step)
        source, exported, version = weights.path, weights.exported, weights.version
    else:
        source, exported, version = subject.path, subject.kind == "model", version_of(subject)
    if exported:
        if target is None:
            return Exported(str(source), version, str(source), made=False)
        _copy(source, target)
        return Exported(str(target), version, str(source), made=True)
    if target is None:
        if subject.run_dir is None:
            raise ConfigError(f"--to: {source} is in no run's folder: say where to write the model")
        target = subject.run_dir / "export" / f"policy-{version}"
        if (target / "config.json").is_file():
            return Exported(str(target), version, str(source), made=False)
        target.parent.mkdir(parents=True, exist_ok=True)
    convert(source, target, subject, model=model, report=report)
    return Exported(str(target), version, str(source), made=True)


def as_json(exported: Exported) -> str:
    return json.dumps(asdict(exported), ensure_ascii=False)


def as_text(exported: Exported) -> str:
    what = "exported to" if exported.made else "is there already, in"
    return f"policy {exported.version} {what} {exported.path}"


def convert(checkpoint: Path, target: Path, subject: Subject, *, model: Path | None, report: Report) -> None:
    """Writes the folder `target`, with the recipe's own chat template where it has one. Raises what went wrong."""
    recipe = _recipe(subject)
    source = model.expanduser().resolve() if model is not None else None
    if source is None:
        if recipe is None:
            raise ConfigError(
                f"--model: {checkpoint} is in no run's folder: name the model that its training began with"
            )
        source = Path(recipe.model.path)
    if not (source / "config.json").is_file():
        raise NoModel(f"{source}: the model that training began with has gone, and with it the tokenizer; name a copy "
                      "of it by --model")  # fmt: skip
    template = recipe.coordinator.data.own_template() if recipe is not None else None
    with (
        tempfile.TemporaryDirectory(prefix="antiphon-export-") as folder,
        _held(checkpoint, subject) as held,
    ):
        command = [sys.executable, "-m", MODULE, "--checkpoint", str(held), "--model", str(source)]
        command += ["--to", str(target)]
        if template:
            file = Path(folder) / "template.jinja"
            file.write_text(template, encoding="utf-8")
            command += ["--chat-template-file", str(file)]
        try:
            _follow(command, Path(folder) / "said", report)
        except AntiphonError as error:
            raise type(error)(str(error).replace(str(held), str(checkpoint))) from None


def _follow(command: list[str], errors: Path, report: Report) -> None:
    with (
        errors.open("w+") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, stdin=subprocess.DEVNULL, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                told = json.loads(line)
                if "phase" in told:
                    report(told["phase"], told["done"], told["of"])
        except BaseException:  # Ctrl-C, too: the folder aside is removed by the next export into its parent
            process.kill()
            raise
        if process.wait() != 0:
            said.seek(0)
            raise said_by_process(said.read())


@contextlib.contextmanager
def _held(checkpoint: Path, subject: Subject) -> Iterator[Path]:
    """The checkpoint under further names: a run that is alive may delete its own while they are read.

    Where the disk knows no hard links, the checkpoint itself. Raises NotFound when it goes this very moment.
    """
    if subject.run_dir is None:
        yield checkpoint
        return
    aside = subject.run_dir / f".export-{uuid.uuid4().hex[:8]}"
    try:
        try:
            aside.mkdir()
            for file in list(checkpoint.iterdir()):
                os.link(file, aside / file.name)
        except FileNotFoundError:
            raise NotFound(f"checkpoint {checkpoint}: the run has just deleted it; name another one") from None
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
        yield aside if aside.is_dir() else checkpoint
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _recipe(subject: Subject) -> Recipe | None:
    return None if subject.recipe_path is None else read_recipe(subject.recipe_path, [])


def version_of(subject: Subject) -> int:
    """Of a checkpoint or an exported policy, as it says or is called; 0 for a model that is of no run."""
    if subject.kind == "checkpoint":
        try:
            return int(json.loads((subject.path / "manifest.json").read_text())["policy"].get("version", 0))
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{subject.path / 'manifest.json'}: cannot be read: {error!r}; name another one"
            ) from None
    digits = subject.path.name.rpartition("-")[2]
    return int(digits) if subject.run_dir is not None and digits.isdigit() else 0


def _target(to: Path | None) -> Path | None:
    if to is None:
        return None
    to = to.expanduser().absolute()
    if os.path.lexists(to):
        raise ConfigError(f"--to: {to} exists, and nothing is ever replaced; name another path")
    if not to.parent.is_dir():
        raise ConfigError(f"--to: there is no folder {to.parent}; make it first")
    return to


def _copy(source: Path, target: Path) -> None:
    """Whole or not at all."""
    aside = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        shutil.copytree(source, aside)
        aside.rename(target)
    except OSError as error:
        raise Unavailable(f"--to {target}: {error}; nothing was left there") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
