"""A piece of a model, from behind one attention to before the next, in two halves of a symbolic number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from families import FAMILIES
from one_rank import one_rank  # noqa: F401
from split_graphs import random_values, run_alone
from torch import nn
from torch._inductor import config as inductor_config

from tw_compile import Config, TWCompilePass, collect_reports, pipeline
from tw_compile.backend import make_backend
from tw_compile.current import current_gate, current_profile
from tw_compile.graph.copy import copy_of
from tw_compile.graph.predicates import value
from tw_compile.graph.snapshot import snapshot
from tw_compile.kernels.runtime.tokens_of_half import arguments_of, tokens_of_half
from tw_compile.models.config import config_from_dict
from tw_compile.models.decoder import build_decoder
from tw_compile.passes import manager
from tw_compile.passes.contract import Context, HostGraph
from tw_compile.passes.fusion import FusionDecisions
from tw_compile.passes.operators import AllGatherOperator, OneScaleOperator, RowWiseOperator, registered_operators
from tw_compile.passes.reasons import SplitRefusal, SplitRefused
from tw_compile.passes.split import SPLIT, SplitReport, layer_of_piece, split_tokens
from tw_compile.passes.split.analysis.token_axis import TokenAxis, find_token_axis
from tw_compile.planning import Attention, Gemm
from tw_compile.planning.halves import FirstHalf, constant_first_half, shares_of_range
from tw_compile.report import Split
from tw_compile.testing import fake_cuda, fake_process_group
from tw_compile.testing.capture import capture_graphs

WORLD_SIZE = 4
TINY = {"hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 8, "width": 24}
LLAMA_70B = {"hidden": 8192, "heads": 16, "kv_heads": 2, "head_dim": 128, "width": 7168}
"""Of one rank of four."""


class Piece(nn.Module):
    """``(attention output, residual, positions) -> (queries, keys, values, residual)``, as vLLM cuts a Llama."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        width: int,
        extra: str = "",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.extra = heads, kv_heads, head_dim, extra
        sizes = {
            "o_proj": (heads * head_dim, hidden),
            "gate_up": (hidden, 2 * width),
            "down": (width, hidden),
            "qkv": (hidden, (heads + 2 * kv_heads) * head_dim),
        }
        for name, (depth, columns) in sizes.items():
            setattr(self, name, nn.Linear(depth, columns, bias=False, dtype=dtype))
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-5, dtype=dtype) for _ in range(2))
        self.register_buffer("angles", torch.randn(512, head_dim))

    def forward(
        self, attention: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        x = self.o_proj(attention.reshape(residual.shape[0], -1))
        dist.all_reduce(x)
        residual = residual + x
        gate, up = self.gate_up(self.norms[0](residual)).chunk(2, dim=-1)
        x = nn.functional.silu(gate) * up
        if self.extra == "sums":
            x = x.cumsum(0)
        if self.extra == "unknown":
            x = torch.ops.aten.fft_fft(x).real
        if self.extra in ("one_scale", "row_wise"):
            x = declared(x)
        x = self.down(x)
        dist.all_reduce(x)
        residual = residual + x
        sizes = [count * self.head_dim for count in (self.heads, self.kv_heads, self.kv_heads)]
        queries, keys, values = self.qkv(self.norms[1](residual)).split(sizes, dim=-1)
        cos, sin = self.angles.index_select(0, positions).chunk(2, dim=-1)
        return self.rotated(queries, cos, sin), self.rotated(keys, cos, sin), values, residual

    def rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.view(x.shape[0], -1, self.head_dim).chunk(2, dim=-1)
        cos, sin = (one.unsqueeze(1).to(x.dtype) for one in (cos, sin))
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(1)


@torch.library.custom_op("tw_toy::declared", mutates_args=())
def declared(x: torch.Tensor) -> torch.Tensor:
    """An operator that tests declare as one of a host's."""
    return x * 2


declared.register_fake(torch.empty_like)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(WORLD_SIZE):
        yield


def inputs(shape: dict[str, int], tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    rows = (tokens, shape["heads"], shape["head_dim"]), (tokens, shape["hidden"])
    return *(torch.empty(one, dtype=dtype) for one in rows), torch.zeros(tokens, dtype=torch.long)


def piece(
    tokens: tuple[int, int | None], extra: str = "", known: int | None = None, measures: bool = False, **options: Any
) -> Seen:
    """What the passes make of a tiny piece on a CPU, compiled for ``tokens``. ``measures``: see :class:`HostGraph`."""
    config = Config(**{"transport": "gloo", "strict": True, **options})
    module = Piece(**TINY, extra=extra)
    return _seen(module, inputs(TINY, known or 40, torch.float32), config, tokens, known is None, measures)


def big_piece(tokens: tuple[int, int | None], known: int | None = None, **options: Any) -> Seen:
    """The same of Llama-70B's sizes on fake GPUs."""
    with fake_cuda():
        config = Config(**{"split": "auto", "device_profile": "H200", "strict": True, **options})
        with torch.device("cuda"):
            module = Piece(**LLAMA_70B, dtype=torch.bfloat16)
            args = inputs(LLAMA_70B, known or 4096, torch.bfloat16)
        return _seen(module, args, config, tokens, known is None)


class Seen:
    """``fused`` is the graph before it is split, ``graph`` what the passes leave, ``guards`` those that the split added."""

    fused: fx.Graph
    graph: fx.Graph
    guards: list[Any]
    split: Split | None
    warning: str

    @property
    def sizes(self) -> tuple[int | str, ...]:
        assert self.split is not None
        return self.split.sizes


def _seen(
    module: Any, args: Any, config: Config, tokens: tuple[int, int | None], dynamic: bool, measures: bool = False
) -> Seen:
    found, host = Seen(), HostGraph(tokens, measures=measures)

    def apply(graph: fx.Graph) -> None:
        symbol = next(iter(symbols(graph)), None)
        guards = [] if symbol is None else symbol.node.shape_env.guards
        before = len(guards)
        with collect_reports() as reports:
            TWCompilePass(replace(config, split="off")).rewrite(graph, current_gate(config), host)
        found.fused = copy_of(graph)
        context = Context(config, current_gate(config), current_profile(config), host)
        context.keep(FusionDecisions(tuple(reports[0].sites)))
        run = manager.run(graph, context, SPLIT)
        found.split, found.warning = pipeline.split_report(graph, context, run), run.warning
        found.guards = guards[before:]
        found.graph = copy_of(graph)

    if dynamic:
        for one in args:
            torch._dynamo.mark_dynamic(one, 0)
    capture_graphs(module, args, pass_=apply)
    return found


def symbols(graph: fx.Graph) -> list[torch.SymInt]:
    tensors = (tensor for node in graph.find_nodes(op="placeholder") if (tensor := value(node)) is not None)
    return [size for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)]


def axis_of(graph: fx.Graph) -> TokenAxis:
    axis = find_token_axis(graph, piece=True)
    assert isinstance(axis, TokenAxis)
    return axis


# The function of the token count


def test_first_half_is_proven_for_every_count_of_its_range() -> None:
    half = FirstHalf(256, 1024, 7, 16, 64)
    counts = range(256, 1025)
    assert half.bounds == ((64, 448), (165, 639)) and half(1000) == 384 and str(half) == "s*7//16//64*64"
    assert {(half(s) % 64, 0 < half(s) < s) for s in counts} == {(0, True)}
    fixed = constant_first_half(100, 200, 300)
    assert (fixed(200), fixed(300), fixed.bounds, str(fixed)) == (100, 100, ((100, 100), (100, 200)), "100")
    assert [FirstHalf(8, 64)(tokens) for tokens in (8, 63, 64)] == [4, 31, 32]
    more = FirstHalf(8, 64, constant=1)
    assert (more(8), more(63), str(more)) == (5, 32, "s*1//2+1")


@pytest.mark.parametrize("change", [{"multiple": 256}, {"numerator": 16}, {"constant": 130}, {"low": 0}, {"high": 200}])
def test_first_half_that_leaves_none_is_an_error(change: dict[str, int]) -> None:
    given = {"low": 256, "high": 1024, "numerator": 8, "denominator": 16, "multiple": 64}
    FirstHalf(**given)
    with pytest.raises(ValueError, match=r"first half: expected 2 tokens or more in each half|low, high: expected"):
        FirstHalf(**{**given, **change})


def test_shares_are_whole_tiles_where_a_range_has_some() -> None:
    assert {half.multiple for half in shares_of_range(4096, 8192, 4)} == {256, 128, 16}
    assert {half.multiple for half in shares_of_range(128, 255, 6)} == {48}
    assert not list(shares_of_range(8, 16, 8))


def test_shares_are_a_quarter_to_three_quarters_and_leave_rows_for_all_ranks() -> None:
    shares = {half.numerator for half in shares_of_range(4096, 8192, 4)}
    assert shares == set(range(4, 13)) and {half.denominator for half in shares_of_range(4096, 8192, 4)} == {16}
    few = list(shares_of_range(43, 60, 4))
    assert few and all(least >= 16 for half in few for least, _ in half.bounds)


def test_operator_computes_what_the_planner_does_and_nothing_outside_of_the_range() -> None:
    rows, half = torch.empty(0), FirstHalf(64, 128, 1, 2, 16)
    for tokens in (64, 65, 128):
        found = [tokens_of_half(rows, tokens, index, *arguments_of(half)) for index in (0, 1)]
        assert found == [half(tokens), tokens - half(tokens)]
    for tokens in (63, 129):
        with pytest.raises(
            ValueError, match=f"tokens: expected 64 to 128, for which the graph was split, got {tokens}"
        ):
            tokens_of_half(rows, tokens, 0, *arguments_of(half))


# The graph


@pytest.mark.parametrize("half", [FirstHalf(8, 512, 1, 2, 4), constant_first_half(5, 8, 512)], ids=str)
def test_halves_of_any_token_count_are_the_whole(half: FirstHalf) -> None:
    seen = piece((8, 512))
    halves = copy_of(seen.fused)
    env = symbols(halves)[0].node.shape_env
    before = len(env.guards), dict(env.var_to_range)
    report = split_tokens(halves, half, axis=axis_of(halves))
    assert isinstance(report, SplitReport) and not report.joined and (report.slices, report.cats) == (3, 4)
    assert len(env.guards) == before[0] and not any(env.deferred_runtime_asserts.values())
    assert {symbol: env.var_to_range[symbol] for symbol in before[1]} == before[1]
    names = {str(size.node.expr) for size in symbols(halves)}
    for tokens in (8, 9, 63, 512):
        values = random_values(seen.fused, dict.fromkeys(names, tokens))
        for one, other in zip(run_alone(halves, values), run_alone(seen.fused, values), strict=True):
            torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match="expected 8 to 512"):
        run_alone(halves, random_values(seen.fused, dict.fromkeys(names, 7)))


