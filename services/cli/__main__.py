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


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the run has its own handler there is nothing to stop
    app()


if __name__ == "__main__":
    main()
