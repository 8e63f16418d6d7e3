"""What a reward function is told, and by which names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """services/reward/functions.py tells users what each name means."""

    always: tuple[str, ...]
    on_request: tuple[str, ...]
    """Sent to the child only for a function that names them."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.always + self.on_request


SINGLE = Signature(
    ("prompt", "response", "reference"), ("response_raw", "response_token_ids", "finish_reason", "conversation")
)
"""One answer."""
GROUP = Signature(
    ("prompt", "responses", "reference"), ("responses_raw", "responses_token_ids", "finish_reasons", "conversation")
)
"""All answers to a prompt."""


def signature_of(*, whole_groups: bool) -> Signature:
    return GROUP if whole_groups else SINGLE
