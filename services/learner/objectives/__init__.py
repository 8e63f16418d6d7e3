"""The objectives a Step may have.

To add one: a message in the oneof of `StepHeader`, a class in a file here, a line in OBJECTIVES.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from antiphon.learner.v1 import learner_pb2

from services.common.errors import InvalidRequest
from services.learner.objectives.policy import PolicyObjective
from services.learner.objectives.terms import Objective

OBJECTIVES: dict[str, Callable[[Any], Objective]] = {"policy": PolicyObjective}
"""Field of `StepHeader.objective` -> what computes it from that field's message."""


def objective_of(header: learner_pb2.StepHeader) -> Objective:
    """The objective a Step asks for. Raises InvalidRequest for none, or one that is not built in."""
    name = header.WhichOneof("objective")
    if name not in OBJECTIVES:
        raise InvalidRequest(f"step {header.step_id}: objective {name!r}; expected one of {sorted(OBJECTIVES)}")
    return OBJECTIVES[name](getattr(header, name))
