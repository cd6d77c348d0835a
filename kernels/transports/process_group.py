"""The transport made of the group's own collectives: gloo on CPU (the reference), NCCL on GPUs (the fallback).

``start`` begins an asynchronous all_reduce, the same one that the unfused graph does. ``finish`` adds and normalises.
With a replicated residual every rank does this for all rows, on its own. With a sharded residual each rank does it for the
rows that it owns, and an all_gather shares the result.

With a wire, an all_to_all and an all_gather of bytes replace all_reduce and all_gather (``wire_rows.py``), and each rank
adds and normalises the rows that it owns. The codes are computed by ``codes.py``, in torch, on any device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.kernels.collective.spec import FP8, Request, empty_hidden, row_range, rows_per_rank, scales_of
from tw_compile.kernels.collective.transport import Started, Transport
from tw_compile.kernels.collective.wires import WIRES
from tw_compile.kernels.epilogues import EPILOGUES
from tw_compile.kernels.registry import load
from tw_compile.kernels.transports import wire_rows

_c10d = torch.ops._c10d_functional  # the collectives of the unfused graph, without Python between them and the backend


class CollectiveTransport(Transport):
    """all_reduce of the process group, then the norm."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, request: Request) -> Started:
        group = compat.resolve_process_group(request.group_name)
        hidden, residual = request.allocate(group.size())
        wire = WIRES[request.wire]
        if wire.sums is not None:
            own_sums = wire_rows.begin_sum(request.x, wire.sums, group)
            return Started(hidden, residual, lambda: _finish_own_rows(request, group, own_sums(), hidden, residual))
        in_flight = _c10d.all_reduce.default(request.x, "sum", compat.group_name(group))
        by_owners = request.residual_sharded or request.residual_out == "sharded" or wire.results is not None

        def finish() -> None:
            reduced = _c10d.wait_tensor.default(in_flight)
            if by_owners:
                begin, end = row_range(len(reduced), group.size(), dist.get_rank(group))
                _finish_own_rows(request, group, reduced[begin:end], hidden, residual)
            else:
                columns = request.norm.scale_columns
                scales = scales_of(hidden, columns) if columns else None
                _norm(request, reduced, request.residual, hidden, residual if len(residual) else None, scales)

        return Started(hidden, residual, finish)


def _finish_own_rows(
    request: Request, group: dist.ProcessGroup, reduced: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor
) -> None:
    """Normalise the rows that this rank owns and share the results with all ranks.

    ``reduced``: the sums of the rows that this rank owns, ``[rows, hidden]``.
    """
    tokens = hidden.shape[0]
    per_rank = rows_per_rank(tokens, group.size())
    begin, end = row_range(tokens, group.size(), dist.get_rank(group))
    own = request.residual
    if own is not None:
        own = own[: end - begin] if request.residual_sharded else own[begin:end]
    # Rows past the last token pad the trailing shards: they are gathered, and dropped.
    rows = empty_hidden(per_rank, hidden.shape[1], request.norm, hidden.device).zero_()
    h = residual if request.residual_out == "sharded" else residual.new_zeros((per_rank, residual.shape[1]))
    h[end - begin :].zero_()
    columns = request.norm.scale_columns
    own_scales = scales_of(rows, columns) if columns else None
    _norm(request, reduced, own, rows[: end - begin], h[: end - begin], own_scales)
    codes = WIRES[request.wire].results
    if codes is None or rows.dtype == FP8:  # float8 has few bits already
        hidden.copy_(_all_gather_rows(rows, tokens, group))
    else:
        hidden.copy_(wire_rows.gather_rows(rows, codes, tokens, group))
    if own_scales is not None:
        own_scales[end - begin :].zero_()
        scales_of(hidden, columns).copy_(_all_gather_rows(own_scales, tokens, group))
    if request.residual_out == "replicated":
        residual.copy_(_all_gather_rows(h, tokens, group))


def _norm(
    request: Request,
    reduced: torch.Tensor,
    residual: torch.Tensor | None,
    hidden: torch.Tensor,
    h: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> None:
    """Write the normalised rows to ``hidden``, the sums to ``h`` and the computed scales to ``scales``.

    ``h`` and ``scales`` may be None, and may have more rows than ``hidden``.
    """
    epilogue = EPILOGUES[request.norm.epilogue]
    operands = (reduced, residual, request.bias, request.weight, request.norm)
    last = (request.hidden_scale, request.norm_bias)
    if reduced.is_cuda and epilogue.local_kernel is not None:
        made = () if scales is None else (scales,)
        load(epilogue.local_kernel)(*operands, hidden, h, *last, *made)
        return
    rows, sums = load(epilogue.reference)(*operands, *last)
    hidden.copy_(rows)
    if scales is not None:
        scales[: len(rows)].copy_(scales_of(rows, request.norm.scale_columns))
    if h is not None:
        h.copy_(sums)


def _all_gather_rows(shard: torch.Tensor, tokens: int, group: dist.ProcessGroup) -> torch.Tensor:
    """``[tokens, hidden]`` from every rank's ``[rows_per_rank, hidden]``."""
    moved = shard.view(torch.uint8) if shard.dtype == FP8 else shard  # not every backend knows float8
    return compat.all_gather(moved, group)[:tokens].view(shard.dtype)
