"""A causal language model from a Hugging Face folder, as a module that answers log-probs of chosen tokens."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.common.errors import ConfigError
from services.learner import varlen_attention
from services.learner.batching import Layout, Row, plan_micro_batches
from services.learner.fused_layers import fuse_layers
from services.learner.logprob_head import LogprobHead
from services.learner.packing import Packed, pack

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CPU = torch.device("cpu")


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
        words = {}
        if packed.boundaries is not None:
            words = varlen_attention.row_boundaries(packed.boundaries, packed.longest)
        hidden = self.model.base_model(
            input_ids=packed.token_ids,
            position_ids=packed.position_ids,
            attention_mask=packed.attends,
            use_cache=False,
            **words,
        ).last_hidden_state
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, packed.sources)
        logprobs, entropies = self.head(chosen, packed.targets, temperature)
        return logprobs, entropies


def load_policy_model(
    path: str,
    dtype_name: str,
    *,
    gradient_checkpointing: bool,
    device: torch.device = CPU,
    kernel: varlen_attention.Kernel | None = None,
) -> PolicyModel:
    """Loads plainly, never under zero.Init, which rounds rotary frequencies; refuses what it could not train rightly.

    On a GPU in bfloat16 the model attends over rows in one line (`layout_of` says so); `kernel` does it in place of
    torch's own. Raises ConfigError that says what the model has and this cannot do.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=DTYPES[dtype_name], attn_implementation="eager", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path}: cannot be loaded: {error}") from None
    return make_policy_model(path, model, gradient_checkpointing=gradient_checkpointing, device=device, kernel=kernel)


def make_policy_model(
    path: str,
    model: Any,
    *,
    gradient_checkpointing: bool,
    device: torch.device = CPU,
    kernel: varlen_attention.Kernel | None = None,
) -> PolicyModel:
    """The same of a model that is loaded; `path` is what errors call it."""
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
    one_line = kernel is not None or (device.type == "cuda" and model.dtype == torch.bfloat16)
    policy = PolicyModel(model.to(device))
    _compare_with_own_forward(path, policy, varlen_attention.register(kernel) if one_line else "sdpa")
    return policy


def layout_of(model: Any, longest: int) -> Layout:
    """How rows of at most `longest` tokens are laid out for a model that was loaded here."""
    if model.config._attn_implementation == varlen_attention.NAME:
        return Layout.ONE_LINE
    on_cpu = next(model.parameters()).device.type == "cpu"
    return Layout.SHARED if on_cpu and may_share_contexts(model, longest) else Layout.PADDED


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
def _compare_with_own_forward(path: str, policy: PolicyModel, attention: str) -> None:
    """What is trained must be the model's own function, as its plain attention computes it row by row.

    The head must give what the model's own forward gives: some models scale or cap their logits on the way. And rows
    in one line must not see each other: in some model classes a layer does not hear where a row begins.
    """
    model, kind = policy.model, policy.model.config.model_type
    count = max(2, min(model.config.get_text_config().vocab_size, 16))
    first = list(range(count))
    rows = [first, first[::-1], [*first[1:], 0]]
    expected = [_own_logprobs(model, row) for row in rows]
    if next(model.parameters()).device.type == "cuda":
        logger.info("%d modules of %s are computed by fused operations", fuse_layers(model), path)
    try:
        model.set_attn_implementation(attention)
        if model.config._attn_implementation != attention:
            raise ConfigError(f"model {path}: {kind} computes its attention itself; expected one that can be replaced")
        layout = Layout.ONE_LINE if attention == varlen_attention.NAME else Layout.PADDED
        alone, together, other = (
            _found_logprobs(policy, part, layout) for part in (rows[:1], rows[:2], [rows[2], rows[1]])
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"model {path}: {kind} cannot be computed with attention {attention}: {error}") from None
    # In bfloat16 the same products in another batch shape round differently, by half a step of a logit.
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.25
    worst = (alone[0] - expected[0]).abs().max().item()
    if not worst <= tolerance:
        raise ConfigError(
            f"model {path}: its logits are not its hidden states times its output layer: log-probs differ by "
            f"{worst:.3g}; {kind} changes them on the way, which the trainer does not do"
        )
    worst = max((a - b).abs().max().item() for a, b in zip([*together, other[0]], expected, strict=True))
    # The same shapes give the same bits, row by row, unless experts share their products between rows.
    seen = (together[1] - other[1]).abs().max().item()
    has_experts = any("expert" in name for name, _ in model.named_modules())
    if not (worst <= tolerance and seen <= (tolerance if has_experts else 0.0)):
        raise ConfigError(
            f"model {path}: rows that lie in one line see each other: log-probs differ by {worst:.3g} from those of "
            f"the rows alone, and by {seen:.3g} when the neighbour changes; a layer of {kind} does not hear where a "
            "row begins, so the trainer cannot pack rows for it"
        )


def _own_logprobs(model: Any, row: list[int]) -> torch.Tensor:
    ids = torch.tensor([row], device=next(model.parameters()).device)
    logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
    return logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)


def _found_logprobs(policy: PolicyModel, rows: list[list[int]], layout: Layout) -> list[torch.Tensor]:
    asked = [Row(row, range(1, len(row))) for row in rows]
    ((micro_batch,),) = plan_micro_batches(asked, ranks=1, token_budget=1 << 20, layout=layout)
    packed = pack(micro_batch, asked, layout, next(policy.parameters()).device)
    logprobs, _ = policy(packed, 1.0)
    parts = dict(zip(packed.rows, logprobs.split(packed.counts), strict=True))
    return [parts[number] for number in range(len(rows))]
