"""A recipe: the whole configuration of a run in one YAML tree, checked before anything starts.

Imports nothing of the services but their `config` modules. Relative paths, in the file and on the command line, are
relative to the current directory; the resolved recipe that is kept with the run has absolute ones.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic

from services.cli.launch import nats_server
from services.cli.model_size import read_size
from services.common.config import Config, ModelConfig, dump, override, parse, read_yaml
from services.common.errors import ConfigError
from services.coordinator.config import CoordinatorConfig, SourceConfig, is_template
from services.learner.config import LearnerConfig
from services.reward.config import RewardConfig
from services.rollout.config import RolloutConfig

INSTALL_SINKS = ".venv/bin/uv pip install --python .venv/bin/python --no-deps -r deploy/constraints/sinks.lock"
PROBE_TOKENS = 32
"""What a learner sends with a publication (services/learner/publishing.py)."""
# The tail of a run id, "-" and six digits, is added to the name.
NAME_PATTERN = r"^[a-z0-9][a-z0-9-]{0,54}$"


class RunConfig(Config):
    """Which run this is and where it keeps its files."""

    name: str = pydantic.Field(pattern=NAME_PATTERN, description="its files are in <directory>/<name>")
    directory: Path = Path("runs")
    seed: int = pydantic.Field(0, ge=0, lt=2**63)
    restarts: int = pydantic.Field(
        3, ge=0, description="how often each process that dies is started again; 0: the run ends and is resumed by hand"
    )


class NatsConfig(Config):
    """The NATS server; by default one is started for the run."""

    url: str | None = pydantic.Field(default=None, description="nats://host:port of a server that runs already")
    monitor_url: str | None = pydantic.Field(default=None, description="its HTTP monitor, to assert its settings")


class Recipe(Config):
    """Everything about a run."""

    run: RunConfig
    model: ModelConfig
    coordinator: CoordinatorConfig
    rollout: RolloutConfig
    reward: RewardConfig
    learner: LearnerConfig
    nats: NatsConfig = NatsConfig()

    @property
    def run_dir(self) -> Path:
        return self.run.directory / self.run.name

    def data_files(self) -> list[Path]:
        """The data sets, the reward files: what the result depends on beside the model and this recipe."""
        files = [file for _, source in _sources(self) for file in source.locate().files]
        template = self.coordinator.data.template
        if template is not None and not is_template(template):
            files.append(Path(template))
        return [*files, *self.reward.files.values()]


def read_recipe(path: Path, assignments: list[str], directory: Path | None = None) -> Recipe:
    """The recipe with `key.path=value` applied and paths made absolute from `directory` (default: the current one).

    Raises ConfigError with the list of everything that does not parse; `problems` looks at what does.
    """
    tree = override(read_yaml(path), assignments)
    _resolve_paths(tree, directory or Path.cwd())
    return parse(Recipe, tree, str(path))


def save_recipe(recipe: Recipe, path: Path) -> None:
    path.write_text(dump(recipe))


def _resolve_paths(tree: dict[str, Any], directory: Path) -> None:
    run = tree.get("run")
    if isinstance(run, dict):
        run.setdefault("directory", "runs")
    scorers = _section(tree, "reward").get("scorers")
    places = [
        (_section(tree, "run"), "directory"),
        (_section(tree, "model"), "path"),
        (_section(tree, "reward", "reference"), "path"),
        *((scorer, "path") for scorer in _items(scorers)),
    ]
    for section, key in places:
        value = section.get(key)
        if isinstance(value, str):  # anything else is left for the model to refuse
            section[key] = str((directory / Path(value).expanduser()).resolve())
    data = _section(tree, "coordinator", "data")
    for part in (data, _section(tree, "coordinator", "evaluation")):
        for source in (part, *_items(part.get("sources"))):
            _resolve_source(source, directory)
    template = data.get("template")
    if isinstance(template, str) and not is_template(template):
        data["template"] = str((directory / Path(template).expanduser()).resolve())


def _resolve_source(source: dict[str, Any], directory: Path) -> None:
    path, kind = source.get("path"), str(source.get("kind", "auto"))
    absolute = SourceConfig.absolute
    if isinstance(path, str) and path:
        source["path"] = absolute(path, directory, kind)
    elif isinstance(path, list):  # what is no path is left for the model to refuse
        source["path"] = [absolute(one, directory, kind) if isinstance(one, str) and one else one for one in path]


def _items(node: Any) -> list[dict[str, Any]]:
    """The sections in a list; anything else is left for the model to refuse."""
    return [item for item in node if isinstance(item, dict)] if isinstance(node, list) else []


def _section(tree: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The section at these keys, or an empty one."""
    node: Any = tree
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def problems(recipe: Recipe, *, resuming: bool = False) -> list[str]:
    """What does not fit together, each with what to do; empty when the run may start. Reads small files only.

    A run that is taken up again has its folder already.
    """
    checks = [_missing_files, _data, _model_folders, _lengths, _gpus, _scorer, _reference, _sinks, _nats]
    if not resuming:
        checks.append(_run_folder)
    return [problem for check in checks for problem in check(recipe)]


