"""How one compiled graph hands tensors to the next graph, where a host's graph is cut between layers.

    leave_layers(hidden, residual, group_name, sharded=False) -> left [tokens, hidden]
    enter_layers(left, group_name, rows_dtype=None) -> (hidden [tokens, hidden], residual)

``hidden`` and ``residual`` stay in the tensors that the graph has. ``left`` stands for them and has no contents. A graph can't
return some values without a copy or an exchange between ranks. Cut graphs can hand these over: a residual of which each rank
has its own rows (``sharded``; ``rows_dtype`` asks for it), halves of the tokens that are tensors of their own, and results of
a call that is still in flight:

    leave_halves(hidden, residual, keep, group_name, slot, first_hidden, first_residual, sharded, tokens) -> left
    arrive_(hidden!, residual!, keep, group_name, slot)

The first arguments of ``leave_halves`` are those of the ``wait_`` for half 2. ``arrive_`` does that ``wait_``. If half 2 leaves
values that are computed from the last call's results, no call is in flight:

    leave_done_halves(hidden, residual, first_hidden, first_residual, sharded, tokens) -> left

Whole, replicated tensors (``leave_layers`` without ``sharded``) can be entered in any form: each half enters with its rows of
``left``. All other forms must be entered as they were left. :func:`leave_off` takes the hidden states that the last graph has
left. CUDA and CPU, any dtype. Only one step of one model may run at a time, because all graphs of a process share one place
(``left_now``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tw_compile import compat
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.spec import rows_per_rank, slice_of_whole_residual
from tw_compile.kernels.runtime.operator import define


@dataclass
class _Left:
    """What a graph has left.

    ``parts``: hidden and residual, by the address in ``left`` at which their rows begin. ``sharded``: whether the residuals in
    ``parts`` are sharded.
    """

    left: torch.Tensor
    parts: dict[int, tuple[torch.Tensor, torch.Tensor]]
    sharded: bool
    in_flight: tuple[str, int] | None = None
    taken: int = field(default=0, init=False)


left_now: _Left | None = None


def leave_off(left: torch.Tensor) -> torch.Tensor:
    """The hidden states of all tokens that ``left`` stands for. This waits for a call that is still in flight."""
    global left_now
    there = _at(left)
    left_now = None
    found = list(there.parts.values())
    if there.in_flight is not None:
        ops.wait_(*found[-1], [], *there.in_flight)
    return found[0][0] if len(found) == 1 else torch.cat([hidden for hidden, _ in found])


def _leave_layers(hidden: torch.Tensor, residual: torch.Tensor, group_name: str, sharded: bool = False) -> torch.Tensor:
    return _leave(hidden.shape[0], [(hidden, residual)], sharded, None)


def _leave_halves(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    keep: list[torch.Tensor],
    group_name: str,
    slot: int,
    first_hidden: torch.Tensor,
    first_residual: torch.Tensor,
    sharded: bool,
    tokens: int,
) -> torch.Tensor:
    halves = [(first_hidden, first_residual), (hidden, residual)]
    return _leave(tokens, halves, sharded, (group_name, slot))


def _leave_done_halves(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    first_hidden: torch.Tensor,
    first_residual: torch.Tensor,
    sharded: bool,
    tokens: int,
) -> torch.Tensor:
    return _leave(tokens, [(first_hidden, first_residual), (hidden, residual)], sharded, None)


def _leave(
    tokens: int,
    found: list[tuple[torch.Tensor, torch.Tensor]],
    sharded: bool,
    in_flight: tuple[str, int] | None,
) -> torch.Tensor:
    global left_now
    left_now = None  # drop what an aborted step has left
    hidden = found[0][0]
    left = hidden.new_empty((tokens, hidden.shape[1]))
    place, parts = left.data_ptr(), {}
    for one in found:
        parts[place] = (one[0].contiguous(), one[1].contiguous())  # readers expect contiguous tensors
        place += one[0].shape[0] * hidden.shape[1] * left.element_size()
    left_now = _Left(left, parts, sharded, in_flight)
    return left


def _enter_layers(
    left: torch.Tensor, group_name: str, rows_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    global left_now
    there = _at(left)
    whole = not there.sharded and len(there.parts) == 1
    found = there.parts.get(left.data_ptr())
    tokens = left.shape[0]
    if found is not None and found[0].shape[0] == tokens:
        hidden, residual = found
    elif whole:
        (hidden, residual), begin = next(iter(there.parts.values())), row_of(left, there.left)
        hidden, residual = hidden[begin : begin + tokens].clone(), residual[begin : begin + tokens].clone()
    else:
        raise RuntimeError(f"left: expected rows of one of {len(there.parts)} halves, got {tokens} others")
    if there.sharded != (rows_dtype is not None):
        if not whole:
            raise RuntimeError(f"rows_dtype: expected one only for sharded residuals, got {rows_dtype}")
        residual = own_rows(residual, group_name, rows_dtype)
    there.taken += tokens
    if there.taken == there.left.shape[0]:
        left_now = None
    return hidden, residual


def _at(left: torch.Tensor) -> _Left:
    """What was left under ``left``, or under a tensor of which ``left`` is a part."""
    if left_now is None or not is_within(left, left_now.left):
        raise RuntimeError("left: expected what leave_layers or leave_halves has returned last, got another tensor")
    return left_now


def is_within(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether both have the same memory."""
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def row_of(part: torch.Tensor, whole: torch.Tensor) -> int:
    """The row of ``whole`` at which ``part``, rows of it, begins."""
    return (part.data_ptr() - whole.data_ptr()) // (whole.shape[1] * whole.element_size())


