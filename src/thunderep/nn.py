"""ExpertParallel: a Mixture-of-Experts layer whose experts live on several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from thunderep.api import DispatchOutput, combine, dispatch, permute, permute_fp8, quantize_fp8, unpermute
from thunderep.buffer import Buffer
from thunderep.ops.dispatch_arguments import check_ids
from thunderep.straight_through import straight_through

Activation = Callable[[torch.Tensor], torch.Tensor]

_OVERLAP_BYTES = 8 << 20
"""Bytes of a rank's rows from which on they travel in two parts, if experts have rows enough."""

_OVERLAP_ROWS = 256
"""Rows of each part that an expert must have on average: a product of fewer takes as long as reading its matrices does, and two
parts read them twice.

Source: whole layers of three models' shapes on an H200 that played two ranks. With 256 rows two parts took 0.91 and 0.95 of the
time of one, with 128 1.01 and 1.05, with 64 1.35 to 1.37.
"""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What `combine` can sum."""


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [C, I], for [C, 2 I]: gate in the first half of the columns, up in the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


class ExpertParallel(nn.Module):
    """The experts of a Mixture-of-Experts layer, spread over the ranks of a Buffer: router output in, layer output out.

    Tokens travel to their experts' ranks (`dispatch`), are grouped by expert (`permute`), pass the experts in two grouped
    matrix products, are weighted and summed (`unpermute`), and travel back (`combine`). Every rank of the Buffer must call it,
    and its backward, in the same order; a rank without tokens or without experts takes part like any other.

    On a CPU the groups have exactly as many rows as were chosen, so nothing is computed in vain. On a CUDA device, where the
    host would have to wait to learn that number, there is room for all R * K choices that could arrive: the operators never
    wait for the device, nor do products of bf16 and fp16: PyTorch's where it has a kernel for the device, else one of our own.
    `torch.compile` makes one graph for all values, with `fullgraph=True`.

    With `overlap` the tokens travel in parts: while the experts work on one, the next one's dispatch and the last one's combine
    run beside them, and a shared expert runs beside the first dispatch. The backward pass does the same the other way round.
    Bits change only where a matrix product rounds a row according to how many others it has.

    Shape legend: T tokens; N ranks; M max_tokens; R = N * M; H hidden; K experts per token; L local experts; I intermediate.

    Args:
        buffer: The group's Buffer; it says how many experts there are, where they live, H and K.
        intermediate: I, the inner size of an expert.
        activation: What stands between the products: [C, 2 I] to [C, I], row by row and without parameters. On CUDA one of
            your own also gets rows that no token has, with anything in them; `swiglu` passes them over.
        dtype: The parameters' type, which x must have too; None: the Buffer's.
        overlap: Parts that the tokens are cut into; None: 2 on CUDA where each part has 4 MiB of rows a rank and 256 rows an
            expert, if experts are chosen evenly, else 1.
        shared: A shared expert, [T, H] to [T, H], whose output is added; it runs while tokens travel.
        dispatch_dtype: What rows travel to the experts as: torch.float8_e4m3fn, with a scale per 128 columns, is half the bytes
            of bf16; results travel back in x's type. Gradients are those of rows that had not been rounded (straight through),
            and travel in x's type. None: x's type.

    Attributes:
        gate_up: [L, H, 2 I], this rank's experts only.
        down: [L, I, H].

    Raises:
        ValueError: A wrong size or type.
    """

    def __init__(
        self,
        buffer: Buffer,
        intermediate: int,
        *,
        activation: Activation = swiglu,
        dtype: torch.dtype | None = None,
        overlap: int | None = None,
        shared: nn.Module | None = None,
        dispatch_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if intermediate < 1:
            raise ValueError(f"intermediate: got {intermediate}, expected at least 1")
        if overlap is not None and overlap < 1:
            raise ValueError(f"overlap: got {overlap}, expected None or at least 1")
        dtype = buffer.dtype if dtype is None else dtype
        if dtype not in _DTYPES:
            raise ValueError(f"dtype: got {dtype}, expected one of {_DTYPES}")
        if dispatch_dtype not in (None, torch.float8_e4m3fn):
            raise ValueError(f"dispatch_dtype: got {dispatch_dtype}, expected torch.float8_e4m3fn or None")
        self.buffer = buffer
        self.intermediate = intermediate
        self.activation = activation
        self.overlap = overlap
        self.shared = shared
        self.dispatch_dtype = dispatch_dtype
        self._native = _has_grouped_mm(buffer.device)
        local = len(buffer.local_experts)
        self.gate_up = nn.Parameter(torch.empty(local, buffer.hidden, 2 * intermediate, dtype=dtype, device=buffer.device))
        self.down = nn.Parameter(torch.empty(local, intermediate, buffer.hidden, dtype=dtype, device=buffer.device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters as `nn.Linear` does.

        An expert gets the same ones on any number of ranks, if all ranks have seeded torch alike.
        """
        seed = int(torch.randint(2**62, (), device="cpu"))
        for parameter in (self.gate_up, self.down):
            bound = 1 / math.sqrt(parameter.shape[1])
            for expert, matrix in zip(self.buffer.local_experts, parameter.detach(), strict=True):
                generator = torch.Generator().manual_seed(seed + expert)
                matrix.copy_(torch.empty(matrix.shape, device="cpu").uniform_(-bound, bound, generator=generator))
            seed += self.buffer.num_experts

    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, max_tokens: int | None = None
    ) -> torch.Tensor:
        """Apply each token's experts and sum what they give, weighted.

        Args:
            x: [T, H], the parameters' type.
            topk_idx: [T, K] int32 or int64: global expert ids; -1: no expert.
            topk_weights: [T, K] float32.
            max_tokens: M, the same on all ranks; None: T, which must then be equal on all ranks.

        Returns:
            [T, H], x's type; zero for tokens without an expert.
        """
        if x.dtype != self.down.dtype:
            raise ValueError(f"x: got {x.dtype}, expected {self.down.dtype}, as the experts have")
        rows = x.shape[0] if max_tokens is None else max_tokens
        parts = self._parts(x, rows)
        if parts == 1 and self.shared is None:
            payload, weights, scales = self._payload(x, topk_weights)
            received = dispatch(payload, topk_idx, weights, self.buffer.num_experts, self.buffer, max_tokens, scales)
            return combine(self._experts(received, x, topk_weights), received, self.buffer)
        self._check(x, topk_idx, topk_weights, rows)  # before the first part moves
        size = -(-rows // parts)
        started = []
        for part in range(parts):
            rows_of_part = slice(part * size, (part + 1) * size)
            part_x, idx, part_weights = (t[rows_of_part] for t in (x, topk_idx, topk_weights))
            payload, weights, scales = self._payload(part_x, part_weights)
            work = dispatch(payload, idx, weights, self.buffer.num_experts, self.buffer, size, scales, async_op=True)
            started.append((work, part_x, part_weights))
        shared = None if self.shared is None else self.shared(x)
        combined = []
        for work, part_x, part_weights in started:
            received = work.wait()
            y = self._experts(received, part_x, part_weights)
            combined.append(combine(y, received, self.buffer, async_op=True))
        routed = torch.cat([work.wait() for work in combined])
        return routed if shared is None else routed + shared

    def _check(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, rows: int) -> None:
        """Raise what `dispatch` would of a call that is not cut into parts."""
        for name, choices in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if choices.shape[0] != x.shape[0]:
                raise ValueError(f"{name}: got shape {list(choices.shape)}, expected [{x.shape[0]}, {self.buffer.topk}] (topk)")
        if rows > self.buffer.max_tokens:
            raise RuntimeError(f"max_tokens: got {rows} tokens, more than the Buffer's max_tokens = {self.buffer.max_tokens}")
        if x.shape[0] > rows:
            raise RuntimeError(f"x: got {x.shape[0]} tokens, more than max_tokens = {rows} of this call")
        if not torch.compiler.is_compiling():  # under a compiler each part's operator looks at its own
            check_ids(topk_idx, self.buffer.num_experts)

    def _parts(self, x: torch.Tensor, rows: int) -> int:
        """Parts that M rows are cut into, the same on all ranks."""
        if self.overlap is not None:
            return max(1, min(self.overlap, rows))
        large = rows * x.shape[1] * x.element_size() >= _OVERLAP_BYTES
        busy = rows * self.buffer.topk * self.buffer.num_ranks >= 2 * _OVERLAP_ROWS * self.buffer.num_experts
        return 2 if x.is_cuda and large and busy else 1

    def _payload(self, x: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What travels: rows, weights and scales. Gradients go round what was quantised."""
        if self.dispatch_dtype is None:
            return x, topk_weights, None
        rows, scales = quantize_fp8(x)
        return rows, topk_weights.detach(), scales

    def _experts(self, received: DispatchOutput, x: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """[R, H]: what this rank's experts make of the rows that came; x and topk_weights are what was sent, for gradients."""
        local, idx = self.gate_up.shape[0], received.recv_topk_idx
        capacity = idx.numel() if x.is_cuda else None
        if self.dispatch_dtype is None:
            groups = permute(received.recv_x, idx, local, capacity)
        else:
            groups = permute_fp8(received.recv_x, received.recv_x_scales, idx, local, capacity, dtype=x.dtype)
            received, groups = straight_through(received, groups, x, topk_weights, self.buffer.open_name)
        gate_up = self._grouped_mm(groups.expert_x, self.gate_up, groups.offsets)
        fused = self.activation is swiglu
        hidden = torch.ops.thunderep.swiglu(gate_up, groups.offsets) if fused else self.activation(gate_up)
        expert_y = self._grouped_mm(hidden, self.down, groups.offsets)
        return unpermute(expert_y, groups.row_id_map, received.recv_topk_weights)

    def _grouped_mm(self, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[C, A] by [L, A, B], group by group: PyTorch's kernel where it fits, else the operator that takes anything."""
        if self._native and a.dtype == torch.bfloat16 and len(b) and a.shape[1] % 8 == 0 and b.shape[2] % 8 == 0:
            return _torch_grouped_mm(a, b, offs=offsets)
        result: torch.Tensor = torch.ops.thunderep.grouped_mm(a, b, offsets)
        return result

    def extra_repr(self) -> str:
        """What `print` shows."""
        experts = self.buffer.local_experts
        return f"experts {experts.start} to {experts.stop - 1} of {self.buffer.num_experts}, {self.buffer!r}"


def _has_grouped_mm(device: torch.device) -> bool:
    """Whether PyTorch multiplies groups there without reading on the host how large they are."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


_torch_grouped_mm = functional.grouped_mm if hasattr(functional, "grouped_mm") else torch._grouped_mm
