"""A residual that goes from one compiled graph to another, where a host compiles a model in pieces.

    pass_residual(residual [tokens, hidden], group_name, sharded_from) -> [tokens, hidden]   in the piece that makes it
    take_residual(passed [tokens, hidden], group_name, sharded_from) -> [tokens, hidden]     in the piece that reads it

They are a contract, for each token count by itself: of fewer than ``sharded_from`` tokens what is passed is whole; from there
on only those rows of it are sure that the rank owns, as of a sharded residual. A piece can rely on it, and can make use of it,
without knowing the other. As they are here nothing is made use of: all rows are passed, and what is taken is gathered.
The fusion pass puts these in their place, with residuals as fused operators have them, ``[rows_per_rank, hidden]``:

    spread_rows(rows, like [tokens, ...], group_name) -> [tokens, hidden]     the other ranks' rows are not written
    own_rows(passed, group_name) -> [rows_per_rank, hidden]

which move a rank's rows within its memory, and nothing between ranks. CUDA and CPU, any dtype.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.library import Library

from tw_compile import compat
from tw_compile.kernels.all_reduce_rms_norm.spec import rows_per_rank

_library = Library("tw_compile", "FRAGMENT")
_library.define("pass_residual(Tensor residual, str group_name, int sharded_from) -> Tensor")
_library.define("take_residual(Tensor passed, str group_name, int sharded_from) -> Tensor")
_library.define("spread_rows(Tensor rows, Tensor like, str group_name) -> Tensor")
_library.define("own_rows(Tensor passed, str group_name) -> Tensor")


def _pass_residual(residual: torch.Tensor, group_name: str, sharded_from: int) -> torch.Tensor:
    return residual.clone(memory_format=torch.contiguous_format)


def _take_residual(passed: torch.Tensor, group_name: str, sharded_from: int) -> torch.Tensor:
    tokens, hidden_size = passed.shape
    if tokens < sharded_from:
        return passed.clone(memory_format=torch.contiguous_format)
    own = _own_rows(passed, group_name)
    group = compat.resolve_process_group(group_name)
    whole = passed.new_empty((group.size() * own.shape[0], hidden_size))
    dist.all_gather_into_tensor(whole, own, group=group)
    return whole[:tokens]


def _spread_rows(rows: torch.Tensor, like: torch.Tensor, group_name: str) -> torch.Tensor:
    spread = torch.empty((like.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)
    own = _own(spread, group_name)
    own.copy_(rows[: own.shape[0]])
    return spread


def _own_rows(passed: torch.Tensor, group_name: str) -> torch.Tensor:
    own = _own(passed, group_name)
    rows = passed.new_empty((_per_rank(passed, group_name), passed.shape[1]))
    rows[: own.shape[0]].copy_(own)
    return rows


def _own(whole: torch.Tensor, group_name: str) -> torch.Tensor:
    """The rows of ``whole [tokens, hidden]`` that the rank owns, as a view; the last ranks may own fewer, or none."""
    per_rank = _per_rank(whole, group_name)
    begin = compat.resolve_process_group(group_name).rank() * per_rank
    return whole[begin : begin + per_rank]


def _per_rank(whole: torch.Tensor, group_name: str) -> int:
    return rows_per_rank(whole.shape[0], compat.resolve_process_group(group_name).size())


def _like_residual(residual: torch.Tensor, group_name: str, sharded_from: int) -> torch.Tensor:
    return torch.empty_like(residual, memory_format=torch.contiguous_format)


def _spread_rows_fake(rows: torch.Tensor, like: torch.Tensor, group_name: str) -> torch.Tensor:
    return rows.new_empty((like.shape[0], rows.shape[1]))


def _own_rows_fake(passed: torch.Tensor, group_name: str) -> torch.Tensor:
    return passed.new_empty((_per_rank(passed, group_name), passed.shape[1]))


for _name, _run, _fake in (
    ("pass_residual", _pass_residual, _like_residual),
    ("take_residual", _take_residual, _like_residual),
    ("spread_rows", _spread_rows, _spread_rows_fake),
    ("own_rows", _own_rows, _own_rows_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _run, _key)
    torch.library.register_fake(f"tw_compile::{_name}", _fake, lib=_library)

pass_residual = torch.ops.tw_compile.pass_residual.default
take_residual = torch.ops.tw_compile.take_residual.default
spread_rows = torch.ops.tw_compile.spread_rows.default
own_rows = torch.ops.tw_compile.own_rows.default
