"""The `antiphon` command. Help and reading a recipe load no heavy library; commands import what they need."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(f"antiphon {importlib.metadata.version('antiphon')}")
        raise typer.Exit


@app.callback()
def antiphon(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", callback=_print_version)] = False,
) -> None:
    """Reinforcement learning of language models as four services over gRPC."""


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file of the run.")],
    assignments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Changes to the recipe, e.g. run.name=second run.seed=1."),
    ] = None,
) -> None:
    """Train a policy: start the services, follow the run, export the result.

    Relative paths are relative to the current directory. Ctrl-C stops after the work under way, exports the last policy
    and says how to go on; a second Ctrl-C kills at once.

    Exit code: 0 finished, 1 failed, 2 the recipe is wrong (nothing was started), 3 stopped by somebody else,
    130 Ctrl-C, 143 SIGTERM.
    """
    from services.cli import train as command
    from services.common.errors import ConfigError

    try:
        code = command.train(recipe, assignments or [])
    except ConfigError as error:
        print(error, file=sys.stderr)
        code = command.CONFIG
    raise typer.Exit(code)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    assignments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Changes to its recipe, e.g. coordinator.steps=200."),
    ] = None,
) -> None:
    """Take up a run that was stopped or killed: load its newest checkpoint, replay what it trained since, go on.

    Model, data, sampling, sizes, algorithm and rewards stay as they were. Exit codes as of train.
    """
    from services.cli import resume as command
    from services.cli.train import CONFIG
    from services.common.errors import ConfigError

    try:
        code = command.resume(run_dir, assignments or [])
    except ConfigError as error:
        print(error, file=sys.stderr)
        code = CONFIG
    raise typer.Exit(code)


@app.command()
def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file of the run.")],
    assignments: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Changes to the recipe.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object; errors as JSON, too.")] = False,
    preview: Annotated[bool, typer.Option("--preview", help="The first prompts as the model sees them.")] = False,
    step_seconds: Annotated[
        float | None, typer.Option(help="Seconds that a Step was measured to take: then time is told.", min=0.0)
    ] = None,
) -> None:
    """Check a recipe and show what its run would be: sizes, memory, files, ports. Starts nothing.

    Needs no GPU and no weights. Exit code: 0 well, 2 the recipe is wrong, with the problems that train would name.
    """
    from services.cli import plan as command
    from services.cli.told import tell
    from services.common.errors import ConfigError

    try:
        found = command.plan(recipe, assignments or [], step_seconds=step_seconds, preview=preview)
    except ConfigError as error:
        tell(error, as_json=json)
        raise typer.Exit(2) from None
    print(command.as_json(found) if json else command.as_text(found))


@app.command()
def doctor(
    directory: Annotated[Path, typer.Option(help="Where runs would keep their files.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check whether this machine has what a run needs, and say what to do where it has not.

    Exit code: 0 nothing is in the way, 1 something is.
    """
    from services.cli import doctor as command

    checks = command.examine(directory.absolute())
    print(command.as_json(checks) if json else command.as_text(checks))
    raise typer.Exit(1 if any(check.verdict == "fail" for check in checks) else 0)


@app.command()
def watch(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    json: Annotated[bool, typer.Option("--json", help="Events as JSON lines; errors as JSON, too.")] = False,
) -> None:
    """Follow a run that another terminal runs, on this machine. Ctrl-C ends the watching, not the run.

    Exit code: 0 the run finished, 1 it failed or was killed, 2 the folder is none of a run, 3 it was stopped,
    130 Ctrl-C.
    """
    from services.cli import follow as command
    from services.cli.told import tell
    from services.common.errors import ConfigError

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = command.follow(run_dir, as_json=json)
    except ConfigError as error:
        tell(error, as_json=json)
        code = 2
    raise typer.Exit(code)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the run has its own handler there is nothing to stop
    app()


if __name__ == "__main__":
    main()
