"""The functions that models call: each calls its operator and names what it returns."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch

import thunderep.ops  # noqa: F401  registers torch.ops.thunderep
from thunderep.buffer import Buffer
from thunderep.work import Work


class DispatchOutput(NamedTuple):
    """What `dispatch` returns. R = N * M rows: row s * M + i is token i of rank s."""

    recv_x: torch.Tensor
    """[R, H], x's type: the tokens that chose an expert of this rank, bit for bit. All other rows are unspecified."""
    recv_topk_idx: torch.Tensor
    """[R, K], topk_idx's type: local expert ids in the token's own top-k positions; -1 where there is none for this rank."""
    recv_topk_weights: torch.Tensor
    """[R, K] float32; 0 where recv_topk_idx is -1."""
    recv_x_scales: torch.Tensor
    """[R, S] float32, as recv_x; [R, 0] without x_scales."""
    is_token_in_rank: torch.Tensor
    """[T, N] bool: token i went to rank r."""


class PermuteOutput(NamedTuple):
    """What `permute` returns."""

    expert_x: torch.Tensor
    """[capacity, H], x's type: rows grouped by expert; expert e's are `expert_x[offsets[e - 1] : offsets[e]]`."""
    offsets: torch.Tensor
    """[L] int32: the end of each expert's group, as `torch.nn.functional.grouped_mm` takes it."""
    row_id_map: torch.Tensor
    """[R, K] int32: the row of expert_x that holds a choice; -1 where there is none."""


class QuantizedOutput(NamedTuple):
    """What `quantize_fp8` returns. Dequantised, column c of a row is x_fp8[:, c] * x_scales[:, c // 128]."""

    x_fp8: torch.Tensor
    """[T, H] float8_e4m3fn."""
    x_scales: torch.Tensor
    """[T, ceil(H / 128)] float32: one for 128 columns."""


@overload
def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    buffer: Buffer,
    max_tokens: int | None = ...,
    x_scales: torch.Tensor | None = ...,
    async_op: Literal[False] = ...,
) -> DispatchOutput: ...
@overload
def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    buffer: Buffer,
    max_tokens: int | None = ...,
    x_scales: torch.Tensor | None = ...,
    *,
    async_op: Literal[True],
) -> Work[DispatchOutput]: ...
def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    buffer: Buffer,
    max_tokens: int | None = None,
    x_scales: torch.Tensor | None = None,
    async_op: bool = False,
) -> DispatchOutput | Work[DispatchOutput]:
    """Send every token to the ranks that own the experts it chose. Collective: all ranks call it in the same order.

    Args:
        x: [T, H] rows; bf16, fp16, fp32, fp8 (e4m3, e5m2), int8 or uint8, any strides. T may differ from rank to
            rank, and be 0.
        topk_idx: [T, K] int32 or int64: global expert ids; -1: no expert.
        topk_weights: [T, K] float32.
        num_experts: E, as the Buffer has it.
        buffer: The Buffer.
        max_tokens: M, at least every rank's T and the same on every rank; None: T, which must then be equal on all ranks.
        x_scales: [T, S] float32: scales that travel with the rows of a block-scaled payload.
        async_op: Return at once, over "collective" on the CPU once it is done; the inputs may be changed or freed. The same on
            every rank. On CUDA wait for the work before a captured graph with operations of this Buffer is replayed: a replay
            knows nothing of what is under way.

    Returns:
        What this rank received, or work whose `wait()` gives it. Gradients reach topk_weights, and x unless its elements have
        8 bits.

    Raises:
        ValueError: A shape, type, device or expert id is wrong.
        RuntimeError: More tokens than max_tokens or the Buffer hold, ranks that disagree, a closed or forked Buffer.
        PeerError: A peer died or stayed silent; the Buffer is broken from then on.
    """
    rows = -1 if max_tokens is None else max_tokens
    if not async_op:
        return DispatchOutput(
            *torch.ops.thunderep.dispatch(x, topk_idx, topk_weights, num_experts, buffer.open_name, rows, x_scales)
        )
    handle = torch.ops.thunderep.dispatch_start(x, topk_idx, topk_weights, num_experts, buffer.open_name, rows, x_scales)
    tokens, dtype, idx_dtype = x.shape[0], x.dtype, topk_idx.dtype
    received = buffer.num_ranks * (tokens if max_tokens is None else max_tokens)
    scales = 0 if x_scales is None else x_scales.shape[1]

    def finish(handle: torch.Tensor) -> DispatchOutput:
        wait = torch.ops.thunderep.dispatch_wait
        return DispatchOutput(*wait(handle, buffer.open_name, received, tokens, dtype, idx_dtype, scales))

    return Work(buffer, handle, finish)


