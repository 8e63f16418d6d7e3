"""How a reward function is loaded and called, and its answer understood. Runs in the child.

The native signature, one call per candidate, plain or async:

    def score(prompt: str, response: str, reference: str, **columns) -> float | dict | None

With `whole_groups`, one call for all answers to a prompt, in the order of their sample numbers; it answers a list (or
tuple, or array of one dimension) with one element per response, in the same order:

    def score(prompt: str, responses: list[str], reference: str, **columns) -> list[float | dict | None]

- `prompt` is the rendered prompt with its special tokens, `response` what the policy answered without special tokens,
  `reference` the data row's reference (text; JSON where the column held a structure), `columns` every other column of
  the row. Arguments are passed by keyword; a function without `**columns` gets those that it names. A column called
  prompt, response (responses) or reference is not passed: these names are taken.
- A function that names them also gets `response_raw` (special tokens kept), `response_token_ids` (as sampled, without
  padding), `finish_reason` ("stop", "length" or "aborted") and `conversation` (the messages that the prompt was
  rendered from; empty for plain text). For a group the first three are lists: `responses_raw`, `responses_token_ids`,
  `finish_reasons`. The scorer's `arguments` come by name as well; they win over columns.
- A number is the score; True is 1 and False is 0; a tensor or array of one element is its number.
- A dict {"score": number, name: number, …} gives the score and named parts for the metrics; a part may be None, which
  leaves it out.
- None says that this function does not apply: the candidate counts as failed ("none"), never as 0.
- Anything else fails: NaN and infinities, also in a part ("not_finite"), text, lists and other types ("wrong_type"),
  an exception, SystemExit included ("exception"). For a group: another number of elements than responses
  ("wrong_length"), which fails them all.
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

from services.reward.signature import SINGLE, Signature

PARTS_LIMIT = 64
TRACEBACK_LINES = 12

Understood = tuple[float, dict[str, float]]
"""A score and its named parts."""


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

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        signature: Signature = SINGLE,
    ) -> None:
        """Raises CannotLoad for a function that can never be called."""
        self._function = function
        self.name = getattr(function, "__name__", "the function")
        self._arguments = dict(arguments or {})
        self._runner: asyncio.Runner | None = None
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if positional:
            raise CannotLoad(f"its parameters {positional} are positional only; arguments are passed by keyword")
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self.wants = [name for name in signature.on_request if name in self._names]
        """What it is told because it names it."""
        if self._takes_all:
            return
        if not self._names & set(signature.names):
            raise CannotLoad(f"its signature does not fit; expected score({', '.join(signature.always)}, **columns)")
        unknown = sorted(set(self._arguments) - self._names)
        if unknown:
            raise CannotLoad(f"it takes no {', '.join(unknown)}, which the scorer's `arguments` give")

    def __call__(self, given: Mapping[str, Any], columns: Mapping[str, Any]) -> Any:
        """What the function answered; raises what it raised."""
        arguments = {**columns, **self._arguments, **given}
        if not self._takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self._names}
        answer = self._function(**arguments)
        if inspect.iscoroutine(answer):
            if self._runner is None:
                self._runner = asyncio.Runner()
            answer = self._runner.run(answer)
        return answer


def understand(answer: Any) -> Understood:
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


def understand_group(answer: Any, count: int, function: str) -> list[Understood | BadValue]:
    """What the function says of each of `count` responses. Raises BadValue when it says nothing of each."""
    elements = answer.tolist() if _library(answer) and hasattr(answer, "tolist") else answer
    if not isinstance(elements, list | tuple):
        got = f"got {type(answer).__name__}: {_shown(answer)}"
        raise BadValue("wrong_type", f"{function} scores whole groups: expected a list of {count} scores, {got}")
    if len(elements) != count:
        got = f"got {len(elements)}: {_shown(elements)}"
        raise BadValue("wrong_length", f"{function} was given {count} responses: expected as many scores, {got}")
    found: list[Understood | BadValue] = []
    for element in elements:
        try:
            found.append(understand(element))
        except BadValue as error:
            found.append(error)
    return found


def _number(value: Any, what: str) -> float:
    if not isinstance(value, numbers.Real) and _library(value):
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


def _library(value: Any) -> bool:
    """Whether it is an array, tensor or scalar of one of these libraries."""
    return type(value).__module__.partition(".")[0] in ("numpy", "torch")


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
