"""Groups of columns that are viewed across rows: a hidden size that is no multiple of the group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tw_compile import Config
from tw_compile.passes.reasons import QuantRefusal
from tw_compile.testing import rewrite


class Block(nn.Module):
    def __init__(self, hidden: int, group: int) -> None:
        super().__init__()
        self.group, self.norm = group, nn.RMSNorm(hidden)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        partial = x * 2
        dist.all_reduce(partial)
        groups = self.norm(residual + partial).float().view(-1, self.group)
        scales = groups.abs().amax(-1, keepdim=True) / 448
        return (groups / scales).clamp(-448, 448).to(torch.float8_e4m3fn), scales


@pytest.mark.parametrize(("hidden", "group"), [(96, 64), (64, 128)])
def test_groups_across_rows_are_left(hidden: int, group: int) -> None:
    x = torch.empty(8, hidden, dtype=torch.bfloat16)
    result = rewrite(Block(hidden, group).bfloat16(), (x, x), device="cpu", config=Config(strict=True))
    assert result.report.counts["fused"] == 1
    assert result.report.sites[0].quantisation == QuantRefusal.SCALE_GROUP