def _missing_files(recipe: Recipe) -> list[str]:
    named = {f"reward.{key}": path for key, path in recipe.reward.files.items()}
    template = recipe.coordinator.data.template
    if template is not None and not is_template(template):
        named["coordinator.data.template"] = Path(template)
    found = [f"{key}: no such file: {path}" for key, path in named.items() if not path.is_file()]
    for key, path in recipe.reward.files.items():
        if path.is_file():
            try:
                compile(path.read_bytes(), str(path), "exec")
            except (SyntaxError, ValueError) as error:
                found.append(f"reward.{key}: not Python: {error}")
    return found


def _data(recipe: Recipe) -> list[str]:
    """Data sets whose files are not there, or of which it is not clear what they are."""
    found = []
    for key, source in _sources(recipe):
        try:
            source.locate()
        except ConfigError as error:
            found.append(f"{key}.path: {error}")
    return found


def _sources(recipe: Recipe) -> Iterator[tuple[str, SourceConfig]]:
    """Every data set and the key of its section."""
    data, evaluation = recipe.coordinator.data, recipe.coordinator.evaluation
    parts: list[tuple[str, bool, Sequence[SourceConfig]]] = [("data", bool(data.sources), data.all_sources)]
    if evaluation is not None:
        parts.append(("evaluation", bool(evaluation.sources), evaluation.all_sources(data)))
    for section, several, found in parts:
        for number, source in enumerate(found):
            yield f"coordinator.{section}" + (f".sources.{number}" if several else ""), source


def _model_folders(recipe: Recipe) -> list[str]:
    """That of the run, and that of a reference model of its own."""
    folder = Path(recipe.model.path)
    found = _no_model("model.path", folder)
    reference = recipe.reward.reference
    if reference is not None and reference.path is not None:
        found += _no_model("reward.reference.path", Path(reference.path))
    config = _read_config(folder)
    limit = config.get("max_position_embeddings")
    if isinstance(limit, int) and recipe.rollout.max_sequence_tokens > limit:
        found.append(
            f"rollout.max_sequence_tokens: {recipe.rollout.max_sequence_tokens} is more than the model's "
            f"max_position_embeddings, {limit}; at most {limit}"
        )
    return [*found, *_heads(config, recipe.rollout.tensor_parallel)]


