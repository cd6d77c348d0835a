"""Look at what the passes do to a block, in a test, without a GPU: ``pytest examples/test_graph.py``."""

from __future__ import annotations

import torch
from own_pipeline import Block

from tw_compile.testing import assert_annotation, assert_order, count_ops, find_ops, rewrite


def test_the_block_is_one_operator_on_eight_gpus() -> None:
    x = torch.empty(5, 64, dtype=torch.bfloat16)
    result = rewrite(Block(64).bfloat16(), (x, x), world_size=8, device="cuda")
    graph = result.after.graph

    assert result.report.counts == {"all_reduce": 1, "fused": 1, "refused": 0, "gated": 0}
    assert count_ops(graph, "all_reduce") == 0
    assert_order(graph, "mm_all_reduce_rms_norm_start", "all_reduce_rms_norm_wait_")
    (start,) = find_ops(graph, "mm_all_reduce_rms_norm_start")
    assert_annotation(start, site=0, role="start", stream=0)
