"""Host code for ``fed.cuh``: rows of a fused call that arrive while a GEMM reads them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from tw_compile.planning.joint_tiles import PAIR_ROWS

_BLOCK_ROWS, _BLOCKS, _RANKS = 128, 512, 8
MOST_ROWS = _BLOCK_ROWS * _BLOCKS
ROWS_OFFSET = 4 * _RANKS * _BLOCKS
"""Bytes of the flags, which lie before the rows."""
STATE_WORDS = 3 + _BLOCKS
SHARED_BYTES = 832
"""Of ``FedShared`` in fed.cuh."""
_SENDERS, _SENDERS_TO_MANY = 3, 5
"""Clusters that send rows before they multiply, to one peer and to more. Five send most of what the links of an H200 carry. But
rows that are sent are only needed when other clusters have computed their own, and clusters that send compute fewer tiles."""
_CHUNK_BYTES = 64 * 1024
"""Of rows that a thread claims at a time, at most. To claim and count so many takes less time than to send them."""


class FedParams(ctypes.Structure):
    """``FedParams`` of fed.cuh."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("rank", "world", "first", "own", "senders", "chunk")),
        ("unused", ctypes.c_int32 * 4),
    ]


@dataclass(frozen=True)
class FedRows:
    """The rows of one call.

    Attributes:
        rows: bfloat16 ``[tokens, hidden]``, in memory that peers write. A GEMM that is fed these rows exchanges them between
            the ranks.
        table: int64, the address of each rank's flags and rows.
        state: int32 ``[STATE_WORDS]`` of this rank.
        begin, end: The range of the rows that this rank has computed.
        status: int32, where a thread reports that it gave up waiting after ``spin_limit`` polls; 0: it never gives up.
    """

    rows: torch.Tensor
    table: torch.Tensor
    state: torch.Tensor
    status: torch.Tensor
    rank: int
    world_size: int
    begin: int
    end: int
    spin_limit: int

    def params(self, clusters: int) -> FedParams:
        """For a GEMM on ``clusters`` clusters."""
        first, own = own_pairs(len(self.rows), self.begin, self.end)
        return FedParams(
            memory=self.table.data_ptr(),
            state=self.state.data_ptr(),
            status=self.status.data_ptr(),
            rank=self.rank,
            world=self.world_size,
            first=first,
            own=own,
            senders=min(_SENDERS if self.world_size == 2 else _SENDERS_TO_MANY, clusters),
            chunk=rows_of_a_chunk(self.rows.shape[1] * self.rows.itemsize),
        )


def fed_bytes(tokens: int, hidden_size: int) -> int:
    """Bytes of a rank's flags and rows."""
    return ROWS_OFFSET + tokens * hidden_size * torch.bfloat16.itemsize


def rows_in(memory: torch.Tensor, tokens: int, hidden_size: int) -> torch.Tensor:
    """The rows in a rank's ``memory``, which is uint8 ``[bytes]``."""
    return memory[ROWS_OFFSET : fed_bytes(tokens, hidden_size)].view(torch.bfloat16).view(tokens, hidden_size)


def rows_of_a_chunk(row_bytes: int) -> int:
    """A power of 2 that divides the rows of a block: as many as have the bytes of a chunk, and one at least."""
    return 1 << min(max(_CHUNK_BYTES // row_bytes, 1), _BLOCK_ROWS).bit_length() - 1


def own_pairs(rows: int, begin: int, end: int) -> tuple[int, int]:
    """The pairs of vertically adjacent tiles that have only rows from ``begin`` to ``end``: the first pair, and how many.

    Low tiles, which have the last rows, are not counted.
    """
    high = (rows + PAIR_ROWS // 2 - 1) // PAIR_ROWS
    first, last = -(-begin // PAIR_ROWS), high if end == rows else end // PAIR_ROWS
    return (first, last - first) if first < last else (0, 0)
