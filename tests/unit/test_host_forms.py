"""all_reduces and norms that are operators of vLLM's, in graphs as its pieces have them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from graph_builder import GraphBuilder, copy_of, metadata, propagated_metadata, run_graph
from one_rank import one_rank  # noqa: F401
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from tw_compile import Config, TWCompilePass, compat
from tw_compile.gating.facts import Node
from tw_compile.graph.predicates import operator_name
from tw_compile.own_gate import own_gate
from tw_compile.passes.fusion import fuse_all_reduce_rms_norm
from tw_compile.passes.fusion.find import FusionSite, RefusedSite, find_sites
from tw_compile.passes.reasons import Refusal
from tw_compile.passes.split import HostGraph
from tw_compile.testing import fake_cuda, fake_process_group

pytestmark = pytest.mark.usefixtures("one_rank")

T, H, EPS = 6, 8, 0.25
BF16 = torch.bfloat16
CONFIG = Config(strict=True)


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    rows = x.float()
    rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon)
    return (rows if weight is None else rows.to(weight.dtype) * weight).to(x.dtype)


def _fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    added = x.float() + x_residual.float()
    rows = added * torch.rsqrt(added.pow(2).mean(-1, keepdim=True) + epsilon)
    return (rows if weight is None else rows.to(weight.dtype) * weight).to(x.dtype), added.to(x.dtype)


@pytest.fixture(scope="module", autouse=True)
def vllm_operators() -> Iterator[None]:
    """Operators of the names and signatures of vLLM 0.24's."""
    rest = "Tensor? weight, float epsilon, int? variance_size=None"
    with torch.library._scoped_library("vllm", "FRAGMENT") as vllm:  # noqa: SIM117
        with torch.library._scoped_library("vllm_ir", "FRAGMENT") as ir:
            vllm.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
            vllm.impl("all_reduce", lambda tensor, group_name: tensor.clone(), "CompositeExplicitAutograd")
            ir.define(f"rms_norm(Tensor x, {rest}) -> Tensor")
            ir.impl("rms_norm", _rms_norm, "CompositeExplicitAutograd")
            ir.define(f"fused_add_rms_norm(Tensor x, Tensor x_residual, {rest}) -> (Tensor, Tensor)")
            ir.impl("fused_add_rms_norm", _fused_add_rms_norm, "CompositeExplicitAutograd")
            yield


