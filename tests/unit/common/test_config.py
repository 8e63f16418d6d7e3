from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.common.config import (
    Config,
    ProcessConfig,
    dump,
    load_process_config,
    override,
    parse,
    read_yaml,
)
from services.common.errors import ConfigError


class Adam(Config):
    type: Literal["adam"] = "adam"
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)


class Sgd(Config):
    type: Literal["sgd"] = "sgd"
    momentum: float = 0.0


class Scorer(Config):
    name: str
    timeout_seconds: float = 10.0


class Evaluation(Config):
    path: Path
    every: int = 0


class Settings(Config):
    steps: int = 1
    name: str = "x"
    optimizer: Annotated[Adam | Sgd, pydantic.Field(discriminator="type")] = Adam()
    either: Adam | Sgd = Adam()
    scorers: list[Scorer] = pydantic.Field(default_factory=list)
    more: list[Annotated[Adam | Sgd, pydantic.Field(discriminator="type")]] = pydantic.Field(default_factory=list)
    by_name: dict[str, Scorer] = pydantic.Field(default_factory=dict)
    evaluation: Evaluation | None = None
    maybe: float | None = None

    @pydantic.field_validator("steps")
    @classmethod
    def _positive(cls, value: int) -> int:
        if value < 1:
            raise ValueError("at least one step")
        return value


def problems(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(Settings, tree, "recipe.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({"step": 2}, "step: unknown key; did you mean 'steps'?"),
        ({"optimizer": {"learning_rate": 1}}, "optimizer: lacks the key 'type'"),
        (
            {"optimizer": {"type": "adam", "learning_rat": 1}},
            "optimizer.learning_rat: unknown key; did you mean 'learning_rate'?",
        ),
        (
            {"optimizer": {"type": "sgd", "momentun": 1}},
            "optimizer.momentun: unknown key; did you mean 'momentum'?",
        ),
        # The names of the other variant are no help.
        (
            {"optimizer": {"type": "sgd", "learning_rat": 1}},
            "optimizer.learning_rat: unknown key; known keys: momentum, type",
        ),
        (
            {"scorers": [{"name": "a"}, {"name": "b", "timeout": 3}]},
            "scorers.1.timeout: unknown key; did you mean 'timeout_seconds'?",
        ),
        (
            {"more": [{"type": "adam", "beta": 3}]},
            "more.0.beta: unknown key; did you mean 'betas'?",
        ),
        (
            {"by_name": {"name": {"name": "b", "timeout": 3}}},
            "by_name.name.timeout: unknown key; did you mean 'timeout_seconds'?",
        ),
        ({"evaluation": {"pth": "x", "path": "y"}}, "evaluation.pth: unknown key; did you mean 'path'?"),
        ({"evaluation": {}}, "evaluation.path: Field required"),
        ({"zzz": 1}, "zzz: unknown key; known keys: by_name, either, evaluation, maybe, more, name"),
        ({"steps": "many"}, "steps: Input should be a valid integer"),
        ({"steps": "many"}, "(got 'many')"),
        ({"steps": 0}, "at least one step (got 0)"),
        ({"optimizer": {"type": "adams"}}, "'adam', 'sgd'"),
        ({"maybe": float("nan")}, "maybe: Input should be a finite number"),
        ({"scorers": "x" * 500}, "xxx..."),
    ],
)
def test_a_problem_is_told_at_the_path_the_user_wrote(tree: dict[str, Any], line: str) -> None:
    text = problems(tree)
    assert text.startswith("recipe.yaml: 1 problem(s)\n")
    assert line in text
    assert all(len(part) < 250 for part in text.splitlines())


def test_a_union_without_a_discriminator_suggests_from_each_variant() -> None:
    text = problems({"either": {"momentun": 0.1, "type": "sgd"}})
    assert "either.momentun: unknown key; did you mean 'momentum'?" in text


def test_all_problems_are_told_at_once() -> None:
    text = problems({"step": 1, "steps": "x", "evaluation": {}})
    assert "3 problem(s)" in text and len(text.splitlines()) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-6", 1e-6),
        ("1E6", 1e6),
        ("5.", 5.0),
        (".5", 0.5),
        ("-1.5e+3", -1500.0),
        ("12", 12),
        ("-3", -3),
        ("007", 7),
        ("0x1F", 31),
        ("true", True),
        ("null", None),
        ("~", None),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2026-11-30", "2026-11-30"),
        ("e6", "e6"),
        ("1e", "1e"),
        ("-", "-"),
        (".", "."),
        ("'12'", "12"),
        ("[1, 2e-1]", [1, 0.2]),
    ],
)
def test_plain_words_mean_what_they_look_like(tmp_path: Path, text: str, expected: Any) -> None:
    if text != "-":
        path = tmp_path / "a.yaml"
        path.write_text(f"key: {text}\n")
        found = read_yaml(path)["key"]
        assert found == expected and type(found) is type(expected)
    found = override({}, [f"a.b={text}"])["a"]["b"] if text != "-" else expected
    assert found == expected and type(found) is type(expected)


