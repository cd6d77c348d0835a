"""vLLM's quantised matmuls, quantisations and experts in graphs that are split: rules, and what halves compute."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.fx as fx
from graph_builder import GraphBuilder, copy_of, run_graph
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from vllm_schemas import FP8, stand_ins

from tw_compile.hosts.vllm.experts import whole_experts
from tw_compile.hosts.vllm.rules import experts as experts_rule
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split import Join, SplitReport, TokenAxis, analyse, find_token_axis, split_tokens

aten = torch.ops.aten
TOKENS, HIDDEN, FIRST, GROUP = 12, 8, 5, 4


@pytest.fixture(scope="module", autouse=True)
def vllm_operators() -> Iterator[None]:
    with stand_ins():
        yield


class Graph(GraphBuilder):
    """Rows ``x`` and ``residual``, a square ``matrix``, and calls of operators of ``_C``."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.residual = self.input(TOKENS, HIDDEN), self.input(TOKENS, HIDDEN)
        self.matrix, self.weight = self.input(HIDDEN, HIDDEN), self.input(HIDDEN)

    def mm(self, x: fx.Node) -> fx.Node:
        return self.call(aten.mm.default, x, self.matrix)

    def part(self, of: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, of, index)

    def writes(self, name: str, **arguments: Any) -> fx.Node:
        return self.call(auto_functionalized, getattr(torch.ops._C, name).default, **arguments)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        return self.call(aten.empty.memory_format, list(shape), dtype=dtype, device=torch.device("cpu"))

    def by_token(self, rows: fx.Node) -> tuple[fx.Node, fx.Node]:
        codes, scale = self.empty(TOKENS, HIDDEN, dtype=FP8), self.empty(TOKENS, 1)
        made = self.writes("dynamic_per_token_scaled_fp8_quant", result=codes, input=rows, scale=scale, scale_ub=None)
        return self.part(made, 1), self.part(made, 2)

    def scaled_mm(self, codes: fx.Node, scale: fx.Node, out: fx.Node | None = None) -> fx.Node:
        weight, out = self.input(HIDDEN, HIDDEN), self.empty(TOKENS, HIDDEN) if out is None else out
        scales = {"a_scales": scale, "b_scales": self.input(1)}
        return self.part(self.writes("cutlass_scaled_mm", out=out, a=codes, b=weight, bias=None, **scales), 1)

    def marlin(self, rows: fx.Node, tokens: Any = TOKENS, c: fx.Node | None = None) -> fx.Node:
        weight, scales, workspace = self.input(HIDDEN, HIDDEN), self.input(1, HIDDEN), self.input(4)
        none = (None,) * 5
        sizes = (tokens, HIDDEN, HIDDEN)
        given = (rows, c, weight, None, scales, *none, workspace, 0, *sizes, True, False, True, False)
        return self.call(torch.ops._C.marlin_gemm.default, *given)


def axis_of(graph: fx.Graph) -> TokenAxis:
    axis = find_token_axis(graph, tokens=TOKENS, piece=True)
    assert isinstance(axis, TokenAxis)
    return axis


def joins(graph: fx.Graph) -> list[Join]:
    return [one for one in analyse(graph, axis_of(graph)).verdicts.values() if isinstance(one, Join)]


def check_halves(graph: fx.Graph, twice: str) -> fx.Graph:
    """Splits ``graph``; its halves compute what it does, and run an operator ``twice`` in place of once."""
    halves = copy_of(graph)
    report = split_tokens(halves, FIRST, axis=axis_of(halves))
    assert isinstance(report, SplitReport) and not report.joins, report
    counts = [
        str([node.args[:1] if node.target is auto_functionalized else node.target for node in one.nodes]).count(twice)
        for one in (graph, halves)
    ]
    assert counts[0] and counts[1] == 2 * counts[0], counts
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(node.meta["val"].shape, generator=generator) for node in graph.find_nodes(op="placeholder")]
    given = [[one.clone() for one in inputs] for _ in range(2)]
    for one, other in zip(run_graph(halves, given[0]), run_graph(graph, given[1]), strict=True):
        torch.testing.assert_close(one.float(), other.float())
    return halves


def _cutlass(b: Graph) -> list[fx.Node]:
    return [b.scaled_mm(*b.by_token(b.mm(b.x)))]


def _cutlass_with_zeros(b: Graph) -> list[fx.Node]:
    codes, scale = b.by_token(b.mm(b.x))
    zeros = b.call(aten.sum.dim_IntList, b.x, [-1], True)
    given = {"a": codes, "b": b.input(HIDDEN, HIDDEN), "a_scales": scale, "b_scales": b.input(1), "bias": b.weight}
    made = b.writes(
        "cutlass_scaled_mm_azp", out=b.empty(TOKENS, HIDDEN), azp_adj=b.input(1, HIDDEN), azp=zeros, **given
    )
    return [b.part(made, 1)]


