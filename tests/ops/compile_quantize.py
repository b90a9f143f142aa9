"""Compile the kernels of fp8 rows for cards that need not be here.

    python compile_quantize.py 89 90

Prints for each how many kernels were compiled.
"""

from __future__ import annotations

import itertools
import sys

import torch

from tests.ops.compile_direct import Compiler
from thunderep.ops.kernels import quantize as kernels
from thunderep.ops.quantize import WIDE_DTYPES, groups_of

KERNELS = (kernels._quantize, kernels._scatter_dequantized)


def compile_for(capability: int) -> int:
    """Compile what quantising and dequantising launch, for each wide type and for rows of one and of many groups."""
    kernels._quantize, kernels._scatter_dequantized = quantize, scatter = [Compiler(k, capability) for k in KERNELS]
    for dtype, hidden in itertools.product(WIDE_DTYPES, (7, 2880)):
        x = torch.zeros(4, hidden, dtype=dtype)
        codes, scales = torch.zeros(4, hidden, dtype=torch.uint8), torch.zeros(4, groups_of(hidden))
        kernels.quantize(x, codes, scales)
        row_id_map, ends = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        kernels.scatter_dequantized(codes, scales, row_id_map, ends, ends, x)
    return len(quantize.compiled) + len(scatter.compiled)


if __name__ == "__main__":
    sys.stdout.write(f"{[compile_for(int(capability)) for capability in sys.argv[1:]]}\n")
