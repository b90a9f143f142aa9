"""What a transport does: two movements of rows between ranks, over any tensors of bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from thunderep.runtime.window import Window

if TYPE_CHECKING:
    from thunderep.runtime.traffic import Stats


class Call(NamedTuple):
    """What all ranks must agree on before an operation moves anything; only `tokens` may differ.

    Attributes:
        kind: Index in `KINDS`.
        tokens: T of this rank.
        max_tokens: M; T where the caller gave none.
        dtype: Index in `DTYPES` of the rows.
        hidden: Elements in a row.
        topk: K, or 0 where no routing moves.
        idx_dtype: Index in `DTYPES` of the ids.
        scales: S, scale columns; -1 for none.
        sizes: Checksum of every rank's number of rows, where callers know them; 0 where they do not.
        async_op: Whether it is to run beside what the caller does next.
    """

    kind: int
    tokens: int
    max_tokens: int
    dtype: int
    hidden: int
    topk: int = 0
    idx_dtype: int = 0
    scales: int = -1
    sizes: int = 0
    async_op: bool = False


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
KINDS = ("dispatch", "combine", "dispatch_backward", "combine_backward", *COLLECTIVES)
OUTWARD = (True, False, False, True, True, False, True)
"""Whether rows of that kind go from a token's rank to all others; else they come back to it."""

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.int16,
    torch.float64,
    torch.float8_e8m0fnu,
)


ByRank = torch.Tensor | Sequence[torch.Tensor]
"""Tensors of [rows, ...] by rank: one tensor of [N, M, ...], or N tensors."""

Scratch = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""Memory for tensors like the given ones, until the operation ends."""


class Moved(NamedTuple):
    """What `dispatch` tells of its rows.

    Attributes:
        rows: T of every rank, as far as the host knows.
        own: Copies this rank's own rows where that is still to be done: on a GPU, in order on the current stream.
    """

    rows: Sequence[int]
    own: Callable[[], None]


class Transport(Protocol):
    """Moves rows between the ranks of one Buffer. All ranks call the same methods in the same order."""

    def dispatch(
        self, call: Call, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> AbstractContextManager[Moved]:
        """Give every rank all rows of all ranks.

        Args:
            call: What ranks must agree on.
            inputs: Payloads of [T, ...], contiguous.
            outputs: For each payload, contiguous [N * M, ...]; row s * M + i becomes row i of rank s. Rows past T[s]
                are left alone.

        Returns:
            A context at whose end the outputs are there, but for this rank's own rows; on a GPU what is issued within it runs
            beside the copies.
        """
        ...

    def combine(self, call: Call, inputs: Sequence[torch.Tensor], scratch: Scratch) -> AbstractContextManager[list[ByRank]]:
        """Give every rank back the rows that stem from it.

        Args:
            call: What ranks must agree on.
            inputs: Payloads of [N * M, ...], contiguous; row s * M + i belongs to row i of rank s.
            scratch: Gives memory for what must be copied.

        Returns:
            A context in which, for each payload and rank s other than this one, row i is what rank s holds for this
            rank's row i, in memory that may be written. This rank's own part, and rows past T, are unspecified.
        """
        ...

    def window(self, call: Call) -> Window | None:
        """The window in which kernels do all of such a call, and announce it; None if the methods above are to move it."""
        ...

    @property
    def routing(self) -> Window | None:
        """The window in which kernels exchange ids, weights and scales beside `dispatch`; None: they are payloads of it."""
        ...

    def stats(self) -> Stats:
        """What this rank has moved so far."""
        ...

    def check(self) -> None:
        """Raise what went wrong since the last call."""
        ...

    def close(self) -> None:
        """Release everything; whoever waits in another thread raises. Idempotent, never blocks on peers."""
        ...


def agree(calls: Sequence[Call]) -> list[int]:
    """Return T of every rank if the ranks' calls are one operation.

    Raises:
        RuntimeError: They are not; each rank's value is listed.
    """
    found = difference(dict(enumerate(calls)))
    if found is not None:
        raise RuntimeError(found)
    return [call.tokens for call in calls]


def difference(calls: Mapping[int, Call]) -> str | None:
    """What calls, by rank, that are not one operation differ in first; None if they are."""
    if len({call._replace(tokens=0) for call in calls.values()}) <= 1:
        return None
    show = {
        "kind": lambda value: KINDS[value],
        "dtype": lambda value: str(DTYPES[value]),
        "idx_dtype": lambda value: str(DTYPES[value]),
        "sizes": lambda value: f"a list of checksum {value:#010x}",
    }
    name = next(n for n in Call._fields if n != "tokens" and len({getattr(call, n) for call in calls.values()}) > 1)
    listed = ", ".join(f"rank {rank} has {show.get(name, str)(getattr(call, name))}" for rank, call in calls.items())
    hint = " (the number of tokens, unless max_tokens is given)" if name == "max_tokens" else ""
    return f"ranks disagree on {name}: {listed}{hint}"
