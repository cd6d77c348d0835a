"""What becomes of a graph: operators, metadata, order, and what happens when the rewrite itself fails."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from graph_builder import GraphBuilder, aten, copy_of, metadata, propagated_metadata
from torch import nn
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from tw_compile import Config, TWCompilePass, collect_reports, compat
from tw_compile.kernels.collective.seam import enter_layers, leave_layers
from tw_compile.kernels.collective.spec import row_range
from tw_compile.passes.fusion.rewrite import Rewriter
from tw_compile.passes.reasons import Refusal
from tw_compile.pipeline import say_training
from tw_compile.report import GraphReport
from tw_compile.testing import (
    assert_annotation,
    assert_order,
    capture_graphs,
    count_ops,
    diff,
    fake_process_group,
    find_ops,
    rewrite,
    snapshot,
)

T, H = 6, 8
START = "all_reduce_rms_norm_start"


@pytest.fixture
def group() -> Iterator[None]:
    with fake_process_group(4):
        yield


def apply(graph: fx.Graph, config: Config | None = None) -> GraphReport:
    with collect_reports() as reports:
        TWCompilePass(config or Config(strict=True))(graph)
    graph.lint()
    return reports[0]


def arguments(graph: fx.Graph, target: str, name: str) -> list[Any]:
    """The argument called ``name`` of every node that calls ``target``."""
    found = find_ops(graph, target)
    assert found, f"no node calls {target}"
    names = [argument.name for argument in found[0].target._schema.arguments]  # type: ignore[union-attr]
    return [node.args[names.index(name)] for node in found]


def two_sites(dtype: torch.dtype = torch.float32) -> fx.Graph:
    b = GraphBuilder()
    stream = b.input(T, H, dtype=dtype)
    for _ in range(2):
        stream = b.add(stream, b.all_reduce(b.input(T, H, dtype=dtype)))
        normed = b.rms_norm(stream, b.input(H, dtype=dtype))
    return b.finish(normed, stream)


class HFNorm(nn.Module):
    def __init__(self, width: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.offset, self.eps = offset, 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (y * (self.offset + self.weight.float())).to(x.dtype)
        return self.weight * y.to(x.dtype)


class Decoder(nn.Module):
    """Pre-norm layers; ``sandwich`` norms what a block gives before it is added to the stream, too."""

    def __init__(self, norm: str, layers: int = 2, sandwich: bool = False, bias: bool = False, width: int = 64) -> None:
        super().__init__()
        make = {"hf": HFNorm, "torch": nn.RMSNorm, "gemma": lambda w: HFNorm(w, 1.0)}[norm]
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2 * layers))
        self.norms = nn.ModuleList(make(width) for _ in range(2 * layers + 1))
        self.post = nn.ModuleList(make(width) for _ in range(2 * layers)) if sandwich else None
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            partial = block(self.norms[index](stream))
            dist.all_reduce(partial)
            if self.bias is not None:
                partial = partial + self.bias
            if self.post is not None:
                partial = self.post[index](partial)
            stream = stream + partial if index % 2 else partial + stream
        return self.norms[-1](stream)


@pytest.mark.few(2)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("norm", ["hf", "torch", "gemma"])
def test_decoder_is_fused_whole(norm: str, device: str) -> None:
    stream = torch.zeros(5, 64, dtype=torch.bfloat16)
    result = rewrite(Decoder(norm).bfloat16(), (stream,), world_size=4, device=device)  # type: ignore[arg-type]
    assert result.report.counts == {"all_reduce": 4, "fused": 4, "refused": 0, "gated": 0}
    assert count_ops(result.before.graph, "all_reduce") == 4
    graph = result.after.graph
    start = "all_reduce_rms_norm_start" if device == "cpu" else "mm_all_reduce_rms_norm_start"
    for gone in ("all_reduce", "wait_tensor", "rsqrt"):
        assert count_ops(graph, gone) == (1 if gone == "rsqrt" else 0)  # the first norm has no all_reduce before it
    assert arguments(graph, start, "residual_out") == ["sharded"] * 3 + ["none"]
    assert {site.transport for site in result.report.sites} == {"gloo" if device == "cpu" else "p2p"}


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dynamic", [False, True])
def test_three_dimensional_static_and_symbolic(group: None, dtype: torch.dtype, dynamic: bool) -> None:
    stream = torch.zeros(2, 5, 64, dtype=dtype)
    result = rewrite(Decoder("torch", bias=True).to(dtype), (stream,), dynamic=dynamic)
    assert result.report.counts["fused"] == 4
    assert [site.bytes is None for site in result.report.sites] == [dynamic] * 4
    assert metadata(result.after.graph) == propagated_metadata(result.after.graph)


@pytest.mark.few(1)
@pytest.mark.parametrize("norm", ["hf", "gemma"])
def test_sandwich_norms(norm: str) -> None:
    stream = torch.zeros(5, 64, dtype=torch.bfloat16)
    result = rewrite(Decoder(norm, sandwich=True).bfloat16(), (stream,), dynamic=True)
    assert result.report.counts["fused"] == 4
    assert arguments(result.after.graph, "mm_all_reduce_rms_norm_start", "residual") == [None] * 4


class Flattened(nn.Module):
    """The message is 2-D, the stream 3-D."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.flatten(0, 1) * 2
        dist.all_reduce(flat)
        stream = stream + flat.view(stream.shape)
        return self.norm(stream), stream