def test_layer_of_a_piece_is_read_off_it() -> None:
    seen = big_piece((4096, 8192), split="off")
    found = layer_of_piece(seen.fused, axis_of(seen.fused))
    assert not isinstance(found, fx.Node) and found.transport == "p2p"  # type: ignore[union-attr]
    shape = found.shape  # type: ignore[union-attr]
    assert (shape.world_size, shape.hidden_size) == (WORLD_SIZE, 8192)
    assert shape.qkv == (Gemm("qkv", 2560, 8192),) and shape.o_proj == Gemm("o_proj", 8192, 2048)
    assert shape.mlp == (Gemm("gate_up", 14336, 8192), Gemm("down", 8192, 7168))
    assert shape.attention == Attention(16, 2, 128, kernel="flash3")


def test_one_expression_is_planned_for_a_range_and_windows_run_with_what_the_plan_says() -> None:
    seen = big_piece((4096, 8192))
    split = seen.split
    assert split is not None and split.mode == "split", split
    assert seen.guards == [] and split.joins == {} and split.plan is not None and split.plan.mode == "join"
    first, second = split.sizes
    assert str(first).startswith("s*") and second == f"s-({first})"
    overlap = split.overlap
    assert overlap is not None and (overlap.calls, overlap.refused) == (4, "")
    kinds = [(one.kind, one.computes) for one in overlap.windows]
    assert kinds == [("prologue", 1), ("o_proj", 2), ("mlp", 1), ("mlp", 2), ("qkv", 1), ("qkv", 2)], kinds
    # Nothing is beside the first window, and nothing of half 1 is left when half 2's last sum has arrived.
    assert [bool(one.overlap_sms) for one in overlap.windows] == [False, True, True, True, True, False]
    assert [one.us is not None for one in overlap.windows] == [False, True, True, True, True, False]


