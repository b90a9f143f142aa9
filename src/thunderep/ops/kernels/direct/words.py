"""Words that carry their own signal: 96 bits of data and the operation's sequence number, stored and loaded whole.

PTX makes a 128-bit access of this form one access, so who sees the sequence number sees the data: no fence, no flag and
no second round trip over PCIe, at the price of a third more bytes. Every word has one writer and lives in memory that
holds nothing else. A pointer of 0 means: no word.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def put(word: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, sequence: tl.tensor) -> None:
    """Store one word an element: publishes a, b and c to whoever polls it."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred some;
            .reg .b64 low, high;
            .reg .b128 word;
            setp.ne.u64 some, $1, 0;
            mov.b64 low, {$2, $3};
            mov.b64 high, {$4, $5};
            mov.b128 word, {low, high};
            @some st.relaxed.sys.global.b128 [$1], word;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r,r,r",
        [word, a, b, c, sequence],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def get(word: tl.tensor, sequence: tl.tensor, stop: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Poll one word an element until it carries this sequence number, or the stop word is set."""
    return tl.inline_asm_elementwise(  # type: ignore[no-any-return]
        """
        {
            .reg .pred some;
            .reg .b64 low, high;
            .reg .b128 word;
            .reg .u32 seen, polls, halt;
            mov.u32 polls, 0;
            mov.u32 $0, 0;
            mov.u32 $1, 0;
            mov.u32 $2, 0;
            setp.eq.u64 some, $3, 0;
            @some bra DONE;
            POLL:
            ld.relaxed.sys.global.b128 word, [$3];
            mov.b128 {low, high}, word;
            mov.b64 {$0, $1}, low;
            mov.b64 {$2, seen}, high;
            setp.eq.u32 some, seen, $4;
            @some bra DONE;
            add.u32 polls, polls, 1;
            and.b32 halt, polls, 1023;
            setp.ne.u32 some, halt, 0;
            @some bra POLL;
            ld.relaxed.sys.global.u32 halt, [$5];
            setp.eq.u32 some, halt, 0;
            @some bra POLL;
            DONE:
        }
        """,
        "=&r,=&r,=&r,l,r,l",
        [word, sequence, stop],
        dtype=(tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def get4(word: tl.tensor, sequence: tl.tensor, stop: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """As `get`, four elements of a thread at a time: their round trips overlap. Each thread must hold a multiple of four."""
    return tl.inline_asm_elementwise(  # type: ignore[no-any-return]
        """
        {
            .reg .pred some, missing;
            .reg .b64 low, high;
            .reg .b128 word0, word1, word2, word3;
            .reg .u32 seen0, seen1, seen2, seen3, polls, halt;
            mov.b64 low, 0;
            mov.u32 polls, 0;
            mov.b64 high, {polls, $16};         // no word: nothing to wait for, all zeros
            mov.b128 word0, {low, high};
            mov.b128 word1, {low, high};
            mov.b128 word2, {low, high};
            mov.b128 word3, {low, high};
            POLL:
            setp.ne.u64 some, $12, 0;
            @some ld.relaxed.sys.global.b128 word0, [$12];
            setp.ne.u64 some, $13, 0;
            @some ld.relaxed.sys.global.b128 word1, [$13];
            setp.ne.u64 some, $14, 0;
            @some ld.relaxed.sys.global.b128 word2, [$14];
            setp.ne.u64 some, $15, 0;
            @some ld.relaxed.sys.global.b128 word3, [$15];
            mov.b128 {low, high}, word0;
            mov.b64 {$0, $4}, low;
            mov.b64 {$8, seen0}, high;
            mov.b128 {low, high}, word1;
            mov.b64 {$1, $5}, low;
            mov.b64 {$9, seen1}, high;
            mov.b128 {low, high}, word2;
            mov.b64 {$2, $6}, low;
            mov.b64 {$10, seen2}, high;
            mov.b128 {low, high}, word3;
            mov.b64 {$3, $7}, low;
            mov.b64 {$11, seen3}, high;
            setp.ne.u32 missing, seen0, $16;
            setp.ne.or.u32 missing, seen1, $16, missing;
            setp.ne.or.u32 missing, seen2, $16, missing;
            setp.ne.or.u32 missing, seen3, $16, missing;
            @!missing bra DONE;
            add.u32 polls, polls, 1;
            and.b32 halt, polls, 1023;
            setp.ne.u32 some, halt, 0;
            @some bra POLL;
            ld.relaxed.sys.global.u32 halt, [$20];
            setp.eq.u32 some, halt, 0;
            @some bra POLL;
            DONE:
        }
        """,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r,l,l,l,l",
        [word, sequence, stop],
        dtype=(tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=4,
    )
