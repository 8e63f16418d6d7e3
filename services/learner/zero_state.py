"""What a ZeRO-3 rank trains with, by the names of the model's parameters: float32 masters and AdamW's moments.

Every tensor here is this rank's slice of a flattened parameter, cut to the elements that are truly there: ZeRO-3 gives
each rank ceil(n / ranks) of them and pads the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

from services.learner.checkpoint import KINDS, MASTER, MOMENTS


class ZeroState:
    """The state of one rank's engine around `model`."""

    def __init__(self, engine: Any, model: Any, rank: int) -> None:
        self._zero = engine.optimizer
        self._rank = rank
        self.parameters: dict[str, Any] = dict(model.named_parameters())
        """By Hugging Face name, aliases left out."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole parameters."""
        return {name: tuple(parameter.ds_shape) for name, parameter in self.parameters.items()}

    def extent(self, name: str) -> tuple[int, int]:
        """(first element, count) of this rank's slice; the count may be 0."""
        parameter = self.parameters[name]
        each = parameter.ds_tensor.numel()
        start = min(self._rank * each, parameter.ds_numel)
        return start, min(each, parameter.ds_numel - start)

    def weights(self, name: str) -> torch.Tensor:
        """The slice of the weights in the model's dtype, [count]."""
        held: torch.Tensor = self.parameters[name].ds_tensor.detach()
        return held.narrow(0, 0, self.extent(name)[1])

    def slice_of(self, kind: str, name: str) -> torch.Tensor:
        """[count] float32; a moment only where `optimizer_updates` is not 0."""
        parameter = self.parameters[name]
        whole: torch.Tensor
        if kind == MASTER:
            whole = safe_get_local_fp32_param(parameter)
        else:
            whole = safe_get_local_optimizer_state(parameter, kind)
        return whole.detach().narrow(0, 0, self.extent(name)[1])

    @property
    def optimizer_updates(self) -> int:
        """How many Updates moved the optimizer."""
        counts = {int(state["step"].item()) for state in self._zero.optimizer.state.values() if "step" in state}
        if len(counts) > 1:
            raise RuntimeError(f"the optimizer's groups disagree about their Updates: {sorted(counts)}")
        return counts.pop() if counts else 0

    def make_moments(self) -> None:
        """Makes the moments as AdamW would at its first Update, where there are none yet: zeros, no Update done."""
        for master in self._zero.fp32_partitioned_groups_flat:
            state = self._zero.optimizer.state[master]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                for moment in MOMENTS:
                    state[moment] = torch.zeros_like(master, memory_format=torch.preserve_format)

    def begin_writing(self) -> None:
        """To be called before `write`, in every rank: whole copies of parameters are given up."""
        self._zero.checkpoint_event_prologue()
        self.make_moments()

    def write(self, name: str, slices: Mapping[str, torch.Tensor]) -> None:
        """Takes over the slices of one parameter, by kind; a moment that is not given becomes zero."""
        parameter = self.parameters[name]
        padded = torch.zeros(parameter.ds_tensor.numel(), dtype=torch.float32, device=parameter.ds_tensor.device)
        for kind in KINDS:
            padded.zero_()
            if kind in slices:
                padded[: slices[kind].numel()] = slices[kind]
            if kind == MASTER:
                safe_set_local_fp32_param(parameter, padded)
                parameter.ds_tensor.data.copy_(padded)
            else:
                safe_set_local_optimizer_state(parameter, padded, kind)

    def end_writing(self, optimizer_updates: int) -> None:
        """To be called after `write`, in every rank: whole copies are made of the slices again."""
        for state in self._zero.optimizer.state.values():
            state["step"].fill_(float(optimizer_updates))
        self._zero.checkpoint_event_epilogue()
