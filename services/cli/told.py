"""How a command says that it could not do its work: what, why and what to do, by a stable code, and its exit code.

docs/errors.md is this table for users; a test compares the two.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TextIO

from services.common.errors import (
    AntiphonError,
    ConfigError,
    Conflict,
    Expired,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)

OK, FAILED, CONFIG, STOPPED, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes of all commands; a signal's is 128 + its number. 2: nothing was started. 3: somebody else stopped it."""


class NoRun(ConfigError):
    """What was named is no folder of a run."""

    code = "ANT-NO-RUN"


class NoModel(ConfigError):
    """What was named is no model, run or checkpoint."""

    code = "ANT-NO-MODEL"


class NoWeights(ConfigError):
    """A run that has neither a checkpoint nor an exported policy."""

    code = "ANT-NO-WEIGHTS"


class NoEvaluation(ConfigError):
    """The recipe names no held-out prompts."""

    code = "ANT-NO-EVALUATION"


class NoSamples(ConfigError):
    """There are none of those that were asked for."""

    code = "ANT-NO-SAMPLES"


class RunAlive(ConfigError):
    """Another command has the run."""

    code = "ANT-RUN-ALIVE"


class RunFailed(AntiphonError):
    """Services were started, and the work did not come to its end."""

    code = "ANT-RUN-FAILED"


@dataclass(frozen=True)
class Meaning:
    """Of a code, the same in every command."""

    exit_code: int
    why: str
    what_to_do: str


MEANINGS: dict[str, Meaning] = {
    ConfigError.code: Meaning(
        CONFIG,
        "what was asked for cannot be done as it stands; nothing was started",
        "correct what the problems name, each says how",
    ),
    NoRun.code: Meaning(CONFIG, "the folder is none of a run", "name the folder of a run, such as runs/first"),
    NoModel.code: Meaning(
        CONFIG,
        "the folder holds no model, no run and no checkpoint",
        "name a Hugging Face folder (config.json, tokenizer.json, *.safetensors), a run or one of its checkpoints",
    ),
    NoWeights.code: Meaning(
        CONFIG,
        "the run has neither a checkpoint nor an exported policy",
        "take the run up with `antiphon resume`: it replays its Steps and exports at its end",
    ),
    NoEvaluation.code: Meaning(
        CONFIG,
        "the recipe names no held-out prompts",
        "add coordinator.evaluation with a path and max_tokens, or name a recipe that has it",
    ),
    NoSamples.code: Meaning(CONFIG, "the run has none of those samples", "ask for one of the Steps that are named"),
    RunAlive.code: Meaning(
        CONFIG, "another command has this run", "wait until it ended, or end it with `antiphon down RUN`"
    ),
    RunFailed.code: Meaning(
        FAILED, "services were started, and the work did not come to its end", "read the log that is named, then go on"
    ),
    InvalidRequest.code: Meaning(FAILED, "a service refused what it was asked", "change what the message names"),
    NotFound.code: Meaning(FAILED, "nothing has that name or id", "name one that is there"),
    Conflict.code: Meaning(FAILED, "something is not in the state that was expected", "look at it, then ask again"),
    Overloaded.code: Meaning(FAILED, "a service has no room now", "ask again later"),
    Unavailable.code: Meaning(FAILED, "a process or a disk cannot do its part now", "mend what is named; ask again"),
    Expired.code: Meaning(FAILED, "a deadline passed", "see who was waited for; raise the deadline where it is short"),
    Internal.code: Meaning(FAILED, "a bug in a service", "report it with the log that is named"),
    AntiphonError.code: Meaning(FAILED, "an error without a kind of its own", "read the message"),
}


def tell(error: AntiphonError, *, as_json: bool, stream: TextIO | None = None) -> int:
    """Says it on stderr, as lines or as {code, what, why, what_to_do, problems, exit_code}; answers the exit code."""
    meaning = MEANINGS.get(error.code, MEANINGS[AntiphonError.code])
    stream = stream or sys.stderr
    if not as_json:
        print(error, file=stream)
        print(f"{error.code}: {meaning.why}. To do: {meaning.what_to_do}", file=stream)
        return meaning.exit_code
    what, *problems = str(error).splitlines()
    tree = {
        "code": error.code,
        "what": what,
        "why": meaning.why,
        "what_to_do": meaning.what_to_do,
        "problems": [line.strip() for line in problems],
        "exit_code": meaning.exit_code,
    }
    print(json.dumps(tree, ensure_ascii=False), file=stream)
    return meaning.exit_code


def said_by_process(text: str) -> AntiphonError:
    """What a module that ran as a process wrote as its last words, CODE: message, as the error it was."""
    code, separator, message = text.strip().partition(": ")
    kinds = (ConfigError, InvalidRequest, NotFound, Conflict, Unavailable, Expired)
    kind = {one.code: one for one in kinds}.get(code)
    if separator and kind is not None:
        return kind(message)
    return Internal(f"a process ended with: {text.strip()[-2000:] or 'nothing'}")
