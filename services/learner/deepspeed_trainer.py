"""One rank of a learner on DeepSpeed ZeRO-3 (stage 3 also where there is only one rank: one code path)."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from antiphon.learner.v1 import learner_pb2, ranks_pb2
from antiphon.tenant.v1 import tenant_pb2
from antiphon.types.v1 import chat_pb2, grant_pb2, transfer_pb2
from transformers import AutoTokenizer

from services.common.config import ProcessConfig
from services.common.errors import AntiphonError, InvalidRequest, Unavailable
from services.learner import exporting
from services.learner.batching import Layout, Row, plan_micro_batches
from services.learner.config import LearnerConfig
from services.learner.device_memory import DeviceMemory
from services.learner.dry_stepping import DryStepRunner
from services.learner.memory_peak import MemoryWatch
from services.learner.packing import pack
from services.learner.policy_model import (
    compute_in_float32,
    lacks_bfloat16_arithmetic,
    layout_of,
    load_policy_model,
)
from services.learner.publishing import WeightTransfer, probe_token_ids
from services.learner.rank_checkpoint import RankCheckpoint
from services.learner.stepping import StepRunner
from services.learner.trainer import Report
from services.learner.zero_engine import VERSION, gathered, join_distributed, make_zero_engine
from services.learner.zero_state import ZeroState

logger = logging.getLogger(__name__)


class DeepSpeedTrainer:
    """See services/learner/trainer.py for what each method owes."""

    def __init__(self, process: ProcessConfig[LearnerConfig], rank: int, ranks: int, rendezvous: Path) -> None:
        """Loads the model and joins the other ranks at the file `rendezvous`. Blocks until all are there."""
        settings = process.settings
        self._process = process
        self._rank = rank
        self._ranks = ranks
        self._device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        # OMP_NUM_THREADS, which the parent sets, is what torch takes for its threads.
        torch.manual_seed(process.service.seed)
        self._join_ranks(rendezvous, settings.rank_silence_seconds)
        policy = load_policy_model(
            process.model.path,
            process.model.dtype,
            gradient_checkpointing=settings.gradient_checkpointing,
            device=self._device,
        )
        self._model = policy.model
        text_config = self._model.config.get_text_config()
        self._max_sequence_tokens = int(text_config.max_position_embeddings)
        if process.model.dtype == "bfloat16" and lacks_bfloat16_arithmetic(self._device):
            logger.warning("no bfloat16 arithmetic on this CPU: weights are bfloat16, products and activations float32")
            compute_in_float32(self._model)
        layout = layout_of(self._model, self._max_sequence_tokens)
        self._engine = make_zero_engine(policy, settings.optimizer, process.model.dtype, ranks, self._device)
        self._state = ZeroState(self._engine, self._model, rank)
        self._steps = StepRunner(
            self._engine,
            settings.optimizer,
            rank=rank,
            ranks=ranks,
            device=self._device,
            token_budget=settings.micro_batch_tokens,
            layout=layout,
        )
        self._checkpoint = RankCheckpoint(
            process, self._state, self._steps, rank=rank, ranks=ranks, device=self._device
        )
        self._memory: DeviceMemory | None = None
        if self._device.type == "cuda":
            self._memory = DeviceMemory(self._engine, self._device)
            if process.service.shares_gpus:
                self._memory.prepare()
        self._transfer = WeightTransfer(self._model, rank, ranks, self._device)
        self._tokenizer = AutoTokenizer.from_pretrained(process.model.path, local_files_only=True)
        self._vocabulary = int(text_config.vocab_size)
        self._probe_ids = probe_token_ids(
            min(self._vocabulary, len(self._tokenizer)),
            [*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder],
        )
        self._probe_logprobs: list[float] | None = None
        """Of the current weights, once computed."""
        if self._memory is not None:
            self._probe()

    def hello(self) -> ranks_pb2.RankHello:
        return ranks_pb2.RankHello(
            rank=self._rank,
            pid=os.getpid(),
            backend=f"deepspeed {VERSION}",
            dtype=self._process.model.dtype,
            max_sequence_tokens=self._max_sequence_tokens,
        )

    def forward(self, work: ranks_pb2.RankForward, report: Report) -> list[learner_pb2.ForwardResponse]:
        for sequence in work.sequences:
            self._check_tokens(sequence.id, sequence.token_ids)
        answers = self._logprobs([list(s.token_ids) for s in work.sequences], work.header.temperature, report)
        if self._rank != 0:
            return []
        return [
            learner_pb2.ForwardResponse(id=sequence.id, logprobs=logprobs)
            for sequence, logprobs in zip(work.sequences, answers, strict=True)
        ]

    def train_step(self, work: ranks_pb2.RankTrainStep, report: Report) -> learner_pb2.StepResult | None:
        for trajectory in work.trajectories:
            self._check_tokens(trajectory.trajectory_id, trajectory.token_ids)
        if work.header.dry_run:
            return self._dry_run(work, report)
        self._probe_logprobs = None
        result = self._steps.run(work.header, work.trajectories, report)
        if self._memory is not None:
            self._memory.note_sizes()
            self._probe()  # not in the pause of the publication
        return result if self._rank == 0 else None

    def encode(self, work: ranks_pb2.RankEncode) -> list[chat_pb2.TokenIds]:
        if self._rank != 0:
            return []
        encoded: list[chat_pb2.TokenIds] = []
        for number, conversation in enumerate(work.conversations):
            messages = [{"role": message.role, "content": message.content} for message in conversation.messages]
            try:
                ids = self._tokenizer.apply_chat_template(
                    messages, tokenize=True, return_dict=False, add_generation_prompt=True
                )
            except Exception as error:  # the template is the model's own program: it may raise anything
                raise InvalidRequest(f"conversation {number}: the chat template refuses it: {error}") from None
            encoded.append(chat_pb2.TokenIds(ids=ids))
        return encoded

    def join_transfer(self, request: learner_pb2.JoinTransferRequest) -> transfer_pb2.TransferManifest | None:
        return self._transfer.join(request, self._process.service.host)

    def connect_transfer(self, work: ranks_pb2.RankConnectTransfer) -> None:
        self._transfer.connect(work.manifest, work.deadline_seconds)

    def publish(self, request: learner_pb2.PublishRequest, report: Report) -> learner_pb2.PublishResult | None:
        begin = time.monotonic()
        failure: AntiphonError | None = None
        digest = sent = 0
        try:
            sending = self._transfer.send(
                request.epoch, request.deadline_seconds, lambda done, of: report("transfer", done, of)
            )
            digest, sent = sending.digest, sending.bytes
        except AntiphonError as error:
            failure = error
        # Every rank comes here, whatever became of its own group, so that none is left waiting for another.
        signed = digest - (1 << 64) if digest >= 1 << 63 else digest
        sums = torch.tensor([signed, sent, int(failure is not None)], dtype=torch.int64, device=self._device)
        dist.all_reduce(sums)  # int64 wraps around, as the digest does
        digest, sent, failures = (int(value) for value in sums.tolist())
        if failures:
            self._transfer.leave()
            if failure is not None:
                raise failure
            return None  # the rank that failed says why
        logprobs = self._probe()
        if self._rank != 0:
            return None
        result = learner_pb2.PublishResult(
            probe_token_ids=self._probe_ids, probe_logprobs=logprobs, bytes=sent, seconds=time.monotonic() - begin
        )
        result.policy.digest = digest & ((1 << 64) - 1)
        return result

    def export(self, request: learner_pb2.ExportRequest, report: Report) -> learner_pb2.ExportResult | None:
        tensors = self._gathered()
        if self._rank != 0:
            for _ in tensors:
                pass
            return None
        shapes = {name: tuple(parameter.ds_shape) for name, parameter in self._model.named_parameters()}
        try:
            exporting.write_folder(
                Path(request.path),
                source=Path(self._process.model.path),
                tensors=tensors,
                shapes=shapes,
                dtype_name=self._process.model.dtype,
                report=lambda done: report("export", done, len(shapes)),
                chat_template=request.chat_template,
            )
        except OSError as error:
            raise Unavailable(f"export to {request.path}: {error}; nothing was left there") from None
        finally:
            for _ in tensors:  # the other ranks take part in every gather: so does this one, even when it cannot write
                pass
        return learner_pb2.ExportResult(path=request.path)

    def save(self, work: ranks_pb2.RankSave, report: Report) -> ranks_pb2.RankSaved:
        return self._checkpoint.save(work, report)

    def check_load(self, work: ranks_pb2.RankCheckLoad, report: Report) -> None:
        self._checkpoint.check_load(work, report)

    def load(self, work: ranks_pb2.RankLoad, report: Report) -> ranks_pb2.RankLoaded:
        self._probe_logprobs = None
        loaded = self._checkpoint.load(work, report)
        if self._memory is not None:
            self._memory.note_sizes()
            self._probe()
        return loaded

    def sleep(self, tags: Sequence[grant_pb2.MemoryTag]) -> ranks_pb2.RankMemoryChange | None:
        if grant_pb2.MEMORY_TAG_WEIGHTS in tags:
            self._transfer.leave()  # its buffers are on the GPU, under no tag
        return None if self._memory is None else self._memory.sleep(tags)

    def wake(self, tags: Sequence[grant_pb2.MemoryTag]) -> ranks_pb2.RankMemoryChange | None:
        return None if self._memory is None else self._memory.wake(tags)

    def memory(self) -> tenant_pb2.DeviceMemory | None:
        return None if self._memory is None else self._memory.held()

    def _dry_run(self, work: ranks_pb2.RankTrainStep, report: Report) -> learner_pb2.StepResult:
        watch = MemoryWatch(self._rank, self._device)
        self._state.make_moments()
        steps = DryStepRunner(
            self._engine,
            self._process.settings.optimizer,
            rank=self._rank,
            ranks=self._ranks,
            device=self._device,
            token_budget=self._steps.token_budget,
            layout=self._steps.layout,
        )
        result = steps.run(work.header, work.trajectories, report)
        result.peaks.append(watch.peak())
        if self._memory is not None:
            self._memory.note_sizes()
        return result

    def _probe(self) -> list[float]:
        """Log-probs of the probe's tokens but the first under the current weights; computed once for each version."""
        if self._probe_logprobs is None:
            self._probe_logprobs = self._logprobs([self._probe_ids], 1.0, lambda phase, done, of: None)[0][1:]
        return self._probe_logprobs

    def _join_ranks(self, rendezvous: Path, timeout_seconds: float) -> None:
        os.environ.update(RANK=str(self._rank), LOCAL_RANK=str(self._rank), WORLD_SIZE=str(self._ranks))
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=f"file://{rendezvous}",
            rank=self._rank,
            world_size=self._ranks,
            timeout=timedelta(seconds=timeout_seconds),
        )
        join_distributed(backend)

    @torch.no_grad()
    def _logprobs(self, sequences: list[list[int]], temperature: float, report: Report) -> list[list[float]]:
        """Log-probs of every token of each sequence, 0 for its first; in every rank."""
        layout = Layout.PADDED if self._steps.layout is Layout.SHARED else self._steps.layout
        rows = [Row(ids, range(1, len(ids))) for ids in sequences]
        plan = plan_micro_batches(rows, ranks=self._ranks, token_budget=self._steps.token_budget, layout=layout)[
            self._rank
        ]
        found = torch.zeros(sum(len(row.predicted) for row in rows), dtype=torch.float32, device=self._device)
        for done, micro_batch in enumerate(plan, start=1):
            packed = pack(micro_batch, rows, layout, self._device)
            logprobs, _ = self._engine(packed, temperature)
            if not packed.is_empty:
                found[packed.numbers] = logprobs
            report("forward", done, len(plan))
        dist.all_reduce(found)  # every row was computed by one rank; elsewhere it is 0
        values = iter(found.tolist())
        return [[0.0, *itertools.islice(values, len(ids) - 1)] for ids in sequences]

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors one by one on the host, in rank 0; the other ranks take part and get empty ones."""
        for name, parameter in self._model.named_parameters():
            with gathered(parameter):
                whole = parameter.detach().to("cpu", copy=True) if self._rank == 0 else torch.empty(0)
            yield name, whole

    def _check_tokens(self, name: str, token_ids: Any) -> None:
        if not 0 < len(token_ids) <= self._max_sequence_tokens:
            raise InvalidRequest(f"{name}: {len(token_ids)} tokens; the model takes 1 to {self._max_sequence_tokens}")
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocabulary:
            wrong = low if low < 0 else high
            raise InvalidRequest(f"{name}: token id {wrong} is outside the vocabulary of {self._vocabulary}")
