"""The `antiphon` command. Help and reading a recipe load no heavy library; commands import what they need."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

RECIPE = typer.Argument(metavar="RECIPE", help="YAML file of the run.")
CHANGES = typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Changes to the recipe, e.g. run.name=second run.seed=1.")
RUN = typer.Argument(metavar="RUN", help="Folder of the run.")
WEIGHTS = typer.Argument(metavar="MODEL", help="Folder of a model, of a checkpoint, or of a run: its newest policy.")
AS_JSON = typer.Option("--json", help="JSON in place of text; errors as JSON, too.")


def _end(work: Callable[[], int], *, json: bool) -> NoReturn:
    """Ends the command with the work's exit code, or that of its error, which is told."""
    from services.cli.told import tell
    from services.common.errors import AntiphonError

    try:
        code = work()
    except AntiphonError as error:
        code = tell(error, as_json=json)
    raise typer.Exit(code)


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
    recipe: Annotated[Path, RECIPE],
    assignments: Annotated[list[str] | None, CHANGES] = None,
    json: Annotated[
        bool, typer.Option("--json", help="The run's events as JSON lines on stdout, all else as JSON on stderr.")
    ] = False,
) -> None:
    """Train a policy: start the services, follow the run, export the result.

    Relative paths are relative to the current directory. Ctrl-C stops after the work under way, exports the last policy
    and says how to go on; a second Ctrl-C kills at once.

    Exit code: 0 finished, 1 failed, 2 the recipe is wrong (nothing was started), 3 stopped by somebody else,
    130 Ctrl-C, 143 SIGTERM.
    """
    from services.cli import train as command

    _end(lambda: command.train(recipe, assignments or [], as_json=json), json=json)


@app.command()
def resume(
    run_dir: Annotated[Path, RUN],
    assignments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Changes to its recipe, e.g. coordinator.steps=200."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As of train.")] = False,
) -> None:
    """Take up a run that was stopped or killed: load its newest checkpoint, replay what it trained since, go on.

    Model, data, sampling, sizes, algorithm and rewards stay as they were. Exit codes as of train.
    """
    from services.cli import resume as command

    _end(lambda: command.resume(run_dir, assignments or [], as_json=json), json=json)


@app.command()
def plan(
    recipe: Annotated[Path, RECIPE],
    assignments: Annotated[list[str] | None, CHANGES] = None,
    json: Annotated[bool, AS_JSON] = False,
    preview: Annotated[bool, typer.Option("--preview", help="The first prompts as the model sees them.")] = False,
    step_seconds: Annotated[
        float | None, typer.Option(help="Seconds that a Step was measured to take: then time is told.", min=0.0)
    ] = None,
) -> None:
    """Check a recipe and show what its run would be: sizes, memory, files, ports. Starts nothing.

    Needs no GPU and no weights. Exit code: 0 well, 2 the recipe is wrong, with the problems that train would name.
    """
    from services.cli import plan as command

    def work() -> int:
        found = command.plan(recipe, assignments or [], step_seconds=step_seconds, preview=preview)
        print(command.as_json(found) if json else command.as_text(found))
        return 0

    _end(work, json=json)


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
    run_dir: Annotated[Path, RUN],
    json: Annotated[bool, typer.Option("--json", help="Events as JSON lines; errors as JSON, too.")] = False,
) -> None:
    """Follow a run that another terminal runs, on this machine. Ctrl-C ends the watching, not the run.

    Exit code: 0 the run finished, 1 it failed or was killed, 2 the folder is none of a run, 3 it was stopped,
    130 Ctrl-C.
    """
    from services.cli import follow as command

    signal.signal(signal.SIGINT, signal.default_int_handler)
    _end(lambda: command.follow(run_dir, as_json=json), json=json)


