"""A kernel that waits for a word of memory, and gives up after a while. A stream's wait (``stream_words.py``) never does."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["value", "number"])
def await_word(word, value, report, number, SPIN_LIMIT: tl.constexpr):
    """Wait until the word at the address ``word`` equals ``value``, for at most ``SPIN_LIMIT`` polls.

    Then write ``number`` to ``report`` (int32). One program of one warp.
    """
    polls = 0
    seen = _load(word)
    while (seen != value) & (polls < SPIN_LIMIT):
        seen = _load(word)
        polls += 1
    if seen != value:
        tl.store(report, number)


@triton.jit
def _load(word):
    """The int32 at an address, acquired at system scope."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [word], dtype=tl.int32, is_pure=False, pack=1
    )
