"""all_reduce + bias + residual + RMSNorm in one kernel: two-shot, over peer loads and stores.

Rank ``r`` owns token rows ``row_range(tokens, world_size, r)``. On every rank, CTA ``b`` of a grid of ``G`` CTAs handles the
local rows ``b, b + G, b + 2G, ...`` of each owner's rows. So the peer's CTA of the same index makes everything that a CTA needs
from a peer. The two barriers (``tw_compile.kernels.runtime.barrier``) are only between CTAs of the same index:

1. copy this rank's partial sums of the peers' rows to the symmetric staging buffer, unless x lies there; barrier 1;
2. add up the own rows of all ranks, in rank order and in float32, add bias and residual, normalise, and publish the
   result to the symmetric output buffer of every peer; barrier 2;
3. copy the rows that the peers published from the local output buffer to the output tensors.

One rank computes a row and the others copy it. So all ranks get the same bits, and every run gives the same bits.

``NORMALISE`` is the epilogue's row code, such as ``row.normalise_row``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tw_compile.kernels.collective.row import add_row, to_hidden
from tw_compile.kernels.runtime.barrier import MAX_WORLD_SIZE, barrier, load_pointer

_PAD_WIDTH = tl.constexpr(MAX_WORLD_SIZE)


@triton.jit
def _offset(row, HIDDEN: tl.constexpr):
    """Elements before row number ``row`` (int32) of ``[*, HIDDEN]``, as int64."""
    return tl.cast(row, tl.int64) * HIDDEN


@triton.jit
def _copy_row(source, source_row, target, target_row, columns, mask, HIDDEN: tl.constexpr):
    """``target[target_row] = source[source_row]`` for row numbers (int32) of ``[*, HIDDEN]`` with one dtype."""
    values = tl.load(source + _offset(source_row, HIDDEN) + columns, mask=mask)
    tl.store(target + _offset(target_row, HIDDEN) + columns, values, mask=mask)


@triton.jit
def _rows_of(tokens, per_rank, owner):
    """How many rows ``owner`` owns: ``per_rank``; the last ranks may own fewer, or none."""
    return tl.minimum(tl.maximum(tokens - owner * per_rank, 0), per_rank)


@triton.jit
def _sum_row(x, staging_table, rank, begin, columns, mask, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """The sum of all ranks' partial sums for the row that begins at element ``begin``; float32 ``[BLOCK]``."""
    h = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(WORLD_SIZE):
        # This rank's own partial sums come directly from x, because they were not staged.
        addend = tl.where(rank == source, x, load_pointer(staging_table, source, x))
        h = add_row(h, addend, begin, columns, mask)
    return h


@triton.jit
def _publish_row(
    y,
    h,
    hidden,
    residual_out,
    hidden_table,
    residual_table,
    rank,
    begin,
    columns,
    mask,
    WORLD_SIZE: tl.constexpr,
    RESIDUAL_OUT: tl.constexpr,
):
    """Write ``y`` to every peer's output buffers from element ``begin`` on, and ``h`` too if the residual is "replicated"."""
    for distance in tl.static_range(1, WORLD_SIZE):
        # Every rank starts with another peer, so that no link gets all the stores at once.
        peer = (rank + distance) % WORLD_SIZE
        tl.store(load_pointer(hidden_table, peer, hidden) + begin + columns, y, mask=mask)
        if RESIDUAL_OUT == "replicated":
            tl.store(load_pointer(residual_table, peer, residual_out) + begin + columns, h, mask=mask)


@triton.jit(do_not_specialize=["rank", "tokens"])
def all_reduce_rms_norm_kernel(
    x,
    residual,
    bias,
    weight,
    norm_bias,
    hidden,
    residual_out,
    hidden_scale,
    staging_table,
    hidden_table,
    residual_table,
    pads,
    epochs,
    status,
    rank,
    tokens,
    eps,
    weight_offset,
    scale,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    STAGED: tl.constexpr,
    RESIDUAL_SHARDED: tl.constexpr,
    RESIDUAL_OUT: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """See the module docstring. Launch with a grid that is the same on every rank, at most ``MAX_CTAS``.

    ``x``, ``hidden``: ``[tokens, HIDDEN]``. ``residual``: the same, or ``[per_rank, HIDDEN]`` with
    ``RESIDUAL_SHARDED``, or None. ``bias``, ``weight``, ``norm_bias``: ``[HIDDEN]`` or None. ``residual_out``:
    ``[tokens | per_rank, HIDDEN]`` as ``RESIDUAL_OUT`` is "replicated" or "sharded"; not touched for "none".
    ``hidden_scale``: float32 ``[1]`` or None. The tables are ``int64 [world]``: the addresses of every rank's symmetric
    buffers with x's, hidden's and residual_out's dtype (``residual_table`` only for "replicated"), and pads. ``STAGED``: x
    is not this rank's staging buffer itself.
    """
    cta = tl.program_id(0)
    grid = tl.num_programs(0)
    per_rank = (tokens + WORLD_SIZE - 1) // WORLD_SIZE
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    epoch = tl.load(epochs + cta)

    if STAGED:
        staging = load_pointer(staging_table, rank, x)
        for step in range(1, WORLD_SIZE):
            owner = (rank + step) % WORLD_SIZE
            for local in range(cta, _rows_of(tokens, per_rank, owner), grid):
                row = owner * per_rank + local
                _copy_row(x, row, staging, row, columns, mask, HIDDEN)
    barrier(pads, status, epoch + 1, cta, rank, WORLD_SIZE, 1, SPIN_LIMIT, _PAD_WIDTH)

    for local in range(cta, _rows_of(tokens, per_rank, rank), grid):
        begin = _offset(rank * per_rank + local, HIDDEN)
        own_begin = _offset(local, HIDDEN)
        h = _sum_row(x, staging_table, rank, begin, columns, mask, BLOCK, WORLD_SIZE)
        h = add_row(h * scale, bias, 0, columns, mask)
        h = add_row(h, residual, own_begin if RESIDUAL_SHARDED else begin, columns, mask)
        y = NORMALISE(h, weight, columns, mask, eps, weight_offset, HIDDEN, CAST_BEFORE_WEIGHT)
        y = add_row(y, norm_bias, 0, columns, mask)
        y = to_hidden(y, hidden.dtype.element_ty, hidden_scale)
        h = h.to(residual_out.dtype.element_ty)
        tl.store(hidden + begin + columns, y, mask=mask)
        if RESIDUAL_OUT == "sharded":
            tl.store(residual_out + own_begin + columns, h, mask=mask)
        elif RESIDUAL_OUT == "replicated":
            tl.store(residual_out + begin + columns, h, mask=mask)
        _publish_row(
            y, h, hidden, residual_out, hidden_table, residual_table, rank, begin, columns, mask,
            WORLD_SIZE, RESIDUAL_OUT,
        )  # fmt: skip
    barrier(pads, status, epoch + 2, cta, rank, WORLD_SIZE, 2, SPIN_LIMIT, _PAD_WIDTH)
    tl.store(epochs + cta, epoch + 2)

    for step in range(1, WORLD_SIZE):
        owner = (rank + step) % WORLD_SIZE
        published = load_pointer(hidden_table, rank, hidden)
        for local in range(cta, _rows_of(tokens, per_rank, owner), grid):
            row = owner * per_rank + local
            _copy_row(published, row, hidden, row, columns, mask, HIDDEN)
            if RESIDUAL_OUT == "replicated":
                _copy_row(
                    load_pointer(residual_table, rank, residual_out), row, residual_out, row, columns, mask, HIDDEN
                )