def test_a_known_token_count_is_split_in_numbers() -> None:
    seen = big_piece((4096, 4096), known=4096)
    assert seen.split is not None and seen.split.mode == "split"
    first, second = seen.sizes
    assert isinstance(first, int) and isinstance(second, int) and first + second == 4096


def test_short_ranges_stay_whole() -> None:
    seen = big_piece((64, 256))
    assert seen.split is not None and (seen.split.mode, seen.split.reason) == ("off", "not_faster")
    assert snapshot(seen.graph) == snapshot(seen.fused) and seen.guards == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"extra": "sums"}, SplitRefusal.NEEDS_ALL_TOKENS),
        ({"extra": "unknown"}, SplitRefusal.OPERATOR_WITHOUT_RULE),
        ({"fuse": False}, SplitRefusal.NO_COMMUNICATION),
        ({"tokens": (8, None)}, SplitRefusal.TOKEN_COUNT_UNKNOWN),
        ({"tokens": (8, 2**40)}, SplitRefusal.TOKEN_COUNT_UNKNOWN),
        ({"tokens": (5, 64)}, SplitRefusal.TOO_FEW_TOKENS),
        ({"tokens": (6, 64)}, SplitRefusal.TOO_FEW_TOKENS),
        ({"split": "auto"}, SplitRefusal.NO_DEVICE_PROFILE),
    ],
    ids=str,
)
def test_pieces_that_are_refused_are_left_as_fused(given: dict[str, Any], reason: SplitRefusal) -> None:
    seen = piece(**{"tokens": (8, 64), "split": "5", **given})
    assert seen.split is not None and (seen.split.mode, seen.split.reason) == ("off", reason), seen.split
    assert seen.split.detail and snapshot(seen.graph) == snapshot(seen.fused) and seen.guards == []


