"""vLLM's operators in graphs that are split."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
import torch.fx as fx
from graph_builder import GraphBuilder, copy_of, run_graph
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split import Join, SplitReport, TokenAxis, analyse, find_token_axis, split_tokens
from tw_compile.passes.split.schedule.dependences import written_by
from tw_compile.passes.split.schedule.lock import has_own_kernel

aten = torch.ops.aten
TOKENS, HIDDEN, EPS = 12, 8, 1e-5


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def _fused_add(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, ...]:
    return _rms_norm(x + residual, weight, epsilon), x + residual


def _silu_and_mul(result: torch.Tensor, input: torch.Tensor) -> None:
    gate, up = input.chunk(2, -1)
    result.copy_(torch.nn.functional.silu(gate) * up)


def _embedding(out: torch.Tensor, input_ids: torch.Tensor, weight: torch.Tensor, begin: int) -> None:
    out.copy_(weight[input_ids - begin])


def _per_token(result: torch.Tensor, input: torch.Tensor) -> None:
    result.copy_(input)


def _norm_into(result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    result.copy_(_rms_norm(input, weight, epsilon))


def _all_gather(tensor: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    return torch.cat([tensor * (rank + 1) for rank in range(world_size)], dim)


def _shrink(inputs: torch.Tensor, weights: list[torch.Tensor], output: torch.Tensor, order: torch.Tensor) -> None:
    output.zero_()


def _rotary(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, cos_sin: torch.Tensor
) -> None:
    for one in (query, key):
        one.mul_(cos_sin[positions].repeat(1, one.shape[1] // head_size))


@pytest.fixture(scope="module", autouse=True)
def vllm_operators() -> Iterator[None]:
    """Operators of the names of vLLM 0.24's, and as much of their signatures as matters."""
    kind = "CompositeExplicitAutograd"
    with (
        torch.library._scoped_library("vllm", "FRAGMENT") as vllm,
        torch.library._scoped_library("vllm_ir", "FRAGMENT") as ir,
        torch.library._scoped_library("_C", "FRAGMENT") as kernels,
    ):
        vllm.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
        vllm.impl("all_reduce", lambda tensor, group_name: tensor * 2, kind)
        vllm.define("all_gather(Tensor tensor, int dim, SymInt world_size, str group_name) -> Tensor")
        vllm.impl("all_gather", _all_gather, kind)
        vllm.define("lora_shrink(Tensor inputs, Tensor[] lora_a_weights, Tensor! output_tensor, Tensor order) -> ()")
        vllm.impl("lora_shrink", _shrink, kind)
        vllm.define("lora_linear_async(Tensor x, Tensor order) -> Tensor")
        vllm.impl("lora_linear_async", lambda x, order: x * 2, kind)
        ir.define("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor")
        ir.impl("rms_norm", _rms_norm, kind)
        ir.define("fused_add_rms_norm(Tensor x, Tensor x_residual, Tensor weight, float epsilon) -> (Tensor, Tensor)")
        ir.impl("fused_add_rms_norm", _fused_add, kind)
        kernels.define("silu_and_mul(Tensor! result, Tensor input) -> ()")
        kernels.impl("silu_and_mul", _silu_and_mul, kind)
        kernels.define("rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()")
        kernels.impl("rms_norm", _norm_into, kind)
        kernels.define(
            "rotary_embedding(Tensor positions, Tensor! query, Tensor! key, int head_size, Tensor cos_sin_cache) -> ()"
        )
        kernels.impl("rotary_embedding", _rotary, kind)
        kernels.define("vocab_parallel_embedding(Tensor! out, Tensor input_ids, Tensor weight, int begin) -> ()")
        kernels.impl("vocab_parallel_embedding", _embedding, kind)
        kernels.define("per_token(Tensor! result, Tensor input) -> ()")
        kernels.impl("per_token", _per_token, kind)
        yield


class Piece(GraphBuilder):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.residual = self.input(TOKENS, HIDDEN), self.input(TOKENS, HIDDEN)
        self.positions = self.input(TOKENS, dtype=torch.long)
        self.weight, self.matrix = self.input(HIDDEN), self.input(HIDDEN, HIDDEN)

    def mm(self, x: fx.Node) -> fx.Node:
        return self.call(aten.mm.default, x, self.matrix)

    def part(self, of: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, of, index)

    def writes(self, target: object, **arguments: object) -> fx.Node:
        return self.call(auto_functionalized, target, **arguments)

    def empty(self, *shape: int) -> fx.Node:
        return self.call(aten.empty.memory_format, list(shape), dtype=torch.float32, device=torch.device("cpu"))

    def axis(self) -> TokenAxis:
        axis = find_token_axis(self.graph, tokens=TOKENS, piece=True)
        assert isinstance(axis, TokenAxis) and len(axis.inputs) == 3
        return axis