def _static(b: Graph) -> list[fx.Node]:
    scale = b.input(1)
    codes = b.empty(TOKENS, HIDDEN, dtype=FP8)
    made = b.writes("static_scaled_fp8_quant", result=codes, input=b.mm(b.x), scale=scale, group_shape=None)
    return [b.scaled_mm(b.part(made, 1), scale)]


def _column_major_groups(b: Graph) -> list[fx.Node]:
    codes = b.empty(TOKENS, HIDDEN, dtype=FP8)
    scales = b.call(aten.permute.default, b.empty(HIDDEN // GROUP, TOKENS), [1, 0])
    options = dict.fromkeys(("scale_ue8m0", "dummy_is_scale_transposed", "dummy_is_tma_aligned"), False)
    options |= {"group_size": GROUP, "eps": 1e-10, "fp8_min": -448.0, "fp8_max": 448.0}
    made = b.writes("per_token_group_fp8_quant", input=b.mm(b.x), output_q=codes, output_s=scales, **options)
    return [b.scaled_mm(b.part(made, 1), b.part(made, 2)), b.part(made, 2)]


def _int8(b: Graph) -> list[fx.Node]:
    codes, scale = b.empty(TOKENS, HIDDEN, dtype=torch.int8), b.empty(TOKENS, 1)
    made = b.writes("dynamic_scaled_int8_quant", result=codes, input=b.mm(b.x), scale=scale, azp=None)
    return [b.scaled_mm(b.part(made, 1), b.part(made, 2))]


def _norm(b: Graph) -> list[fx.Node]:
    scale, codes = b.input(1), b.empty(TOKENS, HIDDEN, dtype=FP8)
    rest = {"weight": b.weight, "scale": scale, "epsilon": 1e-5}
    made = b.writes("rms_norm_static_fp8_quant", result=codes, input=b.mm(b.x), **rest)
    return [b.scaled_mm(b.part(made, 1), scale)]


def _norm_by_token(b: Graph) -> list[fx.Node]:
    given = {"input": b.mm(b.x), "weight": b.weight, "epsilon": 1e-5, "scale_ub": None, "residual": b.residual}
    codes, scale = b.empty(TOKENS, HIDDEN, dtype=FP8), b.empty(TOKENS, 1)
    made = b.writes("rms_norm_dynamic_per_token_quant", result=codes, scale=scale, **given)
    return [b.scaled_mm(b.part(made, 1), b.part(made, 2)), b.part(made, 3)]


def _deep_gemm(b: Graph) -> list[fx.Node]:
    codes, scale = b.by_token(b.mm(b.x))
    given = {"weight": b.input(HIDDEN, HIDDEN), "weight_scale": b.input(1, 1), "use_deep_gemm_e8m0": False}
    target, output = torch.ops.vllm.fp8_gemm_nt_op.default, b.empty(TOKENS, HIDDEN)
    return [b.part(b.call(auto_functionalized, target, q_input=codes, input_scale=scale, output=output, **given), 1)]


def _triton(b: Graph) -> list[fx.Node]:
    codes, scale = b.by_token(b.mm(b.x))
    target, weight = torch.ops.vllm.w8a8_triton_block_scaled_mm_func.default, b.input(HIDDEN, HIDDEN)
    return [b.call(target, codes, weight, scale, b.input(1, 1), [128, 128], torch.float32)]


def _marlin(b: Graph) -> list[fx.Node]:
    return [b.marlin(b.mm(b.x))]


def _machete(b: Graph) -> list[fx.Node]:
    scale = b.call(aten.sum.dim_IntList, b.x, [-1], True)
    rest = (0, None, None, None, None, None, scale, None)
    return [b.call(torch.ops._C.machete_mm.default, b.mm(b.x), b.input(HIDDEN, HIDDEN), *rest)]


def _awq(b: Graph) -> list[fx.Node]:
    operands = (b.input(HIDDEN, HIDDEN), b.input(1, HIDDEN), b.input(1, HIDDEN))
    return [b.call(torch.ops._C.awq_gemm.default, b.mm(b.x), *operands, 8)]


def _gptq(b: Graph) -> list[fx.Node]:
    operands = (b.input(HIDDEN, HIDDEN), b.input(1, HIDDEN), b.input(1, HIDDEN), b.input(HIDDEN))
    return [b.call(torch.ops._C.gptq_gemm.default, b.mm(b.x), *operands, True, False, 4)]


def _grouped_topk(b: Graph) -> list[fx.Node]:
    made = b.call(torch.ops._moe_C.grouped_topk.default, b.mm(b.x), 2, 1, 2, True, 1.0, b.weight, 0)
    return [b.part(made, 0), b.part(made, 1)]


FORMS: dict[str, tuple[str, Callable[[Graph], list[fx.Node]]]] = {
    "cutlass": ("cutlass_scaled_mm", _cutlass),
    "quantised by token": ("dynamic_per_token_scaled_fp8_quant", _cutlass),
    "cutlass with zeros": ("cutlass_scaled_mm_azp", _cutlass_with_zeros),
    "quantised by one number": ("static_scaled_fp8_quant", _static),
    "column-major scales": ("per_token_group_fp8_quant", _column_major_groups),
    "int8": ("dynamic_scaled_int8_quant", _int8),
    "norm": ("rms_norm_static_fp8_quant", _norm),
    "norm by token": ("rms_norm_dynamic_per_token_quant", _norm_by_token),
    "DeepGEMM": ("fp8_gemm_nt_op", _deep_gemm),
    "Triton": ("w8a8_triton_block_scaled_mm_func", _triton),
    "Marlin": ("marlin_gemm", _marlin),
    "Machete": ("machete_mm", _machete),
    "AWQ": ("awq_gemm", _awq),
    "GPTQ": ("gptq_gemm", _gptq),
    "grouped top-k": ("grouped_topk", _grouped_topk),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_half_runs_the_operator_on_its_rows(form: str) -> None:
    name, build = FORMS[form]
    b = Graph()
    b.graph.output(build(b))
    check_halves(b.graph, name)


def test_column_major_scales_stay_so_in_each_half() -> None:
    b = Graph()
    b.graph.output(_column_major_groups(b))
    halves = check_halves(b.graph, "per_token_group_fp8_quant")
    scales = [node.kwargs["output_s"].meta["val"] for node in halves.nodes if "output_s" in node.kwargs]
    assert [(tuple(one.shape), one.stride()) for one in scales] == [((5, 2), (1, 5)), ((7, 2), (1, 7))]


def test_halves_begin_again_at_a_quantisation_behind_what_ran_once() -> None:
    b = Graph()
    whole = b.call(aten.cumsum.default, b.mm(b.x), 0)
    b.graph.output((b.scaled_mm(*b.by_token(whole)),))
    analysis = analyse(b.graph, axis_of(b.graph))
    assert analysis.joins == {"reduces_tokens": 1}


def test_one_scale_of_all_tokens_has_a_name_of_its_own() -> None:
    b = Graph()
    codes, scale = b.empty(TOKENS, HIDDEN, dtype=FP8), b.empty(1)
    made = b.writes("dynamic_scaled_fp8_quant", result=codes, input=b.mm(b.x), scale=scale)
    b.graph.output((b.scaled_mm(b.part(made, 1), b.part(made, 2)),))
    found = joins(b.graph)
    assert [one.reason for one in found] == [JoinReason.SCALE_OF_ALL_TOKENS]
    assert "_C::dynamic_scaled_fp8_quant makes one scale of all tokens" in found[0].detail


def _rows_in_columns(b: Graph) -> fx.Node:
    turned = b.call(aten.permute.default, b.mm(b.x), [1, 0])
    operands = (b.input(TOKENS, HIDDEN), b.input(1, HIDDEN), b.input(1, HIDDEN))
    return b.call(torch.ops._C.awq_gemm.default, turned, *operands, 8)


def _another_count(b: Graph) -> fx.Node:
    return b.marlin(b.mm(b.x), tokens=TOKENS - 1)


def _accumulator(b: Graph) -> fx.Node:
    return b.marlin(b.mm(b.x), c=b.empty(TOKENS, HIDDEN))


def _weight_of_tokens(b: Graph) -> fx.Node:
    operands = (b.input(HIDDEN, HIDDEN), b.input(1, HIDDEN), b.mm(b.residual))
    return b.call(torch.ops._C.awq_gemm.default, b.mm(b.x), *operands, 8)


def _result_of_someone(b: Graph) -> fx.Node:
    return b.scaled_mm(*b.by_token(b.mm(b.x)), out=b.residual)


def _scale_by_column(b: Graph) -> fx.Node:
    return b.scaled_mm(b.by_token(b.mm(b.x))[0], b.input(1, HIDDEN))


def _packed_columns_of_whole_scales(b: Graph) -> fx.Node:
    packed = b.call(aten.permute.default, b.input(2, TOKENS), [1, 0])
    return b.scaled_mm(b.by_token(b.mm(b.x))[0], packed)


@pytest.mark.parametrize(
    "build",
    [
        _rows_in_columns,
        _another_count,
        _accumulator,
        _weight_of_tokens,
        _result_of_someone,
        _scale_by_column,
        _packed_columns_of_whole_scales,
    ],
)
def test_other_layouts_join(build: Callable[[Graph], fx.Node]) -> None:
    b = Graph()
    b.graph.output((build(b),))
    assert JoinReason.OPERANDS_DISAGREE in [one.reason for one in joins(b.graph)]


# Experts


def _layer(**changes: Any) -> SimpleNamespace:
    """As much of vLLM's layer of experts as matters."""
    config = {"dp_size": 1, "pcp_size": 1, "is_sequence_parallel": False, "is_lora_enabled": False}
    quantised = {"quant_dtype": None, "per_act_token_quant": False, "block_shape": None, "a1_scale": None}
    config |= {name: changes[name] for name in config.keys() & changes.keys()}
    quantised |= {name: changes[name] for name in quantised.keys() & changes.keys()}
    method = SimpleNamespace(moe_quant_config=SimpleNamespace(**quantised))
    return SimpleNamespace(
        moe_config=SimpleNamespace(**config),
        router=SimpleNamespace(capture_fn=changes.get("capture_fn")),
        routed_experts=SimpleNamespace(quant_method=method),
    )


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = [_layer()]
    monkeypatch.setattr(experts_rule, "_layers", lambda: found)
    return found


def _experts(b: Graph, layer_name: str = "model.layers.0.mlp.experts") -> list[fx.Node]:
    given = {"hidden_states": b.mm(b.x), "router_logits": b.call(aten.mm.default, b.x, b.input(HIDDEN, 4))}
    rest = {"shared_experts_input": None, "input_ids": None, "layer_name": layer_name, "hidden_dim_unpadded": 0}
    made = b.call(auto_functionalized, torch.ops.vllm.moe_forward.default, **given, **rest)
    return [b.part(made, 0)]


def _shared_experts(b: Graph) -> list[fx.Node]:
    operands = (b.mm(b.x), b.call(aten.mm.default, b.x, b.input(HIDDEN, 4)))
    made = b.call(torch.ops.vllm.moe_forward_shared.default, *operands, None, None, "model.layers.0.mlp.experts", 0)
    return [b.part(made, 0), b.part(made, 1)]


@pytest.mark.parametrize(("build", "name"), [(_experts, "moe_forward"), (_shared_experts, "moe_forward_shared")])
def test_experts_run_once_for_each_half(layers: list[Any], build: Callable[[Graph], list[fx.Node]], name: str) -> None:
    b = Graph()
    b.graph.output(build(b))
    check_halves(b.graph, name)


@pytest.mark.parametrize("build", [_experts, _shared_experts])
def test_experts_of_a_layer_that_nobody_knows_join(build: Callable[[Graph], list[fx.Node]]) -> None:
    b = Graph()
    b.graph.output(build(b))
    assert [(one.reason, one.detail.rpartition(": ")[2]) for one in joins(b.graph)] == [
        (JoinReason.EXPERTS, "the layers of experts are not known")
    ]


def test_experts_that_are_counted_and_not_named_join(layers: list[Any]) -> None:
    b = Graph()
    b.graph.output(_experts(b, "from_forward_context"))
    assert [one.reason for one in joins(b.graph)] == [JoinReason.EXPERTS]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"dp_size": 2}, "dp_size is 2: tokens go to other ranks by the step's counts"),
        ({"pcp_size": 2}, "pcp_size is 2: tokens go to other ranks by the step's counts"),
        ({"is_sequence_parallel": True}, "each rank has a part of the tokens"),
        ({"is_lora_enabled": True}, "adapters' kernels sort the tokens of a whole step by their adapter"),
        ({"capture_fn": print}, "the step's choices are recorded by its tokens' numbers"),
        ({"quant_dtype": FP8}, "activations have one dynamic scale of all tokens"),
        ({"quant_dtype": torch.int8}, "activations have one dynamic scale of all tokens"),
        ({"quant_dtype": FP8, "per_act_token_quant": True}, ""),
        ({"quant_dtype": FP8, "block_shape": [128, 128]}, ""),
        ({"quant_dtype": FP8, "a1_scale": torch.ones(1)}, ""),
    ],
    ids=str,
)
def test_layers_of_experts_say_what_they_do_beside_rows(changes: dict[str, Any], reason: str) -> None:
    assert whole_experts([object(), _layer(**changes)]) == reason


def test_how_experts_are_quantised_must_be_known() -> None:
    layer = _layer()
    layer.routed_experts.quant_method = SimpleNamespace(
        moe_quant_config=None, get_fused_moe_quant_config=lambda experts: None
    )
    assert whole_experts([layer]) == "it is not known how activations are quantised"