def test_one_scale_of_all_tokens_is_refused_by_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registered_operators, "tw_toy::declared", OneScaleOperator("tw_toy::declared", writes=False))
    seen = piece((8, 64), "one_scale", split="5")
    assert seen.split is not None and (seen.split.mode, seen.split.reason) == ("off", SplitRefusal.SCALE_OF_ALL_TOKENS)
    assert "tw_toy::declared makes one scale of all tokens" in seen.split.detail


def test_row_wise_operators_of_hosts_are_split_and_have_no_plan_nor_have_gathers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator = RowWiseOperator("tw_toy::declared", reads=("x",), writes=False)
    monkeypatch.setitem(registered_operators, operator.name, operator)
    seen = piece((8, 64), "row_wise", split="5")
    assert seen.split is not None and seen.split.mode == "split" and not seen.split.joins, seen.split
    for without_times in (operator, AllGatherOperator(operator.name)):
        monkeypatch.setitem(registered_operators, operator.name, without_times)
        found = layer_of_piece(seen.fused, axis_of(seen.fused))
        assert isinstance(found, SplitRefused) and found.reason is SplitRefusal.LAYER_NOT_RECOGNISED
        assert found.detail == "declared is not in the planner's formulas"


@pytest.mark.parametrize("profile", ["auto", "H200"])
def test_where_the_host_measures_a_piece_without_a_plan_is_split_in_equal_halves(
    monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    operator = RowWiseOperator("tw_toy::declared", reads=("x",), writes=False)
    monkeypatch.setitem(registered_operators, operator.name, operator)
    options = {"split": "auto", "device_profile": profile}
    seen = piece((512, 4096), "row_wise", measures=True, **options)
    assert seen.split is not None and seen.split.mode == "split" and seen.split.plan is None, seen.split
    assert seen.sizes[0] == "s*1//2//256*256" and seen.guards == []
    seen = piece((300, 4096), "row_wise", measures=True, **options)
    assert seen.sizes[0] == "s*1//2//128*128", "no whole tile of 256 rows in half of 300"
    for tokens, measures in (((512, 4096), False), ((100, 4096), True), ((512, None), True)):
        off = piece(tokens, "row_wise", measures=measures, **options).split
        assert off is not None and off.reason in (SplitRefusal.LAYER_NOT_RECOGNISED, SplitRefusal.NO_DEVICE_PROFILE)


def test_exception_behind_the_rewrite_restores_the_fused_piece(
    monkeypatch: pytest.MonkeyPatch, tw_log: pytest.LogCaptureFixture
) -> None:
    def broken(graph: fx.Graph, calls: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr("tw_compile.passes.split.steps.lock_order", broken)
    seen = piece((8, 64), split="5", strict=False)
    assert seen.split is not None and (seen.split.mode, seen.split.reason) == ("off", SplitRefusal.SPLIT_FAILED)
    assert snapshot(seen.graph) == snapshot(seen.fused)
    assert [record.levelname for record in tw_log.records if "on purpose" in record.getMessage()].count("WARNING") == 1


# A whole model


@pytest.mark.full
@pytest.mark.usefixtures("one_rank")
def test_one_compilation_serves_every_count_of_a_bounded_range() -> None:
    """A model with attention in it: half 2 of a sequence sees the keys and values of half 1."""
    torch.manual_seed(0)
    fields = {**FAMILIES["llama"], "num_hidden_layers": 1}
    decoder = build_decoder(config_from_dict(fields), device="cpu", dtype=torch.float32)
    config = Config(split="5", transport="gloo", strict=True)
    torch._dynamo.reset()
    with inductor_config.patch(fallback_by_default=True), collect_reports() as reports, torch.no_grad():
        compiled = torch.compile(decoder, backend=make_backend(config), fullgraph=True)
        for tokens in (40, 8, 63):
            ids = torch.randint(0, 256, (1, tokens))
            torch._dynamo.mark_dynamic(ids, 1, min=8, max=64)
            torch.testing.assert_close(compiled(ids), decoder(ids))
    torch._dynamo.reset()
    assert [report.split.sizes for report in reports if report.split is not None] == [(5, "s-(5)")]


class Positioned(nn.Module):
    """A layer whose rows are multiplied by ``rows(count)``, which all halves read parts of."""

    def __init__(self, rows: Callable[[nn.Module, int], torch.Tensor]) -> None:
        super().__init__()
        self.rows = rows
        self.embedding, self.norm = nn.Embedding(64, 16), nn.RMSNorm(16, eps=1e-5)
        self.first, self.second = (nn.Linear(16, 16, bias=False) for _ in range(2))
        self.register_buffer("frequencies", torch.rand(32))
        self.register_buffer("table", torch.rand(100, 32))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self.embedding(ids)
        partial = self.first(residual * self.rows(self, ids.shape[1]))
        dist.all_reduce(partial)
        residual = residual + partial
        partial = self.second(self.norm(residual))
        dist.all_reduce(partial)
        residual = residual + partial
        return self.norm(residual), residual


def _angles(layer: Any, count: int) -> torch.Tensor:
    return (torch.arange(count)[:, None] * layer.frequencies).sin()


ROWS: dict[str, Callable[[Any, int], torch.Tensor]] = {
    "first columns": lambda layer, count: _angles(layer, count)[:, :16],
    "last columns": lambda layer, count: _angles(layer, count)[:, 16:],
    "every other column": lambda layer, count: _angles(layer, count).view(-1, 16, 2)[..., 1],
    "rows from the second on": lambda layer, count: _angles(layer, count + 1)[1:, :16],
    "columns of looked-up rows": lambda layer, count: layer.table[torch.arange(count)].chunk(2, -1)[1],
    "transposed": lambda layer, count: _angles(layer, count).t().contiguous().t()[:, :16],
    "rows of a buffer": lambda layer, count: layer.table[2 : 2 + count, :16],
}


@pytest.mark.full
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_views_that_all_tokens_share_are_those_of_the_half(name: str) -> None:
    """Generated code, as that is where views of what is computed have memory of their own."""
    torch.manual_seed(0)
    layer = Positioned(ROWS[name])
    with collect_reports() as reports, torch.no_grad():
        compiled = torch.compile(
            layer, backend=make_backend(Config(split="5", transport="gloo", strict=True)), fullgraph=True
        )
        for tokens in (40, 8, 63):
            ids = torch.randint(0, 64, (1, tokens))
            torch._dynamo.mark_dynamic(ids, 1, min=8, max=64)
            torch.testing.assert_close(compiled(ids), layer(ids))
    assert [report.split.mode for report in reports if report.split is not None] == ["split"]


@pytest.mark.usefixtures("one_rank")
def test_sizes_that_depend_on_values_are_not_made_twice() -> None:
    """As many rows as ids are even, which all tokens decide."""
    torch.manual_seed(0)
    layer = Positioned(lambda layer, count: torch.ones(count, 16))

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            hidden, residual = self.layer(ids)
            return hidden, residual[residual.sum(-1) > 0]

    model, ids = Counting(), torch.randint(0, 64, (1, 40))
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        collect_reports() as reports,
        torch.no_grad(),
    ):
        compiled = torch.compile(model, backend=make_backend(Config(split="5", transport="gloo", strict=True)))
        torch.testing.assert_close(compiled(ids), model(ids))
    (split,) = [report.split for report in reports if report.split is not None]
    assert (split.mode, split.reason) == ("off", SplitRefusal.NEEDS_ALL_TOKENS) and "depend on" in split.detail
