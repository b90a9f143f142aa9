"""Launches of Triton kernels from the host, at the price of the launch alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address as Triton takes it."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.address


class Launch:
    """A kernel with all that stays the same from call to call; the first call finds or compiles the binary that later ones run.

    Triton looks at every argument of every call to find its binary, which takes longer than small kernels do. Nothing that it
    looks at may change here: addresses must be multiples of 16, integers in the kernel's `do_not_specialize`.

    Args:
        kernel: The kernel.
        blocks: Blocks of its grid.
        before: Addresses that come first.
        pointers: Types of the pointers that a call brings, in order; those of `before` are to 64-bit words.
        after: Integers that come last, or None where the kernel takes it.
        constants: The kernel's constexpr arguments, in its order.
        num_warps: Warps of a block.
    """

    def __init__(
        self,
        kernel: Any,
        blocks: int,
        *,
        before: tuple[int, ...],
        pointers: Sequence[torch.dtype | None],
        after: tuple[int | None, ...],
        constants: Mapping[str, Any],
        num_warps: int,
    ) -> None:
        self._kernel, self._grid, self._num_warps = kernel, (blocks, 1, 1), num_warps
        self._before, self._pointers, self._after, self._constants = before, pointers, after, constants
        self._binary: Any = None
        self._device = -1
        self._rest = (*after, *constants.values())

    def __call__(self, tokens: int, *addresses: int | None) -> None:
        """Launch on the current stream.

        Args:
            tokens: T, which follows `before`.
            addresses: What the pointers of this call point to; None where the kernel takes it.
        """
        if self._binary is not None:
            self._again((*self._before, tokens, *addresses, *self._rest))
            return
        before = [Pointer(address, torch.int64) for address in self._before]
        pointers = [
            None if address is None or dtype is None else Pointer(address, dtype)
            for address, dtype in zip(addresses, self._pointers, strict=True)
        ]
        launched = self._kernel[self._grid](
            *before, tokens, *pointers, *self._after, **self._constants, num_warps=self._num_warps
        )
        if launched is not None:  # Triton's interpreter has no binary
            self._binary, self._device = launched, torch.cuda.current_device()

    def _again(self, arguments: tuple[Any, ...]) -> None:
        """Launch the binary as Triton would, but for hooks, which it calls from C whether or not anyone has set some."""
        binary = self._binary
        if _hooked():
            binary[self._grid](*arguments)
        else:
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            binary.run(*self._grid, stream, binary.function, binary.packed_metadata, None, None, None, *arguments)


def _hooked() -> bool:
    """Whether somebody, a profiler say, wants to know of launches."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)
