"""Rows in codes of few bits, moved as bytes by the collectives of a process group, in both directions.

Every rank sends to each rank as many rows as the first rank owns, so all messages have the same size. Rows past the last token
are zeros, and receivers ignore them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.kernels.collective.codes import decode, encode
from tw_compile.kernels.collective.spec import row_range, rows_per_rank
from tw_compile.kernels.collective.wire_reference import add_in_rank_order
from tw_compile.kernels.collective.wires import Codes

_c10d = torch.ops._c10d_functional


def begin_sum(x: torch.Tensor, codes: Codes, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Send the rows of ``x [tokens, hidden]`` to the ranks that own them.

    Returns a function that waits for the rows of other ranks and returns the sums of the rows that this rank owns: float32
    ``[rows, hidden]``, added in rank order. This rank's own part is exact.
    """
    world_size, rank = group.size(), dist.get_rank(group)
    tokens, hidden_size = x.shape
    per_rank = rows_per_rank(tokens, world_size)
    packed = encode(_padded(x, world_size * per_rank), codes)
    splits = [per_rank] * world_size
    in_flight = _c10d.all_to_all_single.default(packed, splits, splits, compat.group_name(group))
    begin, end = row_range(tokens, world_size, rank)

    def own_sums() -> torch.Tensor:
        received = _c10d.wait_tensor.default(in_flight)
        of_ranks = decode(received, codes, hidden_size).view(world_size, per_rank, hidden_size)
        parts = list(of_ranks[:, : end - begin])
        parts[rank] = x[begin:end].float()
        return add_in_rank_order(parts)

    return own_sums


def gather_rows(rows: torch.Tensor, codes: Codes, tokens: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather ``rows [rows_per_rank, hidden]`` of all ranks as ``[tokens, hidden]`` in their dtype.

    All rows are decoded from codes, also this rank's own rows.
    """
    packed = encode(rows, codes)
    return decode(compat.all_gather(packed, group)[:tokens], codes, rows.shape[1]).to(rows.dtype)


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """``x`` followed by rows of zeros, ``[rows, hidden]``."""
    return x if len(x) == rows else torch.cat((x, x.new_zeros((rows - len(x), x.shape[1]))))
