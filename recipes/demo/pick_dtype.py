"""Prints the dtype that suits this machine: bfloat16, or float32 where the processor has no bf16 arithmetic.

Without AVX-512 a bf16 product is emulated and ten to a hundred times slower, so it is measured, not guessed.
"""

from __future__ import annotations

import sys
import time

SIZE = 512


def seconds(dtype: object) -> float:
    """The shortest of three products of two SIZE x SIZE matrices."""
    import torch

    assert isinstance(dtype, torch.dtype)
    left, right = torch.ones(SIZE, SIZE, dtype=dtype), torch.ones(SIZE, SIZE, dtype=dtype)
    taken = []
    for _ in range(4):  # the first one also pays for what is set up once
        started = time.perf_counter()
        left @ right
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


def main() -> None:
    import torch

    single, half = seconds(torch.float32), seconds(torch.bfloat16)
    print(f"dtype: bf16 takes {half / single:.2f} times as long as fp32 here", file=sys.stderr)
    print("bfloat16" if half < 1.5 * single else "float32")


if __name__ == "__main__":
    main()
