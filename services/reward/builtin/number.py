"""Is the number in the answer that of the reference? Compared exactly, as decimals, or within a tolerance.

A number is written plainly: 72, -3.5, 1,234.50, 2e-3, .5. A minus counts as a sign unless a digit, letter or closing
bracket stands before it. Fractions and formulas are for the `math` scorer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

from services.reward.config import NumberScorer

NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z_)\]}])[-+−])?(?<![0-9.])"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,9}(?![0-9A-Za-z]))?"
)
BOX = "\\boxed{"
LARGEST_EXPONENT = 1000
"""Beyond it numbers are compared for equality only: their difference would take the memory that it asks for."""


def make(settings: NumberScorer) -> Callable[..., dict[str, float] | None]:
    """The score, and as part `found` whether the answer has a number where one was looked for."""

    def score(response: str, reference: str) -> dict[str, float] | None:
        if not reference:
            return None
        wanted = numbers_in(reference)
        if not wanted:
            raise ValueError(f"the reference has no number: {reference[:100]!r}")
        found = find(response, settings)
        right = found is not None and is_close(found, wanted[-1], settings)
        return {"score": float(right), "found": float(found is not None)}

    return score


def find(text: str, settings: NumberScorer) -> Decimal | None:
    """The number that the settings look for; None where there is none."""
    match settings.where:
        case "last":
            found = numbers_in(text)
        case "boxed":
            found = numbers_in(last_box(text) or "")
        case "after_marker":
            _, marker, rest = text.rpartition(settings.marker or "")
            return next(iter(numbers_in(rest)), None) if marker else None
    return found[-1] if found else None


def numbers_in(text: str) -> list[Decimal]:
    """Every number of the text, in order."""
    return [Decimal(match.group().replace(",", "").replace("−", "-")) for match in NUMBER.finditer(text)]


def last_box(text: str) -> str | None:
    """What the last \\boxed{…} holds, braces inside it counted; None without one that is closed."""
    begin = text.rfind(BOX)
    while begin >= 0:
        depth = 1
        for place in range(begin + len(BOX), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[begin + len(BOX) : place]
        begin = text.rfind(BOX, 0, begin)
    return None


def is_close(found: Decimal, wanted: Decimal, settings: NumberScorer) -> bool:
    """|found − wanted| ≤ max(absolute, relative·|wanted|), computed exactly."""
    if found == wanted:
        return True
    if max(abs(found.adjusted()), abs(wanted.adjusted())) > LARGEST_EXPONENT:
        return False
    distance = abs(Fraction(found) - Fraction(wanted))
    # A tolerance is meant as it is written: 0.1, not the binary fraction nearest to it.
    absolute, relative = Fraction(str(settings.absolute_tolerance)), Fraction(str(settings.relative_tolerance))
    return distance <= max(absolute, relative * abs(Fraction(wanted)))
