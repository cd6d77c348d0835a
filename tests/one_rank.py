"""A transport for fake groups: the sum is this rank's summand, and every rank computes all rows.

Fake collectives move nothing, so rows of other ranks would be missing; what this makes is what the unfused graph makes there.
"""

from __future__ import annotations

import pytest
import torch

from tw_compile import compat
from tw_compile.kernels.collective import residual_seam, seam, transport
from tw_compile.kernels.collective.spec import Request, rows_per_rank, slice_of_whole_residual, whole_residual
from tw_compile.kernels.epilogues import EPILOGUES
from tw_compile.kernels.registry import load


class OneRank(transport.Transport):
    name = "gloo"

    def start(self, request: Request) -> transport.Started:
        world_size = compat.resolve_process_group(request.group_name).size()
        tokens, residual = request.x.shape[0], request.residual
        if request.residual_sharded:
            assert residual is not None
            rows, residual = residual, whole_residual(residual, tokens, world_size, 0)
            if residual is None:  # this rank's rows alone
                residual = rows.new_full((tokens, rows.shape[1]), torch.nan)
                residual[: rows.shape[0]] = rows[:tokens]
        operands = request.bias, request.weight, request.norm, request.hidden_scale, request.norm_bias
        hidden, h = load(EPILOGUES[request.norm.epilogue].reference)(request.x, residual, *operands)
        if request.residual_out == "none":
            h = h[:0].clone()
        elif request.residual_out == "sharded":
            whole = h.new_zeros((world_size * rows_per_rank(tokens, world_size), h.shape[1]))
            whole[:tokens] = h
            h = slice_of_whole_residual(whole, world_size, 0)
        return transport.Started(hidden, h)


def _own_rows(residual: torch.Tensor, group_name: str, dtype: torch.dtype, as_slice: bool = True) -> torch.Tensor:
    """With the others behind them, where this rank would otherwise have to do without."""
    world_size = compat.resolve_process_group(group_name).size()
    whole = residual.new_zeros(
        (world_size * rows_per_rank(residual.shape[0], world_size), residual.shape[1]), dtype=dtype
    )
    whole[: residual.shape[0]] = residual
    return slice_of_whole_residual(whole, world_size, 0)


def be_one_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(transport.instances, "gloo", OneRank())
    for module in (seam, residual_seam):
        patch.setattr(module, "own_rows", _own_rows)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    be_one_rank(monkeypatch)
