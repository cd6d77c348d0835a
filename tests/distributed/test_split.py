"""Split decoders with the real operators on two gloo ranks: slots, sharded residuals and gathers of each half."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from graph_builder import copy_of
from split_graphs import family_graph, random_values

from tw_compile.passes.split import SplitReport, split_tokens
from tw_compile.passes.split.analysis.token_axis import Unit
from tw_compile.testing import GlooRanks


def outputs_of_both(
    rank: int, family: str, batch: int, seq: int, first: int, unit: Unit
) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    """Outputs of the unsplit and of the split graph, and whether those of the latter have rank 0's bits."""
    graph = family_graph(family, batch, seq)
    values = random_values(graph)
    halves = copy_of(graph)
    assert isinstance(split_tokens(halves, first, unit=unit), SplitReport)

    def run(which: fx.Graph) -> list[Any]:
        given = [one.clone() if isinstance(one, torch.Tensor) else one for one in values]
        with torch.no_grad():
            return list(fx.Interpreter(torch.nn.Module(), graph=which).run(*given))

    expected, found = run(graph), run(halves)
    of_rank_0 = [one.clone() for one in found]
    for one in of_rank_0:
        dist.broadcast(one, 0)
    return expected, found, all(torch.equal(a, b) for a, b in zip(of_rank_0, found, strict=True))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "batch", "seq", "first", "unit"),
    [
        ("llama", 1, 63, 1, "token"),
        ("olmo2", 1, 63, 62, "token"),
        ("mixtral", 3, 21, 20, "token"),
        ("gpt_oss", 3, 21, 2, "request"),
        ("qwen3_moe", 1, 1025, 512, "token"),
    ],
)
def test_split_equals_unsplit_on_two_ranks(
    gloo_ranks: GlooRanks, family: str, batch: int, seq: int, first: int, unit: Unit
) -> None:
    for expected, found, same_bits in gloo_ranks.run(outputs_of_both, family, batch, seq, first, unit):
        assert same_bits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