def test_the_embedding_is_looked_up_by_each_half() -> None:
    b = Piece()
    table = b.input(64, HIDDEN)
    embedding = torch.ops._C.vocab_parallel_embedding.default
    result = b.empty(TOKENS, HIDDEN)
    looked_up = b.part(b.writes(embedding, out=result, input_ids=b.positions, weight=table, begin=0), 1)
    b.graph.output((b.call(torch.ops.vllm.all_reduce.default, looked_up, "tp:0"),))
    split = copy_of(b.graph)
    report = split_tokens(split, 5, axis=find_axis(split))
    assert isinstance(report, SplitReport) and not report.joins and not report.joined
    calls = [node for node in split.nodes if node.target is auto_functionalized]
    assert [node.kwargs["out"].meta["val"].shape[0] for node in calls] == [5, 7]  # type: ignore[union-attr]
    values = [torch.arange(one.meta["val"].numel()).view(one.meta["val"].shape) for one in b.inputs]
    values = [one if node is b.positions else one.float() for node, one in zip(b.inputs, values, strict=True)]
    torch.testing.assert_close(run_graph(split, values), run_graph(b.graph, values))


def test_vllms_operators_are_run_by_each_half_on_tensors_of_its_own() -> None:
    b = Piece()
    wide = b.call(aten.cat.default, [b.mm(b.x), b.mm(b.x)], 1)
    gated = b.part(b.writes(torch.ops._C.silu_and_mul.default, result=b.empty(TOKENS, HIDDEN), input=wide), 1)
    summed = b.call(torch.ops.vllm.all_reduce.default, b.mm(gated), "tp:0")
    both = b.call(torch.ops.vllm_ir.fused_add_rms_norm.default, summed, b.residual, b.weight, EPS)
    hidden = b.call(torch.ops.vllm_ir.rms_norm.default, b.part(both, 0), b.weight, EPS)
    norm = torch.ops._C.rms_norm.default
    result = b.empty(TOKENS, HIDDEN)
    hidden = b.part(b.writes(norm, result=result, input=hidden, weight=b.weight, epsilon=EPS), 1)
    halves = b.call(aten.split_with_sizes.default, b.mm(hidden), [4, 4], -1)
    query, key = b.part(halves, 0), b.part(halves, 1)
    angles = b.input(64, 4)
    rotary = torch.ops._C.rotary_embedding.default
    rotated = b.writes(rotary, positions=b.positions, query=query, key=key, head_size=4, cos_sin_cache=angles)
    b.graph.output((b.part(rotated, 1), b.part(rotated, 2), b.part(both, 1)))
    split = copy_of(b.graph)
    report = split_tokens(split, 5, axis=find_axis(split))
    assert isinstance(report, SplitReport) and not report.joins and not report.joined
    calls = [node for node in split.nodes if node.target is auto_functionalized]
    assert len(calls) == 6 and not any(has_own_kernel(node) or written_by(node) for node in calls)
    results = [node.kwargs["result"] for node in calls if "result" in node.kwargs]
    assert [node.meta["val"].shape[0] for node in results] == [5, 7, 5, 7] and len(set(results)) == 4  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.randint(0, 64, one.meta["val"].shape)
        if one is b.positions
        else torch.randn(one.meta["val"].shape, generator=generator)
        for one in b.inputs
    ]
    given = [[one.clone() for one in values] for _ in range(2)]
    for one, other in zip(run_graph(split, given[0]), run_graph(b.graph, given[1]), strict=True):
        torch.testing.assert_close(one, other)


def find_axis(graph: fx.Graph) -> TokenAxis:
    axis = find_token_axis(graph, tokens=TOKENS, piece=True)
    assert isinstance(axis, TokenAxis)
    return axis


def reasons(b: Piece) -> list[JoinReason]:
    return [one.reason for one in analyse(b.graph, b.axis()).verdicts.values() if isinstance(one, Join)]


