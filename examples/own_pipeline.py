"""A host that owns its compile pipeline: it calls Inductor itself, and runs the passes behind a pass of its own.

torchrun --nproc-per-node 2 examples/own_pipeline.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import nn

from tw_compile import Config, TWCompilePass, collect_reports


class Block(nn.Module):
    """The end of an MLP: a projection whose results are summed over the ranks, the residual add and the norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        partial = self.down(x)
        dist.all_reduce(partial)
        residual = residual + partial
        return self.norm(residual), residual


def count_nodes(graph: fx.Graph) -> None:
    """A pass of the host's own. It runs first."""
    print(f"rank {dist.get_rank()}: {len(graph.nodes)} nodes before the passes")


def main() -> None:
    torch.manual_seed(dist.get_rank())
    block = Block(64)
    block.norm.weight.data.fill_(1.0)
    x, residual = torch.randn(5, 64), torch.ones(5, 64)
    passes = TWCompilePass(Config(strict=True, split="off"), before=count_nodes)
    with torch.no_grad(), collect_reports() as reports:
        expected = block(x, residual)
        compiled = torch.compile(block, options={"post_grad_custom_post_pass": passes, "fx_graph_cache": False})
        results = compiled(x, residual)
    for result, unfused in zip(results, expected, strict=True):
        torch.testing.assert_close(result, unfused)
    print(f"rank {dist.get_rank()}: {reports[0].counts}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
