"""How a user's reward function is loaded and called, and its answer understood. Runs in the child.

The native signature, one call per candidate, plain or async:

    def score(prompt: str, response: str, reference: str, **columns) -> float | dict | None

- `prompt` is the rendered prompt with its special tokens, `response` what the policy answered without special tokens,
  `reference` the data row's reference (text; JSON where the column held a structure), `columns` every other column of
  the row. Arguments are passed by keyword; a function without `**columns` gets those that it names. A column called
  prompt, response or reference is not passed: these three names are taken.
- A number is the score; True is 1 and False is 0; a tensor or array of one element is its number.
- A dict {"score": number, name: number, …} gives the score and named parts for the metrics; a part may be None, which
  leaves it out.
- None says that this function does not apply: the candidate counts as failed ("none"), never as 0.
- Anything else fails: NaN and infinities, also in a part ("not_finite"), text, lists and other types ("wrong_type"),
  an exception, SystemExit included ("exception").
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
import math
import numbers
import reprlib
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

GIVEN = ("prompt", "response", "reference")
PARTS_LIMIT = 64
TRACEBACK_LINES = 12


class CannotLoad(Exception):
    """The file cannot be imported or has no such function."""


class BadValue(Exception):
    """The function's answer is not a score."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def load(source: str, path: str, function: str) -> Callable[..., Any]:
    """The function from the file's text as it was read at the start; its folder is importable. Raises CannotLoad."""
    name = f"antiphon_user_{Path(path).stem}"
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    sys.path.insert(0, str(Path(path).parent))
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except BaseException as error:
        raise CannotLoad(f"importing it raised {explain(error)}") from None
    found = module.__dict__.get(function)
    if not callable(found):
        names = sorted(n for n, v in module.__dict__.items() if inspect.isfunction(v) and v.__module__ == name)
        raise CannotLoad(f"it has no function {function!r}; it has {', '.join(names) or 'none'}")
    return found  # type: ignore[no-any-return]


class Caller:
    """Calls one function with what it accepts; async functions share one event loop."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._runner: asyncio.Runner | None = None
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if positional:
            raise CannotLoad(f"its parameters {positional} are positional only; arguments are passed by keyword")
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not self._takes_all and not self._names & set(GIVEN):
            raise CannotLoad("its signature does not fit; expected score(prompt, response, reference, **columns)")

    def __call__(self, given: Mapping[str, str], columns: Mapping[str, Any]) -> Any:
        """What the function answered; raises what it raised."""
        arguments = {**columns, **given}
        if not self._takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self._names}
        answer = self._function(**arguments)
        if inspect.iscoroutine(answer):
            if self._runner is None:
                self._runner = asyncio.Runner()
            answer = self._runner.run(answer)
        return answer


def understand(answer: Any) -> tuple[float, dict[str, float]]:
    """Score and parts. Raises BadValue."""
    if answer is None:
        raise BadValue("none", "the function returned None: it does not apply to this candidate")
    if not isinstance(answer, Mapping):
        return _number(answer, "the score"), {}
    if "score" not in answer:
        raise BadValue("wrong_type", f"the dict has no 'score'; its keys are {_shown(list(answer))}")
    if answer["score"] is None:
        raise BadValue("none", "the dict's 'score' is None: the function does not apply to this candidate")
    score = _number(answer["score"], "'score'")
    parts: dict[str, float] = {}
    for name, value in answer.items():
        if name == "score" or value is None:
            continue
        if not isinstance(name, str):
            raise BadValue("wrong_type", f"the name of a part must be text, got {_shown(name)}")
        parts[name] = _number(value, f"part {name!r}")
    if len(parts) > PARTS_LIMIT:
        raise BadValue("wrong_type", f"at most {PARTS_LIMIT} parts, got {len(parts)}")
    return score, parts


def _number(value: Any, what: str) -> float:
    if not isinstance(value, numbers.Real) and type(value).__module__.partition(".")[0] in ("numpy", "torch"):
        try:
            value = value.item()  # a tensor or array of one element
        except (AttributeError, ValueError, RuntimeError):
            pass
    if not isinstance(value, numbers.Real):
        raise BadValue("wrong_type", f"{what} must be a number, got {type(value).__name__}: {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        raise BadValue("not_finite", f"{what} is an integer too large for a float") from None
    if not math.isfinite(number):
        raise BadValue("not_finite", f"{what} must be finite, got {number}")
    return number


def explain(error: BaseException) -> str:
    """Type and message, with the last lines of the traceback; our own frames left out."""
    ours = str(Path(__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    lines = "".join(traceback.format_list(frames)).splitlines()[-TRACEBACK_LINES:]
    summary = "".join(traceback.format_exception_only(error)).strip()
    return "\n".join([summary, *lines])


def _shown(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception as error:
        return f"<its repr raised {type(error).__name__}>"
