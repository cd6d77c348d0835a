"""How one compiled graph hands a residual to a later graph, where a host cuts a model at its attention.

    leave_residual(residual, tokens, group_name, sharded, after) -> left [tokens, hidden]
    enter_residual(left, group_name, rows_dtype=None) -> residual

``left`` stands for the residual and has no contents. A graph between two attentions reads a residual at its first fused site
and makes another one at its last. If both sites keep the rows of the rank alone (``sharded``; ``rows_dtype`` asks for it), the
rows stay where they are, and no rank sends its rows to others. Halves of the tokens are left as halves:

    leave_residual_halves(first, second, tokens, group_name, sharded, after) -> left

A residual may be entered in another form than the one in which it was left. Rows that this rank doesn't have are then gathered,
so neighbouring graphs need not agree. They should, since that costs an all_gather. All ranks must leave and enter alike.

A compiler takes the residual's memory for its own, and gives it to another value when its last reader has run. So
``leave_residual`` must be the last operator of its graph: it also reads ``after``, everything else that the graph returns.
CUDA and CPU, any dtype. Only one step of one model may run at a time, because all graphs of a process share one place
(``left_now``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.kernels.collective.seam import is_within, own_rows, row_of
from tw_compile.kernels.collective.spec import rows_per_rank, whole_residual
from tw_compile.kernels.runtime.operator import define


@dataclass
class _Left:
    """What a graph has left.

    ``parts``: the number of tokens of each part, and the part: its rows, or, if ``sharded``, those that this rank owns. The
    parts follow each other. ``taken``: tokens of which the residual has been entered.
    """

    left: torch.Tensor
    parts: list[tuple[int, torch.Tensor]]
    sharded: bool
    taken: int = field(default=0, init=False)


left_now: _Left | None = None


def _leave_residual(
    residual: torch.Tensor, tokens: int, group_name: str, sharded: bool, after: Sequence[torch.Tensor]
) -> torch.Tensor:
    return _leave([(tokens, residual)], sharded)


def _leave_residual_halves(
    first: torch.Tensor,
    second: torch.Tensor,
    first_tokens: int,
    tokens: int,
    group_name: str,
    sharded: bool,
    after: Sequence[torch.Tensor],
) -> torch.Tensor:
    return _leave([(first_tokens, first), (tokens - first_tokens, second)], sharded)


def _leave(parts: list[tuple[int, torch.Tensor]], sharded: bool) -> torch.Tensor:
    global left_now
    left_now = None  # drop what an aborted step has left
    residual = parts[0][1]
    left = residual.new_empty((sum(tokens for tokens, _ in parts), residual.shape[1]))
    left_now = _Left(left, [(tokens, part.contiguous()) for tokens, part in parts], sharded)
    return left


def _enter_residual(left: torch.Tensor, group_name: str, rows_dtype: torch.dtype | None = None) -> torch.Tensor:
    global left_now
    there = left_now
    if there is None or not is_within(left, there.left):
        raise RuntimeError("left: expected what leave_residual has returned last, got another tensor")
    residual = _part(there, row_of(left, there.left), left.shape[0], group_name, rows_dtype)
    there.taken += left.shape[0]
    if there.taken == there.left.shape[0]:
        left_now = None
    return residual


def _part(there: _Left, begin: int, tokens: int, group_name: str, rows_dtype: torch.dtype | None) -> torch.Tensor:
    """The residual of ``tokens`` tokens from ``begin`` on: rows of this rank in ``rows_dtype``, or all rows if that is None."""
    sharded, first = rows_dtype is not None, 0
    for of_part, part in there.parts:
        if (first, of_part) == (begin, tokens) and there.sharded is sharded and rows_dtype in (None, part.dtype):
            return part
        first += of_part
    if there.sharded or len(there.parts) > 1:
        whole = [_gathered(part, of_part, group_name) if there.sharded else part for of_part, part in there.parts]
        there.parts = [(there.left.shape[0], whole[0] if len(whole) == 1 else torch.cat(whole))]
        there.sharded = False
    (_, residual), end = there.parts[0], begin + tokens
    if sharded:
        return _own_slice(residual[begin:end], group_name, rows_dtype)
    return residual if tokens == residual.shape[0] else residual[begin:end].clone()


def _own_slice(residual: torch.Tensor, group_name: str, dtype: torch.dtype | None) -> torch.Tensor:
    """This rank's rows of ``residual``, as a slice of all rows. They are copied only where they have no storage like that."""
    group = compat.resolve_process_group(group_name)
    rows = residual.shape[0] // group.size()
    shard = residual[group.rank() * rows : (group.rank() + 1) * rows]
    fits = residual.dtype == dtype and rows and rows * group.size() == residual.shape[0] and residual.is_contiguous()
    if fits and whole_residual(shard, residual.shape[0], group.size(), group.rank()) is not None:
        return shard
    return own_rows(residual, group_name, dtype, as_slice=True)


def _gathered(rows: torch.Tensor, tokens: int, group_name: str) -> torch.Tensor:
    """All rows of a residual of which this rank has ``rows``."""
    group = compat.resolve_process_group(group_name)
    whole = whole_residual(rows, tokens, group.size(), group.rank())
    if whole is not None:
        return whole
    gathered = rows.new_empty((group.size() * rows.shape[0], rows.shape[1]))
    dist.all_gather_into_tensor(gathered, rows, group=group)
    return gathered[:tokens]


def _leave_residual_fake(residual: torch.Tensor, tokens: int, *rest: object) -> torch.Tensor:
    return residual.new_empty((tokens, residual.shape[1]))


def _leave_residual_halves_fake(
    first: torch.Tensor, second: torch.Tensor, first_tokens: int, tokens: int, *rest: object
) -> torch.Tensor:
    return first.new_empty((tokens, first.shape[1]))


def _enter_residual_fake(left: torch.Tensor, group_name: str, rows_dtype: torch.dtype | None = None) -> torch.Tensor:
    if rows_dtype is None:
        return left.new_empty(left.shape)
    rows = rows_per_rank(left.shape[0], compat.resolve_process_group(group_name).size())
    return left.new_empty((rows, left.shape[1]), dtype=rows_dtype)


leave_residual = define(
    "leave_residual(Tensor residual, SymInt tokens, str group_name, bool sharded, Tensor[] after) -> Tensor",
    _leave_residual,
    _leave_residual_fake,
)
leave_residual_halves = define(
    "leave_residual_halves(Tensor first, Tensor second, SymInt first_tokens, SymInt tokens, str group_name, bool sharded, "
    "Tensor[] after) -> Tensor",
    _leave_residual_halves,
    _leave_residual_halves_fake,
)
enter_residual = define(
    "enter_residual(Tensor left, str group_name, ScalarType? rows_dtype=None) -> Tensor",
    _enter_residual,
    _enter_residual_fake,
)
