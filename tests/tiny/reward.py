"""Exact match: the answer is the reference, nothing more."""

from __future__ import annotations

from typing import Any


def score(prompt: str, response: str, reference: str, **columns: Any) -> float:
    return 1.0 if response.strip() == reference else 0.0
