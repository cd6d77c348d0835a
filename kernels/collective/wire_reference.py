"""Readable eager form of a whole call whose rows travel in codes, for all ranks at once and without any group.

This defines the results of a call with a ``wire`` for all transports. ``codes.py`` defines the codes themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tw_compile.kernels.collective.codes import round_trip
from tw_compile.kernels.collective.spec import FP8, NormSpec, check_wire, row_range
from tw_compile.kernels.collective.wires import WIRES, Codes
from tw_compile.kernels.epilogues import EPILOGUES
from tw_compile.kernels.registry import load


def all_reduce_with_wire(
    partials: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    norm: NormSpec,
    wire: str,
    hidden_scale: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(hidden, h)``, both ``[tokens, hidden]``, of a call in which rank ``r`` gives ``partials[r] [tokens, hidden]``.

    ``residual`` has all rows, ``bias``, ``weight`` and ``norm_bias`` are ``[hidden]``. ``hidden`` has the same bits on all
    ranks. Each rank keeps the rows of ``h`` that it owns (:func:`~tw_compile.kernels.collective.spec.row_range`). If a call
    returns all rows of ``h``, they are gathered exactly, without codes.

    Raises:
        ValueError: There is no such wire, or ``hidden`` is not a multiple of its group.
    """
    check_wire(wire, partials[0].shape[1])
    codes = WIRES[wire]
    sums = sums_of_owners(partials, codes.sums)
    add_and_normalise = load(EPILOGUES[norm.epilogue].reference)
    rows, h = add_and_normalise(sums, residual, bias, weight, norm, hidden_scale, norm_bias)
    return (rows if codes.results is None or rows.dtype == FP8 else round_trip(rows, codes.results).to(rows.dtype)), h


def sums_of_owners(
    partials: Sequence[torch.Tensor],
    codes: Codes | None,
    travel: Callable[[torch.Tensor, Codes], torch.Tensor] = round_trip,
) -> torch.Tensor:
    """Float32 ``[tokens, hidden]``: the sum that each row's owner computes, in rank order. The owner's own part is exact.

    ``travel``: returns rows as a receiver gets them in these codes.
    """
    world_size, tokens = len(partials), partials[0].shape[0]
    received = [partial.float() if codes is None else travel(partial, codes) for partial in partials]
    owned: list[torch.Tensor] = []
    for owner in range(world_size):
        begin, end = row_range(tokens, world_size, owner)
        parts = [rows[begin:end] for rows in received]
        parts[owner] = partials[owner][begin:end].float()
        owned.append(add_in_rank_order(parts))
    return torch.cat(owned)


def add_in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of float32 ``parts``, one of each rank, rounded after each addition."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
