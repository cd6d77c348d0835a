"""Static quantisation to float8 behind a fused norm: what is recognised, and what it computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from graph_builder import aten, copy_of, metadata, propagated_metadata, run_graph
from one_rank import one_rank  # noqa: F401
from quant_graphs import (
    BF16,
    F32,
    SCALE,
    H,
    Quant,
    T,
    fuse,
    host_add_norm,
    host_norm,
    values,
    vllm_operators,  # noqa: F401
)
from torch import nn

from tw_compile import Config, TWCompilePass, collect_reports
from tw_compile.graph.predicates import operator_name
from tw_compile.kernels.collective.spec import FP8
from tw_compile.testing import capture_graphs, fake_process_group, find_ops, generated_code

pytestmark = pytest.mark.usefixtures("one_rank", "vllm_operators")

START = "all_reduce_rms_norm_start"
WAIT = "all_reduce_rms_norm_wait_"
GEMMA = {"aten::add", "prims::convert_element_type"}
LEFT_OVER = {"aten::reciprocal", "aten::full", "aten::reshape", "aten::view", "aten::alias"}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(2):
        yield


Form = Callable[[Quant, fx.Node], fx.Node]


def _vllm_native(b: Quant, y: fx.Node) -> fx.Node:
    return b.rounded(b.clamped(b.multiplied(b.cast(y, F32), b.inverse(b.scale_input(1)))))


def _divided(b: Quant, y: fx.Node) -> fx.Node:
    return b.quantised(y, b.scale_input())


def _without_clamp_in_bf16(b: Quant, y: fx.Node) -> fx.Node:
    """A scale of no dimension does not change the dtype: what is cast to float8 was rounded to bf16 twice."""
    return b.rounded(b.divided(y, b.scale_input()))


def _times_an_inverse_that_is_given(b: Quant, y: fx.Node) -> fx.Node:
    return b.rounded(b.clamped(b.multiplied(b.cast(y, F32), b.scale_input(1))))


def _number(b: Quant, y: fx.Node) -> fx.Node:
    bounded = b.clamped(b.cast(b.multiplied(y, 1 / SCALE), F32))
    return b.rounded(b.cast(bounded, BF16))


def _constant_tensor(b: Quant, y: fx.Node) -> fx.Node:
    return b.quantised(y, b.constant(SCALE, torch.device("cpu")))


def _times_a_constant_tensor(b: Quant, y: fx.Node) -> fx.Node:
    return b.rounded(b.clamped(b.multiplied(b.cast(y, F32), b.constant(1 / SCALE, torch.device("cpu")))))


def _negative_number(b: Quant, y: fx.Node) -> fx.Node:
    return b.quantised(y, -SCALE)


def _clamped_by_tensors(b: Quant, y: fx.Node) -> fx.Node:
    scaled = b.divided(b.cast(y, F32), b.scale_input())
    low, high = (b.constant(bound, torch.device("cpu")) for bound in (-448.0, 448.0))
    return b.rounded(b.call(aten.clamp_max.Tensor, b.call(aten.clamp_min.Tensor, scaled, low), high))


def _one_clamp(b: Quant, y: fx.Node) -> fx.Node:
    return b.rounded(b.call(aten.clamp.default, b.divided(b.cast(y, F32), b.scale_input()), -448, 448))


def _no_scale(b: Quant, y: fx.Node) -> fx.Node:
    return b.rounded(y)


def _other_shape_on_the_way(b: Quant, y: fx.Node) -> fx.Node:
    heads = b.view(b.quantised(b.view(y, T, 2, H // 2), b.view(b.scale_input(), 1)), 2, T // 2, H)
    return b.call(aten.view.default, heads, [T * 2, H // 2])


def _other_width_on_the_way(b: Quant, y: fx.Node) -> fx.Node:
    return b.quantised(b.view(y, 2 * T, H // 2), b.scale_input())


def _vllm_operator(b: Quant, y: fx.Node) -> fx.Node:
    return b.part(b.functional("static_scaled_fp8_quant", result=b.buffer(), input=y, scale=b.scale_input(1)), 1)


def _vllm_operator_with_one_group(b: Quant, y: fx.Node) -> fx.Node:
    given = {"result": b.buffer(), "input": y, "scale": b.scale_input(1), "group_shape": [-1, -1]}
    return b.part(b.functional("static_scaled_fp8_quant", **given), 1)


FORMS: dict[str, Form] = {
    form.__name__.strip("_"): form
    for form in (
        _vllm_native,
        _divided,
        _without_clamp_in_bf16,
        _times_an_inverse_that_is_given,
        _number,
        _constant_tensor,
        _times_a_constant_tensor,
        _negative_number,
        _clamped_by_tensors,
        _one_clamp,
        _no_scale,
        _other_shape_on_the_way,
        _other_width_on_the_way,
        _vllm_operator,
        _vllm_operator_with_one_group,
    )
}


def ordinals(tensor: torch.Tensor) -> torch.Tensor:
    """Neighbouring float8 values are one apart, and both zeros are 0."""
    assert tensor.dtype == FP8
    bits = tensor.view(torch.uint8).to(torch.int32)
    return torch.where(bits < 128, bits, 128 - bits)


def assert_within_one_step(before: fx.Graph, after: fx.Graph, scale: float) -> None:
    inputs = values(before, scale)
    for wanted, got in zip(run_graph(before, inputs), run_graph(after, inputs), strict=True):
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        if wanted.dtype == FP8:
            steps = (ordinals(got) - ordinals(wanted)).abs()
            assert not wanted.float().isnan().any() and wanted.float().abs().max() > 1
            assert steps.max() <= 1 and (steps == 0).float().mean() > 0.9, steps
        else:
            torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("norm", ["hf", "torch", "gemma", "no_weight"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_absorbed_and_within_one_step(name: str, norm: str) -> None:
    b = Quant(form=norm)
    y = b.site()
    quantised = FORMS[name](b, y)
    graph = b.finish(b.call(aten.alias.default, quantised), b.h)
    before = copy_of(graph)
    (site,) = fuse(graph)
    assert site.decision == "fused" and site.quantisation == "float8_e4m3fn" and site.form.endswith("]+fp8"), site
    (start,) = find_ops(graph, START)
    assert start.meta["val"][0].dtype == FP8 and start.meta["val"][1].dtype == BF16
    left_over = {operator_name(node) for node in graph.nodes} - {""}
    assert left_over - {f"tw_compile::{START}", f"tw_compile::{WAIT}"} <= LEFT_OVER | GEMMA
    assert metadata(graph) == propagated_metadata(graph)
    inverse = name in ("times_an_inverse_that_is_given",)
    assert_within_one_step(before, graph, 1 / SCALE if inverse else SCALE)


def test_a_norm_without_weight_is_quantised_from_float32() -> None:
    for scaled in (False, True):
        b = Quant()
        b.site()
        y = b.scale(b.h)
        graph = b.finish(b.quantised(y, b.scale_input()) if scaled else b.rounded(y), b.h)
        before = copy_of(graph)
        assert fuse(graph)[0].form == "all_reduce+residual+rms_norm[no_weight]+fp8"
        assert_within_one_step(before, graph, SCALE)


@pytest.mark.parametrize("dtype", [torch.float16, F32])
def test_other_model_dtypes(dtype: torch.dtype) -> None:
    b = Quant(dtype)
    graph = b.finish(_divided(b, b.site()), b.h)
    before = copy_of(graph)
    assert fuse(graph)[0].quantisation == "float8_e4m3fn"
    assert_within_one_step(before, graph, SCALE)


def test_values_beyond_the_range_saturate() -> None:
    b = Quant()
    graph = b.finish(_divided(b, b.site()))
    before = copy_of(graph)
    fuse(graph)
    inputs = values(before, 1e-3)
    (wanted,), (got,) = run_graph(before, inputs), run_graph(graph, inputs)
    assert (wanted.float().abs() == 448).any() and torch.equal(wanted.float().abs() == 448, got.float().abs() == 448)


def test_error_against_float64_is_no_larger_than_that_of_the_unfused_graph() -> None:
    b = Quant()
    graph = b.finish(_divided(b, b.site()))
    before = copy_of(graph)
    fuse(graph)
    inputs = values(before, SCALE)
    (wanted,), (got,) = run_graph(before, inputs), run_graph(graph, inputs)
    residual, partial, weight = (tensor.double() for tensor in inputs[:3])
    h = residual + partial
    exact = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * weight / inputs[3].double()
    errors = [(one.double() - exact).pow(2).mean().sqrt() for one in (got, wanted)]
    assert 0 < errors[0] <= 1.1 * errors[1]


def test_equal_quantisations_of_several_readers_become_one() -> None:
    b = Quant()
    y, scale = b.site(), b.scale_input(1)
    first, second = b.quantised(y, scale), b.quantised(b.view(y, 2, T // 2, H), scale)
    graph = b.finish(first, second, b.h)
    before = copy_of(graph)
    (site,) = fuse(graph)
    assert site.quantisation == "float8_e4m3fn"
    assert_within_one_step(before, graph, SCALE)


def test_scale_is_an_input_of_the_call_and_kept_until_its_wait() -> None:
    b = Quant()
    y, scale = b.site(), b.scale_input(1)
    graph = b.finish(b.quantised(y, scale), b.h)
    fuse(graph)
    (start,), (wait,) = find_ops(graph, START), find_ops(graph, WAIT)
    names = [argument.name for argument in start.target._schema.arguments]  # type: ignore[union-attr]
    assert start.args[names.index("hidden_scale")] is scale and start.args[names.index("hidden_dtype")] == FP8
    assert scale in wait.args[2]


HOST_NORMS: dict[str, Callable[[Quant, fx.Node], tuple[fx.Node, ...]]] = {
    "norm": host_norm,
    "add": host_add_norm,
    "residual first": lambda b, scale: host_add_norm(b, scale, swapped=True),
    "last": lambda b, scale: host_add_norm(b, scale, stream=False),
}


@pytest.mark.parametrize("name", HOST_NORMS)
def test_operators_of_vllm_that_normalise_and_quantise(name: str) -> None:
    b = Quant()
    graph = b.finish(*HOST_NORMS[name](b, b.scale_input(1)))
    before = copy_of(graph)
    (site,) = fuse(graph)
    assert site.decision == "fused" and site.form.endswith("rms_norm[hf]+fp8"), site
    assert not [node for node in graph.nodes if node.target is torch.ops.higher_order.auto_functionalized]
    assert not any(operator_name(node).startswith("aten::empty") for node in graph.nodes) and metadata(
        graph
    ) == propagated_metadata(graph)
    assert_within_one_step(before, graph, SCALE)


def test_between_two_quantising_norms_the_residual_stays_sharded() -> None:
    b = Quant()
    hidden, stream = host_add_norm(b, b.scale_input(1))
    partial = b.call(aten.relu.default, b.rounded(hidden, BF16))
    rest = {"weight": b.input(H, dtype=BF16), "scale": b.scale_input(1), "epsilon": 1e-5}
    node = b.functional(
        "fused_add_rms_norm_static_fp8_quant",
        result=b.buffer(), input=b.all_reduce(partial), residual=stream, **rest,
    )  # fmt: skip
    graph = b.finish(b.part(node, 1), b.part(node, 2))
    assert [site.decision for site in fuse(graph)] == ["fused", "fused"]
    shards = [node.meta["val"][1] for node in find_ops(graph, START)]
    assert [(tuple(one.shape), one.dtype) for one in shards] == [((T // 2, H), F32), ((T, H), BF16)]


def test_reports_count_what_became_of_quantisations() -> None:
    b = Quant()
    first = b.quantised(b.site(), b.scale_input(1))
    second = b.rounded(b.clamped(b.divided(b.cast(b.site(), F32), b.scale_input(1)), -240.0, 240.0))
    with collect_reports() as reports:
        TWCompilePass(Config(strict=True))(b.finish(first, second))
    assert reports[0].quantisations == {"float8_e4m3fn": 1, "clamp": 1}
    written = reports[0].as_dict()
    assert written["quantisations"] == reports[0].quantisations and written["sites"][1]["quantisation"] == "clamp"


class Float8Layer(nn.Module):
    """A sum, its norm and a statically quantised layer, twice."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-5) for _ in range(2))

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for norm in self.norms:
            partial = x * 2
            dist.all_reduce(partial)
            stream = stream + partial
            hidden = (norm(stream).float() * scale.reciprocal()).clamp(-448.0, 448.0).to(FP8)
            x = torch._scaled_mm(hidden, weight.t(), scale_a=scale, scale_b=scale, out_dtype=BF16)
        return x, stream


