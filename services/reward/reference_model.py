"""A frozen causal language model from a Hugging Face folder, and the log-probabilities of token ids under it.

For the logits z = W h / T that predict a token y:  log p(y) = z_y − logsumexp(z).  Logits come in the dtype of the
hidden states, as the trainer computes them, and are float32 from there on. They exist for a chunk of tokens at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from services.common.digest import digest_vocabulary
from services.common.errors import ConfigError
from services.common.weights.digest import add_digests, tensor_digest

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHUNK_LOGITS = 1 << 25
"""Float32 logits at a time: 128 MiB, and as much again for what is made of them."""


class ReferenceModel:
    """Rows of a micro-batch lie side by side, padded at the right: causal attention never looks there."""

    def __init__(self, path: str, dtype: str, device: str = "auto") -> None:
        """Loads and checks the model. Raises ConfigError that says what it has and this cannot do."""
        cuda = torch.cuda.is_available()
        if device == "cuda" and not cuda:
            raise ConfigError(f"reference {path}: device cuda, and torch {torch.__version__} sees no GPU")
        self._device = torch.device("cuda" if cuda and device != "cpu" else "cpu")
        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=DTYPES[dtype], attn_implementation="eager", local_files_only=True
            )
            tokenizer = Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
        except Exception as error:  # `tokenizers` raises bare Exception; a broken folder makes transformers raise many
            raise ConfigError(f"reference {path}: cannot be loaded: {type(error).__name__}: {error}") from None
        self.tokenizer_digest = digest_vocabulary(tokenizer.get_vocab(with_added_tokens=True))
        _refuse_unsupported(path, self._model)
        self._model.requires_grad_(False).eval()
        # named_parameters leaves out aliases; a policy's digest does, too.
        self.digest = add_digests(
            *(tensor_digest(name, parameter.reshape(-1), 0) for name, parameter in self._model.named_parameters())
        )
        if dtype == "bfloat16" and self._device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            logger.warning("no bfloat16 arithmetic on this CPU: weights are rounded to bfloat16, computing is float32")
            self._model.float()
        self._model.to(self._device)
        text_config = self._model.config.get_text_config()
        self.max_sequence_tokens = int(text_config.max_position_embeddings)
        self._head: torch.Tensor = self._model.get_output_embeddings().weight  # [V, H]
        self.vocabulary_size = int(self._head.shape[0])
        self._compare_with_own_forward(path)

    @torch.inference_mode()
    def logprobs(self, rows: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """Of every token of each row given those before it, at this temperature; the first of a row is 0."""
        width = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
        sources = [number * width + place for number, row in enumerate(rows) for place in range(len(row) - 1)]
        ids = ids.to(self._device)
        found = torch.zeros(0)
        if sources:
            hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            chosen = torch.tensor(sources, device=self._device)
            found = self._chosen_logprobs(hidden.flatten(0, 1)[chosen], ids.flatten()[chosen + 1], temperature).cpu()
        return [[0.0, *part.tolist()] for part in found.split([len(row) - 1 for row in rows])]

    def _chosen_logprobs(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        """hidden [T, H], targets [T] → [T] float32."""
        chunk = max(1, CHUNK_LOGITS // self.vocabulary_size)
        parts = []
        for some, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = torch.nn.functional.linear(some, self._head).float().div_(temperature)
            parts.append(logits.gather(-1, wanted[:, None]).squeeze(-1) - torch.logsumexp(logits, dim=-1))
            del logits  # before the next ones come
        return torch.cat(parts)

    @torch.inference_mode()
    def _compare_with_own_forward(self, path: str) -> None:
        """The log-probs must be the model's own, by its plain attention and row by row: some models scale or cap their
        logits on the way, and none may look at padding or at the row beside.
        """
        count = max(2, min(self.vocabulary_size, 16))
        row = list(range(count))
        rows = [row, row[::-1], [*row[1:], 0]]
        expected = [self._own_logprobs(each) for each in rows]
        kind = self._model.config.model_type
        try:
            self._model.set_attn_implementation("sdpa")
            found = self.logprobs([rows[0], rows[1][: count // 2 + 1], rows[2]], 1.0)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"reference {path}: {kind} cannot be computed: {error}") from None
        worst = max(
            abs(a - b)
            for got, wanted in zip(found, expected, strict=True)
            for a, b in zip(got[1:], wanted, strict=False)
        )
        # In bfloat16 the same products in another batch shape round differently, by half a step of a logit.
        tolerance = 1e-3 if self._model.dtype == torch.float32 else 0.25
        if not worst <= tolerance:
            raise ConfigError(
                f"reference {path}: log-probs from its hidden states and its output layer, of rows side by side, "
                f"differ by {worst:.3g} from the model's own: {kind} changes its logits on the way, or its rows see "
                "each other; it cannot be a reference here"
            )

    def _own_logprobs(self, row: list[int]) -> list[float]:
        ids = torch.tensor([row], device=self._device)
        logprobs = torch.log_softmax(self._model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
        found: list[float] = logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()
        return found


def _refuse_unsupported(path: str, model: Any) -> None:
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise ConfigError(f"reference {path}: its output layer is {head}; expected a linear layer without bias")
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dtype != torch.float32:
            raise ConfigError(f"reference {path}: {name} is {buffer.dtype}; rotary frequencies must be float32")
