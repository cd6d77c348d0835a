"""Rows in codes of few bits, moved by the collectives of a process group: bytes there and back.

Every rank sends as many rows as the first one owns, so that all messages have one size. Rows past the last token are zeros, and
nothing is made of them.
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
    """Send the rows of ``x [tokens, hidden]`` that others own to them. The function waits for theirs and returns the sums.

    These are float32 ``[rows, hidden]``, of the rows that this rank owns: added in rank order, its own part exact.
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
    """``[tokens, hidden]`` in the dtype of ``rows [rows_per_rank, hidden]``, decoded on all ranks, this one too."""
    packed = encode(rows, codes)
    gathered = _c10d.all_gather_into_tensor.default(packed, group.size(), compat.group_name(group))
    received = _c10d.wait_tensor.default(gathered)[:tokens]
    return decode(received, codes, rows.shape[1]).to(rows.dtype)


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """``x`` with zeros behind it, ``[rows, hidden]``."""
    return x if len(x) == rows else torch.cat((x, x.new_zeros((rows - len(x), x.shape[1]))))
