"""`antiphon plan`: what a run would be, before anything starts. Needs no GPU and no weights, loads no heavy library.

Sizes with their equations, memory of each process, files, ports. Time only by a rate that was measured: nothing here
knows how fast a machine is.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.cli import plan_memory
from services.cli.model_size import FAMILIES, ModelSize, Shape, read_shape, read_size
from services.cli.plan_memory import Process
from services.cli.recipe import Recipe, problems, read_recipe
from services.cli.view import duration
from services.common.config import ProcessConfig, ServiceConfig, dump
from services.common.errors import ConfigError
from services.coordinator.config import CoordinatorConfig
from services.rollout.config import chosen_engine

PREVIEWED_ROWS = 3
PREVIEW_SECONDS = 120.0
NOT_YET = ("run.name: ",)
"""Problems that a plan only mentions, by their beginnings: the folder of an earlier run."""
WEIGHTS_LACK = "has no *.safetensors"
"""How the problem ends that a plan only mentions: it needs no weights."""


@dataclass(frozen=True)
class Size:
    """One derived number. Example: "trajectories per Step", 32, "prompts_per_step x samples_per_prompt = 8 x 4"."""

    name: str
    value: int
    equation: str


@dataclass(frozen=True)
class Plan:
    """All that is said of a run."""

    run_dir: Path
    sizes: list[Size]
    model: str
    memory: list[Process]
    files: dict[str, str]
    network: list[str]
    notes: list[str]
    seconds: float | None
    """By the measured seconds per Step that were given."""
    preview: list[dict[str, Any]]


def plan(
    recipe_path: Path, assignments: list[str], *, step_seconds: float | None = None, preview: bool = False
) -> Plan:
    """Raises ConfigError with the problems that `antiphon train` would name, all of them."""
    if step_seconds is not None and not math.isfinite(step_seconds):
        raise ConfigError(f"--step-seconds: expected the seconds that a Step took, got {step_seconds}")
    recipe = read_recipe(recipe_path, assignments)
    found = problems(recipe)
    notes = [line for line in found if line.startswith(NOT_YET) or line.endswith(WEIGHTS_LACK)]
    wrong = [line for line in found if line not in notes]
    shape: Shape | None = None
    size: ModelSize | None = None
    reference: ModelSize | None = None
    if not any(line.startswith(("model.path: ", "reward.reference.path: ")) for line in wrong):
        try:
            shape, size = _measured(Path(recipe.model.path))
            folder = plan_memory.model_folder_of_reference(recipe)
            reference = None if folder is None else _measured(folder)[1]
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join([f"{recipe_path}: {len(wrong)} problem(s)", *(f"  {line}" for line in wrong)]))
    return Plan(
        run_dir=recipe.run_dir,
        sizes=_sizes(recipe),
        model=_model(recipe, size, shape),
        memory=[] if size is None else plan_memory.processes(recipe, size, shape, reference, _engine(recipe)),
        files=_files(recipe),
        network=_network(recipe),
        notes=[*notes, *_notes(recipe, size, shape, reference)],
        seconds=None if step_seconds is None else step_seconds * recipe.coordinator.steps,
        preview=_preview(recipe) if preview else [],
    )


def as_json(plan: Plan) -> str:
    """One object; memory in bytes."""
    tree = asdict(plan)
    for process, entry in zip(plan.memory, tree["memory"], strict=True):
        entry["bytes"] = process.bytes
    tree["memory_by_place"] = plan_memory.by_place(plan.memory)
    return json.dumps(tree, indent=2, default=str, ensure_ascii=False)


def as_text(plan: Plan) -> str:
    lines = [f"run in {plan.run_dir}", f"model {plan.model}", "", "sizes"]
    lines += [f"  {size.name}: {size.value:,}  ({size.equation})" for size in plan.sizes]
    if plan.memory:
        lines += ["", "memory, GiB (activations, and what processes take by themselves, are bounds)"]
        for process in plan.memory:
            lines.append(f"  {process.name} on {', '.join(process.places)}: {_gib(process.bytes)}")
            lines += [f"    {_gib(part.bytes):>8}  {part.name}  ({part.equation})" for part in process.parts]
        totals = plan_memory.by_place(plan.memory).items()
        lines.append("  in all: " + ", ".join(f"{place} {_gib(amount)}" for place, amount in totals))
    lines += ["", "files", *(f"  {what}: {path}" for what, path in plan.files.items())]
    lines += ["", "network", *(f"  {line}" for line in plan.network)]
    if plan.seconds is not None:
        lines += [
            "",
            f"time: {duration(plan.seconds)} for the Steps, by the rate given; start, evaluation, export apart",
        ]
    if plan.notes:
        lines += ["", "to know", *(f"  {line}" for line in plan.notes)]
    if plan.preview:
        lines += ["", "first prompts, as the model sees them"]
        for row in plan.preview:
            lines.append(f"  {row['dataset']}, {row['place']}: {row['problem'] or _seen(row)}")
    return "\n".join(lines)


def _seen(row: dict[str, Any]) -> str:
    return f"{row['tokens']} tokens {json.dumps(row['text'], ensure_ascii=False)}, reference {row['reference']!r}"


def _gib(amount: int) -> str:
    return f"{amount / plan_memory.GIB:.2f}"


def _engine(recipe: Recipe) -> str:
    """The engine that is counted: where the recipe leaves it open and this machine has none, vLLM."""
    try:
        return chosen_engine(recipe.rollout)
    except ConfigError:
        return "vllm"


def _measured(folder: Path) -> tuple[Shape | None, ModelSize | None]:
    shape = read_shape(folder)
    return shape, read_size(folder, shape)


def _model(recipe: Recipe, size: ModelSize | None, shape: Shape | None) -> str:
    count = "of unknown size" if size is None else f"of {size.parameters:,} parameters, by {size.counted_by}"
    family = "" if shape is None else f" ({shape.family}, {shape.layers} layers, hidden size {shape.hidden})"
    return f"{recipe.model.path}{family} {count}; {recipe.model.dtype}"


def _filter_sizes(run: CoordinatorConfig) -> list[Size]:
    if run.filter is None:
        return []
    most = run.most_prompts_per_step
    equation = f"prompts_per_step + filter.most_extra_prompts = {run.prompts_per_step} + {most - run.prompts_per_step}"
    return [Size("prompts sampled per Step, at most", most, equation)]


def _sizes(recipe: Recipe) -> list[Size]:
    run, algorithm = recipe.coordinator, recipe.coordinator.algorithm
    trajectories, row = run.trajectories_per_step, plan_memory.longest_row(recipe)
    updates = algorithm.epochs * algorithm.mini_batches
    sizes = [
        Size(
            "trajectories per Step",
            trajectories,
            f"prompts_per_step x samples_per_prompt = {run.prompts_per_step} x {run.samples_per_prompt}",
        ),
        *_filter_sizes(run),
        Size("trajectories of the run", run.steps * trajectories, f"steps x that = {run.steps} x {trajectories}"),
        Size(
            "Updates planned",
            run.planned_updates,
            f"steps x epochs x mini_batches = {run.steps} x {algorithm.epochs} x {algorithm.mini_batches}",
        ),
        Size(
            "trajectories per Update, at most",
            -(-trajectories // algorithm.mini_batches),
            f"trajectories / mini_batches = {trajectories} / {algorithm.mini_batches}, rounded up",
        ),
        Size(
            "tokens of a row, at most",
            row,
            f"max_prompt_tokens + max_tokens = {run.data.max_prompt_tokens} + {run.sampling.max_tokens}",
        ),
        Size(
            "tokens per Step, at most", trajectories * row, f"trajectories x tokens of a row = {trajectories} x {row}"
        ),
        Size(
            "tokens trained per Step, at most",
            trajectories * run.sampling.max_tokens * updates // algorithm.mini_batches,
            f"trajectories x max_tokens x epochs = {trajectories} x {run.sampling.max_tokens} x {algorithm.epochs}",
        ),
        Size(
            "tokens of a micro-batch of a rank, at most",
            plan_memory.tokens_at_a_time(recipe),
            f"the larger of one row and min(micro_batch_tokens = {recipe.learner.micro_batch_tokens}, a Step's)",
        ),
    ]
    evaluation = run.evaluation
    if evaluation is not None:
        between = (run.steps - 1) // evaluation.every if evaluation.every else 0
        sizes.append(
            Size(
                "evaluations",
                evaluation.at_start + between + evaluation.at_end,
                f"at start {int(evaluation.at_start)} + every {evaluation.every} Steps {between} + at end "
                f"{int(evaluation.at_end)}",
            )
        )
    return sizes


def _files(recipe: Recipe) -> dict[str, str]:
    folder, run = recipe.run_dir, recipe.coordinator
    files = {
        "configuration": f"{folder / 'recipe.yaml'}, manifest.json",
        "numbers of each Step": str(folder / "metrics.jsonl"),
        "events, memory": f"{folder / 'events.jsonl'}, memory.jsonl",
        "ledger": str(folder / "run.db"),
        "logs": str(folder / "logs"),
        "checkpoints": str(folder / "checkpoints"),
    }
    if run.evaluation is not None:
        files["answers to held-out prompts"] = str(folder / "evaluations")
    if run.export:
        files["last policy"] = str(folder / "export" / f"policy-{run.steps}")
    return files


def _network(recipe: Recipe) -> list[str]:
    where = recipe.nats.url or "started for the run, on two free ports of 127.0.0.1"
    run = recipe.coordinator
    services = 2 + run.rollout_workers + run.reward_workers
    return [
        f"NATS: {where}",
        f"gRPC: {services} services, each on a free port of 127.0.0.1, which it announces on NATS",
        f"weights: by {run.publication.transport} (publication.transport)",
    ]


def _notes(recipe: Recipe, size: ModelSize | None, shape: Shape | None, reference: ModelSize | None) -> list[str]:
    notes = []
    counted = None if shape is None else shape.parameters()
    if size is None:
        kind = "of which a width is not said" if shape is None else f"of model_type {shape.family!r}"
        notes.append(
            f"memory is not known: the model has no weights, and its config.json is one {kind}; fetch the weights "
            f"(without them only {', '.join(FAMILIES)} are counted)"
        )
    elif shape is None:
        notes.append("activations are not counted: config.json does not say the widths of a decoder")
    elif counted is not None and counted != size.parameters:
        notes.append(f"the weights hold {size.parameters:,} parameters, config.json makes {counted:,}: is it theirs?")
    if recipe.reward.reference is not None and reference is None:
        notes.append(
            "memory of the reference model is not known: it has no weights, and its config.json is not counted"
        )
    if size is not None and recipe.learner.gpus is None:
        notes.append("counted as on a host without GPUs for the learner; learner.gpus names GPUs")
    if size is not None and recipe.rollout.gpus is None:
        notes.append("counted as on a host without GPUs for the engines; rollout.gpus names GPUs")
    try:
        notes.append(f"engine here: {chosen_engine(recipe.rollout)}")
    except ConfigError as error:
        notes.append(f"not on this machine: {error}")
    optimizer = recipe.learner.optimizer
    planned = recipe.coordinator.planned_updates
    if optimizer.total_updates is not None and optimizer.total_updates != planned:
        notes.append(
            f"learner.optimizer.total_updates is {optimizer.total_updates}, the run has {planned} Updates: the "
            "schedule ends elsewhere"
        )
    return notes


def _preview(recipe: Recipe) -> list[dict[str, Any]]:
    """The first rows of each data set, by a process that may load the tokenizer. Raises ConfigError with its words."""
    service = ServiceConfig(run_id="preview", worker_id="coordinator-0", run_dir=recipe.run_dir, nats_url="")
    process: ProcessConfig[CoordinatorConfig] = ProcessConfig(
        service=service, model=recipe.model, settings=recipe.coordinator
    )
    with tempfile.TemporaryDirectory(prefix="antiphon-plan-") as folder:
        config = Path(folder) / "coordinator.yaml"
        config.write_text(dump(process))
        command = [sys.executable, "-m", "services.coordinator.data.preview"]
        command += ["--config", str(config), "--count", str(PREVIEWED_ROWS)]
        return _rows(command)


def _rows(command: Sequence[str]) -> list[dict[str, Any]]:
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PREVIEW_SECONDS, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"coordinator.data: no preview within {PREVIEW_SECONDS:.0f} s; plan without --preview"
        ) from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"coordinator.data: {said[-1]}")
    return [json.loads(line) for line in done.stdout.splitlines()]
