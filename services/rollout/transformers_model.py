"""A causal language model of transformers without its weights: publications fill it, and then it is computed with."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from antiphon.types.v1.transfer_pb2 import TransferManifest
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import Cache
from transformers.initialization import no_init_weights

from services.common.errors import ConfigError, InvalidRequest
from services.common.weights.manifest import ELEMENT_TYPES, sent, validate
from services.rollout.engine import Unmatched
from services.rollout.transformers_cache import RowCache

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Model:
    """Every parameter is NaN until a publication fills it, so that one that was forgotten cannot hide."""

    def __init__(self, path: str, dtype_name: str) -> None:
        """Raises ConfigError for a folder that holds no model which this can compute."""
        self.dtype = DTYPES[dtype_name]
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            with no_init_weights():
                self._model: Any = AutoModelForCausalLM.from_config(
                    config, dtype=self.dtype, attn_implementation="sdpa"
                )
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: {path} cannot be loaded by transformers: {error}") from None
        self._model.tie_weights()
        self._model.eval().requires_grad_(False)
        self._config = config.get_text_config()
        self.vocabulary_size = int(self._config.vocab_size)
        self._parameters: dict[str, torch.Tensor] = dict(self._model.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        self._tied: dict[str, str] = {}
        """Name of a parameter that is another one → the other one's."""
        for name, parameter in self._parameters.items():
            source = first.setdefault(id(parameter), name)
            if source != name:
                self._tied[name] = source
        self._shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        buffers = set(self._model.state_dict()) - set(self._parameters)
        if buffers:
            raise ConfigError(
                f"model.path: {path} has tensors that a learner does not publish: {sorted(buffers)[:5]}; "
                "use engine: vllm, or another model"
            )
        self._empty()

    @property
    def batches_rows(self) -> bool:
        """Whether rows of different lengths may share a batch under a mask of ours: every layer looks back over all."""
        kinds = set(getattr(self._config, "layer_types", None) or ["full_attention"])
        return kinds == {"full_attention"} and getattr(self._config, "sliding_window", None) is None

    def prefill(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, Cache]:
        """Logits [vocabulary] of what follows, and the keys and values of the tokens."""
        cache = DynamicCache(config=self._model.config)
        return self._last_logits(input_ids=torch.tensor([list(token_ids)]), past_key_values=cache)[0], cache

    def decode(self, token_id: int, cache: Cache) -> torch.Tensor:
        """Logits [vocabulary] of what follows one more token, which the cache takes in."""
        return self._last_logits(input_ids=torch.tensor([[token_id]]), past_key_values=cache)[0]

    def decode_rows(self, token_ids: Sequence[int], rows: RowCache) -> torch.Tensor:
        """The same for one more token of each row: logits [rows, vocabulary]."""
        logits = self._last_logits(
            input_ids=torch.tensor(token_ids)[:, None],
            position_ids=rows.lengths[:, None],
            attention_mask=rows.mask(),
            past_key_values=rows,
        )
        rows.advance()
        return logits

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Of each token but the first, at temperature 1, in one forward without a cache."""
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0, :-1]
            # A row at a time: in float64 the table of a long sequence is large.
            rows = zip(logits, token_ids[1:], strict=True)
            return [float(torch.log_softmax(row.double(), dim=-1)[token]) for row, token in rows]

    def unmatched(self, manifest: TransferManifest) -> Unmatched:
        """Tensors by name that do not fit. Raises InvalidRequest for a manifest that is wrong in itself."""
        validate(manifest)
        known = {spec.name: spec for spec in manifest.tensors}
        differing: list[str] = []
        for name, spec in known.items():
            source = self._tied.get(name)
            if source is not None and spec.alias_of != source:
                sent_as = f"as an alias of {spec.alias_of}" if spec.alias_of else "apart"
                differing.append(f"{name}: expected an alias of {source}, the manifest has it {sent_as}")
            if name not in self._shapes or source is not None:
                continue
            if tuple(spec.shape) != self._shapes[name]:
                differing.append(f"{name}: expected shape {list(self._shapes[name])}, got {list(spec.shape)}")
            if ELEMENT_TYPES.get(spec.element_type) != self.dtype:
                differing.append(f"{name}: expected {self.dtype}, got {ELEMENT_TYPES.get(spec.element_type)}")
        return Unmatched(
            unknown=tuple(name for name in known if name not in self._shapes),
            missing=tuple(name for name in self._shapes if name not in known and name not in self._tied),
            differing=tuple(differing),
        )

    def fill(self, manifest: TransferManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies a whole publication into the parameters.

        Raises InvalidRequest, before any is touched, when it does not fill exactly what there is.
        """
        sources = {spec.name: spec.name for spec in sent(manifest)}
        sources |= {
            spec.name: spec.alias_of for spec in manifest.tensors if spec.alias_of and spec.name in self._shapes
        }
        wanted = set(self._shapes) - set(self._tied)
        if not wanted <= set(sources) or not set(sources) <= set(self._shapes):
            odd = sorted((wanted - set(sources)) | (set(sources) - set(self._shapes)))
            raise InvalidRequest(f"the publication does not fill the model: {odd[:10]}")
        with torch.no_grad():
            for name in sorted(wanted):
                self._parameters[name].copy_(tensors[sources[name]])

    def discard(self) -> None:
        """Gives the memory of the weights up."""
        for name, parameter in self._parameters.items():
            if name not in self._tied:
                parameter.data = torch.empty(0, dtype=self.dtype)

    def restore(self) -> None:
        """Takes it again, without content."""
        for name, parameter in self._parameters.items():
            if name not in self._tied:
                parameter.data = torch.empty(self._shapes[name], dtype=self.dtype)
        self._empty()

    def _empty(self) -> None:
        with torch.no_grad():
            for parameter in self._parameters.values():
                parameter.fill_(float("nan"))

    def _last_logits(self, **words: Any) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self._model(**words, use_cache=True, logits_to_keep=1).logits[:, -1]
        return logits
