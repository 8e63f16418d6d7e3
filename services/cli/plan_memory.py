"""Memory of each process of a run, added up from the sizes of its model and settings. Pure.

What is kept (weights, masters, moments, gradients, keys and values, buckets) is exact arithmetic; activations are a
bound for decoders with gated layers. What the processes take by themselves (an interpreter, torch, the engine's code)
is counted as it was measured, on the host; a CUDA context on a GPU is not, nor what a reward function itself keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.cli.model_size import ModelSize, Shape
from services.cli.recipe import Recipe

MIB, GIB = 2**20, 2**30
BYTES = {"float32": 4, "bfloat16": 2}
SUB_GROUP_ELEMENTS = 10**9
"""DeepSpeed's default: AdamW sees gradients of so many elements at a time, in a copy."""
HEAD_LOGITS = {"cpu": 1 << 25, "gpu": 1 << 29}
"""Of one chunk (services/learner/logprob_head.py)."""
REFERENCE_LOGITS = 1 << 25
"""Of one chunk (services/reward/reference_model.py)."""
ENGINE_WORKSPACE_BYTES = 2 * GIB
"""What an engine on a GPU asks for beside weights and keys (services/rollout/vllm_start.py)."""


BY_ITSELF_MIB = {
    "command": 96,
    "NATS": 48,
    "coordinator": 128,
    "reward worker": 96,
    "scorer": 128,
    "reference model": 576,
    "learner": 96,
    "rank of the learner": 704,
    "rollout worker of vLLM": 672,
    "vLLM engine": 896,
    "rollout worker of transformers": 96,
    "transformers engine": 608,
    "helper of the engine": 16,
}
"""Each process with a model of next to no size, at its highest, and a fifth more: benchmarks/process_memory.py."""


@dataclass(frozen=True)
class Part:
    """Example: "moments", 12345678 bytes, "8 x parameters"."""

    name: str
    bytes: int
    equation: str


@dataclass(frozen=True)
class Process:
    """Example: "learner-0 rank 1" on ("GPU 1",)."""

    name: str
    places: tuple[str, ...]
    """Where its memory is: "host", or GPUs; each part is needed on each of them."""
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """On each of its places."""
        return sum(part.bytes for part in self.parts)


def processes(
    recipe: Recipe, size: ModelSize, shape: Shape | None, reference: ModelSize | None, engine: str = "vllm"
) -> list[Process]:
    """Every process that holds a model, and what all take by themselves. `reference` is the size of the reference
    model, if there is one."""
    found = [_rank(recipe, size, shape, rank) for rank in range(recipe.learner.ranks)]
    found += [_engine(recipe, size, number) for number in range(recipe.coordinator.rollout_workers)]
    if reference is not None:
        found += [_reference(recipe, reference, number) for number in range(recipe.coordinator.reward_workers)]
    return [*found, _by_themselves(recipe, engine)]


def by_place(found: Sequence[Process]) -> dict[str, int]:
    """Bytes on the host and on each GPU."""
    totals: dict[str, int] = {}
    for process in found:
        for place in process.places:
            totals[place] = totals.get(place, 0) + process.bytes
    return totals


def longest_row(recipe: Recipe) -> int:
    """Tokens of the longest prompt with the longest answer."""
    return recipe.coordinator.data.max_prompt_tokens + recipe.coordinator.sampling.max_tokens


def tokens_at_a_time(recipe: Recipe) -> int:
    """Of one pass of a rank, at most: a row that is longer than micro_batch_tokens is a micro-batch of its own."""
    row = longest_row(recipe)
    return max(row, min(recipe.learner.micro_batch_tokens, recipe.coordinator.trajectories_per_step * row))


def activation_bytes_per_token(shape: Shape, width: int) -> int:
    """Of one layer, kept for the backward pass: a bound for any of the kernels.

    In the model's width: two residuals and two normed inputs; queries, rotated ones, attention's output, and keys and
    values widened to all heads (5 x queries); keys, rotated ones and values; gate, up, the gate's activation and the
    product; of a mixture of experts also each chosen expert's input, output and weighted output. In float32: the two
    norms' inputs and normalised inputs.
    """
    routed = 0 if shape.experts is None else 3 * shape.experts.per_token * shape.hidden
    return (
        width * (4 * shape.hidden + 5 * shape.queries + 3 * shape.keys + 4 * shape.inner_at_work + routed)
        + 4 * 4 * shape.hidden
    )


def _by_themselves(recipe: Recipe, engine: str) -> Process:
    """All processes without their models; `engine` is vllm or transformers."""
    run, engines, kind = recipe.coordinator, recipe.coordinator.rollout_workers, {"vllm": "vLLM"}.get(engine, engine)
    scorers = sum(getattr(scorer, "processes", 0) for scorer in recipe.reward.scorers)
    counts = {
        "command": 1,
        "NATS": int(recipe.nats.url is None),
        "coordinator": 1,
        "reward worker": run.reward_workers,
        "scorer": run.reward_workers * scorers,
        "reference model": run.reward_workers * int(recipe.reward.reference is not None),
        "learner": 1,
        "rank of the learner": recipe.learner.ranks,
        f"rollout worker of {kind}": engines,
        f"{kind} engine": engines * recipe.rollout.tensor_parallel,
        "helper of the engine": engines,
    }
    parts = [
        Part(name, count * BY_ITSELF_MIB[name] * MIB, f"{count} x {BY_ITSELF_MIB[name]} MiB")
        for name, count in counts.items()
        if count
    ]
    return Process("processes by themselves, libraries mostly", ("host",), tuple(parts))


