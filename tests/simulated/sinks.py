"""Stand-ins for the libraries wandb 0.31 and trackio 0.43: their signatures, and what they do with runs and steps.

They are not installed where tests run; the real ones were tried against services/coordinator/sinks by hand.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


class SimulatedWandb(types.ModuleType):
    """Runs by id, of all lives. A step below the last one is left out, as W&B does."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: dict[str, dict[int, dict[str, Any]]] = {}
        self.opened: list[dict[str, Any]] = []
        self.finished = 0
        self.on_log: Callable[[int], None] = lambda step: None
        """Called before a line is taken; may raise, or take its time."""

    def Settings(self, *, console: str) -> dict[str, str]:
        return {"console": console}

    def init(
        self, *, entity: str | None = None, project: str | None = None, dir: str | None = None, id: str | None = None,
        name: str | None = None, config: dict[str, Any] | None = None, reinit: str | None = None,
        resume: str | None = None, settings: Any = None,
    ) -> Any:  # fmt: skip
        assert id is not None and resume in ("allow", "never", "must", "auto")
        self.opened.append({"project": project, "id": id, "name": name, "dir": dir, "config": config})
        if resume != "allow":
            assert id not in self.runs
        history = self.runs.setdefault(id, {})
        first = max(history, default=-1) + 1
        library = self

        class Run:
            def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
                assert step is not None
                library.on_log(step)
                if step >= first and step >= max(history, default=0):
                    history.setdefault(step, {}).update(data)

            def finish(self, exit_code: int | None = None) -> None:
                library.finished += 1

        return Run()


class SimulatedTrackio(types.ModuleType):
    """Runs by name, of all lives: every line that was logged."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.runs: dict[str, list[tuple[int, dict[str, Any]]]] = {}

    def init(  # noqa: PLR0917 - as it is there
        self, project: str, name: str | None = None, group: str | None = None, space_id: str | None = None,
        server_url: str | None = None, config: dict[str, Any] | None = None, resume: str = "never",
        private: bool | None = None, embed: bool = True, auto_log_gpu: bool | None = None,
        auto_log_cpu: bool | None = None,
    ) -> Any:  # fmt: skip
        assert name is not None and (resume == "allow" or name not in self.runs)
        lines = self.runs.setdefault(name, [])

        class Run:
            def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
                assert step is not None
                lines.append((step, metrics))

            def finish(self) -> None:
                pass

        return Run()
