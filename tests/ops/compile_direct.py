"""Compile the kernels of `direct`, as their launches specialise them, for a card that need not be here.

    python compile_direct.py 89

Prints how many kernels were compiled.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from thunderep.ops import direct
from thunderep.runtime.window import OPERATION, Region

TYPES = {
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}


class Compiler:
    """Takes a kernel's place: a launch compiles it for the given compute capability."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self._kernel, self._target = kernel, GPUTarget("cuda", capability, 32)
        self.compiled: set[str] = set()
        self.shared = 0  # bytes of shared memory that a launch takes at most

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._compile

    def _compile(self, *arguments: Any, num_warps: int, num_stages: int = 3, **constants: Any) -> None:
        constexprs = dict(constants)
        signature: dict[str, str] = dict.fromkeys(constants, "constexpr")
        for name, value in zip(self._kernel.arg_names, arguments, strict=False):
            if value is None:
                constexprs[name], signature[name] = None, "constexpr"
            else:
                signature[name] = "i32" if isinstance(value, int) else f"*{TYPES[value.dtype]}"
        key = f"{signature} {constexprs}"
        if key not in self.compiled:
            self.compiled.add(key)
            source = ASTSource(fn=self._kernel, signature=signature, constexprs=constexprs)
            options = {"num_warps": num_warps, "num_stages": num_stages}
            self.shared = max(self.shared, triton.compile(source, target=self._target, options=options).metadata.shared)


class Window:
    """A window that nothing is moved through."""

    address, rank, announcer = 1 << 30, 0, None
    ticket = torch.full((1,), OPERATION)

    def __init__(self, num_ranks: int) -> None:
        self.region = Region.for_calls(num_ranks, 512, 4096, 8, 16)


def main(capability: int) -> None:
    """Compile what all kinds of calls launch."""
    names = ("dispatch", "combine", "latency_dispatch", "latency_combine")
    for name in names:
        setattr(direct, name, Compiler(getattr(direct, name), capability))
    calls = [
        (4, 2048, 8, 0, torch.bfloat16),
        (512, 2048, 8, 16, torch.bfloat16),
        (8, 17, 3, 0, torch.float16),
        (8, 72, 3, 5, torch.float32),
    ]
    for num_ranks, (rows, hidden, topk, scales, dtype) in itertools.product((1, 2, 8), calls):
        kernels = direct.Kernels(Window(num_ranks), 128, torch.zeros(1, dtype=torch.int32))  # type: ignore[arg-type]
        x, in_rank = torch.zeros(rows, hidden, dtype=dtype), torch.ones(rows, num_ranks, dtype=torch.bool)
        idx, weights = torch.zeros(rows, topk, dtype=torch.int64), torch.zeros(rows, topk)
        kernels.dispatch(x, idx, weights, torch.zeros(rows, scales) if scales else None, rows)
        kernels.exchange_routing(idx, weights, torch.zeros(rows, scales) if scales else None, rows)
        y, recv_idx = x.new_zeros(num_ranks * rows, hidden), idx.new_zeros(num_ranks * rows, topk)
        kernels.combine([y], recv_idx, in_rank)
        kernels.combine([y, torch.zeros(num_ranks * rows, topk)], recv_idx, in_rank)
        kernels.spread(x, in_rank, rows)
    sys.stdout.write(f"{sum(len(getattr(direct, name).compiled) for name in names)}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
