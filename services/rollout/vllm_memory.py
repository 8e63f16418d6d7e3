"""Memory of a GPU as vLLM's worker sees it: by the driver, and what vLLM's sleep-mode allocator holds there by tag."""

from __future__ import annotations

import os
from typing import Any

import torch


class MemoryExtension:
    """Methods that the service calls on every worker; `WorkerExtension` (vllm_weights.py) inherits them."""

    def antiphon_memory(self) -> dict[str, Any]:
        """{"pid"}, and on a GPU {"uuid", "total", "free", "held", "asleep"}: the last two are bytes by vLLM's own tags.

        Without sleep mode that allocator holds nothing.
        """
        answer: dict[str, Any] = {"pid": os.getpid()}
        if not torch.cuda.is_available():
            return answer
        from vllm.device_allocator.cumem import CuMemAllocator

        free, total = torch.cuda.mem_get_info()
        held: dict[str, int] = {}
        asleep: dict[str, int] = {}
        allocator = CuMemAllocator.instance
        for allocation in allocator.pointer_to_data.values() if allocator is not None else ():
            sizes = asleep if allocation.is_asleep else held
            sizes[allocation.tag] = sizes.get(allocation.tag, 0) + int(allocation.handle[1])
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        return {**answer, "uuid": f"GPU-{uuid}", "total": total, "free": free, "held": held, "asleep": asleep}