def test_operator_that_writes_and_is_not_declared_joins() -> None:
    b = Piece()
    written = b.writes(torch.ops._C.per_token.default, result=b.empty(TOKENS, HIDDEN), input=b.x)
    b.graph.output(b.part(written, 1))
    assert JoinReason.UNKNOWN_OPERATOR in reasons(b)


def test_each_half_gathers_its_own_rows_columns_and_writes_into_rows_of_its_own() -> None:
    b = Piece()
    gathered = b.call(torch.ops.vllm.all_gather.default, b.mm(b.x), -1, 2, "tp:0")
    made = b.empty(TOKENS, 2 * HIDDEN)
    for begin, rows in ((0, b.mm(b.residual)), (HIDDEN, b.call(aten.neg.default, b.mm(b.x)))):
        place = b.call(aten.slice.Tensor, made, 1, begin, begin + HIDDEN)
        written = b.call(aten.copy.default, place, rows)
        made = b.call(aten.slice_scatter.default, made, written, 1, begin, begin + HIDDEN)
    b.graph.output((b.call(aten.mul.Tensor, gathered, made),))
    split = copy_of(b.graph)
    report = split_tokens(split, 5, axis=find_axis(split))
    assert isinstance(report, SplitReport) and not report.joins
    gathers = [node for node in split.nodes if node.target is torch.ops.vllm.all_gather.default]
    assert [node.meta["val"].shape for node in gathers] == [(5, 2 * HIDDEN), (7, 2 * HIDDEN)]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(one.meta["val"].shape, generator=generator) for one in b.inputs]
    torch.testing.assert_close(run_graph(split, values), run_graph(b.graph, values))


def test_gathering_tokens_of_all_ranks_and_writing_over_some_tokens_join() -> None:
    b = Piece()
    b.graph.output(b.call(torch.ops.vllm.all_gather.default, b.mm(b.x), 0, 2, "tp:0"))
    assert JoinReason.RESHAPES_TOKENS in reasons(b)
    b = Piece()
    b.graph.output(b.call(aten.slice_scatter.default, b.mm(b.x), b.input(4, HIDDEN), 0, 0, 4))
    assert JoinReason.OPERANDS_DISAGREE in reasons(b)


def test_adapters_run_once_as_their_tokens_are_sorted_for_the_whole_step() -> None:
    b = Piece()
    order = b.call(aten.slice.Tensor, b.input(64, dtype=torch.long), 0, 0, TOKENS)
    buffer, rows = b.empty(1, TOKENS, 4), b.mm(b.x)
    shrink = torch.ops.vllm.lora_shrink.default
    shrunk = b.writes(shrink, inputs=rows, lora_a_weights=[b.matrix], output_tensor=buffer, order=order)
    both = b.call(torch.ops.vllm.lora_linear_async.default, rows, order)
    b.graph.output((b.part(shrunk, 1), both))
    assert reasons(b) == [JoinReason.LORA] * 2


def test_result_that_is_no_new_tensor_and_angles_that_vary_join() -> None:
    b = Piece()
    wide = b.call(aten.cat.default, [b.mm(b.x), b.mm(b.x)], 1)
    written = b.writes(torch.ops._C.silu_and_mul.default, result=b.residual, input=wide)
    b.graph.output(b.part(written, 1))
    assert JoinReason.OPERANDS_DISAGREE in reasons(b)
    b = Piece()
    rotary = torch.ops._C.rotary_embedding.default
    rotated = b.writes(
        rotary, positions=b.positions, query=b.mm(b.x), key=b.mm(b.x), head_size=8, cos_sin_cache=b.residual
    )
    b.graph.output(b.part(rotated, 1))
    assert JoinReason.OPERANDS_DISAGREE in reasons(b)


def test_norms_of_other_rows_and_by_a_weight_made_of_tokens_join() -> None:
    def joined(residual: bool) -> list[JoinReason]:
        b = Piece()
        x = b.call(aten.mm.default, b.x, b.input(HIDDEN, TOKENS))
        turned, made = b.call(aten.permute.default, x, [1, 0]), b.call(aten.sum.dim_IntList, x, [1])
        norm = torch.ops.vllm_ir.fused_add_rms_norm if residual else torch.ops.vllm_ir.rms_norm
        normed = b.call(norm.default, x, *([turned, b.input(TOKENS)] if residual else [made]), EPS)
        b.graph.output(b.part(normed, 0) if residual else normed)
        return reasons(b)

    assert JoinReason.OPERANDS_DISAGREE in joined(residual=True)
    assert JoinReason.REDUCES_TOKENS in joined(residual=False)
