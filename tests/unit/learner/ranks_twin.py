"""Ranks in memory, deterministic, without a model: what the learner's contract is tested against.

A token's log-prob is −(token mod 7) / temperature; a Step adds 1 to `applied`. A checkpoint holds how many Steps that
were, in a file for each rank. `hold` names commands that wait for `release`; `errors` names commands that fail, once,
with the error given.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from antiphon.learner.v1 import learner_pb2, ranks_pb2
from antiphon.types.v1 import chat_pb2, transfer_pb2

from services.common.errors import AntiphonError, InvalidRequest, Unavailable
from services.learner import checkpoint

DIGEST_OF_VERSION_0 = 1000
SHAPE = [4, 2]
TOTAL_BYTES = 80 << 30


class RanksTwin:
    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.pids = [40 + rank for rank in range(count)]
        self.loading = False
        self.lost_because: str | None = None
        self.hold: set[str] = set()
        self.errors: dict[str, AntiphonError] = {}
        self.asked: list[str] = []
        self.applied: list[int] = []
        self.connected: list[ranks_pb2.RankConnectTransfer] = []
        self.gpu_bytes: dict[int, int] = {}
        """What each memory tag holds on each rank's GPU; none without a GPU."""
        self.asleep: set[int] = set()
        self.loaded_digest: int | None = None
        """What the weights come to after a Load, in place of what was saved."""
        self.loads: list[ranks_pb2.RankLoad] = []
        self.stuck_bytes = 0
        """What a Sleep does not give back."""
        self._release = asyncio.Event()

    @property
    def hello(self) -> ranks_pb2.RankHello:
        if self.lost_because is not None:
            raise Unavailable(self.lost_because)
        if self.loading:
            raise Unavailable("still loading")
        return ranks_pb2.RankHello(backend="twin 1.0", dtype="float32", max_sequence_tokens=100)

    @property
    def problem(self) -> str | None:
        return self.lost_because or ("loading" if self.loading else None)

    @property
    def is_lost(self) -> bool:
        return self.lost_because is not None

    def release(self) -> None:
        self._release.set()
        self._release = asyncio.Event()
        self.hold.clear()

    def lose(self, why: str) -> None:
        """A rank dies: whoever waits is told."""
        self.lost_because = why
        self.release()

    async def run_all(self, command, report=None) -> list[ranks_pb2.RankReply]:
        reply = await self.run(command, report)
        replies = []
        for rank in range(self.count):
            mine = ranks_pb2.RankReply()
            mine.CopyFrom(reply)
            for part in ("memory", "memory_change"):
                if self.gpu_bytes and part == reply.WhichOneof("part"):
                    device = mine.memory if part == "memory" else mine.memory_change.device
                    device.uuid = f"GPU-{rank}"
            if mine.HasField("saved"):
                del mine.saved.files[:]
                mine.saved.files.extend(file for file in reply.saved.files if file.rank == rank)
            if rank and (mine.HasField("saved") or mine.HasField("loaded")):
                part = mine.saved if mine.HasField("saved") else mine.loaded
                part.digest = 0
            for peak in mine.step.peaks:
                peak.rank = rank
            replies.append(mine)
        return replies

    def give_up(self, problem: str) -> None:
        self.lose(problem)

    async def run(self, command, report=None) -> ranks_pb2.RankReply:
        _ = self.hello
        work = command.WhichOneof("work")
        self.asked.append(work)
        if report is not None:
            report("working", 1, 2)
        if work in self.hold:
            await self._release.wait()
        if work in self.errors:
            raise self.errors.pop(work)
        _ = self.hello
        return getattr(self, f"_{work}")(getattr(command, work))

    def _forward(self, work):
        reply = ranks_pb2.RankReply()
        for sequence in work.sequences:
            logprobs = [0.0, *(-(t % 7) / work.header.temperature for t in sequence.token_ids[1:])]
            reply.forward.responses.add(id=sequence.id, logprobs=logprobs)
        return reply

    def _train_step(self, work):
        if work.header.dry_run:
            peak = learner_pb2.MemoryPeak(device="host", bytes=5, total_bytes=7)
            return ranks_pb2.RankReply(step=learner_pb2.StepResult(step_id=work.header.step_id, peaks=[peak]))
        self.applied.append(work.header.step_id)
        step = learner_pb2.StepResult(step_id=work.header.step_id, seconds=0.5)
        for update in work.header.updates:
            step.updates.add(tokens=update.token_count, loss=float(len(self.applied)))
        return ranks_pb2.RankReply(step=step)

    def _encode(self, work):
        encoded = [chat_pb2.TokenIds(ids=map(ord, c.messages[0].content)) for c in work.conversations]
        return ranks_pb2.RankReply(encode=ranks_pb2.RankEncodeResult(encoded=encoded))

    def _join_transfer(self, work):
        manifest = transfer_pb2.TransferManifest(
            epoch=work.request.epoch,
            address="127.0.0.1:1",
            sender_ranks=self.count,
            bucket_bytes=work.request.bucket_bytes,
        )
        return ranks_pb2.RankReply(manifest=manifest)

    def _connect_transfer(self, work):
        self.connected.append(work)
        return ranks_pb2.RankReply(done=ranks_pb2.RankDone())

    def _publish(self, work):
        publish = learner_pb2.PublishResult(probe_token_ids=[1, 2], probe_logprobs=[-0.5], bytes=64, seconds=0.1)
        publish.policy.digest = self._digest()
        return ranks_pb2.RankReply(publish=publish)

    def _export(self, work):
        return ranks_pb2.RankReply(export=learner_pb2.ExportResult(path=work.request.path))

    def _save(self, work):
        saved = ranks_pb2.RankSaved(digest=self._digest())
        for rank in range(self.count):
            path = Path(work.folder) / f"rank{rank}.bin"
            path.write_bytes(bytes([len(self.applied)]) * 100)
            saved.files.append(checkpoint.described(path, rank))
        saved.manifest.role, saved.manifest.dtype, saved.manifest.ranks = "actor", "float32", self.count
        saved.manifest.tensors.add(name="w", shape=SHAPE)
        return ranks_pb2.RankReply(saved=saved)

    def _check_load(self, work):
        checkpoint.check_contents(Path(work.folder), work.manifest.files)
        if list(work.manifest.tensors[0].shape) != SHAPE:
            raise InvalidRequest(f"the checkpoint is of another model: w: {work.manifest.tensors[0].shape}")
        return ranks_pb2.RankReply(done=ranks_pb2.RankDone())

    def _load(self, work):
        self.loads.append(work)
        steps = (Path(work.folder) / "rank0.bin").read_bytes()[0]
        self.applied = self.applied[:steps] if len(self.applied) >= steps else list(range(1, steps + 1))
        loaded = ranks_pb2.RankLoaded(digest=self.loaded_digest or self._digest())
        loaded.parts.add(name="optimizer", restored=not work.fresh_optimizer)
        loaded.parts.add(name="schedule", restored=not work.fresh_schedule)
        return ranks_pb2.RankReply(loaded=loaded)

    def _digest(self):
        return DIGEST_OF_VERSION_0 + len(self.applied)

    def _sleep(self, work):
        return self._moved(work.tags, self.asleep | set(work.tags), self.stuck_bytes)

    def _wake(self, work):
        return self._moved(work.tags, self.asleep - set(work.tags), 0)

    def _moved(self, tags, asleep, stuck):
        before, self.asleep = self._free(), asleep
        reply = ranks_pb2.RankReply()
        if self.gpu_bytes:
            change = reply.memory_change
            change.tag_bytes = sum(self.gpu_bytes[tag] for tag in tags)
            change.device.free_bytes_before, change.device.free_bytes_after = before, self._free() - stuck
        else:
            reply.done.SetInParent()
        return reply

    def _free(self):
        return TOTAL_BYTES - sum(size for tag, size in self.gpu_bytes.items() if tag not in self.asleep)

    def _memory(self, work):
        reply = ranks_pb2.RankReply()
        if not self.gpu_bytes:
            reply.done.SetInParent()
            return reply
        reply.memory.total_bytes, reply.memory.free_bytes = TOTAL_BYTES, self._free()
        for tag, size in self.gpu_bytes.items():
            reply.memory.held.add(tag=tag, bytes=0 if tag in self.asleep else size)
        return reply