def float8_layer() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    rows = torch.randn(48, 64).to(BF16)
    return Float8Layer().bfloat16(), (rows, rows.clone(), torch.randn(64, 64).to(FP8), torch.full((1,), SCALE))


def test_generated_code_for_a_gpu_multiplies_what_the_call_gives() -> None:
    code = generated_code(*float8_layer(), device="cuda", world_size=4, config=Config(strict=True))
    starts = re.findall(rf"(\w+) = torch\.ops\.tw_compile\.{START}\.default\.direct\((.*)\)", code)
    matmuls = re.findall(r"extern_kernels\._scaled_mm\((\w+),", code)
    assert len(starts) == 2 and all("torch.float8_e4m3fn" in arguments for _, arguments in starts)
    hidden = [re.search(rf"(\w+) = {result}\[0\]", code)[1] for result, _ in starts]  # type: ignore[index]
    assert matmuls == hidden
    assert set(re.findall(r"triton_\w+?_fused_(\w+)_\d+ = async", code)) == {"mul"}  # none that normalises or quantises


def test_halves_of_a_split_are_quantised_apart() -> None:
    with collect_reports() as reports:
        (module,) = capture_graphs(*float8_layer(), pass_=TWCompilePass(Config(strict=True, split="16")))
    (report,) = reports
    assert report.split is not None and report.split.mode == "split" and report.split.joins == {}, report.split
    matmuls = find_ops(module.graph, "_scaled_mm")
    assert [tuple(node.meta["val"].shape) for node in matmuls] == [(16, 64), (32, 64)] * 2