def own_rows(
    residual: torch.Tensor, group_name: str, dtype: torch.dtype | None, as_slice: bool = False
) -> torch.Tensor:
    """``[rows_per_rank, hidden]`` with the residual's rows that this rank owns. The last ranks may own fewer rows, or none.

    For two ranks, or with ``as_slice``, it is a slice of all rows, because the graph's calls may use one-shot, and that needs
    them.
    """
    group = compat.resolve_process_group(group_name)
    tokens, rank, world_size = residual.shape[0], group.rank(), group.size()
    per_rank = rows_per_rank(tokens, world_size)
    if world_size == 2 or as_slice:
        whole = residual.new_empty((world_size * per_rank, residual.shape[1]), dtype=dtype)
        whole[:tokens].copy_(residual)
        return slice_of_whole_residual(whole, world_size, rank)
    rows = residual.new_empty((per_rank, residual.shape[1]), dtype=dtype)
    own = residual[rank * per_rank : (rank + 1) * per_rank]
    rows[: own.shape[0]].copy_(own)
    return rows


def _arrive_(
    hidden: torch.Tensor, residual: torch.Tensor, keep: list[torch.Tensor], group_name: str, slot: int
) -> None:
    if ops.is_in_flight(hidden, group_name, slot):
        ops.wait_(hidden, residual, keep, group_name, slot)


def _leave_layers_fake(
    hidden: torch.Tensor, residual: torch.Tensor, group_name: str, sharded: bool = False
) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


def _leave_halves_fake(
    hidden: torch.Tensor, residual: torch.Tensor, keep: list[torch.Tensor], group_name: str, slot: int, *rest: object
) -> torch.Tensor:
    return hidden.new_empty((rest[-1], hidden.shape[1]))  # type: ignore[arg-type]


def _leave_done_halves_fake(hidden: torch.Tensor, residual: torch.Tensor, *rest: object) -> torch.Tensor:
    return hidden.new_empty((rest[-1], hidden.shape[1]))  # type: ignore[arg-type]


def _enter_layers_fake(
    left: torch.Tensor, group_name: str, rows_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, hidden_size = left.shape
    if rows_dtype is None:
        return left.new_empty((tokens, hidden_size)), left.new_empty((tokens, hidden_size))
    rows = rows_per_rank(tokens, compat.resolve_process_group(group_name).size())
    return left.new_empty((tokens, hidden_size)), left.new_empty((rows, hidden_size), dtype=rows_dtype)


def _arrive_fake(*_: object) -> None:
    return None


leave_layers = define(
    "leave_layers(Tensor hidden, Tensor residual, str group_name, bool sharded=False) -> Tensor",
    _leave_layers,
    _leave_layers_fake,
)
leave_halves = define(
    "leave_halves(Tensor hidden, Tensor residual, Tensor[] keep, str group_name, int slot, Tensor first_hidden, "
    "Tensor first_residual, bool sharded, SymInt tokens) -> Tensor",
    _leave_halves,
    _leave_halves_fake,
)
leave_done_halves = define(
    "leave_done_halves(Tensor hidden, Tensor residual, Tensor first_hidden, Tensor first_residual, bool sharded, "
    "SymInt tokens) -> Tensor",
    _leave_done_halves,
    _leave_done_halves_fake,
)
enter_layers = define(
    "enter_layers(Tensor left, str group_name, ScalarType? rows_dtype=None) -> (Tensor, Tensor)",
    _enter_layers,
    _enter_layers_fake,
)
arrive_ = define(
    "arrive_(Tensor(a!) hidden, Tensor(b!) residual, Tensor[] keep, str group_name, int slot) -> ()",
    _arrive_,
    _arrive_fake,
)
