"""A rank's part of Save and Load: what it trains with, into its share of a checkpoint and out of a whole one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from antiphon.learner.v1 import checkpoint_pb2, ranks_pb2

from services.common.config import ProcessConfig
from services.common.errors import InvalidRequest, Unavailable
from services.common.weights.digest import RunningDigest
from services.learner import checkpoint
from services.learner.checkpoint import MASTER
from services.learner.checkpoint_slices import SavedSlices, write_slices
from services.learner.config import LearnerConfig
from services.learner.stepping import StepRunner
from services.learner.trainer import Report
from services.learner.zero_engine import VERSION
from services.learner.zero_state import ZeroState

SHOWN = 10
"""Tensors that differ, named in an error."""


class RankCheckpoint:
    """Of one rank's `state` and `steps`."""

    def __init__(
        self,
        process: ProcessConfig[LearnerConfig],
        state: ZeroState,
        steps: StepRunner,
        *,
        rank: int,
        ranks: int,
        device: torch.device,
    ) -> None:
        self._role = process.settings.role
        self._dtype = process.model.dtype
        self._optimizer = process.settings.optimizer
        self._state = state
        self._steps = steps
        self._rank = rank
        self._ranks = ranks
        self._device = device

    def save(self, work: ranks_pb2.RankSave, report: Report) -> ranks_pb2.RankSaved:
        """See services/learner/trainer.py."""
        saved = ranks_pb2.RankSaved(digest=self._digest())
        try:
            files = write_slices(
                Path(work.folder), self._rank, self._state, _random_states(), lambda done, of: report("write", done, of)
            )
        except OSError as error:
            raise Unavailable(f"rank {self._rank} cannot write its slices: {error}") from None
        saved.files.extend(files)
        if self._rank == 0:
            self._describe(saved.manifest)
        return saved

    def check_load(self, work: ranks_pb2.RankCheckLoad, report: Report) -> None:
        """See services/learner/trainer.py."""
        folder, manifest = Path(work.folder), work.manifest
        self._check_model(manifest)
        share = manifest.files[self._rank :: self._ranks]
        checkpoint.check_contents(folder, share, lambda done: report("verify", done, len(share)))
        with SavedSlices(folder, manifest) as slices:
            slices.check(self._state.shapes())

    def load(self, work: ranks_pb2.RankLoad, report: Report) -> ranks_pb2.RankLoaded:
        """See services/learner/trainer.py."""
        position = checkpoint_pb2.TrainingPosition()
        position.CopyFrom(work.manifest.position)
        if work.fresh_schedule:
            position.updates = 0
        if work.fresh_optimizer:
            position.optimizer_updates = 0
        names = list(self._state.parameters)
        with SavedSlices(Path(work.folder), work.manifest) as saved:
            self._state.begin_writing()
            for done, name in enumerate(names, start=1):
                slices = saved.read(name, *self._state.extent(name))
                self._state.write(name, {MASTER: slices[MASTER]} if work.fresh_optimizer else slices)
                report("load", done, len(names))
            self._state.end_writing(position.optimizer_updates)
            generators = _set_random_states(saved.own(self._rank))
        self._steps.restore(position)
        loaded = ranks_pb2.RankLoaded(digest=self._digest())
        moments = f"{position.optimizer_updates} Updates in its moments"
        for name, restored, detail in (
            ("weights", True, f"{len(names)} tensors, {self._dtype}{self._cut_anew(work.manifest)}"),
            ("optimizer", not work.fresh_optimizer, f"{moments}{self._settings_changed(work.manifest)}"),
            ("schedule", not work.fresh_schedule, f"at Update {position.updates}"),
            ("random numbers", bool(generators), ", ".join(generators) or f"rank {self._rank} is new"),
        ):
            loaded.parts.add(name=name, restored=restored, detail=detail)
        return loaded

    def _describe(self, manifest: checkpoint_pb2.CheckpointManifest) -> None:
        manifest.role, manifest.dtype, manifest.ranks = self._role, self._dtype, self._ranks
        manifest.backend = f"deepspeed {VERSION}"
        manifest.position.CopyFrom(self._steps.position())
        manifest.position.optimizer_updates = self._state.optimizer_updates
        for name, value in self._settings().items():
            manifest.optimizer_settings.add(name=name, value=value)
        for name, shape in self._state.shapes().items():
            manifest.tensors.add(name=name, shape=shape)

    def _settings(self) -> dict[str, str]:
        return {name: json.dumps(value) for name, value in self._optimizer.model_dump(mode="json").items()}

    def _settings_changed(self, manifest: checkpoint_pb2.CheckpointManifest) -> str:
        ours = self._settings()
        changed = [
            f"; {setting.name} was {setting.value}, now {ours.get(setting.name, 'gone')}"
            for setting in manifest.optimizer_settings
            if ours.get(setting.name) != setting.value
        ]
        return "".join(changed)

    def _cut_anew(self, manifest: checkpoint_pb2.CheckpointManifest) -> str:
        if manifest.ranks == self._ranks:
            return ""
        return f", written by {manifest.ranks} ranks and cut anew for {self._ranks}"

    def _digest(self) -> int:
        """Of this rank's slices of the weights; the policy's is the sum over the ranks (docs/design.md §6)."""
        digest = RunningDigest(self._device)
        for name in self._state.parameters:
            digest.add(name, self._state.weights(name), self._state.extent(name)[0])
        return digest.value()

    def _check_model(self, manifest: checkpoint_pb2.CheckpointManifest) -> None:
        """Raises InvalidRequest that says in what the checkpoint differs from the model that is loaded here."""
        problems = [
            f"its {what} is {saved}, this learner's {here}"
            for what, saved, here in (("role", manifest.role, self._role), ("dtype", manifest.dtype, self._dtype))
            if saved != here
        ]
        ours = self._state.shapes()
        theirs = {tensor.name: tuple(tensor.shape) for tensor in manifest.tensors}
        different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        problems += [
            f"{name}: {theirs.get(name, 'not there')} in the checkpoint, {ours.get(name, 'not there')} here"
            for name in different[:SHOWN]
        ]
        if len(different) > SHOWN:
            problems.append(f"and {len(different) - SHOWN} tensors more")
        if problems:
            raise InvalidRequest(f"the checkpoint is of another model: {'; '.join(problems)}")


def _random_states() -> dict[str, torch.Tensor]:
    """Of torch's generators on the host and, where there is one, on this rank's GPU."""
    states = {"rng/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["rng/cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: Mapping[str, torch.Tensor]) -> list[str]:
    """Takes over those that exist here; answers their names."""
    setters = {"rng/cpu": torch.set_rng_state}
    if torch.cuda.is_available():
        setters["rng/cuda"] = torch.cuda.set_rng_state
    taken = [name for name in setters if name in states]
    for name in taken:
        setters[name](states[name])
    return taken
