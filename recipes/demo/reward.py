"""The demo's reward: 1 if the last whole number in the answer is exactly the sum, else 0."""

from __future__ import annotations

import re
from typing import Any


def score(prompt: str, response: str, reference: str, **columns: Any) -> float:
    numbers = re.findall(r"[0-9]+", response)
    return 1.0 if numbers and numbers[-1] == reference else 0.0
