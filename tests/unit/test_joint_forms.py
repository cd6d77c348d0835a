"""What looks like a gated product, and slices that are not known."""

from __future__ import annotations

import torch
from torch import nn

from tw_compile import Config
from tw_compile.passes.join import join_gemms
from tw_compile.testing import rewrite
from tw_compile.testing.graphs import find_ops

BF16 = torch.bfloat16


class NotSilu(nn.Module):
    """``y / (2 + exp(-y))``."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = (x @ gate.t()).float()
        return (y / torch.add(torch.exp(-y), 1, alpha=2)).to(BF16) * (x @ up.t())


class Parts(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ weight.t()
        return y[:, :columns], y[:, columns:]


def test_alpha_is_not_overlooked() -> None:
    args = torch.zeros(32, 64, dtype=BF16), torch.zeros(64, 64, dtype=BF16), torch.ones(64, 64, dtype=BF16)
    graph = rewrite(NotSilu(), args, device="cpu").before.graph
    join_gemms(graph, None, lambda *_: (0,))
    assert not find_ops(graph, "gated_mm_by_rows")


def test_parts_of_symbolic_columns_are_no_halves() -> None:
    args = torch.zeros(32, 64, dtype=BF16), torch.zeros(64, 64, dtype=BF16), 16
    result = rewrite(Parts(), args, device="cpu", config=Config(strict=True), dynamic=True)
    assert not result.report.warning
