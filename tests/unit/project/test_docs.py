"""What the documents say can be done: every block of commands, configuration and code is parsed or run, links lead
somewhere, and the tree in the README is the tree there is."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from services.cli.__main__ import app
from services.cli.recipe import Recipe, read_recipe
from services.common.config import parse
from services.reward import functions

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "recipes" / "demo" / "addition.yaml"
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")


def blocks(language: str) -> list[Any]:
    return list(_blocks(language))


def _blocks(language: str) -> Iterator[Any]:
    for document in DOCUMENTS:
        for number, (found, text) in enumerate(BLOCK.findall(document.read_text())):
            if found == language:
                yield pytest.param(text, id=f"{document.name}-{number}")


def make(arguments: list[str]) -> None:
    subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True, timeout=30)


def antiphon(arguments: list[str]) -> None:
    """Parsed as the command itself would; a recipe is read, too."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    name, *rest = arguments
    assert name in group.commands, f"no command {name}"
    given = group.commands[name].make_context(name, rest).params
    if "recipe" in given:
        read_recipe(ROOT / given["recipe"], given["assignments"] or [], ROOT)


def python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None, arguments[1]
    else:
        assert (ROOT / arguments[0]).is_file(), arguments[0]


def uv(arguments: list[str]) -> None:
    """Installs what a lock pins, into the environment of the project."""
    *install, lock = arguments
    assert install == ["pip", "install", "--python", ".venv/bin/python", "--no-deps", "-r"]
    pins = [line for line in (ROOT / lock).read_text().splitlines() if not line.startswith("#")]
    assert pins
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", pin) for pin in pins)


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": make,
    ".venv/bin/antiphon": antiphon,
    ".venv/bin/python": python,
    ".venv/bin/uv": uv,
}


@pytest.mark.parametrize("block", blocks("bash"))
def test_commands_would_run(block: str) -> None:
    lines = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    commands = [line for line in lines if line]
    assert commands
    for program, *arguments in commands:
        assert program in CHECKS, f"teach this test what {program!r} is"
        CHECKS[program](arguments)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_configuration_is_accepted(block: str) -> None:
    tree = yaml.safe_load(DEMO.read_text())
    parse(Recipe, merged(tree, yaml.safe_load(block)), "the document")


def merged(tree: Any, change: Any) -> Any:
    if not isinstance(tree, dict) or not isinstance(change, dict):
        return change
    if "sources" in change:  # they stand in place of a path, and of all that belongs to it
        return change
    return {**tree, **{key: merged(tree.get(key), value) for key, value in change.items()}}


@pytest.mark.parametrize("block", blocks("python"))
def test_reward_functions_are_understood(block: str) -> None:
    call = functions.Caller(functions.load(block, str(ROOT / "README.py"), "score"))
    given = {"prompt": "What is it?", "response": " 7\n", "reference": "7"}
    assert functions.understand(call(given, {"source": "a column"})) == (1.0, {})
    assert functions.understand(call({**given, "response": "8"}, {})) == (0.0, {})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    for path, anchor in LINK.findall(text):
        if path:
            assert (document.parent / path).exists(), path
        elif anchor:
            assert anchor[1:] in headings, anchor


def tree_in_readme() -> dict[str, str]:
    """Path to what the README says of it: two spaces of indentation are one level, a name ending in / is a folder."""
    (tree,) = [text for language, text in BLOCK.findall((ROOT / "README.md").read_text()) if language == "text"]
    found: dict[str, str] = {}
    folders: list[str] = []
    for line in tree.splitlines():
        name, _, remark = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[:depth], name]
        found["".join(folders)] = remark.strip()
    return found


def test_the_tree_has_a_line_for_each_file() -> None:
    said = tree_in_readme()
    assert all(said.values()), [path for path, remark in said.items() if not remark]
    files = {path for path in said if not path.endswith("/")}
    sources = [*(ROOT / "services").rglob("*.py"), *(ROOT / "protos").rglob("*.proto")]
    there = {str(source.relative_to(ROOT)) for source in sources if source.name != "__init__.py"}
    generated = {path for path in there if "_pb2" in path}
    assert sorted(files) == sorted(there - generated)
    assert all((ROOT / path).is_dir() for path in said if path.endswith("/"))


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda recipe: recipe.stem)
def test_recipes_are_accepted(recipe: Path) -> None:
    read_recipe(recipe, [], ROOT)
