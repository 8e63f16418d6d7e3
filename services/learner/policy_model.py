"""A causal language model from a Hugging Face folder, as a module that answers log-probs of chosen tokens."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.common.errors import ConfigError
from services.learner.logprob_head import LogprobHead
from services.learner.packing import Packed

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyModel(torch.nn.Module):
    """The whole model in one forward, so that ZeRO-3 sees every use of every weight.

    `model` is the Hugging Face model with its own names; its output layer is never called: `head` uses the same weight
    on the hidden states that predict a token that is asked for, and on no others.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.head = LogprobHead(model.get_output_embeddings().weight)

    def forward(self, packed: Packed, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies [T] of the predicted tokens at this temperature, float32."""
        hidden = self.model.base_model(
            input_ids=packed.token_ids,
            position_ids=packed.position_ids,
            attention_mask=packed.attends,
            use_cache=False,
        ).last_hidden_state
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, packed.sources)
        logprobs, entropies = self.head(chosen, packed.targets, temperature)
        return logprobs, entropies


def load_policy_model(path: str, dtype_name: str, *, gradient_checkpointing: bool) -> PolicyModel:
    """Loads plainly, never under zero.Init, which rounds rotary frequencies; refuses what it could not train rightly.

    Raises ConfigError that says what the model has and this cannot do.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=DTYPES[dtype_name], attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path}: cannot be loaded: {error}") from None
    _refuse_unsupported(path, model)
    _silence_dropout(model)
    model.config.use_cache = False
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dtype != torch.float32:
            raise ConfigError(f"model {path}: {name} is {buffer.dtype}; rotary frequencies must be float32")
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers checkpoints in training mode only; without dropout the mode changes nothing else
    else:
        model.eval()
    policy = PolicyModel(model)
    _compare_with_own_forward(path, policy)
    return policy


def may_share_contexts(model: Any, longest: int) -> bool:
    """Whether rows may lie side by side under a mask of ours: every layer looks back over the whole line."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    return kinds == {"full_attention"} and (window is None or window >= longest)


def lacks_bfloat16_arithmetic(device: torch.device) -> bool:
    """Whether bfloat16 products are emulated here: six times slower than float32 on a CPU without AVX-512 bf16."""
    return device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def compute_in_float32(model: Any) -> None:
    """Makes a bfloat16 model compute in float32: its weights stay bfloat16 and are widened where they are used.

    Activations are not rounded any more, so log-probs come closer to those of the exact function of the same weights.
    """
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.float())
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = _WidenedLinear(module)


class _WidenedLinear:
    def __init__(self, module: torch.nn.Linear) -> None:
        self._module = module

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _WidenedProduct.apply(inputs, self._module.weight)
        return output if self._module.bias is None else output + self._module.bias


class _WidenedProduct(torch.autograd.Function):
    """x Wᵀ with W widened to the dtype of x, again in the backward pass: the wide copy is not kept between the two."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return torch.nn.functional.linear(inputs, weight.to(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, weight = ctx.saved_tensors
        gradient = gradients[0]
        flat = gradient.reshape(-1, gradient.shape[-1])
        into_weight = flat.t() @ inputs.reshape(-1, inputs.shape[-1])
        return gradient @ weight.to(inputs.dtype), into_weight.to(weight.dtype)


def _refuse_unsupported(path: str, model: Any) -> None:
    head = model.get_output_embeddings()
    problems: list[str] = []
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        problems.append(f"its output layer is {head}; expected a linear layer without bias")
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    persistent = sorted(set(model.state_dict()) - parameters)
    if persistent:
        problems.append(f"its checkpoint has buffers, which a publication does not carry: {', '.join(persistent)}")
    if problems:
        raise ConfigError(f"model {path}: " + "; ".join(problems))


def _silence_dropout(model: Any) -> None:
    """A policy gradient needs the log-probs of the distribution that sampled, which had no dropout."""
    changed: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            module.p = 0.0
            changed.add(name)
        if getattr(module, "attention_dropout", 0.0):
            module.attention_dropout = 0.0
            changed.add(f"{name}.attention_dropout")
    if changed:
        logger.warning("dropout is switched off: %s", ", ".join(sorted(changed)))


@torch.no_grad()
def _compare_with_own_forward(path: str, policy: PolicyModel) -> None:
    """The head must give what the model's own forward gives: some models scale or cap their logits on the way."""
    count = min(policy.model.config.get_text_config().vocab_size, 16)
    ids = torch.arange(count)[None]
    expected = torch.log_softmax(policy.model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
    expected = expected.gather(-1, ids[0, 1:, None]).squeeze(-1)
    packed = Packed(ids, None, None, torch.arange(count - 1), ids[0, 1:], (0,), (count - 1,))
    found, _ = policy(packed, 1.0)
    worst = (found - expected).abs().max().item()
    # In bfloat16 the same products in another batch shape round differently, by half a step of a logit.
    tolerance = 1e-3 if found.dtype == policy.model.dtype else 0.25
    if not worst <= tolerance:
        raise ConfigError(
            f"model {path}: its logits are not its hidden states times its output layer: log-probs differ by "
            f"{worst:.3g}; {policy.model.config.model_type} changes them on the way, which the trainer does not do"
        )
