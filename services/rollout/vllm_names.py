"""The Hugging Face names and shapes of a vLLM model's parameters, and how a manifest differs from them.

vLLM packs projections that read the same input (q, k, v; gate, up) into one layer, pads the vocabulary, and on CPU
throws the weights of a linear layer away once they are packed for its kernels: so shapes come from the layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from antiphon.types.v1.transfer_pb2 import TransferManifest
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from services.common.weights.manifest import ELEMENT_TYPES, validate
from services.rollout.engine import Unmatched

Shape = tuple[int, ...]


def tied_heads(model: torch.nn.Module) -> dict[str, str]:
    """Heads that share their weight with an embedding: name of the head's weight -> name of the embedding's."""
    modules = dict(model.named_modules())
    return {
        f"{head_name}.weight": f"{name}.weight"
        for head_name, head in modules.items()
        if isinstance(head, ParallelLMHead)
        for name, module in modules.items()
        if isinstance(module, VocabParallelEmbedding)
        and not isinstance(module, ParallelLMHead)
        and module.weight is head.weight
    }


def expected_shapes(model: torch.nn.Module) -> dict[str, Shape]:
    """Every tensor that fills the model, by Hugging Face name; tied heads are not among them."""
    tied = tied_heads(model)
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    shapes: dict[str, Shape] = {}
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{module_name}.{parameter_name}"
            if name not in tied:
                shapes.update(_unpacked(module_name, module, parameter_name, parameter, packed))
    return shapes


def _unpacked(
    module_name: str,
    module: torch.nn.Module,
    parameter_name: str,
    parameter: torch.nn.Parameter,
    packed: dict[str, list[str]],
) -> Iterator[tuple[str, Shape]]:
    parent, _, last = module_name.rpartition(".")
    if isinstance(module, LinearBase):
        columns: Shape = () if parameter_name == "bias" else (module.input_size,)
        if last in packed and len(packed[last]) > 1:
            for part, rows in zip(packed[last], module.output_sizes, strict=True):
                yield f"{parent}.{part}.{parameter_name}", (rows, *columns)
        else:
            yield f"{module_name}.{parameter_name}", (module.output_size, *columns)
    elif isinstance(module, VocabParallelEmbedding):
        columns = () if parameter_name == "bias" else (module.embedding_dim,)
        yield f"{module_name}.{parameter_name}", (module.org_vocab_size, *columns)
    else:
        yield f"{module_name}.{parameter_name}", tuple(parameter.shape)


def unmatched(manifest: TransferManifest, model: torch.nn.Module, dtype: torch.dtype) -> Unmatched:
    """Tensors by name that do not fit. Raises InvalidRequest for a manifest that is wrong in itself."""
    validate(manifest)
    shapes = expected_shapes(model)
    tied = tied_heads(model)
    known = {spec.name: spec for spec in manifest.tensors}
    unknown = [name for name in known if name not in shapes and name not in tied]
    missing = [name for name in shapes if name not in known]
    differing: list[str] = []
    for name, spec in known.items():
        if name in tied and spec.alias_of != tied[name]:
            sent_as = f"as an alias of {spec.alias_of}" if spec.alias_of else "apart"
            differing.append(f"{name}: expected an alias of {tied[name]}, the manifest has it {sent_as}")
        if name not in shapes:
            continue
        if tuple(spec.shape) != shapes[name]:
            differing.append(f"{name}: expected shape {list(shapes[name])}, got {list(spec.shape)}")
        if ELEMENT_TYPES.get(spec.element_type) != dtype:
            differing.append(f"{name}: expected {dtype}, got {ELEMENT_TYPES.get(spec.element_type)}")
    return Unmatched(tuple(unknown), tuple(missing), tuple(differing))
