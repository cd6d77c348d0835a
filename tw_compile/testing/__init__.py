"""Helpers to test models and passes in your own pytest suite, without a GPU: rewrite, count, compare.

Look at what the passes do to a module (one process, any number of fake ranks, fake CUDA tensors)::

    import torch
    import torch.distributed as dist
    from torch import nn

    from tw_compile.testing import assert_annotation, assert_order, count_ops, find_ops, rewrite


    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.down = nn.Linear(width, width, bias=False)
            self.norm = nn.RMSNorm(width, eps=1e-6)

        def forward(self, x, residual):
            partial = self.down(x)
            dist.all_reduce(partial)
            residual = residual + partial
            return self.norm(residual), residual


    def test_block_is_fused():
        block = Block(64).bfloat16()
        x = torch.empty(5, 64, dtype=torch.bfloat16)
        result = rewrite(block, (x, x), world_size=8, device="cuda")

        assert result.report.counts == {"all_reduce": 1, "fused": 1, "refused": 0, "gated": 0}
        graph = result.after.graph
        assert count_ops(graph, "all_reduce") == 0
        assert_order(graph, "mm_all_reduce_rms_norm_start", "all_reduce_rms_norm_wait_")
        (start,) = find_ops(graph, "mm_all_reduce_rms_norm_start")
        assert_annotation(start, site=0, role="start", stream=0)

``snapshot(graph)`` is the graph as stable text for golden files, ``diff(before, after)`` shows what a rewrite changed.

Compare numerics on real ranks (gloo worker processes on the CPU); factories are functions of an importable module, since
the workers import them::

    from tw_compile.testing import compare_on_gloo

    def block(rank):
        torch.manual_seed(rank)
        return Block(64).bfloat16()

    def arguments(rank, call):
        x = torch.randn(2 * call + 1, 64, generator=torch.Generator().manual_seed(call)).bfloat16()
        return x, x

    def test_block_is_right():
        comparison = compare_on_gloo(block, arguments, calls=2, world_size=2, dynamic=True)
        assert comparison.passed, comparison
"""

from __future__ import annotations

from tw_compile.graph.snapshot import diff, snapshot
from tw_compile.testing.capture import capture_graphs, fake_cuda, fake_process_group
from tw_compile.testing.codegen import calls_of, generated_code
from tw_compile.testing.error_budget import assert_within_budget, budget, relative_error
from tw_compile.testing.gloo import Comparison, GlooRanks, OutputError, RankError, compare_on_gloo
from tw_compile.testing.graphs import annotation, assert_annotation, assert_order, count_ops, find_ops
from tw_compile.testing.rewriting import Rewritten, rewrite

__all__ = [
    "Comparison",
    "GlooRanks",
    "OutputError",
    "RankError",
    "Rewritten",
    "annotation",
    "assert_annotation",
    "assert_order",
    "assert_within_budget",
    "budget",
    "calls_of",
    "capture_graphs",
    "compare_on_gloo",
    "count_ops",
    "diff",
    "fake_cuda",
    "fake_process_group",
    "find_ops",
    "generated_code",
    "relative_error",
    "rewrite",
    "snapshot",
]
