"""The life of a learner's parent process: start the ranks, watch them, and when they are lost say so and end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from antiphon.events.v1 import events_pb2

from services.common.config import ProcessConfig, dump
from services.common.errors import Unavailable
from services.common.tenancy import TenantGuard
from services.learner.config import LearnerConfig
from services.learner.learner import Learner
from services.learner.memory import TAGS
from services.learner.ranks import RANK_MODULE, RankProcesses, rank_command_line, threads_for_each


class LearnerProcess:
    """Holds the learner and its ranks.

    When a rank is lost the process is of no more use, but it has something to say: for `failed_linger_seconds` it
    answers calls with the cause, announces itself FAILED and reports its health as not serving; then it ends with exit
    code 1.
    """

    def __init__(self, process: ProcessConfig[LearnerConfig], rank_module: str = RANK_MODULE) -> None:
        """`rank_module` is what the ranks run; see services/learner/ranks.py."""
        settings = process.settings
        service = process.service
        self._start_seconds = settings.start_seconds
        self._linger_seconds = settings.failed_linger_seconds
        self._save_grace_seconds = settings.save_grace_seconds
        self.on_change: Callable[[], None] = lambda: None
        logs = service.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        config = logs / f"{service.worker_id}-ranks.yaml"  # the ranks read the same settings as this process
        config.write_text(dump(process))
        threads = settings.threads_per_rank or threads_for_each(settings.ranks)
        self._ranks = RankProcesses(
            settings.ranks,
            rank_command_line(config, settings.ranks, rank_module),
            logs,
            service.worker_id,
            environment=rank_environment(threads),
            start_seconds=settings.start_seconds,
            silence_seconds=settings.rank_silence_seconds,
            on_change=self._changed,
        )

    def under(self, guard: TenantGuard) -> Learner:
        """The learner, whose use of its GPUs the guard allows. Call it once, before anything else."""
        self._guard = guard
        self.learner = Learner(self._ranks, guard, self._changed)
        return self.learner

    async def run_ranks(self) -> None:
        """Starts the ranks and waits for the loss of one, which it raises once it has been said for long enough.

        Ranks that share their GPUs take memory there as they load: they start when a grant allows it.
        """
        if self._guard.shares_gpus:
            await self._guard.granted(TAGS, self._start_seconds)
        try:
            await self._ranks.start()
            await self.learner.memory.say_loaded()
            await self._ranks.lost.wait()
        except Unavailable:
            pass  # it is the same problem, and is told in the same way
        await asyncio.sleep(self._linger_seconds)
        raise Unavailable(self._ranks.problem or "the ranks are lost")

    def _changed(self) -> None:
        self.on_change()

    async def health_check(self) -> str | None:
        return self._ranks.problem

    def fill_in(self, announcement: events_pb2.WorkerAnnouncement) -> None:
        """State and policy, for the announcement."""
        state = self.learner.describe()
        announcement.state = state.state
        announcement.policy.CopyFrom(state.policy)

    async def drain(self) -> None:
        """Lets a checkpoint come to its end, then ends the ranks; other work under way gets Unavailable."""
        await self.learner.checkpoints.finish_saves(self._save_grace_seconds)
        await self._ranks.stop()


def rank_environment(threads: int) -> dict[str, str]:
    """This process's environment, with what the libraries of a rank read when they are loaded."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        # The model is a folder: nothing is looked up elsewhere.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # Ranks are children of one process, so of one host.
        "GLOO_SOCKET_IFNAME": "lo",
    }
