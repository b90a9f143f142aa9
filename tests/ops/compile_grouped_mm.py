"""Compile the products of grouped rows for cards that need not be here.

    python compile_grouped_mm.py 89 120

Prints for each how many kernels were compiled.
"""

from __future__ import annotations

import itertools
import sys

import torch

from tests.ops.compile_direct import Compiler
from thunderep.ops.kernels import grouped_mm as kernels

KERNELS = (kernels._rows_by_matrices, kernels._matrices_of_rows)
SHARED_BYTES = 99 << 10
"""What a program can have on the cards with the least: compute capability 8.6, 8.9 and 12."""


def compile_for(capability: int) -> int:
    """Compile what is launched for each type and number of rows."""
    kernels._rows_by_matrices, kernels._matrices_of_rows = compilers = [Compiler(k, capability) for k in KERNELS]
    for dtype, rows in itertools.product(kernels.DTYPES, (16, 200, 2000)):
        a, b, out = (torch.zeros(shape, dtype=dtype) for shape in ((rows, 64), (1, 64, 128), (rows, 128)))
        offsets = torch.zeros(1, dtype=torch.int32)
        kernels.rows_by_matrices(a, b, offsets, out)
        kernels.matrices_of_rows(a.mT, out, offsets, b)
    assert max(compiler.shared for compiler in compilers) <= SHARED_BYTES
    return sum(len(compiler.compiled) for compiler in compilers)


if __name__ == "__main__":
    sys.stdout.write(f"{[compile_for(int(capability)) for capability in sys.argv[1:]]}\n")
