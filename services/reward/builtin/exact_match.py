"""Is the answer the reference? Both are normalised in the same way, then compared."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from services.reward.config import ExactMatchScorer

WHITESPACE = re.compile(r"\s+")


def make(settings: ExactMatchScorer) -> Callable[..., float | None]:
    """1 or 0; None for a row without a reference."""

    def score(response: str, reference: str) -> float | None:
        if not reference:
            return None
        return float(normalised(response, settings) == normalised(reference, settings))

    return score


def normalised(text: str, settings: ExactMatchScorer) -> str:
    """The text as it is compared."""
    if settings.unicode_form is not None:
        text = unicodedata.normalize(settings.unicode_form, text)
    if settings.ignore_case:
        text = text.casefold()
    if settings.ignore_punctuation:
        text = "".join(character for character in text if not unicodedata.category(character).startswith("P"))
    if settings.squeeze_whitespace:
        text = WHITESPACE.sub(" ", text)
    return text.strip() if settings.strip else text