def test_flattened_message_and_two_symbolic_dims(group: None) -> None:
    x = torch.zeros(3, 5, 64)
    result = rewrite(Flattened(), (x, x), dynamic=True)
    assert result.report.counts["fused"] == 1 and not result.report.warning
    assert metadata(result.after.graph) == propagated_metadata(result.after.graph)


def test_new_nodes_are_annotated_and_in_order(group: None) -> None:
    graph = two_sites()
    apply(graph)
    for site, start in enumerate(find_ops(graph, "all_reduce_rms_norm_start")):
        assert_annotation(start, site=site, role="start", stream=0)
    first, second = find_ops(graph, "all_reduce_rms_norm_wait_")
    assert_order(graph, find_ops(graph, "all_reduce_rms_norm_start")[0], first)
    assert_order(graph, first, find_ops(graph, "all_reduce_rms_norm_start")[1])
    assert_order(graph, second, graph.output_node())
    assert_annotation(second, site=1, role="wait")


def test_wait_keeps_every_tensor_input_of_its_start(group: None) -> None:
    b = GraphBuilder()
    x, residual, bias, weight = b.input(T, H), b.input(T, H), b.input(H), b.input(H)
    graph = b.finish(b.rms_norm(b.add(b.add(b.all_reduce(x), bias), residual), weight))
    apply(graph)
    (start,), (wait,) = (find_ops(graph, f"all_reduce_rms_norm_{name}") for name in ("start", "wait_"))
    assert wait.args[2] == [x, residual, bias, weight] == list(start.all_input_nodes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_metadata_is_what_propagation_gives(group: None, dtype: torch.dtype) -> None:
    graph = two_sites(dtype)
    apply(graph)
    assert metadata(graph) == propagated_metadata(graph)


def test_second_run_changes_nothing(group: None) -> None:
    graph = two_sites()
    apply(graph)
    once = snapshot(graph)
    assert apply(graph).counts["all_reduce"] == 0
    assert snapshot(graph) == once


ABSORBED = "mm_all_reduce_rms_norm_start"
ALWAYS = Config(strict=True, absorb_mm="always")


def test_gemm_is_done_by_the_operator(group: None) -> None:
    b = GraphBuilder()
    a, factor, residual, weight = b.input(T, 3), b.input(3, H), b.input(T, H), b.input(H)
    h = b.add(residual, b.all_reduce(b.call(aten.mm.default, a, factor)))
    graph = b.finish(b.rms_norm(h, weight), h)
    report = apply(graph, ALWAYS)
    assert [site.producer for site in report.sites] == ["mm"]
    assert count_ops(graph, "mm") == count_ops(graph, "all_reduce_rms_norm_start") == 0
    (start,), (wait,) = find_ops(graph, ABSORBED), find_ops(graph, "all_reduce_rms_norm_wait_")
    assert_annotation(start, site=0, role="start")
    assert wait.args[2] == [a, factor, residual, weight] == list(start.all_input_nodes)
    assert metadata(graph) == propagated_metadata(graph)


def made_by_views(b: GraphBuilder, product: fx.Node) -> fx.Node:
    return b.view(b.call(aten.clone.default, b.call(aten.unsqueeze.default, product, 0)), 2, T // 2, H)


def made_by_addmm(b: GraphBuilder, product: fx.Node) -> fx.Node:
    return b.call(aten.addmm.default, b.input(H), b.call(aten.relu.default, product), b.input(H, H))


def made_pointwise(b: GraphBuilder, product: fx.Node) -> fx.Node:
    return b.call(aten.mul.Tensor, product, 2.0)


def made_of_narrow_rows(b: GraphBuilder, product: fx.Node) -> fx.Node:
    return b.view(product, T // 2, 2 * H)


def cast_before_the_sum(b: GraphBuilder, product: fx.Node) -> fx.Node:
    return b.cast(product, torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "producer"),
    [
        (made_by_views, "mm"),
        (made_by_addmm, "other"),
        (made_pointwise, "other"),
        (made_of_narrow_rows, "other"),
        (cast_before_the_sum, "other"),
    ],
)
def test_only_a_plain_gemm_of_the_messages_rows_is_absorbed(
    group: None, make: Callable[[GraphBuilder, fx.Node], fx.Node], producer: str
) -> None:
    b = GraphBuilder()
    partial = make(b, b.call(aten.mm.default, b.input(T, 3), b.input(3, H)))
    graph = b.finish(b.rms_norm(b.all_reduce(partial), b.input(partial.meta["val"].shape[-1])))
    gemms = count_ops(graph, "mm")
    assert [(site.decision, site.producer) for site in apply(graph, ALWAYS).sites] == [("fused", producer)]
    assert count_ops(graph, ABSORBED) == (producer == "mm")
    assert count_ops(graph, "mm") == gemms - (producer == "mm")
    assert metadata(graph) == propagated_metadata(graph)


def test_gemms_of_messages_that_travel_as_one_stay(group: None) -> None:
    b = GraphBuilder()
    first, second = (b.all_reduce(b.call(aten.mm.default, b.input(T, 3), b.input(3, H))) for _ in range(2))
    graph = b.finish(b.rms_norm(b.add(first, second), b.input(H)))
    assert [site.producer for site in apply(graph, ALWAYS).sites] == ["other", "other"]
    assert (count_ops(graph, "mm"), count_ops(graph, "all_reduce_rms_norm_start")) == (2, 1)


def test_absorbed_gemm_reads_what_the_site_before_it_gives_out(group: None) -> None:
    """The first GEMM of the normed rows, the second of the residual itself, which is needed whole for it."""
    for of_residual, layout in ((False, "sharded"), (True, "replicated")):
        b = GraphBuilder()
        h = b.add(b.input(T, H), b.all_reduce(b.input(T, H)))
        normed = b.rms_norm(h, b.input(H))
        product = b.call(aten.mm.default, h if of_residual else normed, b.input(H, H))
        graph = b.finish(normed, b.rms_norm(b.add(h, b.all_reduce(product)), b.input(H)))
        assert [site.producer for site in apply(graph, ALWAYS).sites] == ["other", "mm"]
        (first,), (second,) = find_ops(graph, "all_reduce_rms_norm_start"), find_ops(graph, ABSORBED)
        assert arguments(graph, "all_reduce_rms_norm_start", "residual_out") == [layout]
        source = second.args[0]
        assert isinstance(source, fx.Node) and source.args == (first, int(of_residual))
        assert metadata(graph) == propagated_metadata(graph)


@pytest.mark.parametrize(
    ("absorb_mm", "transport", "tuned", "absorbed"),
    [
        ("auto", "p2p", False, True),
        ("auto", "multimem", False, True),
        ("auto", "nccl", False, False),
        ("auto", "p2p", True, False),
        ("always", "nccl", True, True),
        ("never", "p2p", False, False),
    ],
)
def test_who_does_the_gemm(absorb_mm: str, transport: str, tuned: bool, absorbed: bool) -> None:
    config = Config(strict=True, absorb_mm=absorb_mm, transport=transport)
    stream = torch.zeros(5, 64, dtype=torch.bfloat16)
    with inductor_config.patch(max_autotune_gemm=tuned):
        result = rewrite(Decoder("torch").bfloat16(), (stream,), config=config)
    assert {site.producer for site in result.report.sites} == {"mm" if absorbed else "other"}
    assert count_ops(result.after.graph, ABSORBED) == 4 * absorbed
    assert count_ops(result.after.graph, "mm") == 4 * (not absorbed)


@pytest.mark.parametrize("dynamic", [False, True])
def test_absorbed_gemm_of_three_dimensional_activations(group: None, dynamic: bool) -> None:
    stream = torch.zeros(2, 5, 64, dtype=torch.bfloat16)
    result = rewrite(Decoder("hf").bfloat16(), (stream,), dynamic=dynamic)
    graph = result.after.graph
    assert (count_ops(graph, ABSORBED), count_ops(graph, "mm")) == (4, 0)
    assert {a.meta["val"].dim() for a in arguments(graph, ABSORBED, "a")} == {2}
    assert metadata(graph) == propagated_metadata(graph)


def absorbed_gemm() -> fx.Graph:
    b = GraphBuilder()
    return b.finish(b.rms_norm(b.all_reduce(b.call(aten.mm.default, b.input(T, 3), b.input(3, H))), b.input(H)))


def late_weight() -> fx.Graph:
    b = GraphBuilder()
    weight = b.input(H)
    y = b.scale(b.all_reduce(b.input(T, H)))
    return b.finish(b.call(aten.mul.Tensor, y, b.call(aten.neg.default, weight)))


@pytest.mark.parametrize("make", [absorbed_gemm, late_weight])
def test_failure_after_something_else_was_taken_along_leaves_it_where_it_was(
    group: None, monkeypatch: pytest.MonkeyPatch, make: Callable[[], fx.Graph]
) -> None:
    graph = make()
    before = snapshot(graph)

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Rewriter, "shaped_like", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        apply(graph, ALWAYS)
    assert snapshot(graph) == before


def test_late_weight_is_computed_before_its_start(group: None) -> None:
    b = GraphBuilder()
    x, weight = b.input(T, H, dtype=torch.bfloat16), b.input(H)
    y = b.cast(b.scale(b.all_reduce(x)), torch.bfloat16)
    late = b.cast(b.call(aten.mul.Tensor, weight, 2.0), torch.bfloat16)
    graph = b.finish(b.call(aten.mul.Tensor, y, late))
    apply(graph)
    (start,) = find_ops(graph, "all_reduce_rms_norm_start")
    assert count_ops(graph, "mul") == 1
    assert_order(graph, "mul", start)


def test_residual_from_a_site_issued_later(group: None) -> None:
    b = GraphBuilder()
    early = b.issue(b.input(T, H))
    first = b.add(b.all_reduce(b.input(T, H)), b.input(T, H))
    normed = b.rms_norm(first, b.input(H))
    second = b.add(b.wait(early), first)
    graph = b.finish(normed, b.rms_norm(second, b.input(H)))
    assert apply(graph).counts["fused"] == 2
    assert arguments(graph, "all_reduce_rms_norm_start", "residual_sharded") == [False, True]


def test_nodes_that_nothing_reads_any_more_are_gone(group: None) -> None:
    b = GraphBuilder()
    x, weight = b.input(2, 3, H, dtype=torch.bfloat16), b.input(H, dtype=torch.bfloat16)
    graph = b.finish(b.rms_norm(b.all_reduce(b.view(x, T, H)), weight, "gemma"))
    apply(graph)
    idle = [node.name for node in graph.nodes if node.op == "call_function" and not node.users]
    assert idle == [find_ops(graph, "all_reduce_rms_norm_wait_")[0].name]


@pytest.mark.parametrize("kept", [False, True])
def test_the_cast_before_the_weight_is_kept_where_inductor_keeps_casts(group: None, kept: bool) -> None:
    b = GraphBuilder()
    x, weight = b.input(T, H, dtype=torch.bfloat16), b.input(H, dtype=torch.bfloat16)
    graph = b.finish(b.rms_norm(b.all_reduce(x), weight, "hf"))
    with inductor_config.patch(emulate_precision_casts=kept):
        apply(graph)
    assert arguments(graph, START, "cast_before_weight") == [torch.bfloat16 if kept else None]


def test_rows_that_are_summed_are_those_that_are_normed(group: None) -> None:
    """The message is a view of other rows, which the operator is not given instead."""
    b = GraphBuilder()
    x, residual = b.view(b.input(2 * T, H // 2), T, H), b.view(b.input(T // 2, 2 * H), T, H)
    graph = b.finish(b.rms_norm(b.add(b.all_reduce(x), residual), b.input(H)))
    apply(graph)
    assert arguments(graph, START, "x") == [x] and arguments(graph, START, "residual") == [residual]


def test_several_residuals_are_rounded_once(group: None) -> None:
    b = GraphBuilder()
    x, one, two = (b.input(T, H, dtype=torch.bfloat16) for _ in range(3))
    graph = b.finish(b.rms_norm(b.add(b.add(b.all_reduce(x), one), two), b.input(H, dtype=torch.bfloat16)))
    apply(graph)
    (residual,) = arguments(graph, START, "residual")
    assert residual.meta["val"].dtype == torch.float32
    assert {node.meta["val"].dtype for node in residual.all_input_nodes} == {torch.float32}


def test_factor_and_offset_are_given_to_the_operator(group: None) -> None:
    b = GraphBuilder()
    scaled = b.call(aten.mul.Tensor, b.all_reduce(b.input(T, H)), 0.5)
    graph = b.finish(b.rms_norm(b.add(scaled, b.input(T, H)), b.input(H), "gemma"))
    apply(graph)
    assert arguments(graph, START, "scale") == [0.5] and arguments(graph, START, "weight_offset") == [1.0]


def test_a_start_says_what_the_model_keeps_its_residual_in(group: None) -> None:
    b = GraphBuilder()
    h = b.add(b.cast(b.all_reduce(b.input(T, H, dtype=torch.bfloat16)), torch.float32), b.input(T, H))
    graph = b.finish(b.cast(b.rms_norm(h, b.input(H), "torch"), torch.bfloat16), h)
    apply(graph)
    (start,) = find_ops(graph, START)
    assert_annotation(start, stream_dtype=torch.float32)
    assert start.meta["val"][0].dtype == torch.bfloat16


def test_new_nodes_say_where_they_come_from(group: None) -> None:
    graph = two_sites()
    stack = {"a": ("L['self'].model.layers.3.mlp", object)}
    known = {"nn_module_stack": stack, "stack_trace": "in forward", "seq_nr": 7, "original_aten": "mul"}
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta.update(known)
    apply(graph)
    for start in find_ops(graph, START):
        assert {key: start.meta.get(key) for key in known} == known


def test_a_residual_that_enters_and_leaves_as_rows_keeps_the_models_dtype(group: None) -> None:
    """Between two sites of one graph it is float32."""
    b = GraphBuilder()
    enter = b.call(enter_layers, b.input(T, H, dtype=torch.bfloat16), "0")
    stream = b.call(operator.getitem, enter, 1)
    for _ in range(2):
        stream = b.add(stream, b.all_reduce(b.input(T, H, dtype=torch.bfloat16)))
        normed = b.rms_norm(stream, b.input(H, dtype=torch.bfloat16))
    leave = b.call(leave_layers, normed, stream, "0")
    for node in (enter, leave):
        node.meta["eager_input_vals"] = "of the arguments as they were"
    graph = b.finish(leave)
    apply(graph)
    assert arguments(graph, START, "residual_dtype") == [torch.float32, torch.bfloat16]
    assert enter.args[2] == torch.bfloat16 and leave.args[3] is True
    assert not any("eager_input_vals" in node.meta for node in (enter, leave))
    assert metadata(graph) == propagated_metadata(graph)


def test_a_size_that_the_graph_asks_for_later_is_asked_for_again(group: None) -> None:
    b = GraphBuilder()
    b.fake_mode = mode = compat.FakeTensorMode(shape_env=compat.ShapeEnv())
    x = b.input(2, 3, H)
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x.meta["val"] = mode.from_tensor(torch.empty(2, 3, H), symbolic_context=context)
    normed = b.rms_norm(b.all_reduce(b.call(aten.cat.default, [x, x])), None, "no_weight")
    graph = b.finish(normed, b.call(aten.sym_size.int, normed, 1))
    assert apply(graph).counts["fused"] == 1
    assert metadata(graph) == propagated_metadata(graph)


def unweighted(x: torch.Tensor) -> torch.Tensor:
    partial = x * 2
    dist.all_reduce(partial)
    return partial * torch.rsqrt(partial.pow(2).mean(-1, keepdim=True) + 1e-5)


def test_a_symbolic_hidden_size_is_refused(group: None) -> None:
    result = rewrite(unweighted, (torch.zeros(5, 64),), dynamic=True, config=Config(strict=True))
    assert result.report.refusals == {Refusal.HIDDEN_SIZE_NOT_SUPPORTED: 1}


def test_gates(group: None) -> None:
    size = T * H * 4
    for config, reason in (
        (Config(fuse=False), "fusion_off"),
        (Config(fuse_min_bytes=size + 1), "below_fuse_min_bytes"),
        (Config(fuse_max_bytes=size - 1), "above_fuse_max_bytes"),
    ):
        graph = two_sites()
        before = snapshot(graph)
        report = apply(graph, config)
        assert report.counts == {"all_reduce": 2, "fused": 0, "refused": 0, "gated": 2}
        assert report.refusals == {reason: 2} and snapshot(graph) == before
    assert apply(two_sites(), Config(fuse_min_bytes=size, fuse_max_bytes=size)).counts["fused"] == 2


def test_transport_that_cannot_serve_the_graph_is_refused(group: None) -> None:
    assert apply(two_sites(), Config(transport="p2p")).refusals == {Refusal.TRANSPORT_NOT_AVAILABLE: 2}
    odd = rewrite(Decoder("torch", width=63), (torch.zeros(5, 63),), config=Config(transport="p2p"), world_size=4)
    assert odd.report.refusals == {Refusal.HIDDEN_SIZE_NOT_SUPPORTED: 4}


def test_failure_in_the_middle_leaves_the_graph_as_it_was(
    group: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graph = two_sites()
    before, names = snapshot(graph), [node.name for node in graph.nodes]
    insert = Rewriter.insert

    def fail_at_the_second(self: Rewriter, site: object, index: int, *rest: object) -> None:
        insert(self, site, index, *rest)  # type: ignore[arg-type]
        if index == 1:
            raise RuntimeError("on purpose")

    monkeypatch.setattr(Rewriter, "insert", fail_at_the_second)
    with caplog.at_level(logging.WARNING, logger="tw_compile"):
        report = apply(graph, Config(strict=False))
    assert snapshot(graph) == before and [node.name for node in graph.nodes] == names
    (record,) = caplog.records
    assert "left a graph as it was: RuntimeError: on purpose" in record.getMessage()
    assert report.refusals == {Refusal.REWRITE_FAILED: 2} and "on purpose" in report.warning
    with pytest.raises(RuntimeError, match="on purpose"):
        apply(graph, Config(strict=True))
    assert snapshot(graph) == before


@pytest.mark.full
def test_training_graphs_are_refused_and_gradients_are_right(group: None, caplog: pytest.LogCaptureFixture) -> None:
    say_training.cache_clear()
    torch.manual_seed(0)
    module, stream = Decoder("torch", layers=1), torch.randn(3, 64)
    expected = torch.autograd.grad(module(stream).square().sum(), list(module.parameters()))
    with collect_reports() as reports:
        compiled = torch.compile(module, backend="tw_compile", options={"tw_compile.strict": True})
        actual = torch.autograd.grad(compiled(stream).square().sum(), list(module.parameters()))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)  # compiled code adds up in another order
    forward, backward = reports
    assert forward.refusals == {Refusal.TRAINING_GRAPH: 2} and forward.counts["fused"] == 0
    assert set(backward.refusals) <= {Refusal.TRAINING_GRAPH} and backward.counts["fused"] == 0
    (line,) = [record for record in caplog.records if "a graph records gradients" in record.message]
    assert line.levelno == logging.WARNING and "torch.no_grad()" in line.message


@pytest.mark.full
@pytest.mark.parametrize("eps", [1e-6, 3.0])
def test_dynamic_true_makes_eps_an_input_which_the_operator_reads(group: None, eps: float) -> None:
    module, stream = Decoder("hf", layers=1), torch.randn(5, 64)
    for norm in module.norms:
        norm.eps = eps
    with torch.no_grad(), collect_reports() as reports:
        compiled = torch.compile(module, backend="tw_compile", dynamic=True, options={"tw_compile.strict": True})
        own_rows = slice(0, row_range(5, 4, 0)[1])  # a fake group gathers no others
        torch.testing.assert_close(compiled(stream)[own_rows], module(stream)[own_rows])
    assert reports[0].counts == {"all_reduce": 2, "fused": 2, "refused": 0, "gated": 0}


def test_snapshot_is_stable_and_diff_shows_the_rewrite(group: None) -> None:
    graph = two_sites()
    before = copy_of(graph)
    assert snapshot(before) == snapshot(graph) and diff(before, graph) == ""
    apply(graph)
    shown = diff(before, graph)
    assert "-%all_reduce = _c10d_functional.all_reduce.default(" in shown
    assert "+%all_reduce_rms_norm_start = tw_compile." in shown
    assert snapshot(before).splitlines()[0] == "%0 = input : f32[6, 8]"


def test_captured_graph_is_what_the_passes_left() -> None:
    with fake_process_group(2):
        (module,) = capture_graphs(Decoder("hf"), (torch.zeros(4, 64),), pass_=TWCompilePass())
    assert count_ops(module.graph, "all_reduce_rms_norm_start") == 4


class ParallelMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)
        self.norm = nn.RMSNorm(64)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + self.down(torch.relu(self.up(x)))
        return self.norm(residual), residual


@pytest.mark.few(1)
@pytest.mark.parametrize("dynamic", [False, True])
def test_rowwise_parallel_of_dtensor_is_fused(dynamic: bool) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    with fake_process_group(4):
        mlp = parallelize_module(ParallelMlp(), init_device_mesh("cpu", (4,)), plan).requires_grad_(False)
        x = torch.zeros(2, 6, 64)
        result = rewrite(mlp, (x, x), world_size=4, device="cpu", config=Config(strict=True), dynamic=dynamic)
    assert result.report.counts == {"all_reduce": 1, "fused": 1, "refused": 0, "gated": 0}
