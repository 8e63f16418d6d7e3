"""Does the answer equal the reference as mathematics? By math-verify, on sympy.

Both can compute for ever on a few characters. The limit is the scorer's own, and its process is killed: math-verify's
limits are switched off, since their alarms cannot interrupt a long product and hide what took too long as "not equal".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from math_verify import parse, verify

from services.reward.config import MathScorer

MARKS = ("$", "\\boxed", "\\(", "\\[", "\\begin")
"""What shows where mathematics begins in a text."""


def make(settings: MathScorer) -> Callable[..., dict[str, float] | None]:
    """The score, and as part `parsed` whether the answer has something that can be read as mathematics."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn that their limits are off

    def score(response: str, reference: str) -> dict[str, float] | None:
        if not reference:
            return None
        wanted = _parsed(reference if any(mark in reference for mark in MARKS) else f"\\boxed{{{reference}}}")
        if not wanted:
            raise ValueError(f"the reference cannot be read as mathematics: {reference[:100]!r}")
        found = _parsed(response)
        return {"score": float(bool(found) and _equal(wanted, found, settings)), "parsed": float(bool(found))}

    return score


def _parsed(text: str) -> list[Any]:
    found: list[Any] = parse(text, parsing_timeout=None)
    return found


def _equal(wanted: list[Any], found: list[Any], settings: MathScorer) -> bool:
    try:
        return bool(
            verify(
                wanted,
                found,
                float_rounding=settings.decimals,
                strict=settings.strict,
                timeout_seconds=None,
                raise_on_error=True,
            )
        )
    except MemoryError:
        raise  # it says nothing about the answer
    except Exception:  # sympy met something it cannot compare, which is not the reference
        return False