@overload
def combine(y: torch.Tensor, dispatched: DispatchOutput, buffer: Buffer, async_op: Literal[False] = ...) -> torch.Tensor: ...
@overload
def combine(y: torch.Tensor, dispatched: DispatchOutput, buffer: Buffer, *, async_op: Literal[True]) -> Work[torch.Tensor]: ...
def combine(
    y: torch.Tensor, dispatched: DispatchOutput, buffer: Buffer, async_op: bool = False
) -> torch.Tensor | Work[torch.Tensor]:
    """Return partial results to their tokens' ranks and sum them there. Collective, as `dispatch`.

    Args:
        y: [R, H] bf16, fp16 or fp32: for each row of recv_x this rank's partial result, weights applied. Rows that no
            token chose are not read.
        dispatched: What `dispatch` returned.
        buffer: The Buffer.
        async_op: As `dispatch` has it.

    Returns:
        [T, H] of y's type, or work whose `wait()` gives it: for each token the sum over the ranks it went to, added
        in float32 in rank order and rounded once; zero where it went nowhere. Gradients reach y.

    Raises:
        ValueError, RuntimeError, PeerError: As `dispatch`.
    """
    idx, in_rank = dispatched.recv_topk_idx, dispatched.is_token_in_rank
    if not async_op:
        result: torch.Tensor = torch.ops.thunderep.combine(y, idx, in_rank, buffer.open_name)
        return result
    handle = torch.ops.thunderep.combine_start(y, idx, in_rank, buffer.open_name)
    dtype = y.dtype

    def finish(handle: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.thunderep.combine_wait(handle, buffer.open_name, idx, in_rank, dtype)
        return result

    return Work(buffer, handle, finish)


def permute(
    x: torch.Tensor, topk_idx: torch.Tensor, num_local_experts: int, capacity: int | None = None, alignment: int = 1
) -> PermuteOutput:
    """Group rows by local expert, in row order then top-k order.

    Args:
        x: [R, H], elements of 1, 2, 4 or 8 bytes, any strides.
        topk_idx: [R, K] int32 or int64: local expert ids; -1: none. Rows without a choice are not read.
        num_local_experts: L.
        capacity: Rows of expert_x; None: just enough, found out at run time. Those past the last group are zero on a CPU and
            unspecified on CUDA.
        alignment: Each expert's group is padded with zero rows to a multiple of this.

    Returns:
        The groups. Gradients reach x.

    Raises:
        ValueError: A shape or type is wrong; for CPU tensors also: an id is, or capacity is too small. On CUDA the host does
            not look: choices with such an id, or beyond capacity, are left out.
        RuntimeError: No capacity while a CUDA graph is captured.
    """
    rows = -1 if capacity is None else capacity
    return PermuteOutput(*torch.ops.thunderep.permute(x, topk_idx, num_local_experts, rows, alignment))


def quantize_fp8(x: torch.Tensor) -> QuantizedOutput:
    """Turn rows into 8-bit floats with a scale per 128 columns, as DeepSeek and vLLM have them: `dispatch`'s x and x_scales.

    A scale is the largest finite magnitude of its columns, divided by 448; where all are 0, it is 2^-126 and they stay 0.
    NaN and infinities become NaN and change no other element. All others are off by at most 2^-4 of themselves, or 2^-10 of
    their scale.

    Args:
        x: [T, H] bf16, fp16 or fp32, any strides; H need not be a multiple of 128.

    Returns:
        The rows and their scales. No gradient passes; through an `ExpertParallel` that dispatches fp8 it does.

    Raises:
        ValueError: A shape or type is wrong.
    """
    return QuantizedOutput(*torch.ops.thunderep.quantize_fp8(x))


def permute_fp8(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    topk_idx: torch.Tensor,
    num_local_experts: int,
    capacity: int | None = None,
    alignment: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> PermuteOutput:
    """Group rows by local expert, as `permute`, and dequantise them on the way.

    Args:
        x: [R, H] float8_e4m3fn, any strides.
        x_scales: [R, ceil(H / 128)] float32: one for 128 columns, as `quantize_fp8` makes them.
        topk_idx: [R, K] int32 or int64: local expert ids; -1: none. Rows and scales without a choice are not read.
        num_local_experts: L.
        capacity: Rows of expert_x; None: just enough, found out at run time. Those past the last group are zero on a CPU and
            unspecified on CUDA.
        alignment: Each expert's group is padded with zero rows to a multiple of this.
        dtype: Type of expert_x: bf16, fp16 or fp32.

    Returns:
        The groups: expert_x is x * x_scales, a float32 product rounded once. No gradient passes.

    Raises:
        ValueError: As `permute`.
    """
    rows = -1 if capacity is None else capacity
    return PermuteOutput(*torch.ops.thunderep.permute_fp8(x, x_scales, topk_idx, num_local_experts, rows, alignment, dtype))


def unpermute(expert_y: torch.Tensor, row_id_map: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Bring each row's expert results back together, weighted.

    Args:
        expert_y: [capacity, H]: a result for each row of expert_x.
        row_id_map: [R, K] int32, as `permute` returned it.
        topk_weights: [R, K] float32.

    Returns:
        [R, H] of expert_y's type: the sum over k of topk_weights[r, k] * expert_y[row_id_map[r, k]], in float32,
        rounded once; zero where there is none. Gradients reach expert_y and topk_weights.

    Raises:
        ValueError: A shape or type is wrong.
    """
    result: torch.Tensor = torch.ops.thunderep.unpermute(expert_y, row_id_map, topk_weights)
    return result
