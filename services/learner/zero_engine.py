"""The ZeRO-3 engine of a rank: stage 3 also where there is only one rank, so that there is one code path."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch

# Set before DeepSpeed looks around: it takes the GPU of a host whose torch is built for CPU.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed

from services.learner.config import OptimizerConfig
from services.learner.policy_model import PolicyModel

# The compiled shared-memory collectives cost a compiler and 18 s at the first start; gloo is as good here.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

VERSION = deepspeed.__version__
REDUCE_BUCKET_ELEMENTS = 1 << 26
NEVER_GATHERED = 1 << 40  # elements; larger than any parameter


def make_zero_engine(
    policy: PolicyModel, options: OptimizerConfig, dtype_name: str, ranks: int, device: torch.device
) -> Any:
    """A DeepSpeed engine around `policy`, with float32 master weights and AdamW. The ranks have joined before."""
    matrices = [p for p in policy.parameters() if p.dim() > 1]
    vectors = [p for p in policy.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=options.betas,
        eps=options.epsilon,
        fused=True,
    )
    deepspeed.utils.set_z3_leaf_modules(policy, _layers(policy), raise_if_not_found=False)
    engine, *_ = deepspeed.initialize(
        model=policy, optimizer=optimizer, config=zero_config(options, dtype_name, ranks, device)
    )
    return engine


def zero_config(options: OptimizerConfig, dtype_name: str, ranks: int, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's settings."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        # We divide by the token count of the whole Update ourselves, and say ourselves when an Update is whole.
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": options.max_gradient_norm,
        "bf16": {"enabled": dtype_name == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        # Sums of gradients are float32; one rank sums nothing, so there it would only be a wider copy.
        **({"communication_data_type": "fp32"} if ranks > 1 else {}),
        "zero_allow_untested_optimizer": True,
        # It would wait for the device in every micro-batch.
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {
            "stage": 3,
            # With one rank nothing travels: a bucket of its own and a stream of its own would only cost copies.
            "contiguous_gradients": device.type != "cpu" and ranks > 1,
            "overlap_comm": device.type != "cpu" and ranks > 1,
            "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
            # With one rank there is nothing to gather: weights that stay save a copy at every use.
            **({"param_persistence_threshold": NEVER_GATHERED} if ranks == 1 else {}),
            # DeepSpeed's own linear layer, in Python, is for weights that are gone between forward and backward.
            "memory_efficient_linear": ranks > 1,
        },
    }


def join_distributed(backend: str) -> None:
    """Lets DeepSpeed use torch's default process group, which is there."""
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def gathered(parameter: torch.nn.Parameter) -> AbstractContextManager[None]:
    """While inside, the whole parameter is there, in every rank. All ranks enter."""
    context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters([parameter])
    return context


def _layers(policy: PolicyModel) -> list[type[torch.nn.Module]]:
    """The classes of the model's layers. ZeRO-3 treats each layer as one: its hooks cost time for each module."""
    names = set(policy.model._no_split_modules or ())
    return sorted(
        {type(m) for m in policy.model.modules() if type(m).__name__ in names}, key=lambda kind: kind.__name__
    )
