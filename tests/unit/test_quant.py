"""Static quantisation to float8 behind a fused norm: what is recognised, what is left and why, and what it computes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from graph_builder import GraphBuilder, aten, copy_of, metadata, prims, propagated_metadata, run_graph
from one_rank import one_rank  # noqa: F401
from torch import nn
from torch._inductor import config as inductor_config

from tw_compile import Config, TWCompilePass, collect_reports
from tw_compile.graph.predicates import operator_name
from tw_compile.kernels.all_reduce_rms_norm.spec import FP8
from tw_compile.passes.base import QuantRefusal, Refusal
from tw_compile.passes.fusion.find import FusionSite, RefusedSite, find_sites
from tw_compile.report import Site
from tw_compile.testing import capture_graphs, fake_cuda, fake_process_group, find_ops, generated_code

pytestmark = pytest.mark.usefixtures("one_rank")

T, H, SCALE = 6, 16, 0.03
START = "all_reduce_rms_norm_start"
WAIT = "all_reduce_rms_norm_wait_"
GEMMA = {"aten::add", "prims::convert_element_type"}
LEFT_OVER = {"aten::reciprocal", "aten::full", "aten::reshape", "aten::view", "aten::alias"}
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(2):
        yield


@pytest.fixture(scope="module", autouse=True)
def vllm_operators() -> Iterator[None]:
    """Operators of the names and signatures of vLLM 0.24's, which compute what its kernels do."""

    def quantised(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (rows.float() * scale.reciprocal()).clamp(-448, 448).to(FP8)

    def normed(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        rows = rows.float()
        return (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon)).to(weight.dtype) * weight

    def quant(result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, group_shape: object = None) -> None:
        result.copy_(quantised(input, scale))

    def norm(
        result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, epsilon: float
    ) -> None:
        result.copy_(quantised(normed(input, weight, epsilon), scale))

    def add_norm(
        result: torch.Tensor,
        input: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        epsilon: float,
    ) -> None:
        residual.add_(input)
        result.copy_(quantised(normed(residual, weight, epsilon), scale))

    rest = "Tensor weight, Tensor scale, float epsilon) -> ()"
    with torch.library._scoped_library("_C", "FRAGMENT") as library:
        for schema, function in (
            (
                "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
                quant,
            ),
            (f"rms_norm_static_fp8_quant(Tensor! result, Tensor input, {rest}", norm),
            (f"fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, {rest}", add_norm),
        ):
            library.define(schema)
            library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
        yield


class Quant(GraphBuilder):
    """A site whose norm gives ``hidden``, the sum ``h`` before it, and ways to quantise."""

    def __init__(self, dtype: torch.dtype = BF16, form: str = "torch") -> None:
        super().__init__()
        self.dtype, self.form = dtype, form

    def site(self) -> fx.Node:
        self.h = self.add(self.input(T, H, dtype=self.dtype), self.all_reduce(self.input(T, H, dtype=self.dtype)))
        weight = self.input(H, dtype=self.dtype)
        return self.rms_norm(self.h, None if self.form == "no_weight" else weight, self.form)

    def scale_input(self, *shape: int, dtype: torch.dtype = F32) -> fx.Node:
        return self.input(*shape, dtype=dtype)

    def functional(self, name: str, **arguments: object) -> fx.Node:
        target = getattr(torch.ops._C, name).default
        return self.call(torch.ops.higher_order.auto_functionalized, target, **arguments)

    def buffer(self) -> fx.Node:
        return self.call(aten.empty.memory_format, [T, H], dtype=FP8, device=self.device)

    def part(self, of: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, of, index)

    def divided(self, y: fx.Node, scale: object) -> fx.Node:
        return self.call(aten.div.Tensor, y, scale)

    def multiplied(self, y: fx.Node, scale: object) -> fx.Node:
        return self.call(aten.mul.Tensor, y, scale)

    def inverse(self, scale: fx.Node) -> fx.Node:
        return self.call(aten.reciprocal.default, scale)

    def clamped(self, y: fx.Node, low: float = -448.0, high: float = 448.0) -> fx.Node:
        return self.call(aten.clamp_max.default, self.call(aten.clamp_min.default, y, low), high)

    def rounded(self, y: fx.Node, dtype: torch.dtype = FP8) -> fx.Node:
        return self.call(prims.convert_element_type.default, y, dtype)

    def quantised(self, y: fx.Node, scale: object) -> fx.Node:
        return self.rounded(self.clamped(self.divided(self.cast(y, F32), scale)))


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


def _vllm_operator(b: Quant, y: fx.Node) -> fx.Node:
    return b.part(b.functional("static_scaled_fp8_quant", result=b.buffer(), input=y, scale=b.scale_input(1)), 1)


FORMS: dict[str, Form] = {
    form.__name__.strip("_"): form
    for form in (
        _vllm_native,
        _divided,
        _without_clamp_in_bf16,
        _times_an_inverse_that_is_given,
        _number,
        _constant_tensor,
        _clamped_by_tensors,
        _one_clamp,
        _no_scale,
        _other_shape_on_the_way,
        _vllm_operator,
    )
}


def fuse(graph: fx.Graph) -> list[Site]:
    with collect_reports() as reports:
        TWCompilePass(Config(strict=True))(graph)
    graph.lint()
    return reports[0].sites


def values(graph: fx.Graph, scale: float) -> list[torch.Tensor]:
    """Random values; what has one element is the scale, one norm of which is large enough to saturate."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for node in graph.nodes:
        if node.op == "placeholder":
            fake = node.meta["val"]
            random = torch.randn(fake.shape, generator=generator).to(fake.dtype)
            found.append(torch.full(fake.shape, scale) if fake.numel() == 1 else random)
    return found


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


def _host_norm(b: Quant, scale: fx.Node) -> tuple[fx.Node, ...]:
    rest = {"weight": b.input(H, dtype=BF16), "scale": scale, "epsilon": 1e-5}
    wait = b.all_reduce(b.input(T, H, dtype=BF16))
    return b.part(b.functional("rms_norm_static_fp8_quant", result=b.buffer(), input=wait, **rest), 1), wait


def _host_add_norm(b: Quant, scale: fx.Node, swapped: bool = False, stream: bool = True) -> tuple[fx.Node, ...]:
    rest = {"weight": b.input(H, dtype=BF16), "scale": scale, "epsilon": 1e-5}
    pair = b.all_reduce(b.input(T, H, dtype=BF16)), b.input(T, H, dtype=BF16)
    one, other = pair[::-1] if swapped else pair
    if swapped:
        buffer = b.call(aten.empty_like.default, one, dtype=FP8)
    else:
        tokens = b.call(aten.sym_size.int, one, 0)
        buffer = b.call(aten.empty.memory_format, [tokens, H], dtype=FP8, device=b.device)
    node = b.functional("fused_add_rms_norm_static_fp8_quant", result=buffer, input=one, residual=other, **rest)
    return (b.part(node, 1), b.part(node, 2)) if stream else (b.part(node, 1),)


HOST_NORMS: dict[str, Callable[[Quant, fx.Node], tuple[fx.Node, ...]]] = {
    "norm": _host_norm,
    "add": _host_add_norm,
    "residual first": lambda b, scale: _host_add_norm(b, scale, swapped=True),
    "last": lambda b, scale: _host_add_norm(b, scale, stream=False),
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
    hidden, stream = _host_add_norm(b, b.scale_input(1))
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


@pytest.mark.parametrize("shape", [(H,), (T, 1)])
def test_host_operator_whose_scale_is_not_one_number_is_refused(shape: tuple[int, ...]) -> None:
    b = Quant()
    graph = b.finish(*_host_add_norm(b, b.scale_input(*shape)))
    text = str(graph)
    (site,) = fuse(graph)
    assert site.reason == Refusal.QUANTISATION_NOT_PROVABLE and "scale_not_per_tensor" in site.detail
    assert str(graph) == text


def test_host_operator_whose_results_are_read_otherwise_is_refused() -> None:
    b = Quant()
    hidden, stream = _host_add_norm(b, b.scale_input(1))
    graph = b.finish(hidden, hidden.args[0], stream)  # type: ignore[arg-type]
    (site,) = find_sites(graph)
    assert isinstance(site, RefusedSite) and site.refused.reason == Refusal.NORM_INTERMEDIATE_USED


Left = Callable[[Quant, fx.Node], "fx.Node | tuple[fx.Node, ...]"]
LEFT: dict[str, tuple[QuantRefusal, Left]] = {}


def left(reason: QuantRefusal) -> Callable[[Left], Left]:
    def register(build: Left) -> Left:
        LEFT[build.__name__] = (reason, build)
        return build

    return register


@left(QuantRefusal.OUTPUT_USED_ELSEWHERE)
def read_by_something_else(b: Quant, y: fx.Node) -> tuple[fx.Node, ...]:
    return b.quantised(y, b.scale_input(1)), b.call(aten.relu.default, y)


@left(QuantRefusal.OUTPUT_USED_ELSEWHERE)
def read_by_the_graphs_output(b: Quant, y: fx.Node) -> tuple[fx.Node, ...]:
    return b.quantised(y, b.scale_input(1)), b.view(y, T * H)


@left(QuantRefusal.DTYPE_NOT_SUPPORTED)
def fnuz(b: Quant, y: fx.Node) -> fx.Node:
    return b.rounded(b.divided(b.cast(y, F32), b.scale_input(1)), torch.float8_e4m3fnuz)


@left(QuantRefusal.DTYPE_NOT_SUPPORTED)
def e5m2(b: Quant, y: fx.Node) -> fx.Node:
    return b.rounded(b.divided(b.cast(y, F32), b.scale_input(1)), torch.float8_e5m2)


@left(QuantRefusal.CLAMP)
def other_bounds(b: Quant, y: fx.Node) -> fx.Node:
    return b.rounded(b.clamped(b.divided(b.cast(y, F32), b.scale_input(1)), -240.0, 240.0))


@left(QuantRefusal.CLAMP)
def one_bound(b: Quant, y: fx.Node) -> fx.Node:
    return b.rounded(b.call(aten.clamp_min.default, b.divided(b.cast(y, F32), b.scale_input(1)), -448.0))


@left(QuantRefusal.CLAMP)
def bounds_before_the_scale(b: Quant, y: fx.Node) -> fx.Node:
    return b.rounded(b.divided(b.clamped(b.cast(y, F32)), b.scale_input(1)))


@left(QuantRefusal.SCALES_DIFFER)
def two_scales(b: Quant, y: fx.Node) -> tuple[fx.Node, ...]:
    return b.quantised(y, b.scale_input(1)), b.quantised(y, b.scale_input(1))


@left(QuantRefusal.SCALES_DIFFER)
def scale_and_its_inverse(b: Quant, y: fx.Node) -> tuple[fx.Node, ...]:
    scale = b.scale_input(1)
    return b.quantised(y, scale), b.quantised(y, b.inverse(scale))


@left(QuantRefusal.SCALE_NOT_STATIC)
def dynamic_per_tensor(b: Quant, y: fx.Node) -> fx.Node:
    largest = b.call(aten.amax.default, b.call(aten.abs.default, b.cast(y, F32)), [0, 1])
    return b.quantised(y, b.divided(largest, 448.0))


@left(QuantRefusal.SCALE_NOT_STATIC)
def scale_zero(b: Quant, y: fx.Node) -> fx.Node:
    return b.quantised(y, 0.0)


@left(QuantRefusal.SCALE_NOT_PER_TENSOR)
def dynamic_per_token(b: Quant, y: fx.Node) -> fx.Node:
    largest = b.call(aten.amax.default, b.call(aten.abs.default, b.cast(y, F32)), [-1], True)
    return b.quantised(y, b.divided(largest, 448.0))


@left(QuantRefusal.SCALE_NOT_PER_TENSOR)
def per_channel(b: Quant, y: fx.Node) -> fx.Node:
    return b.quantised(y, b.scale_input(1, H))


@left(QuantRefusal.SCALE_NOT_PER_TENSOR)
def operator_with_groups(b: Quant, y: fx.Node) -> fx.Node:
    given = {"result": b.buffer(), "input": y, "scale": b.scale_input(1), "group_shape": [1, 128]}
    return b.part(b.functional("static_scaled_fp8_quant", **given), 1)


@left(QuantRefusal.SCALE_DTYPE)
def scale_in_bf16(b: Quant, y: fx.Node) -> fx.Node:
    return b.quantised(y, b.scale_input(1, dtype=BF16))


@left(QuantRefusal.PRECISION_CASTS_KEPT)
def roundings_are_kept(b: Quant, y: fx.Node) -> fx.Node:
    return b.quantised(y, b.scale_input(1))


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_proven_is_left_by_name_behind_the_fused_norm(name: str) -> None:
    reason, build = LEFT[name]
    b = Quant()
    outputs = build(b, b.site())
    graph = b.finish(*(outputs if isinstance(outputs, tuple) else (outputs,)), b.h)
    before = copy_of(graph)
    with inductor_config.patch(emulate_precision_casts=reason == QuantRefusal.PRECISION_CASTS_KEPT):
        (site,) = fuse(graph)
    assert site.decision == "fused" and site.quantisation == reason and "not quantised: " in site.detail, site
    assert not site.form.endswith("fp8")
    inputs = values(before, SCALE)
    for wanted, got in zip(run_graph(before, inputs), run_graph(graph, inputs), strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0.26, atol=0.02, equal_nan=True)


def test_every_reason_has_a_case() -> None:
    elsewhere = {QuantRefusal.SCALE_ON_OTHER_DEVICE, QuantRefusal.DEVICE_NOT_SUPPORTED}  # below
    assert {reason for reason, _ in LEFT.values()} == set(QuantRefusal) - elsewhere


def test_a_norm_without_float8_behind_it_says_nothing_about_it() -> None:
    b = Quant()
    y = b.site()
    (site,) = fuse(b.finish(b.multiplied(y, b.scale_input()), b.h))
    assert site.quantisation == "" and site.detail.endswith("backend")


@pytest.mark.parametrize(
    ("capability", "device", "expected"),
    [
        ((9, 0), "cuda", None),
        ((8, 9), "cuda", None),
        ((8, 0), "cuda", QuantRefusal.DEVICE_NOT_SUPPORTED),
        (None, "cuda", None),
        ((9, 0), "cpu", QuantRefusal.SCALE_ON_OTHER_DEVICE),
    ],
)
def test_the_gpu_must_convert_to_float8_and_hold_the_scale(
    capability: tuple[int, int] | None, device: str, expected: QuantRefusal | None
) -> None:
    with fake_cuda():
        b = Quant()
        b.device = "cuda"
        y = b.site()
        graph = b.finish(b.quantised(y, b.input(dtype=F32, device=device)), b.h)
        (site,) = find_sites(graph, capability)
    assert isinstance(site, FusionSite)
    found = site.quantisation
    assert found is not None and getattr(found, "reason", None) == expected


def test_reports_count_what_became_of_quantisations() -> None:
    b = Quant()
    first = b.quantised(b.site(), b.scale_input(1))
    second = other_bounds(b, b.site())
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