def _no_model(key: str, folder: Path) -> list[str]:
    """What a Hugging Face folder lacks, and which of its weights are cut or no weights."""
    if not folder.is_dir():
        return [f"{key}: no such folder: {folder}"]
    needed = ("config.json", "tokenizer.json")
    found = [f"{key}: {folder} has no {name}" for name in needed if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        return [*found, f"{key}: {folder} has no *.safetensors"]
    try:
        read_size(folder, None)
    except ConfigError as error:
        found.append(f"{key}: {str(error).removeprefix('model.path: ')}")
    return found


def _read_config(folder: Path) -> dict[str, Any]:
    """config.json; empty where it cannot be read, which others say."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _heads(config: dict[str, Any], width: int) -> list[str]:
    """Every GPU of an engine has the same number of attention heads, and whole key-value heads or copies of them."""
    heads = config.get("num_attention_heads")
    if width == 1 or not isinstance(heads, int) or heads < 1:
        return []
    key_heads = config.get("num_key_value_heads")
    key_heads = key_heads if isinstance(key_heads, int) and key_heads > 0 else heads

    def fits(number: int) -> bool:
        return heads % number == 0 and (key_heads % number == 0 or number % key_heads == 0)

    if fits(width):
        return []
    legal = [number for number in range(1, heads + 1) if fits(number)]
    near = [max(number for number in legal if number < width), *[number for number in legal if number > width][:1]]
    equation = f"num_attention_heads / tensor_parallel = {heads} / {width} = {heads / width:.4g}"
    if heads % width == 0:
        equation = f"num_key_value_heads / tensor_parallel = {key_heads} / {width} = {key_heads / width:.4g}"
    return [f"rollout.tensor_parallel: {equation}, which is not whole; nearest that fit: {' or '.join(map(str, near))}"]


def _lengths(recipe: Recipe) -> list[str]:
    """Prompt and answer must fit into a sequence of the engine, and so must the probe of a publication."""
    coordinator, room = recipe.coordinator, recipe.rollout.max_sequence_tokens
    if room <= PROBE_TOKENS:
        return [
            f"rollout.max_sequence_tokens: {room} has no room for the probe of {PROBE_TOKENS} tokens, by which "
            f"an engine is verified, and one more: at least {PROBE_TOKENS + 1}"
        ]
    prompt = coordinator.data.max_prompt_tokens
    answers = {"coordinator.sampling.max_tokens": coordinator.sampling.max_tokens}
    if coordinator.evaluation is not None:
        answers["coordinator.evaluation.max_tokens"] = coordinator.evaluation.max_tokens
    found = []
    for key, answer in answers.items():
        if prompt + answer > room:
            ways = [f"rollout.max_sequence_tokens={prompt + answer}"]
            if room > prompt:
                ways.append(f"{key}={room - prompt}")
            if room > answer:
                ways.append(f"coordinator.data.max_prompt_tokens={room - answer}")
            found.append(
                f"{key}: coordinator.data.max_prompt_tokens + {key} = {prompt} + {answer} = {prompt + answer} > "
                f"rollout.max_sequence_tokens = {room}; nearest that fit: {' or '.join(ways)}"
            )
    return found


def _gpus(recipe: Recipe) -> list[str]:
    """Enough GPUs for everybody, and nobody's twice: sharing needs grants, which the `sync` schedule does not take."""
    engines = recipe.coordinator.rollout_workers
    wanted = {
        "learner": (recipe.learner.gpus, recipe.learner.ranks, f"ranks = {recipe.learner.ranks}"),
        "rollout": (
            recipe.rollout.gpus,
            engines * recipe.rollout.tensor_parallel,
            f"{engines} engine(s) x tensor_parallel = {engines} x {recipe.rollout.tensor_parallel}",
        ),
    }
    found = []
    taken: dict[int, str] = {}
    for section, (gpus, count, equation) in wanted.items():
        if gpus is None:
            continue
        if len(gpus) != count:
            found.append(f"{section}.gpus: {list(gpus)} are {len(gpus)}, {equation} take {count}")
        for gpu in gpus:
            if gpu in taken:
                found.append(f"{section}.gpus: {gpu} is named in {taken[gpu]}.gpus already; give each its own")
            taken[gpu] = section
    return found


def _scorer(recipe: Recipe) -> list[str]:
    name, separator, version = recipe.coordinator.scorer.partition("@")
    for scorer in recipe.reward.scorers:
        # A version that is not given is the file's digest, which the reward service knows.
        if scorer.name == name and (not separator or scorer.version in (None, version)):
            return []
    known = ", ".join(s.name if s.version is None else f"{s.name}@{s.version}" for s in recipe.reward.scorers)
    return [f"coordinator.scorer: no scorer {recipe.coordinator.scorer!r} in reward.scorers; there is {known}"]


def _reference(recipe: Recipe) -> list[str]:
    if recipe.coordinator.algorithm.kl is None or recipe.reward.reference is not None:
        return []
    return [
        "coordinator.algorithm.kl: there is no reference model; `reward.reference: {}` takes the one that the run "
        "begins with, reward.reference.path another"
    ]


def _sinks(recipe: Recipe) -> list[str]:
    """Those whose library is not installed."""
    return [
        f"coordinator.sinks: {sink.type} needs the library {sink.library}, which is not installed: {INSTALL_SINKS}"
        for sink in recipe.coordinator.sinks
        if not _is_installed(sink.library)
    ]


def _is_installed(library: str) -> bool:
    """Not so where there is only a folder of that name: W&B leaves one wherever it was used."""
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None


def _nats(recipe: Recipe) -> list[str]:
    if recipe.nats.url is not None:
        return []
    try:
        nats_server.find_binary()
    except ConfigError as error:
        return [f"nats.url: {error}"]
    return []


def _run_folder(recipe: Recipe) -> list[str]:
    if not recipe.run_dir.exists():
        return []
    return [f"run.name: {recipe.run_dir} exists already; name this run otherwise: run.name={next_name(recipe.run)}"]


def next_name(run: RunConfig) -> str:
    """The name with the next number at its end that no folder has: demo, demo-2, demo-3."""
    stem, separator, number = run.name.rpartition("-")
    if not separator or not number.isdigit():
        stem, number = run.name, "1"
    following = int(number) + 1
    while (run.directory / f"{stem}-{following}").exists():
        following += 1
    return f"{stem}-{following}"