def test_numbers_reach_their_fields() -> None:
    settings = parse(
        Settings, override({}, ["optimizer={type: adam, learning_rate: 1e-6}", "maybe=1e-6", "name=1e-6x"]), "x"
    )
    assert isinstance(settings.optimizer, Adam) and settings.optimizer.learning_rate == 1e-6
    assert settings.maybe == 1e-6 and settings.name == "1e-6x"


def test_overrides_apply_in_order_and_reach_into_lists() -> None:
    tree = {"scorers": [{"name": "a"}, {"name": "b"}], "steps": 1, "evaluation": None}
    result = override(
        tree,
        ["scorers.1.timeout_seconds=3", "scorers.0={name: c}", "steps=5", "steps=6", "evaluation.path=a=b", "maybe="],
    )
    assert result == {
        "scorers": [{"name": "c"}, {"name": "b", "timeout_seconds": 3}],
        "steps": 6,
        "evaluation": {"path": "a=b"},
        "maybe": None,
    }
    assert tree == {"scorers": [{"name": "a"}, {"name": "b"}], "steps": 1, "evaluation": None}, "a copy was changed"


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("steps", "expected key.path=value"),
        ("=3", "expected key.path=value"),
        ("a..b=3", "expected key.path=value"),
        ("steps.deep=3", "steps is a value, not a section"),
        ("scorers.2.name=x", "'2' is not an index of a list of 1"),
        ("scorers.first=x", "'first' is not an index of a list of 1"),
        ("steps=[1", "not YAML"),
    ],
)
def test_an_override_that_leads_nowhere_is_refused(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match="override") as caught:
        override({"steps": 1, "scorers": [{"name": "a"}]}, [assignment])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("- 1\n", "expected a mapping at the top, got list"),
        ("", "expected a mapping at the top, got NoneType"),
        ("steps: 1\nname: x\nsteps: 2\n", "key 'steps' given twice"),
        ("a: {b: 1, b: 2}\n", "key 'b' given twice"),
        ("a: !!python/object/apply:os.getcwd []\n", "not YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        read_yaml(tmp_path / "none.yaml")


WORDS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["no", "true", "1e-6", "1:30", "~", "null", "007", "0x1F", "-", ".5", ".nan", "on", "é", "a: b"]),
)


@settings(max_examples=60, deadline=None)
@example(name="a\u2028b", rate=0.0, names=["\x85", "a\u2029"], maybe=None)
@given(
    name=WORDS,
    rate=st.floats(allow_nan=False, allow_infinity=False),
    names=st.lists(WORDS, max_size=3),
    maybe=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
def test_what_is_dumped_reads_back_to_the_same(name: str, rate: float, names: list[str], maybe: float | None) -> None:
    settings = Settings(
        name=name,
        optimizer=Adam(learning_rate=rate),
        more=[Sgd(momentum=rate)],
        scorers=[Scorer(name=n) for n in names],
        by_name={n: Scorer(name=n) for n in names},
        evaluation=Evaluation(path=Path("/tmp/a b")),
        maybe=maybe,
    )
    from services.common import config

    text = dump(settings)
    assert parse(Settings, yaml.load(text, config._Loader), "dumped") == settings


def service(folder: Path) -> dict[str, Any]:
    return {"run_id": "r-1", "worker_id": "rollout-0", "run_dir": str(folder), "nats_url": "nats://127.0.0.1:1"}


def test_a_process_file_carries_the_settings_of_its_service(tmp_path: Path) -> None:
    path = tmp_path / "rollout-0.yaml"
    config = ProcessConfig[Settings].model_validate(
        {"service": service(tmp_path), "model": {"path": "m"}, "settings": {"steps": 3}}
    )
    path.write_text(dump(config))
    loaded = load_process_config(Settings, path)
    assert loaded == config and type(loaded.settings) is Settings and loaded.settings.steps == 3
    assert loaded.service.run_dir == tmp_path and loaded.service.host == "127.0.0.1"
    with pytest.raises(pydantic.ValidationError):
        loaded.settings.steps = 4  # type: ignore[misc]

    path.write_text(path.read_text().replace("steps: 3", "stepz: 3"))
    with pytest.raises(ConfigError, match=r"settings\.stepz: unknown key; did you mean 'steps'\?") as caught:
        load_process_config(Settings, path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("bad", ["", "-x", "Run", "a/b", "a.b", "x" * 64, "a b"])
def test_ids_are_safe_in_paths_and_subjects(tmp_path: Path, bad: str) -> None:
    from services.common.config import ServiceConfig

    for key in ("run_id", "worker_id"):
        with pytest.raises(ConfigError):
            parse(ServiceConfig, {**service(tmp_path), key: bad}, "x")
    assert parse(ServiceConfig, service(tmp_path), "x").worker_id == "rollout-0"
