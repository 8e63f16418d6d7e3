"""Real ranks on gloo, the learner over them, and what they are compared with."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import torch
import transformers
from antiphon.learner.v1 import checkpoint_pb2, learner_pb2
from antiphon.types.v1 import transfer_pb2

from services.common.config import ProcessConfig, dump, parse
from services.common.weights.receiver import Receiver
from services.learner import checkpoint
from services.learner.config import LearnerConfig
from services.learner.learner import Learner
from services.learner.process import rank_environment
from services.learner.ranks import RankProcesses, rank_command_line
from tests.tiny.models import make_tiny_model
from tests.unit.learner.batches import make_header
from tests.unit.learner.guards import open_guard

TEMPERATURE = 0.7
START_SECONDS = 120.0
WORK_SECONDS = 60.0


class Group:
    """Ranks of one model, the learner over them, and the same model in plain transformers."""

    def __init__(
        self,
        folder: Path,
        *,
        ranks: int,
        tied: bool,
        dtype: str = "float32",
        one_line: bool = False,
        seed: int | None = None,
    ) -> None:
        self.folder = folder
        self.model_folder = make_tiny_model(folder / "model", seed=ranks if seed is None else seed, tied=tied)
        self.plain = transformers.AutoModelForCausalLM.from_pretrained(self.model_folder, dtype=torch.float32).eval()
        self.cuts: dict[str, dict] = {}
        service = {"run_id": "test", "worker_id": "learner", "run_dir": str(folder), "nats_url": "none"}
        model = {"path": str(self.model_folder), "dtype": dtype}
        settings = {"ranks": ranks, "micro_batch_tokens": 64, "optimizer": {"learning_rate": 0.0}}
        tree = {"service": service, "model": model, "settings": settings}
        (folder / "process.yaml").write_text(dump(parse(ProcessConfig[LearnerConfig], tree, "test")))
        self.cut({})
        self.ranks = RankProcesses(
            ranks,
            rank_command_line(folder / "process.yaml", ranks, "tests.unit.learner.capturing_rank"),
            folder / "logs",
            "learner",
            environment={**rank_environment(1), "CAPTURE": str(folder), **({"ONE_LINE": "1"} if one_line else {})},
            start_seconds=START_SECONDS,
            silence_seconds=WORK_SECONDS,
        )
        self.learner = Learner(self.ranks, open_guard())

    def cut(self, cuts: dict) -> int:
        """Says how the next Step is to be cut; answers its id."""
        step_id = self.learner.policy.version + 1 if hasattr(self, "learner") else 0
        self.cuts[str(step_id)] = cuts
        (self.folder / "cuts.json").write_text(json.dumps(self.cuts))
        return step_id

    async def step(self, batch, *, plan=None, cuts=None, dry_run=False, policy=None) -> learner_pb2.StepResult:
        header = make_header(self.cut(cuts or {}), batch, plan, TEMPERATURE)
        header.dry_run = dry_run
        if policy is not None:
            header.policy.CopyFrom(policy)
        operation = await self.learner.train_step(header, batch)
        return await asyncio.wait_for(operation.result(), WORK_SECONDS)

    def gradients(self, update: int = 1) -> dict[str, torch.Tensor]:
        """The whole gradient of an Update of the last Step."""
        found: dict[str, torch.Tensor] = torch.load(
            self.folder / f"gradients-{self.learner.policy.version}-{update}.pt", weights_only=True
        )
        return found

    async def weights(self, name: str) -> tuple[Path, dict[str, torch.Tensor]]:
        """Exports, and reads the folder back with plain transformers."""
        path = self.folder / name
        operation = self.learner.export(learner_pb2.ExportRequest(request_id=name, path=str(path)))
        await asyncio.wait_for(operation.result(), WORK_SECONDS)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        return path, dict(loaded.state_dict())

    async def save(self, name: str) -> tuple[Path, checkpoint_pb2.CheckpointManifest]:
        """Saves the current version into a folder of that name."""
        path = self.folder / name
        request = learner_pb2.SaveRequest(request_id=name, path=str(path), policy_version=self.learner.policy.version)
        await asyncio.wait_for(self.learner.checkpoints.save(request).result(), WORK_SECONDS)
        return path, checkpoint.read_manifest(path)[0]

    async def load(self, path: Path, request_id: str, **flags: bool) -> learner_pb2.LoadResult:
        request = learner_pb2.LoadRequest(request_id=request_id, path=str(path), **flags)
        return await asyncio.wait_for(self.learner.checkpoints.load(request).result(), WORK_SECONDS)

    async def logprobs(self, rows: list[list[int]], temperature: float) -> list[list[float]]:
        sequences = [learner_pb2.Sequence(id=str(i), token_ids=row) for i, row in enumerate(rows)]
        answer = self.learner.forward(learner_pb2.ForwardHeader(temperature=temperature), sequences)
        return [list(r.logprobs) for r in await asyncio.wait_for(answer, WORK_SECONDS)]

    async def received(self, epoch: int, receivers: int = 1):
        """Publishes to receivers in this process: the result, and what each received."""
        request = learner_pb2.JoinTransferRequest(
            epoch=epoch,
            transport=transfer_pb2.TRANSPORT_GLOO,
            receiver_ranks=receivers,
            bucket_bytes=100_000,
            deadline_seconds=WORK_SECONDS,
        )
        manifest = await self.learner.join_transfer(request)
        ends = await asyncio.gather(
            *(asyncio.to_thread(Receiver, manifest, r, deadline_seconds=WORK_SECONDS) for r in range(receivers))
        )
        publication = self.learner.publish(
            learner_pb2.PublishRequest(
                request_id=f"publish-{epoch}",
                epoch=epoch,
                policy_version=self.learner.policy.version,
                deadline_seconds=WORK_SECONDS,
            )
        )

        def receive(end: Receiver) -> dict[str, torch.Tensor]:
            buckets = end.receive(deadline_seconds=WORK_SECONDS)
            return {spec.name: tensor.clone() for bucket in buckets for spec, tensor in bucket}

        tensors = await asyncio.gather(*(asyncio.to_thread(receive, end) for end in ends))
        result = await asyncio.wait_for(publication.result(), WORK_SECONDS)
        digests = {end.digest for end in ends}
        for end in ends:
            end.close()
        assert digests == {result.policy.digest}
        return manifest, result, tensors


def assert_same_gradients(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        assert scale > 0, name
        worst = (found[name].double() - gradient).abs().max().item()
        assert worst <= 2e-5 * scale + 1e-9, f"{name}: {worst} of {scale}"