def _rank(recipe: Recipe, size: ModelSize, shape: Shape | None, rank: int) -> Process:
    dtype, ranks, gpus = recipe.model.dtype, recipe.learner.ranks, recipe.learner.gpus
    share = -(-size.parameters // ranks)
    of, width = "parameters" if ranks == 1 else f"parameters / {ranks} ranks", BYTES[dtype]
    parts = [Part("weights", width * share, f"{width} x {of}")]
    if dtype != "float32":  # else the weights are the masters
        parts.append(Part("float32 masters", 4 * share, f"4 x {of}"))
    parts.append(Part("AdamW moments", 8 * share, f"8 x {of}"))
    parts.append(Part("gradients", 4 * share, f"4 x {of}"))
    group = min(share, SUB_GROUP_ELEMENTS)
    parts.append(Part("gradients as AdamW sees them", 4 * group, f"4 x min({of}, {SUB_GROUP_ELEMENTS})"))
    if ranks > 1:
        parts.append(
            Part(
                "weights of the layer at work (bound)", 2 * width * size.largest_tensor, f"2 x {width} x largest tensor"
            )
        )
    if shape is not None:
        parts += _passes(recipe, shape, on_gpu=gpus is not None)
    parts.append(_buckets(recipe, size))
    place = f"GPU {gpus[rank]}" if gpus is not None and rank < len(gpus) else "host"
    return Process(f"learner-0 rank {rank}", (place,), tuple(parts))


def _passes(recipe: Recipe, shape: Shape, *, on_gpu: bool) -> list[Part]:
    """What a forward and backward pass takes."""
    width = BYTES[recipe.model.dtype] if on_gpu else 4  # a CPU may have to compute in float32
    tokens, per_token = tokens_at_a_time(recipe), activation_bytes_per_token(shape, width)
    if recipe.learner.gradient_checkpointing:
        kept = tokens * (shape.layers * width * shape.hidden + per_token)
        equation = f"{tokens} tokens x ({shape.layers} layers x {width * shape.hidden} + one layer's {per_token})"
    else:
        kept = tokens * shape.layers * per_token
        equation = f"{tokens} tokens x {shape.layers} layers x {per_token}"
    logits = min(HEAD_LOGITS["gpu" if on_gpu else "cpu"], tokens * shape.vocabulary)
    copies = width if on_gpu else 12  # in place by a kernel; else logits, probabilities and slopes in float32
    table = shape.vocabulary * shape.hidden
    return [
        Part("activations (bound)", kept, equation),
        Part("a chunk of logits", copies * logits, f"{copies} x {logits} logits"),
        Part("gradient of the head", width * table, f"{width} x {shape.vocabulary} x {shape.hidden}"),
    ]


def _buckets(recipe: Recipe, size: ModelSize) -> Part:
    """Two at each end; a tensor that is larger than a bucket is one of its own."""
    mib, width = recipe.coordinator.publication.bucket_mib, BYTES[recipe.model.dtype]
    bucket = max(mib * MIB, width * size.largest_tensor)
    return Part("transfer buckets", 2 * bucket, f"2 x max({mib} MiB, {width} x largest tensor {size.largest_tensor})")


def _engine(recipe: Recipe, size: ModelSize, number: int) -> Process:
    settings, width, parallel = recipe.rollout, BYTES[recipe.model.dtype], recipe.rollout.tensor_parallel
    name, whole, keys = f"rollout-{number}", width * size.parameters, int(settings.kv_cache_gib * GIB)
    if settings.gpus is None:  # every process of the engine is on the host, and stages the publication
        times = "" if parallel == 1 else f"{parallel} (tensor_parallel) x "
        parts = (
            Part("weights", whole, f"{width} x parameters"),
            Part("keys and values", parallel * keys, f"{times}kv_cache_gib = {settings.kv_cache_gib:g}"),
            Part("staging of a publication", parallel * whole, f"{times}{width} x parameters"),
            _buckets(recipe, size),
        )
        return Process(name, ("host",), parts)
    divided = "" if parallel == 1 else f" / {parallel} (tensor_parallel)"
    parts = (
        Part("weights", -(-whole // parallel), f"{width} x parameters{divided}"),
        Part("keys and values", keys, f"kv_cache_gib = {settings.kv_cache_gib:g}"),
        Part("engine's workspace", ENGINE_WORKSPACE_BYTES, "2 GiB"),
        _buckets(recipe, size),
    )
    mine = settings.gpus[number * parallel : (number + 1) * parallel]
    return Process(name, tuple(f"GPU {gpu}" for gpu in mine), parts)


def _reference(recipe: Recipe, size: ModelSize, number: int) -> Process:
    reference = recipe.reward.reference
    assert reference is not None
    on_gpu = reference.device == "cuda"
    width = BYTES[reference.dtype or recipe.model.dtype] if on_gpu else 4  # a CPU may have to compute in float32
    parts = (
        Part("weights", width * size.parameters, f"{width} x parameters"),
        Part("a chunk of logits", 8 * REFERENCE_LOGITS, f"8 x {REFERENCE_LOGITS} logits"),
    )
    return Process(f"reward-{number} reference model", ("a GPU",) if on_gpu else ("host",), parts)


def model_folder_of_reference(recipe: Recipe) -> Path | None:
    """That of the reference model; None where there is none."""
    reference = recipe.reward.reference
    if reference is None:
        return None
    return Path(reference.path or recipe.model.path)
