"""Calls whose rows travel in codes, on gloo ranks: the bits that the reference has, on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.spec import FP8, NormSpec, Request, ResidualOut, row_range, rows_per_rank
from tw_compile.kernels.collective.transport import Started, Transport, get_transport, instances
from tw_compile.kernels.collective.wire_reference import all_reduce_with_wire
from tw_compile.report import Site
from tw_compile.runner.wires import wire_report
from tw_compile.testing import GlooRanks

WORLD_SIZE, HIDDEN = 3, 256
TOKENS = (1, 2, 7, 9)
"""Two ranks without rows, one without, one with fewer than the others, all alike."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(WORLD_SIZE, timeout=120) as started:
        yield started


def operands(tokens: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return [rows(tokens, HIDDEN) for _ in range(WORLD_SIZE)], rows(tokens, HIDDEN), rows(HIDDEN), rows(HIDDEN)


def norm_spec(hidden_dtype: torch.dtype, residual_dtype: torch.dtype) -> NormSpec:
    return NormSpec(1e-5, 0.0, None, hidden_dtype, residual_dtype)


def call(
    rank: int, tokens: int, dtype: torch.dtype, wire: str, sharded: bool, residual_out: ResidualOut, quantised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    partials, residual, bias, weight = operands(tokens, dtype)
    if sharded:
        begin, end = row_range(tokens, WORLD_SIZE, rank)
        own = residual.new_full((rows_per_rank(tokens, WORLD_SIZE), HIDDEN), float("nan"))
        own[: end - begin] = residual[begin:end]
        residual = own
    group_name = dist.group.WORLD.group_name
    scale = torch.tensor([0.01]) if quantised else None
    hidden, h = ops.start(
        partials[rank],
        residual,
        bias,
        weight,
        1e-5,
        0.0,
        None,
        FP8 if quantised else dtype,
        torch.float32 if residual_out == "sharded" else dtype,
        sharded,
        residual_out,
        group_name,
        "gloo",
        0,
        hidden_scale=scale,
        wire=wire,
    )
    ops.wait_(hidden, h, [], group_name, 0)
    return hidden.view(torch.uint8) if quantised else hidden, h  # float8 does not travel between processes


@pytest.mark.parametrize("wire", ("int8", "int6", "int4"))
@pytest.mark.parametrize(
    ("dtype", "sharded", "residual_out"),
    (
        (torch.bfloat16, False, "replicated"),
        (torch.bfloat16, True, "sharded"),
        (torch.float16, False, "none"),
        (torch.float32, True, "replicated"),
    ),
)
def test_ranks_hold_the_bits_of_the_reference(
    ranks: GlooRanks, wire: str, dtype: torch.dtype, sharded: bool, residual_out: ResidualOut
) -> None:
    for tokens in TOKENS:
        partials, residual, bias, weight = operands(tokens, dtype)
        spec = norm_spec(dtype, torch.float32 if residual_out == "sharded" else dtype)
        hidden, h = all_reduce_with_wire(partials, residual, bias, weight, spec, wire)
        results = ranks.run(call, tokens, dtype, wire, sharded, residual_out, False)
        for rank, (own_hidden, own_h) in enumerate(results):
            begin, end = row_range(tokens, WORLD_SIZE, rank)
            wanted = {"none": h[:0], "sharded": h[begin:end], "replicated": h}[residual_out]
            assert torch.equal(own_hidden, hidden), (tokens, rank)
            assert torch.equal(own_h[: len(wanted)], wanted), (tokens, rank)


def test_float8_results_are_gathered_as_they_are(ranks: GlooRanks) -> None:
    partials, residual, bias, weight = operands(7, torch.bfloat16)
    scale = torch.tensor([0.01])
    hidden, _ = all_reduce_with_wire(
        partials, residual, bias, weight, norm_spec(FP8, torch.bfloat16), "int8", hidden_scale=scale
    )
    for own_hidden, _ in ranks.run(call, 7, torch.bfloat16, "int8", False, "replicated", True):
        assert torch.equal(own_hidden, hidden.view(torch.uint8))


def reported(rank: int, served: str) -> dict[str, Any]:
    """What a run says of two calls with int8; the transport serves them with the wire ``served``."""
    gloo = get_transport("gloo")

    class Served(Transport):
        name = "gloo"

        def start(self, request: Request) -> Started:
            return gloo.start(replace(request, wire=served))

    sites = [
        Site(index, layer, "all_reduce+rms_norm", "fused", "", None, "gloo", feeds=feeds, wire="int8")
        for index, (layer, feeds) in enumerate(((0, "attention"), (5, "mlp")))
    ]

    def forward() -> None:
        for residual_out in ("sharded", "none"):
            call(rank, 7, torch.bfloat16, "int8", False, residual_out, False)

    instances["gloo"] = Served()
    try:
        return wire_report("int8", sites, 6, forward, dist.group.WORLD)
    finally:
        instances["gloo"] = gloo


def test_a_run_tells_what_calls_cost_by_what_feeds_them(ranks: GlooRanks) -> None:
    report, *others = ranks.run(reported, "int8")
    assert others == [report] * (WORLD_SIZE - 1)
    assert report["passed"] and report["bitwise_equal_across_ranks"] and report["calls"] == 2
    first, second = report["classes"]
    assert (first["feeds"], first["third"], second["feeds"], second["third"]) == (
        "o_proj",
        "first",
        "down_proj",
        "last",
    )
    assert second["residual"] is None
    for errors in (first["sum"], first["hidden"], first["residual"], second["hidden"]):
        assert 0 < errors["exact_error"] < errors["error"] <= errors["budget"] < 0.02


def test_a_run_fails_where_calls_cost_more_than_their_codes_do(ranks: GlooRanks) -> None:
    report = ranks.run(reported, "int6")[0]
    assert not report["passed"] and report["bitwise_equal_across_ranks"]
    assert not report["classes"][0]["hidden"]["passed"]


def test_what_a_wire_costs_is_bounded() -> None:
    """Of ordinary rows, against float64: a wire that is not applied at all, and one that is applied twice, would be seen."""
    generator = torch.Generator().manual_seed(0)
    partials = [torch.randn(64, 1024, generator=generator).bfloat16() for _ in range(2)]
    exact = torch.stack([partial.double() for partial in partials]).sum(0)
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)
    bounds = {"exact": (0.001, 0.0025), "int8": (0.004, 0.010), "int6": (0.03, 0.09), "int4": (0.06, 0.2)}
    for wire, (least, most) in bounds.items():
        hidden, _ = all_reduce_with_wire(partials, None, None, None, norm_spec(torch.bfloat16, torch.bfloat16), wire)
        error = ((hidden.double() - exact).pow(2).mean() / exact.pow(2).mean()).sqrt()
        assert least < error < most, (wire, float(error))


def call_without_tokens(rank: int, wire: str, residual_out: ResidualOut) -> list[tuple[int, ...]]:
    x, weight = torch.empty(0, HIDDEN), torch.ones(HIDDEN)
    norm = (1e-5, 0.0, None, x.dtype, x.dtype)
    group_name = dist.group.WORLD.group_name
    outputs = ops.start(x, None, None, weight, *norm, False, residual_out, group_name, "gloo", 0, wire=wire)
    ops.wait_(*outputs, [], group_name, 0)
    return [tuple(output.shape) for output in outputs]


@pytest.mark.parametrize("wire", ["exact", "int8", "int6"])
@pytest.mark.parametrize("residual_out", ["none", "sharded", "replicated"])
def test_a_message_may_have_no_tokens(ranks: GlooRanks, wire: str, residual_out: ResidualOut) -> None:
    assert ranks.run(call_without_tokens, wire, residual_out) == [[(0, HIDDEN)] * 2] * WORLD_SIZE
