"""A row summed over all ranks, and a row written to all ranks, by one instruction per 16 bytes: NVLink multicast.

A *multicast address* stands for the same offset of every rank's buffer at once (``multimem`` in the PTX ISA; from Hopper
on, with an NVSwitch). ``multimem.ld_reduce`` returns the sum over all ranks' copies, added up by the switch, and
``multimem.st`` writes all of them. A table of addresses here is ``int64 [world + 1]``: every rank's buffer, as elsewhere,
and then the multicast address. No other instruction may touch a multicast address.

What the switch returns is rounded to the dtype of the addends: 16-bit types are added in float32 (``.acc::f32``) and the
sum is rounded once. The ISA promises neither an order of the addends nor the same bits from run to run; all ranks hold
the same bits because one of them reads the sum and publishes what it made of it.

Both instructions move rows between the ranks and *local memory*, not registers that Triton knows of. It would copy the sum
in each layout that a reader wants, which it takes to be cheaper than converting one into another, although the assembly is
not pure (3.6, remove-layout-conversions): more traffic, and perhaps sums that differ. For the same reason a block of
assembly moves one access (``pack=1``): which elements meet in a larger one depends on a layout that the compiler chose.
A row with fewer accesses than the CTA has threads is moved more than once, with the same result: what counts is what local
memory holds in the end.

``EMULATED`` replaces the two instructions by loops over the ranks' own addresses, which move the same rows and round at
the same places, for GPUs without multicast and for Triton's interpreter.

Why this is correct
-------------------
The argument of ``kernels/runtime/barrier.py`` holds for what it calls program order, release, acquire and ``bar.sync``: they
give *base causality order* between a rank's write and another's read (PTX ISA, memory consistency model). It does not
suffice here, because staging buffers are written through unicast addresses and read through multicast ones, and
published rows the other way round. Two virtual addresses of one memory location are aliases, which count as different
proxies although both are generic; base causality order between aliases is *preserved* only when an alias proxy fence,
``fence.proxy.alias``, lies on the path from the one access to the other.

``fence_aliases`` is that fence. Every thread executes it right after barrier 1 of a launch and right before barrier 2:
between them lie all multicast accesses of the launch, and no unicast access to a buffer that has a multicast address.
So it is on every path from the one kind of access to the other:

- staging writes, barrier 1, fence, ``multimem.ld_reduce``; for the own rank's rows as well, by the barrier's ``bar.sync``;
- ``multimem.st``, fence, barrier 2, reads of the published rows;
- ``multimem.ld_reduce``, fence, barrier 2, end of the launch, staging writes of the next one: a read must not see a later
  write, which follows from the same order;
- reads of the published rows, end of the launch, barrier 1 of the next one, fence, ``multimem.st``.

The ISA asks for one fence anywhere on the path. The model it took proxies from (Lustig et al., "Mixed-proxy extensions for
the NVIDIA PTX memory consistency model", ISCA 2022) wants it in the CTA of the access that is not plain: it is there. One
more on the other side would cost a membar of every thread (SASS) and order nothing else.

The ``multimem`` operations are relaxed at system scope: strong, so that they do not race with a peer's, and ordered by
the barriers alone. They bypass L1; published rows are read after an acquire, which has invalidated it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tw_compile.kernels.runtime.barrier import load_pointer

ACCESS_BYTES = 16
"""Bytes of one multicast access; rows and their addresses are multiples of it."""

_ACCESS_BITS = tl.constexpr(8 * ACCESS_BYTES)


@triton.jit
def fence_aliases():
    """Order accesses through unicast addresses before it and through multicast ones after it, and the reverse."""
    tl.inline_asm_elementwise("fence.proxy.alias; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _copy_by_accesses(
    INSTRUCTIONS: tl.constexpr, table, begin, row, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr
):
    """Run ``INSTRUCTIONS``, predicate ``p``, words ``a`` to ``d``, for each 16 bytes of a row.

    ``$1`` is their multicast address, from element ``begin`` on, and ``$2`` the one in local memory, from ``row`` on.
    """
    bits: tl.constexpr = row.dtype.element_ty.primitive_bitwidth
    accesses = tl.arange(0, BLOCK * bits // _ACCESS_BITS)
    inside = (accesses < HIDDEN * bits // _ACCESS_BITS).to(tl.int32)
    offsets = accesses * (_ACCESS_BITS // 8)
    multicast = tl.load(table + WORLD_SIZE) + begin * (bits // 8) + offsets
    local = row.to(tl.int64) + offsets
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a, b, c, d; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; " + INSTRUCTIONS + " }",
        "=&r,l,l,r",
        [multicast, local, inside],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def reduce_row(
    table, begin, row, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr, EMULATED: tl.constexpr
):
    """Write to ``row [HIDDEN]``, local memory, the sum over all ranks of as many elements from ``begin`` (int64) on.

    The whole CTA may read it afterwards, until its next call. Nothing is touched beyond the row.
    """
    dtype: tl.constexpr = row.dtype.element_ty
    if EMULATED:
        columns = tl.arange(0, BLOCK)
        mask = columns < HIDDEN
        total = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(WORLD_SIZE):
            total += tl.load(load_pointer(table, source, row) + begin + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(row + columns, total.to(dtype), mask=mask)
    else:
        half: tl.constexpr = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
        kind: tl.constexpr = "add.v4.f32" if dtype == tl.float32 else "add.acc::f32.v4." + half
        _copy_by_accesses(
            "@p multimem.ld_reduce.relaxed.sys.global." + kind + " {a, b, c, d}, [$1]; "
            "@p st.global.v4.b32 [$2], {a, b, c, d};",
            table, begin, row, HIDDEN, BLOCK, WORLD_SIZE,
        )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def publish_row(
    row, table, begin, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr, EMULATED: tl.constexpr
):
    """Write ``row [HIDDEN]``, local memory that this CTA has written, to all ranks, from element ``begin`` (int64) on.

    This rank's own copy is written too. Nothing is touched beyond the row.
    """
    tl.debug_barrier()  # all of the row is written; and the sum has been read, so the next one may take its place
    if EMULATED:
        columns = tl.arange(0, BLOCK)
        mask = columns < HIDDEN
        values = tl.load(row + columns, mask=mask)
        for target in tl.static_range(WORLD_SIZE):
            tl.store(load_pointer(table, target, row) + begin + columns, values, mask=mask)
    else:
        # Bits are moved, whatever they mean: .f32 serves all dtypes.
        _copy_by_accesses(
            "@p ld.global.v4.b32 {a, b, c, d}, [$2]; @p multimem.st.relaxed.sys.global.v4.f32 [$1], {a, b, c, d};",
            table, begin, row, HIDDEN, BLOCK, WORLD_SIZE,
        )  # fmt: skip