@pytest.fixture(autouse=True)
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group that the host calls tp:0, of two ranks unless a test says how many."""
    with fake_process_group(getattr(request, "param", 2)):
        found = dist.group.WORLD
        monkeypatch.setattr(compat, "group_resolvers", [lambda name: found if name == "tp:0" else None])
        yield


class Piece(GraphBuilder):
    def reduce(self, x: fx.Node, group: str = "tp:0") -> fx.Node:
        return self.call(torch.ops.vllm.all_reduce.default, x, group)

    def norm(self, x: fx.Node, weight: fx.Node | None, *rest: int) -> fx.Node:
        return self.call(torch.ops.vllm_ir.rms_norm.default, x, weight, EPS, *rest)

    def add_norm(self, x: fx.Node, residual: fx.Node, weight: fx.Node | None, *rest: int) -> fx.Node:
        return self.call(torch.ops.vllm_ir.fused_add_rms_norm.default, x, residual, weight, EPS, *rest)

    def part(self, of: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, of, index)

    def rows(self, *shape: int) -> fx.Node:
        return self.input(*(shape or (T, H)), dtype=BF16)


def symbolic_rows(mode: compat.FakeTensorMode, hidden: int) -> torch.Tensor:
    """``[tokens, hidden]`` with a symbol for the tokens. Fake kernels in Python would make a number of it, so it comes last."""
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    with compat.real_tensors():
        rows = torch.empty(T, hidden, dtype=BF16)
    return mode.from_tensor(rows, symbolic_context=context)


def fuse(graph: fx.Graph) -> list[str]:
    sites = fuse_all_reduce_rms_norm(graph, CONFIG, own_gate(CONFIG, Node(None, False)))
    graph.lint()
    return [site.reason or site.decision for site in sites]


def layouts(graph: fx.Graph) -> list[str]:
    return [str(node.args[-5]) for node in graph.nodes if "norm_start" in operator_name(node)]


def assert_same_results(before: fx.Graph, after: fx.Graph) -> None:
    shapes = [node.meta["val"].shape for node in before.nodes if node.op == "placeholder"]
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=BF16) for shape in shapes]
    for one, other in zip(run_graph(before, inputs), run_graph(after, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_a_piece_is_fused_and_its_residual_is_whole_where_it_leaves() -> None:
    """What stands between two attentions: both sums of a layer, the residual comes from the piece before."""
    b = Piece()
    x, residual, w1, w2 = b.rows(), b.rows(), b.rows(H), b.rows(H)
    first = b.add_norm(b.reduce(x), residual, w1)
    hidden, stream = b.part(first, 0), b.part(first, 1)
    down = b.call(torch.ops.aten.relu.default, hidden)
    second = b.add_norm(b.reduce(down), stream, w2)
    graph = b.finish(b.part(second, 0), b.part(second, 1))
    one, two = find_sites(graph)
    assert isinstance(one, FusionSite) and isinstance(two, FusionSite)
    assert one.residuals == (residual,) and one.stream is stream and two.residuals == (stream,)
    assert one.norm.eps == EPS and one.norm.weight is w1 and one.form == "all_reduce+residual+rms_norm[hf]"
    before = copy_of(graph)
    assert fuse(graph) == ["fused", "fused"]
    assert layouts(graph) == ["sharded", "replicated"]
    assert metadata(graph) == propagated_metadata(graph)
    assert_same_results(before, graph)


def test_the_first_piece_starts_the_residual() -> None:
    b = Piece()
    stream = b.reduce(b.rows())
    graph = b.finish(b.norm(stream, b.rows(H)), stream)
    before = copy_of(graph)
    assert fuse(graph) == ["fused"] and layouts(graph) == ["replicated"]
    assert not any(operator_name(node) == "vllm::all_reduce" for node in graph.nodes)
    assert_same_results(before, graph)


def test_the_last_norm_has_no_residual_output() -> None:
    b = Piece()
    x, residual, weight = b.rows(), b.rows(), b.rows(H)
    graph = b.finish(b.part(b.add_norm(b.reduce(x), residual, weight), 0))
    before = copy_of(graph)
    (site,) = find_sites(graph)
    assert isinstance(site, FusionSite) and site.stream is None
    assert fuse(graph) == ["fused"] and layouts(graph) == ["none"]
    assert_same_results(before, graph)


def test_the_residual_may_come_first_and_be_taken_late() -> None:
    b = Piece()
    x, residual, weight = b.rows(), b.rows(), b.rows(H)
    added = b.add_norm(residual, b.reduce(x), weight)
    used = b.call(torch.ops.aten.relu.default, b.part(added, 0))
    graph = b.finish(used, b.part(added, 1))
    before = copy_of(graph)
    assert fuse(graph) == ["fused"]
    assert_same_results(before, graph)


def test_decomposed_adds_and_sums_of_two_all_reduces() -> None:
    b = Piece()
    x, y, residual, weight = b.rows(), b.rows(), b.rows(), b.rows(H)
    h = b.add(b.add(b.reduce(x), b.reduce(y)), residual)
    graph = b.finish(b.norm(h, weight), h)
    before = copy_of(graph)
    assert fuse(graph) == ["fused", "fused"]
    assert_same_results(before, graph)


def refusal_of(b: Piece, *outputs: fx.Node) -> Refusal:
    graph = b.finish(*outputs)
    text = str(graph)
    (site,) = find_sites(graph)
    assert isinstance(site, RefusedSite)
    assert fuse(graph) == [site.refused.reason] and str(graph) == text
    return site.refused.reason


def test_a_norm_over_a_part_of_the_hidden_dim_is_refused() -> None:
    b = Piece()
    assert refusal_of(b, b.norm(b.reduce(b.rows()), b.rows(H), 4)) == Refusal.MEAN_DIM
    b = Piece()
    added = b.add_norm(b.reduce(b.rows()), b.rows(), b.rows(H), 4)
    assert refusal_of(b, b.part(added, 0), b.part(added, 1)) == Refusal.MEAN_DIM


def test_results_that_are_taken_twice_or_not_at_all_are_refused() -> None:
    b = Piece()
    added = b.add_norm(b.reduce(b.rows()), b.rows(), b.rows(H))
    assert refusal_of(b, b.part(added, 1)) == Refusal.NORM_INTERMEDIATE_USED
    b = Piece()
    added = b.add_norm(b.reduce(b.rows()), b.rows(), b.rows(H))
    assert refusal_of(b, b.part(added, 0), b.part(added, 1), b.part(added, 1)) == Refusal.NORM_INTERMEDIATE_USED


def test_a_sum_that_is_needed_besides_the_norm_is_refused() -> None:
    b = Piece()
    wait = b.reduce(b.rows())
    added = b.add_norm(wait, b.rows(), b.rows(H))
    assert refusal_of(b, b.part(added, 0), b.part(added, 1), wait) == Refusal.REDUCED_VALUE_USED_ELSEWHERE


def test_what_is_no_residual_or_no_weight_is_refused() -> None:
    b = Piece()
    wait = b.reduce(b.rows())
    assert refusal_of(b, b.part(b.add_norm(wait, wait, b.rows(H)), 0)) == Refusal.RESIDUAL_NOT_PROVABLE
    b = Piece()
    assert (
        refusal_of(b, b.part(b.add_norm(b.reduce(b.rows()), b.rows(H), b.rows(H)), 0)) == Refusal.RESIDUAL_NOT_PROVABLE
    )
    b = Piece()
    assert refusal_of(b, b.norm(b.reduce(b.rows()), b.rows(T, H))) == Refusal.WEIGHT_NOT_PROVABLE


def test_a_norm_that_is_given_keywords_is_refused() -> None:
    b = Piece()
    normed = b.call(torch.ops.vllm_ir.rms_norm.default, b.reduce(b.rows()), b.rows(H), EPS, variance_size=4)
    assert refusal_of(b, normed) == Refusal.NO_RMS_NORM


def test_an_eps_that_the_graph_computes_is_refused() -> None:
    b = Piece()
    normed = b.norm(b.reduce(b.rows()), b.rows(H))
    normed.args = (*normed.args[:2], b.input())
    assert refusal_of(b, normed) == Refusal.EPS_NOT_CONSTANT


def test_a_sum_that_is_the_weight_of_a_norm_is_refused() -> None:
    b = Piece()
    row = b.view(b.reduce(b.rows(1, H)), H)
    assert refusal_of(b, b.norm(b.rows(), row)) == Refusal.NO_RMS_NORM


def test_a_weight_in_float32_is_multiplied_before_the_rounding() -> None:
    b = Piece()
    weight = b.input(H, dtype=torch.float32)
    (site,) = find_sites(b.finish(b.norm(b.reduce(b.rows()), weight)))
    assert isinstance(site, FusionSite) and site.norm.cast_before_weight is None
    assert site.form == "all_reduce+rms_norm[fp32]"


def test_a_group_that_nobody_knows_is_refused() -> None:
    b = Piece()
    assert refusal_of(b, b.norm(b.reduce(b.rows(), "tp:9"), b.rows(H))) == Refusal.GROUP_NOT_RESOLVED


@pytest.mark.parametrize("error", [RuntimeError, ValueError, KeyError])
def test_a_group_that_cannot_be_looked_up_is_refused(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise error(name)

    monkeypatch.setattr(compat, "group_resolvers", [fail])
    b = Piece()
    assert refusal_of(b, b.norm(b.reduce(b.rows()), b.rows(H))) == Refusal.GROUP_NOT_RESOLVED


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [((1, 3), "below_fuse_min_bytes"), ((1, 4), "fused"), ((8, 64), "fused"), ((9, 64), "above_fuse_max_bytes")],
)
def test_symbolic_token_counts_are_decided_by_the_hosts_range(tokens: tuple[int, int], expected: str) -> None:
    b = Piece()
    mode = compat.FakeTensorMode(shape_env=compat.ShapeEnv())
    b.fake_mode = mode
    x, weight = b.rows(), b.rows(H)
    graph = b.finish(b.norm(b.reduce(x), weight))
    x.meta["val"] = symbolic_rows(mode, H)
    config = Config(fuse_min_bytes=4 * 2 * H, fuse_max_bytes=8 * 2 * H, strict=True)
    report = TWCompilePass(config).rewrite(graph, own_gate(config, Node(None, False)), HostGraph(tokens))
    (site,) = report.sites
    assert (site.reason or site.decision) == expected and report.tokens == tokens


def test_a_static_token_count_is_decided_by_itself() -> None:
    b = Piece()
    graph = b.finish(b.norm(b.reduce(b.rows()), b.rows(H)))
    config = Config(fuse_min_bytes=T * 2 * H, strict=True)
    (site,) = fuse_all_reduce_rms_norm(graph, config, own_gate(config, Node(None, False)), (1, T - 1))
    assert site.decision == "fused"


@pytest.mark.parametrize("group", [8], indirect=True)
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [((1, 15), "fused"), ((16, 4095), "faster_unfused"), ((4096, 8192), "fused"), ((1, 64), "fused")],
)
def test_the_band_of_issue_44079_is_left_in_its_range(tokens: tuple[int, int], expected: str) -> None:
    """Hopper with multicast, TP8, hidden 8192: multimem from 256 KiB to 64 MiB, where fusing is slower."""
    config = Config(host="vllm-0.24", strict=True)
    with fake_cuda():
        b = Piece()
        b.fake_mode, b.device = contextlib.nullcontext(), "cuda"
        x, weight = b.input(T, 8192, dtype=BF16), b.input(8192, dtype=BF16)
        graph = b.finish(b.norm(b.reduce(x), weight))
        x.meta["val"] = x.meta["val"].new_empty(symbolic_rows(x.meta["val"].fake_mode, 8192).shape)
        (site,) = fuse_all_reduce_rms_norm(graph, config, own_gate(config, Node((9, 0), True)), tokens)
    assert (site.reason or site.decision) == expected and site.backend
    if expected == "faster_unfused":
        assert site.backend == "multimem" and "44079" in site.source
