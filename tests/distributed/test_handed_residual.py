"""A residual handed from one graph to another, each fused or not: what the ranks get is what one graph gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.fx as fx

from tw_compile import Config, TWCompilePass, collect_reports
from tw_compile.gating.current import current_gate
from tw_compile.graph.predicates import operator_name
from tw_compile.kernels.handed_residual import own_rows, pass_residual, spread_rows, take_residual
from tw_compile.passes.split import HostGraph
from tw_compile.testing import GlooRanks

WORLD_SIZE, HIDDEN, SHARDED_FROM = 3, 16, 4
TOKENS = (1, 3, 4, 5, 9)
"""Whole, whole, one rank without rows, one with fewer than the others, all alike."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(WORLD_SIZE, timeout=120) as found:
        yield found


def _norm(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = h.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(h.dtype) * weight


def _sum(x: torch.Tensor) -> torch.Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD)


def first(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = residual + _sum(x)
    return _norm(h, weight), pass_residual(h, dist.group.WORLD.group_name, SHARDED_FROM)


def second(x: torch.Tensor, passed: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = take_residual(passed, dist.group.WORLD.group_name, SHARDED_FROM) + _sum(x)
    return _norm(h, weight), pass_residual(h, dist.group.WORLD.group_name, SHARDED_FROM)


def last(x: torch.Tensor, passed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = take_residual(passed, dist.group.WORLD.group_name, SHARDED_FROM) + _sum(x)
    return _norm(h, weight)


PIECES = (first, second, last)
FUSED = ((True, True, True), (True, False, True), (False, True, False))


def _compiled(piece: Any, tokens: int, fuse: bool, seen: list[list[str]]) -> Any:
    passes = TWCompilePass(Config(strict=True, fuse=fuse, transport="gloo"))

    def apply(graph: fx.Graph) -> None:
        passes.rewrite(graph, current_gate(passes.config), HostGraph((tokens, tokens)))
        seen.append([operator_name(node) for node in graph.nodes])

    torch._dynamo.reset()
    options = {"post_grad_custom_post_pass": apply, "fx_graph_cache": False, "fallback_by_default": True}
    return torch.compile(piece, options=options)


def _run(rank: int, tokens: int, fused: tuple[bool, ...]) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    generator = torch.Generator().manual_seed(10 * tokens)
    residual, weight = torch.randn(tokens, HIDDEN, generator=generator), torch.rand(HIDDEN, generator=generator)
    messages = torch.randn(len(PIECES), WORLD_SIZE, tokens, HIDDEN, generator=generator)
    expected, stream = [], residual
    for message in messages:
        stream = stream + message.sum(0)
        expected.append(_norm(stream, weight))
    seen: list[list[str]] = []
    found, passed, sure = [], residual, []
    with torch.no_grad(), collect_reports():
        for piece, message, fuse in zip(PIECES, messages[:, rank], fused, strict=True):
            made = _compiled(piece, tokens, fuse, seen)(message.clone(), passed, weight)
            hidden, passed = made if isinstance(made, tuple) else (made, passed)
            found.append(hidden)
            sure.append(int((~passed.isnan()).all(1).sum()))
    errors = [float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)]
    return {"errors": errors, "sure": sure[:2], "seen": seen}


@pytest.mark.parametrize("tokens", TOKENS)
def test_pieces_need_not_know_what_became_of_each_other(ranks: GlooRanks, tokens: int) -> None:
    for fused in FUSED:
        per_rank = -(-tokens // WORLD_SIZE)
        for rank, result in enumerate(ranks.run(_run, tokens, fused)):
            assert max(result["errors"]) < 1e-5, (tokens, fused, rank, result["errors"])
            own = max(min(per_rank, tokens - rank * per_rank), 0)
            sharded = tokens >= SHARDED_FROM
            for piece, rows in enumerate(result["sure"]):
                assert rows == (own if sharded and fused[piece] else tokens)
            for piece, names in enumerate(result["seen"]):
                counts = [
                    names.count(one._schema.name) for one in (take_residual, own_rows, spread_rows, pass_residual)
                ]
                takes, passes = piece > 0, piece < 2
                if not sharded:
                    assert counts == [0, 0, 0, 0]
                elif fused[piece]:
                    assert counts == [0, takes, passes, 0]
                else:
                    assert counts == [takes, 0, 0, passes]


def test_the_operators_alone_keep_to_the_contract(ranks: GlooRanks) -> None:
    for found in ranks.run(_whole, (1, 8)):
        assert found == [0.0, 0.0]


def _whole(rank: int, tokens: tuple[int, ...]) -> list[float]:
    """What eager operators do to a residual of which the other ranks' rows are unknown where they may be."""
    differences = []
    for count in tokens:
        residual = torch.arange(count * HIDDEN, dtype=torch.float32).view(count, HIDDEN)
        name = dist.group.WORLD.group_name
        passed = pass_residual(residual, name, SHARDED_FROM)
        if count >= SHARDED_FROM:
            passed = spread_rows(own_rows(passed, name), passed, name)
        differences.append(float((take_residual(passed, name, SHARDED_FROM) - residual).abs().max()))
    return differences
