"""Float8 scales that are made of what a fused norm gives: what is recognised, what is left and why, and what it computes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from graph_builder import aten, copy_of, metadata, propagated_metadata, run_graph
from one_rank import one_rank  # noqa: F401
from quant_graphs import BF16, F32, Quant, fuse, vllm_operators  # noqa: F401
from torch import nn

from tw_compile import Config, TWCompilePass, collect_reports
from tw_compile.graph.predicates import operator_name
from tw_compile.kernels.collective.spec import FP8
from tw_compile.passes.reasons import QuantRefusal, Refusal
from tw_compile.testing import capture_graphs, fake_process_group, find_ops, generated_code

pytestmark = pytest.mark.usefixtures("one_rank", "vllm_operators")

START, WAIT = "all_reduce_rms_norm_quant_start", "all_reduce_rms_norm_wait_"
T, H = 6, 256
LEAST, LEFT_OVER = 1 / (448 * 512), {"aten::reshape", "aten::view", "aten::alias", "aten::unsqueeze"}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(2):
        yield


class Rows(Quant):
    """Of 256 columns, so that there are groups."""

    def site(self) -> fx.Node:
        self.h = self.add(self.input(T, H, dtype=self.dtype), self.all_reduce(self.input(T, H, dtype=self.dtype)))
        return self.rms_norm(self.h, self.input(H, dtype=self.dtype), self.form)

    def buffers(self, scales: int = 1, strides: tuple[int, int] | None = None) -> tuple[fx.Node, fx.Node]:
        codes = self.call(aten.empty.memory_format, [T, H], dtype=FP8, device=self.device)
        given = {"dtype": F32, "device": self.device}
        if strides is None:
            return codes, self.call(aten.empty.memory_format, [T, scales], **given)
        return codes, self.call(aten.empty_strided.default, [T, scales], list(strides), **given)

    def scales(self, y: fx.Node, largest: str = "amax", least: float | None = LEAST) -> fx.Node:
        """As vLLM writes them in torch, or by another way to the largest value."""
        positive = self.call(aten.abs.default, y)
        if largest == "max":
            found = self.part(self.call(aten.max.dim, positive, -1), 0)
            found = self.call(aten.unsqueeze.default, found, -1)
        else:
            found = self.call(aten.amax.default, positive, [-1], True)
        scaled = self.divided(self.cast(found, F32), 448.0)
        return scaled if least is None else self.call(aten.clamp_min.default, scaled, least)

    def codes(self, y: fx.Node, by: fx.Node, multiplied: bool = True) -> fx.Node:
        scaled = self.multiplied(self.cast(y, F32), by) if multiplied else self.divided(self.cast(y, F32), by)
        return self.rounded(self.clamped(scaled))


Form = Callable[[Rows, fx.Node], tuple[fx.Node, fx.Node]]


def _vllm_native_per_token(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    scales = b.scales(y, "max")
    return b.codes(y, b.inverse(scales)), scales


def _divided(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    scales = b.scales(b.cast(y, F32))
    return b.codes(y, scales, multiplied=False), b.view(scales, T)


def _without_least(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    scales = b.scales(y, least=None)
    return b.codes(y, scales, multiplied=False), scales


def _least_amax(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    largest = b.call(aten.amax.default, b.call(aten.abs.default, y), [-1], True)
    scales = b.multiplied(b.call(aten.clamp_min.default, b.cast(largest, F32), 1e-4), 1 / 448)
    return b.codes(y, scales, multiplied=False), scales


def _vllm_native_groups(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    grouped = b.view(y, T, H // 128, 128)
    scales = b.scales(grouped)
    return b.view(b.codes(grouped, scales, multiplied=False), T, H), b.view(scales, T, H // 128)


def _groups_of_64_of_all_rows(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    grouped = b.view(y, T * H // 64, 64)
    scales = b.scales(grouped)
    return b.view(b.codes(grouped, scales, multiplied=False), T, H), scales


def _column_major_copy(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    """vLLM lays scales out by columns behind it: a copy that reads them."""
    codes, scales = _vllm_native_groups(b, y)
    transposed = b.call(aten.permute.default, scales, [1, 0])
    return codes, b.call(aten.clone.default, transposed, memory_format=torch.contiguous_format)


def _vllm_per_token(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    result, scale = b.buffers()
    node = b.functional("dynamic_per_token_scaled_fp8_quant", result=result, input=y, scale=scale, scale_ub=None)
    return b.part(node, 1), b.part(node, 2)


def _vllm_per_group(b: Rows, y: fx.Node, **changed: object) -> tuple[fx.Node, fx.Node]:
    columns = changed.get("group_size", 128)
    strides = changed.pop("strides", None)
    assert isinstance(columns, int)
    result, scale = b.buffers(H // columns, strides)  # type: ignore[arg-type]
    given = {"input": y, "output_q": result, "output_s": scale, "group_size": columns, "eps": 1e-10, "fp8_min": -448.0}
    given |= {"fp8_max": 448.0, "scale_ue8m0": False, "dummy_is_scale_transposed": False, "dummy_is_tma_aligned": False}
    node = b.functional("per_token_group_fp8_quant", **(given | changed))
    return b.part(node, 1), b.part(node, 2)


PER_TOKEN = (_vllm_native_per_token, _divided, _without_least, _least_amax, _vllm_per_token)
PER_GROUP = (_vllm_native_groups, _column_major_copy, _vllm_per_group)
FORMS: dict[str, tuple[Form, str]] = {
    **{form.__name__.strip("_"): (form, "token") for form in PER_TOKEN},
    **{form.__name__.strip("_"): (form, "group128") for form in PER_GROUP},
    "groups_of_64_of_all_rows": (_groups_of_64_of_all_rows, "group64"),
}


def values(graph: fx.Graph) -> list[torch.Tensor]:
    """Random rows, of very different sizes."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for node in graph.nodes:
        if node.op == "placeholder":
            fake = node.meta["val"]
            random = torch.randn(fake.shape, generator=generator)
            found.append(
                random * 10.0 ** torch.arange(fake.shape[0]).neg().unsqueeze(-1) if fake.dim() == 2 else random
            )
    return [tensor.to(node.meta["val"].dtype) for tensor, node in zip(found, _inputs(graph), strict=True)]


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def ordinals(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.view(torch.uint8).to(torch.int32)
    return torch.where(bits < 128, bits, 128 - bits)


def assert_close(before: fx.Graph, after: fx.Graph) -> None:
    """Codes are within one step. The unfused graph makes scales of values that were rounded, and in bfloat16."""
    inputs = values(before)
    for wanted, got in zip(run_graph(before, inputs), run_graph(after, inputs), strict=True):
        assert got.shape == wanted.shape and got.dtype == wanted.dtype and got.stride() == wanted.stride()
        if wanted.dtype == FP8:
            steps = (ordinals(got) - ordinals(wanted)).abs()
            assert steps.max() <= 1 and (steps == 0).float().mean() > 0.9, steps
        else:
            torch.testing.assert_close(got, wanted, rtol=0.01, atol=0.02 if wanted.dtype == BF16 else 0.0)


@pytest.mark.parametrize("norm", ["hf", "torch", "gemma"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_absorbed_with_its_scales(name: str, norm: str) -> None:
    form, per = FORMS[name]
    b = Rows(form=norm)
    codes, scales = form(b, b.site())
    graph = b.finish(b.call(aten.alias.default, codes), b.call(aten.alias.default, scales), b.h)
    before = copy_of(graph)
    (site,) = fuse(graph)
    assert site.decision == "fused" and site.quantisation == f"float8_e4m3fn_per_{per}", site
    assert site.form.endswith(f"]+fp8[{per}]")
    (start,), (wait,) = find_ops(graph, START), find_ops(graph, WAIT)
    hidden, _, made = start.meta["val"]
    columns = {"token": H, "group128": 128, "group64": 64}[per]
    assert hidden.dtype == FP8 and made.dtype == F32 and tuple(made.shape) == (T, H // columns)
    assert start.kwargs["scale_columns"] == columns and wait.args[-1].args == (start, 2)
    left_over = {operator_name(node) for node in graph.nodes} - {""}
    allowed = LEFT_OVER | {"aten::permute", "aten::clone", "aten::add", "prims::convert_element_type"}
    assert left_over - {f"tw_compile::{START}", f"tw_compile::{WAIT}"} <= allowed
    assert metadata(graph) == propagated_metadata(graph)
    assert_close(before, graph)


def test_how_scales_are_made_is_handed_on() -> None:
    found = {}
    for form in (*PER_TOKEN, _vllm_per_group):
        b = Rows()
        graph = b.finish(*form(b, b.site()))
        fuse(graph)
        given = find_ops(graph, START)[0].kwargs
        found[form] = (given["min_scale"], given["divides_by_scale"])
    amax = [float(torch.tensor(least) / torch.tensor(448.0)) for least in (1e-4, 1e-10)]
    assert found == {
        _vllm_native_per_token: (LEAST, False),
        _divided: (LEAST, True),
        _without_least: (0.0, True),
        _least_amax: (amax[0], True),
        _vllm_per_token: (LEAST, True),
        _vllm_per_group: (amax[1], True),
    }


def host_norm(b: Rows, columns: int | None, adds: bool, **changed: object) -> tuple[fx.Node, ...]:
    result, scale = b.buffers(1 if columns is None else H // columns)
    wait = b.all_reduce(b.input(T, H, dtype=BF16))
    given = {"result": result, "input": wait, "weight": b.input(H, dtype=BF16), "scale": scale, "epsilon": 1e-5}
    given |= {"scale_ub": None, "residual": b.input(T, H, dtype=BF16) if adds else None}
    name = "rms_norm_dynamic_per_token_quant"
    if columns is not None:
        name, given = "rms_norm_per_block_quant", given | {"group_size": columns, "is_scale_transposed": False}
    node = b.functional(name, **(given | changed))
    return (b.part(node, 1), b.part(node, 2), b.part(node, 3)) if adds else (b.part(node, 1), b.part(node, 2))


@pytest.mark.parametrize("adds", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("columns", [None, 128, 64])
def test_operators_of_vllm_that_normalise_and_make_scales(columns: int | None, adds: bool) -> None:
    b = Rows()
    graph = b.finish(*host_norm(b, columns, adds))
    before = copy_of(graph)
    (site,) = fuse(graph)
    per = "token" if columns is None else f"group{columns}"
    assert site.decision == "fused" and site.form.endswith(f"rms_norm[hf]+fp8[{per}]"), site
    assert not [node for node in graph.nodes if node.target is torch.ops.higher_order.auto_functionalized]
    assert metadata(graph) == propagated_metadata(graph)
    assert_close(before, graph)


def test_a_buffer_for_scales_may_have_the_size_of_the_sum() -> None:
    b = Rows()
    wait = b.all_reduce(b.input(T, H, dtype=BF16))
    tokens = b.call(operator.floordiv, b.call(aten.sym_size.int, wait, 0), 1)
    scale = b.call(aten.empty.memory_format, [tokens, 1], dtype=F32, device=b.device)
    given = {"result": b.buffers()[0], "input": wait, "weight": b.input(H, dtype=BF16), "scale": scale, "epsilon": 1e-5}
    given |= {"scale_ub": None, "residual": b.input(T, H, dtype=BF16)}
    node = b.functional("rms_norm_dynamic_per_token_quant", **given)
    (site,) = fuse(b.finish(*(b.part(node, index) for index in (1, 2, 3))))
    assert site.quantisation == "float8_e4m3fn_per_token", site


@pytest.mark.parametrize(
    ("columns", "transposed", "reason"),
    [(128, True, QuantRefusal.SCALE_LAYOUT), (32, False, QuantRefusal.SCALE_GROUP)],
)
def test_operators_of_vllm_whose_scales_are_others_are_left(columns: int, transposed: bool, reason: str) -> None:
    b = Rows()
    graph = b.finish(*host_norm(b, columns, True, is_scale_transposed=transposed))
    text = str(graph)
    (site,) = fuse(graph)
    assert site.reason == Refusal.QUANTISATION_NOT_PROVABLE and reason in site.detail
    assert str(graph) == text


def test_an_operator_with_an_upper_bound_is_left() -> None:
    b = Rows()
    (site,) = fuse(b.finish(*host_norm(b, None, True, scale_ub=b.scale_input(1))))
    assert site.reason == Refusal.QUANTISATION_NOT_PROVABLE and QuantRefusal.SCALE_BOUND in site.detail


def _upper_bound(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    scales = b.call(aten.clamp_max.default, b.scales(y), 2.0)
    return b.codes(y, scales, multiplied=False), scales


def _power_of_two(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    scales = b.call(aten.exp2.default, b.call(aten.ceil.default, b.call(aten.log2.default, b.scales(y))))
    return b.codes(y, scales, multiplied=False), scales


def _times_the_scale(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    scales = b.scales(y)
    return b.codes(y, scales), scales


def _scales_of_rows_over_groups(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    scales = b.scales(y)
    return b.codes(b.view(y, T, 2, 128), b.view(scales, T, 1, 1), multiplied=False), scales


def _scales_of_other_rows_and_groups(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    scales = b.scales(b.view(y, T, 2, 128))
    turned = b.call(aten.reshape.default, b.call(aten.permute.default, scales, [1, 0, 2]), [T, 2, 1])
    return b.codes(b.view(y, T, 2, 128), turned, multiplied=False), scales


def _scale_of_each_column(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    scales = b.divided(b.cast(b.call(aten.amax.default, b.call(aten.abs.default, y), [0], True), F32), 448.0)
    return b.codes(y, scales, multiplied=False), scales


def _scales_in_bf16(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    largest = b.call(aten.amax.default, b.call(aten.abs.default, y), [-1], True)
    scales = b.divided(largest, 448.0)
    return b.codes(y, scales, multiplied=False), scales


def _of_other_rows(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    scales = b.scales(b.input(T, H, dtype=BF16))
    return b.codes(y, scales, multiplied=False), scales


def _amax_used_elsewhere(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    largest = b.call(aten.amax.default, b.call(aten.abs.default, y), [-1], True)
    scales = b.divided(b.cast(largest, F32), 448.0)
    return b.codes(y, scales, multiplied=False), largest


def _other_groups(b: Rows, y: fx.Node) -> tuple[fx.Node, fx.Node]:
    grouped = b.view(y, T, H // 32, 32)
    scales = b.scales(grouped)
    return b.codes(grouped, scales, multiplied=False), scales


LEFT: dict[Form, QuantRefusal] = {
    _upper_bound: QuantRefusal.SCALE_BOUND,
    _power_of_two: QuantRefusal.SCALE_POWER_OF_TWO,
    _times_the_scale: QuantRefusal.SCALE_FORM,
    _scales_of_rows_over_groups: QuantRefusal.SCALE_FORM,
    _scales_of_other_rows_and_groups: QuantRefusal.SCALE_NOT_PER_TENSOR,
    _scale_of_each_column: QuantRefusal.SCALE_NOT_PER_TENSOR,
    _scales_in_bf16: QuantRefusal.SCALE_DTYPE,
    _of_other_rows: QuantRefusal.SCALE_NOT_PER_TENSOR,
    _amax_used_elsewhere: QuantRefusal.SCALE_NOT_PER_TENSOR,
    _other_groups: QuantRefusal.SCALE_GROUP,
    lambda b, y: _vllm_per_group(b, y, scale_ue8m0=True): QuantRefusal.SCALE_POWER_OF_TWO,
    lambda b, y: _vllm_per_group(b, y, dummy_is_scale_transposed=True): QuantRefusal.SCALE_LAYOUT,
    lambda b, y: _vllm_per_group(b, y, strides=(1, T)): QuantRefusal.SCALE_LAYOUT,
    lambda b, y: _vllm_per_group(b, y, group_size=32): QuantRefusal.SCALE_GROUP,
    lambda b, y: _vllm_per_group(b, y, fp8_max=240.0): QuantRefusal.CLAMP,
}


@pytest.mark.parametrize("form", LEFT)
def test_other_scales_are_left_with_a_reason(form: Form) -> None:
    b = Rows()
    graph = b.finish(*form(b, b.site()), b.h)
    before = copy_of(graph)
    (site,) = fuse(graph)
    assert site.decision == "fused" and site.quantisation == LEFT[form], site
    assert not find_ops(graph, START)
    assert_close(before, graph)


def test_a_reader_besides_the_quantisation_is_named() -> None:
    b = Rows()
    y = b.site()
    graph = b.finish(*_vllm_native_per_token(b, y), b.call(aten.relu.default, y))
    assert fuse(graph)[0].quantisation == QuantRefusal.OUTPUT_USED_ELSEWHERE


def test_equal_quantisations_of_several_readers_become_one() -> None:
    b = Rows()
    y = b.site()
    graph = b.finish(*_vllm_native_per_token(b, y), *_vllm_native_per_token(b, y))
    before = copy_of(graph)
    assert fuse(graph)[0].quantisation == "float8_e4m3fn_per_token" and len(find_ops(graph, START)) == 1
    assert_close(before, graph)


def _as_they_are(b: Rows, node: fx.Node) -> fx.Node:
    return node


def _as_slices(b: Rows, node: fx.Node) -> fx.Node:
    return b.call(aten.slice.Tensor, node, 0, 0, 2)


@pytest.mark.parametrize("returned", [_as_they_are, _as_slices])
def test_equal_quantisations_that_the_graph_returns_have_memory_of_their_own(
    returned: Callable[[Rows, fx.Node], fx.Node],
) -> None:
    """A caller who writes to one of them must not change the other."""
    b = Rows()
    y = b.site()
    graph = b.finish(*(returned(b, node) for _ in range(2) for node in _vllm_native_per_token(b, y)))
    assert fuse(graph)[0].quantisation == "float8_e4m3fn_per_token"
    results = run_graph(graph, values(graph))
    assert len({result.data_ptr() for result in results}) == len(results) == 4


def test_equal_quantisations_are_not_copied_where_the_graph_returns_one() -> None:
    b = Rows()
    y = b.site()
    codes, scales = _vllm_native_per_token(b, y)
    others = [b.cast(node, BF16) for node in _vllm_native_per_token(b, y)]
    graph = b.finish(codes, scales, *others)
    assert fuse(graph)[0].quantisation == "float8_e4m3fn_per_token" and not find_ops(graph, "clone")


def test_different_scales_of_several_readers_are_left() -> None:
    b = Rows()
    y = b.site()
    graph = b.finish(*_vllm_native_per_token(b, y), *_vllm_native_groups(b, y))
    assert fuse(graph)[0].quantisation == QuantRefusal.SCALES_DIFFER


class Float8Layer(nn.Module):
    """A sum, its norm and a layer that quantises each token, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(64, eps=1e-5) for _ in range(2))

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for norm in self.norms:
            partial = x * 2
            dist.all_reduce(partial)
            stream = stream + partial
            hidden = norm(stream)
            scale = (hidden.abs().max(dim=-1)[0].unsqueeze(-1).float() / 448).clamp(min=LEAST)
            codes = (hidden.float() * scale.reciprocal()).clamp(-448.0, 448.0).to(FP8)
            x = torch._scaled_mm(codes, weight.t(), scale_a=scale, scale_b=weight_scale, out_dtype=BF16)
        return x, stream


def float8_layer() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    rows = torch.randn(48, 64).to(BF16)
    return Float8Layer().bfloat16(), (rows, rows.clone(), torch.randn(64, 64).to(FP8), torch.full((1, 64), 0.03))


def test_generated_code_for_a_gpu_multiplies_what_the_call_gives() -> None:
    code = generated_code(*float8_layer(), device="cuda", world_size=4, config=Config(strict=True))
    assert code.count(f"tw_compile.{START}.default.direct(") == 2
    assert "abs" not in code and "amax" not in code


def test_halves_of_a_split_make_their_scales_apart() -> None:
    with collect_reports() as reports:
        (module,) = capture_graphs(*float8_layer(), pass_=TWCompilePass(Config(strict=True, split="16")))
    (report,) = reports
    assert report.split is not None and report.split.mode == "split" and report.split.joins == {}, report.split
    matmuls = find_ops(module.graph, "_scaled_mm")
    shapes = [[tuple(operand.meta["val"].shape) for operand in (node.args[0], node.args[2])] for node in matmuls]  # type: ignore[union-attr]
    assert shapes == [[(16, 64), (16, 1)], [(32, 64), (32, 1)]] * 2