@app.command()
def up(
    recipe: Annotated[Path, RECIPE],
    assignments: Annotated[list[str] | None, CHANGES] = None,
    json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Start NATS and the services of a recipe without a coordinator, and keep them up until Ctrl-C or `down`.

    They train nothing by themselves: any client of the contracts may call them where they say that they listen.

    Exit code: 1 a service ended or did not come up, 2 the recipe is wrong, 130 Ctrl-C, 143 `down` or SIGTERM.
    """
    from services.cli import up as command

    _end(lambda: command.up(recipe, assignments or [], as_json=json), json=json)


@app.command()
def down(run_dir: Annotated[Path, RUN], json: Annotated[bool, AS_JSON] = False) -> None:
    """End a run, or what `up` started, from another terminal of this machine; or what a killed command left behind.

    A run that is training stops as by Ctrl-C: a checkpoint, an export, a line to go on. Takes up to 50 s.

    Exit code: 0 nothing of it is alive any more, 1 something cannot be ended, 2 the folder is none of a run.
    """
    from services.cli import down as command

    def work() -> int:
        ended = command.down(run_dir, (lambda text: None) if json else print)
        print(command.as_json(ended) if json else command.as_text(ended))
        return 0

    _end(work, json=json)


@app.command()
def samples(
    run_dir: Annotated[Path, RUN],
    *,
    step: Annotated[int | None, typer.Option(help="Of this Step; without it the newest.", min=0)] = None,
    best: Annotated[int | None, typer.Option(help="So many of the highest scores.", min=1)] = None,
    worst: Annotated[int | None, typer.Option(help="So many of the lowest scores.", min=1)] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them; without it the first 10.")] = False,
    heldout: Annotated[bool, typer.Option("--heldout", help="Answers to held-out prompts.")] = False,
    json: Annotated[bool, typer.Option("--json", help="A JSON object for each; errors as JSON, too.")] = False,
) -> None:
    """Show what a run sampled and how it was scored, while it runs or afterwards. Changes nothing.

    The best and worst are those of the whole run, unless a Step is named. Exit code: 0, or 2 there are none.
    """
    import json as encoder

    from services.cli import samples as command

    def work() -> int:
        read = command.heldout if heldout else command.samples
        found = read(run_dir, step=step, best=best, worst=worst, everything=everything)
        lines = (encoder.dumps(sample, ensure_ascii=False) for sample in found)
        print("\n".join(lines) if json else command.as_text(found))
        return 0

    _end(work, json=json)


@app.command()
def export(
    source: Annotated[Path, WEIGHTS],
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder; without it RUN/export/policy-<version>.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Of a run: that of this Step, not the newest.", min=0)] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What training began with, for a checkpoint without its run.")
    ] = None,
    json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Write the Hugging Face folder of a checkpoint, or of the newest policy of a run. Starts no service.

    Exit code: 0 it is there, 1 it could not be written, 2 there is nothing to export.
    """
    from services.cli import export as command
    from services.cli.progress import reporter

    def work() -> int:
        with reporter(quiet=json) as report:
            found = command.export(source, to, step=step, model=model, report=report)
        print(command.as_json(found) if json else command.as_text(found))
        return 0

    _end(work, json=json)


@app.command()
def generate(
    source: Annotated[Path, WEIGHTS],
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="What to answer.")],
    *,
    n: Annotated[int, typer.Option("--n", help="Answers to each prompt.", min=1)] = 1,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0: greedy.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.", min=0)] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="Without it that of the run, or of the model.")
    ] = None,
    format: Annotated[
        Literal["chat", "text"] | None,
        typer.Option(
            help="chat: by the chat template; text: as it is. Without it as the run had it, or chat if it can."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="A JSON object for each answer; errors as JSON, too.")] = False,
) -> None:
    """Answer prompts by a model, through an engine that is started for it and taken down afterwards.

    Exit code: 0 all are answered, 1 failed, 2 nothing was started, 130 Ctrl-C.
    """
    from services.cli import errand
    from services.cli import generate as command

    def work() -> int:
        try:
            found = command.generate(
                source, prompts, samples=n, max_tokens=max_tokens, temperature=temperature, seed=seed, dtype=dtype,
                format=format, quiet=json,
            )  # fmt: skip
        except errand.Interrupted as ended:
            return ended.exit_code
        print(command.as_json(found) if json else command.as_text(found))
        return 0

    _end(work, json=json)


@app.command(name="eval")
def evaluate(
    source: Annotated[Path, WEIGHTS],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY.PATH=VALUE]...",
            help="Whose prompts, scorer and settings; without it those of the run.",
        ),
    ] = None,
    answers: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder for every answer with its score.")
    ] = None,
    json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Score a model on the held-out prompts of a recipe; prints the mean with its standard error.

    Services are started for it and taken down afterwards. Exit code: 0, 1 failed, 2 nothing was started, 130 Ctrl-C.
    """
    from services.cli import errand
    from services.cli import evaluate as command

    def work() -> int:
        try:
            found = command.evaluate(source, words or [], answers_to=answers, quiet=json)
        except errand.Interrupted as ended:
            return ended.exit_code
        print(command.as_json(found) if json else command.as_text(found))
        return 0

    _end(work, json=json)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the run has its own handler there is nothing to stop
    app()


if __name__ == "__main__":
    main()
