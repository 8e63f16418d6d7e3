"""A score from the length of the answer. Tokens are those that the policy sampled, its end token included."""

from __future__ import annotations

from collections.abc import Callable

from services.reward.config import LengthScorer


def make(settings: LengthScorer) -> Callable[..., dict[str, float]]:
    """The score, and the length as a part."""

    def score(response: str, response_token_ids: list[int]) -> dict[str, float]:
        length = len(response_token_ids) if settings.unit == "tokens" else len(response)
        return {"score": shaped(length, settings), "length": float(length)}

    return score


def shaped(length: int, settings: LengthScorer) -> float:
    """overlong is docs/math.md's penalty, "Filters and shaping": −(e/buffer)·factor where e > 0."""
    limit, buffer = settings.limit or 0, settings.buffer or 1
    match settings.shape:
        case "overlong":
            excess = min(length - (limit - buffer), buffer)
            return -(excess / buffer) * settings.factor if excess > 0 else 0.0
        case "limit":
            return float(length <= limit)
        case "target":
            distance = abs(length - (settings.target or 0))
            return max(0.0, 1.0 - distance / (settings.width or 1))
