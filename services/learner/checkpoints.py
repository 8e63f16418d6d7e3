"""Save and Load: the parent's part. It makes the folder and the manifest; the ranks write and read the slices.

Nothing of a Save is visible before all of it is on the disk. Nothing of a Load is done before all of it was checked; if
it then fails all the same, the ranks hold no policy any more and are ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from antiphon.learner.v1 import checkpoint_pb2, learner_pb2, ranks_pb2

from services.common.errors import AntiphonError, Conflict, InvalidRequest, NotFound, Unavailable
from services.common.operations import Operation, Operations, Report
from services.learner import checkpoint, whole_folder
from services.learner.history import History, settings_of
from services.learner.memory import OPTIMIZER, WEIGHTS, LearnerMemory
from services.learner.ranks import Ranks
from services.learner.whole_folder import WholeFolder

logger = logging.getLogger(__name__)

DIGEST_MASK = (1 << 64) - 1


class LearnerCheckpoints:
    """Each Save and Load takes its turn among the other work of the ranks."""

    def __init__(
        self,
        ranks: Ranks,
        turn: asyncio.Lock,
        memory: LearnerMemory,
        history: History,
        on_load: Callable[[], None],
    ) -> None:
        self._ranks = ranks
        self._turn = turn
        self._memory = memory
        self._history = history
        self._on_load = on_load
        self._saves: Operations[learner_pb2.SaveResult] = Operations("save")
        self._loads: Operations[learner_pb2.LoadResult] = Operations("load")

    def save(self, request: learner_pb2.SaveRequest) -> Operation[learner_pb2.SaveResult]:
        """Begins to write a checkpoint, or attaches to that request. Raises InvalidRequest."""
        _ = self._ranks.hello
        for path in (request.path, *request.delete_paths):
            _check_path("save to", path)
        if request.path in request.delete_paths:
            raise InvalidRequest(f"save to {request.path}: it is to be deleted, too; name older ones only")
        return self._saves.start_or_attach(
            request.request_id, settings_of(request), lambda report: self._save(request, report)
        )

    def load(self, request: learner_pb2.LoadRequest) -> Operation[learner_pb2.LoadResult]:
        """Begins to take over a checkpoint, or attaches to that request. Raises InvalidRequest."""
        _ = self._ranks.hello
        _check_path("load", request.path)
        return self._loads.start_or_attach(
            request.request_id, settings_of(request), lambda report: self._load(request, report)
        )

    async def finish_saves(self, seconds: float) -> None:
        """Waits for the end of what is being written, at most so long."""
        running = [asyncio.ensure_future(save.result()) for save in self._saves.running()]
        if running and self._ranks.problem is None:
            logger.info(
                "the stop waits for %d checkpoints that are being written, at most %.0f s", len(running), seconds
            )
            await asyncio.wait(running, timeout=seconds)
        for waiter in running:
            waiter.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _save(self, request: learner_pb2.SaveRequest, report: Report) -> learner_pb2.SaveResult:
        begin = time.monotonic()
        path = Path(request.path)
        async with self._turn:
            known = await asyncio.to_thread(_made_by, request.request_id, path)
            if known is None:
                self._memory.require(f"save to {path}", WEIGHTS, OPTIMIZER)
                if request.policy_version != self._history.version:
                    raise Conflict(f"save version {request.policy_version}: the policy is at {self._history.version}")
                try:
                    known = await self._written(request, path, report)
                except OSError as error:
                    raise Unavailable(
                        f"save to {path}: {error}; there is no new checkpoint, the older ones are as they were"
                    ) from None
                self._history.know_digest(known[0].policy.digest)
            manifest, digest = known
            result = learner_pb2.SaveResult(path=request.path, policy=manifest.policy, digest=digest)
            result.bytes = sum(file.bytes for file in manifest.files)
            for older in request.delete_paths:
                report("delete", 0, len(request.delete_paths))
                try:
                    if await asyncio.to_thread(checkpoint.delete, Path(older), manifest.role):
                        result.deleted_paths.append(older)
                except (InvalidRequest, OSError) as error:
                    result.kept_paths.append(f"{older}: {error}")
            result.seconds = time.monotonic() - begin
            return result

    async def _written(
        self, request: learner_pb2.SaveRequest, path: Path, report: Report
    ) -> tuple[checkpoint_pb2.CheckpointManifest, bytes]:
        folder = await asyncio.to_thread(WholeFolder, "save to", path)
        try:
            command = ranks_pb2.RankCommand(save=ranks_pb2.RankSave(folder=str(folder.aside)))
            parts = [reply.saved for reply in await self._ranks.run_all(command, report)]
            manifest = parts[0].manifest
            manifest.request_id = request.request_id
            manifest.written_at = datetime.now(UTC).isoformat(timespec="seconds")
            manifest.policy.version = self._history.version
            manifest.policy.digest = sum(part.digest for part in parts) & DIGEST_MASK
            for part in parts:
                manifest.files.extend(part.files)
            manifest.steps.extend(self._history.newest_steps())
            report("publish", 0, 1)
            digest = await asyncio.to_thread(checkpoint.write_manifest, folder.aside, manifest)
            await asyncio.to_thread(folder.publish)
        except BaseException:
            await asyncio.to_thread(folder.discard)
            raise
        return manifest, digest

    async def _load(self, request: learner_pb2.LoadRequest, report: Report) -> learner_pb2.LoadResult:
        begin = time.monotonic()
        path = Path(request.path)
        async with self._turn:
            self._memory.require(f"load {path}", WEIGHTS, OPTIMIZER)
            manifest, digest = await asyncio.to_thread(checkpoint.read_manifest, path)
            if request.digest and request.digest != digest:
                raise Conflict(
                    f"load {path}: its digest is {digest.hex()[:16]}…, expected {request.digest.hex()[:16]}…: it is "
                    "another checkpoint than the one that was meant"
                )
            check = ranks_pb2.RankCheckLoad(folder=request.path, manifest=manifest)
            try:
                await self._ranks.run_all(ranks_pb2.RankCommand(check_load=check), report)
            except InvalidRequest as error:
                raise InvalidRequest(f"load {path}: {error}") from None
            work = ranks_pb2.RankLoad(
                folder=request.path,
                manifest=manifest,
                fresh_optimizer=request.fresh_optimizer,
                fresh_schedule=request.fresh_schedule,
            )
            parts = await self._loaded(work, report)
            found = sum(part.digest for part in parts) & DIGEST_MASK
            if found != manifest.policy.digest:
                self._lose(f"load {path}: the weights' digest is {found:#x}, {manifest.policy.digest:#x} was saved")
            self._history.restore(manifest.policy, manifest.steps, request.path)
            self._on_load()
            result = learner_pb2.LoadResult(
                path=request.path, policy=self._history.policy, next_step_id=self._history.version + 1
            )
            result.parts.extend(parts[0].parts)
            result.parts.add(name="answers", restored=True, detail=f"of the last {len(manifest.steps)} Steps")
            result.seconds = time.monotonic() - begin
            return result

    async def _loaded(self, work: ranks_pb2.RankLoad, report: Report) -> list[ranks_pb2.RankLoaded]:
        """From here on there is no way back: whoever is cancelled or fails leaves no policy behind."""
        try:
            replies = await self._ranks.run_all(ranks_pb2.RankCommand(load=work), report)
        except Unavailable:
            raise
        except (AntiphonError, asyncio.CancelledError) as error:
            self._lose(f"load {work.folder}: it failed in the middle, the weights are no policy: {error}")
        return [reply.loaded for reply in replies]

    def _lose(self, problem: str) -> None:
        self._ranks.give_up(problem)
        raise Unavailable(f"{problem}; the ranks are ended: start the learner again, and load again")


def _made_by(request_id: str, path: Path) -> tuple[checkpoint_pb2.CheckpointManifest, bytes] | None:
    """The checkpoint at `path` if this very request made it: whoever asked may not have heard of it."""
    try:
        manifest, digest = checkpoint.read_manifest(path)
    except (NotFound, InvalidRequest):
        return None
    if manifest.request_id != request_id:
        return None
    whole_folder.sync(path.parent)
    return manifest, digest


def _check_path(what: str, path: str) -> None:
    if not Path(path).is_absolute() or "\0" in path:
        raise InvalidRequest(f"{what} {path!r}: expected an absolute path")
