"""Signals between GPUs through pinned host memory: device functions of the `direct` kernels.

A flag is one 64-bit word, stored and loaded whole: the operation's sequence number above, 32 bits of payload below.
PCIe has no atomic operations on host memory, and needs none: every flag has one writer. One thread polls, and a block
barrier lets the others go: polls of a whole block over PCIe would be as slow as the transfer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thunderep.runtime.window import OPERATION

_OPERATION = tl.constexpr(OPERATION)


@triton.jit
def begin(ticket: tl.tensor, header: tl.tensor) -> tl.tensor:
    """The sequence number of this operation. Blocks that have passed `end` do not change it for those that have not begun.

    The first block also writes it into the rank's header, for the host: this operation has begun.
    """
    sequence = (tl.load(ticket, volatile=True) // _OPERATION).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(header.to(tl.pointer_type(tl.int32), bitcast=True) + 1, sequence)
    return sequence


@triton.jit
def end(ticket: tl.tensor, header: tl.tensor) -> None:
    """Count this block as done. When all are, the ticket stands at the next sequence number: a graph may be replayed.

    The last block also writes the sequence number into the rank's header: this operation has ended.
    """
    tl.debug_barrier()  # all threads of this block have read the ticket
    blocks = tl.num_programs(0)
    share = tl.where(tl.program_id(0) == 0, _OPERATION - blocks + 1, 1).to(tl.int64)
    # Relaxed: the next kernel of the stream reads it, and a kernel's end makes everything visible to the next.
    before = tl.atomic_add(ticket, share, sem="relaxed")
    if (before + share) % _OPERATION == 0:
        tl.store(header.to(tl.pointer_type(tl.int32), bitcast=True) + 2, (before // _OPERATION).to(tl.int32))


@triton.jit
def release() -> None:
    """Make all that this block has written visible, to whoever sees a flag that it posts afterwards."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred other;
            .reg .u32 thread;
            bar.sync 0;                 // the block's writes happen before thread 0's fence,
            mov.u32 thread, %tid.x;
            setp.ne.u32 other, thread, 0;
            mov.u32 $0, 0;
            @other bra DONE;
            fence.acq_rel.sys;          // which is cumulative: it holds for all of them, towards all devices and the host
            DONE:
        }
        """,
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def post(flag: tl.tensor, sequence: tl.tensor, payload: tl.tensor) -> None:
    """Thread 0 stores a flag; after `release`, that is a release store."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            .reg .u32 thread;
            .reg .b64 word;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            mov.u32 $0, 0;
            mov.b64 word, {$3, $2};
            @first st.relaxed.sys.global.b64 [$1], word;
        }
        """,
        "=r,l,r,r",
        [flag, sequence, payload],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait(flag: tl.tensor, sequence: tl.tensor, stop: tl.tensor) -> tl.tensor:
    """Wait until a flag carries this sequence number; return its payload, to all threads. 0 when the stop word is set."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred other, found;
            .reg .u32 thread, polls, low, high, halt;
            .reg .b64 word;
            .shared .align 4 .b32 payload;
            mov.u32 thread, %tid.x;
            setp.ne.u32 other, thread, 0;
            mov.u32 polls, 0;
            @other bra DONE;
            POLL:
            ld.acquire.sys.global.b64 word, [$1];   // pairs with the writer's fence: what it tells of is visible here
            mov.b64 {low, high}, word;
            setp.eq.u32 found, high, $2;
            @found bra FOUND;
            add.u32 polls, polls, 1;
            and.b32 halt, polls, 1023;
            setp.ne.u32 found, halt, 0;
            @found bra POLL;
            ld.relaxed.sys.global.u32 halt, [$3];
            setp.eq.u32 found, halt, 0;
            @found bra POLL;
            mov.u32 low, 0;
            FOUND:
            st.shared.u32 [payload], low;
            DONE:
            bar.warp.sync 0xffffffff;
            bar.sync 0;                             // the block's reads come after thread 0's acquire
            ld.shared.u32 $0, [payload];
            bar.sync 0;                             // nobody reads the payload any more: it may be written again
        }
        """,
        "=&r,l,r,l",
        [flag, sequence, stop],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_all(flags: tl.tensor, stride: int, count: int, skip: int, sequence: tl.tensor, stop: tl.tensor) -> None:
    """Wait until flags 0..count-1, `stride` bytes apart, carry this sequence number, except `skip`. One thread polls each."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred other, found;
            .reg .u32 thread, polls, low, high, halt;
            .reg .b64 word, flag;
            mov.u32 thread, %tid.x;
            mov.u32 $0, 0;
            setp.ge.u32 other, thread, $3;
            @other bra DONE;
            setp.eq.u32 other, thread, $4;
            @other bra DONE;
            mad.wide.u32 flag, thread, $2, $1;
            mov.u32 polls, 0;
            POLL:
            ld.acquire.sys.global.b64 word, [flag];  // pairs with the writer's fence: what it tells of is visible here
            mov.b64 {low, high}, word;
            setp.eq.u32 found, high, $5;
            @found bra DONE;
            add.u32 polls, polls, 1;
            and.b32 halt, polls, 1023;
            setp.ne.u32 found, halt, 0;
            @found bra POLL;
            ld.relaxed.sys.global.u32 halt, [$6];
            setp.eq.u32 found, halt, 0;
            @found bra POLL;
            DONE:
            bar.warp.sync 0xffffffff;
            bar.sync 0;                              // the block's reads come after the acquires
        }
        """,
        "=&r,l,r,r,r,r,l",
        [flags, stride, count, skip, sequence, stop],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
