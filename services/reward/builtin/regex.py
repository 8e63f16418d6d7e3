"""Does the answer match a pattern, and does a group of the match equal the reference?"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from services.reward.config import RegexScorer


def make(settings: RegexScorer) -> Callable[..., float | dict[str, float] | None]:
    """1 or 0; with a group also the part `matched`, and None for a row without a reference.

    A group is compared without white space at both ends.
    """
    pattern = re.compile(settings.pattern)

    def score(response: str, response_raw: str, reference: str) -> float | dict[str, float] | None:
        if settings.group is not None and not reference:
            return None
        found = find(pattern, response_raw if settings.text == "response_raw" else response, settings.match)
        if settings.group is None:
            return float(found is not None)
        inner = None if found is None else found.group(settings.group)
        right = inner is not None and inner.strip() == reference.strip()
        return {"score": float(right), "matched": float(found is not None)}

    return score


def find(pattern: re.Pattern[str], text: str, which: str) -> re.Match[str] | None:
    """The match of the whole text, or the first or last one in it."""
    if which == "full":
        return pattern.fullmatch(text)
    if which == "first":
        return pattern.search(text)
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)
