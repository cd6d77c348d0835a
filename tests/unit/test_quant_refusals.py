"""Quantisations behind a fused norm that are left, and why, and what is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.fx as fx
from graph_builder import aten, copy_of, run_graph
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
    values,
    vllm_operators,  # noqa: F401
)
from torch._inductor import config as inductor_config

from tw_compile import Config, TWCompilePass
from tw_compile.gating.facts import Node
from tw_compile.kernels.collective.spec import FP8
from tw_compile.own_gate import own_gate
from tw_compile.passes.fusion.find import FusionSite, RefusedSite, find_sites
from tw_compile.passes.reasons import QuantRefusal, QuantRefused, Refusal
from tw_compile.testing import fake_cuda, fake_process_group

pytestmark = pytest.mark.usefixtures("one_rank", "vllm_operators")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(2):
        yield


@pytest.mark.parametrize("shape", [(H,), (T, 1)])
def test_host_operator_whose_scale_is_not_one_number_is_refused(shape: tuple[int, ...]) -> None:
    b = Quant()
    graph = b.finish(*host_add_norm(b, b.scale_input(*shape)))
    text = str(graph)
    (site,) = fuse(graph)
    assert site.reason == Refusal.QUANTISATION_NOT_PROVABLE and "scale_not_per_tensor" in site.detail
    assert str(graph) == text


def test_host_operator_that_adds_the_sum_to_itself_is_refused() -> None:
    b = Quant()
    wait = b.all_reduce(b.input(T, H, dtype=BF16))
    rest = {"weight": b.input(H, dtype=BF16), "scale": b.scale_input(1), "epsilon": 1e-5}
    node = b.functional("fused_add_rms_norm_static_fp8_quant", result=b.buffer(), input=wait, residual=wait, **rest)
    (site,) = find_sites(b.finish(b.part(node, 1), b.part(node, 2)))
    assert isinstance(site, RefusedSite) and site.refused.reason == Refusal.RESIDUAL_NOT_PROVABLE


def test_host_operator_whose_weight_is_the_sum_is_refused() -> None:
    b = Quant()
    row = b.view(b.all_reduce(b.input(1, H, dtype=BF16)), H)
    rest = {"weight": row, "scale": b.scale_input(1), "epsilon": 1e-5}
    node = b.functional("rms_norm_static_fp8_quant", result=b.buffer(), input=b.input(T, H, dtype=BF16), **rest)
    (site,) = find_sites(b.finish(b.part(node, 1)))
    assert isinstance(site, RefusedSite) and site.refused.reason == Refusal.NO_RMS_NORM


@pytest.mark.parametrize("shape", ["empty_like", "empty"])
def test_a_buffer_of_the_sums_shape_that_others_read_is_a_reader_of_the_sum(shape: str) -> None:
    b = Quant()
    wait, residual = (b.all_reduce(b.input(T, H, dtype=BF16)), b.input(T, H, dtype=BF16))
    if shape == "empty_like":
        buffer = b.call(aten.empty_like.default, wait, dtype=FP8)
    else:
        tokens = b.call(aten.sym_size.int, wait, 0)
        buffer = b.call(aten.empty.memory_format, [tokens, H], dtype=FP8, device=b.device)
    rest = {"weight": b.input(H, dtype=BF16), "scale": b.scale_input(1), "epsilon": 1e-5}
    node = b.functional("fused_add_rms_norm_static_fp8_quant", result=buffer, input=wait, residual=residual, **rest)
    (site,) = find_sites(b.finish(b.part(node, 1), b.part(node, 2), b.call(aten.view.default, buffer, [T * H])))
    assert isinstance(site, RefusedSite) and site.refused.reason == Refusal.REDUCED_VALUE_USED_ELSEWHERE


def test_host_operator_whose_results_are_read_otherwise_is_refused() -> None:
    b = Quant()
    hidden, stream = host_add_norm(b, b.scale_input(1))
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


@left(QuantRefusal.CLAMP)
def other_bounds_by_keyword(b: Quant, y: fx.Node) -> fx.Node:
    return b.rounded(b.call(aten.clamp.default, b.divided(b.cast(y, F32), b.scale_input(1)), min=-448.0, max=240.0))


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


@left(QuantRefusal.SCALE_NOT_STATIC)
def scale_whose_inverse_float32_has_not(b: Quant, y: fx.Node) -> fx.Node:
    return b.quantised(y, 1e-39)


@left(QuantRefusal.SCALE_NOT_STATIC)
def scale_that_is_an_inverse_float32_has_not(b: Quant, y: fx.Node) -> fx.Node:
    return b.quantised(y, 1e38)


@left(QuantRefusal.SCALE_NOT_PER_TENSOR)
def per_token_of_other_values(b: Quant, y: fx.Node) -> fx.Node:
    largest = b.call(aten.amax.default, b.call(aten.abs.default, b.input(T, H, dtype=F32)), [-1], True)
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
    of_made_scales = {"scale_form", "scale_group", "scale_bound", "scale_layout", "scale_power_of_two"}
    elsewhere |= {QuantRefusal(reason) for reason in of_made_scales}  # test_made_scales.py
    assert {reason for reason, _ in LEFT.values()} == set(QuantRefusal) - elsewhere


def divided_by_it(b: Quant, y: fx.Node) -> fx.Node:
    return b.rounded(b.divided(b.scale_input(), b.cast(y, F32)))


def divided_by_itself(b: Quant, y: fx.Node) -> fx.Node:
    return b.rounded(b.divided(y, y))


def scaled_twice(b: Quant, y: fx.Node) -> fx.Node:
    return b.rounded(b.multiplied(b.divided(b.cast(y, F32), SCALE), 0.5))


def changed_on_the_way(b: Quant, y: fx.Node) -> fx.Node:
    return b.rounded(b.call(aten.relu.default, b.divided(b.cast(y, F32), SCALE)))


def read_on_the_way(b: Quant, y: fx.Node) -> tuple[fx.Node, ...]:
    scaled = b.divided(b.cast(y, F32), SCALE)
    return b.rounded(scaled), scaled


def widened(b: Quant, y: fx.Node) -> fx.Node:
    return b.cast(b.divided(b.cast(y, F32), SCALE), torch.float64)


def scale_of_another(b: Quant, y: fx.Node) -> fx.Node:
    given = {"result": b.buffer(), "input": b.input(T, H, dtype=BF16), "scale": b.cast(y, F32)}
    return b.part(b.functional("static_scaled_fp8_quant", **given), 1)


@pytest.mark.parametrize(
    "build",
    [divided_by_it, divided_by_itself, scaled_twice, changed_on_the_way, read_on_the_way, widened, scale_of_another],
)
def test_what_is_no_quantisation_of_the_norm_stays_behind_it(build: Callable[[Quant, fx.Node], Any]) -> None:
    b = Quant()
    outputs = build(b, b.site())
    graph = b.finish(*(outputs if isinstance(outputs, tuple) else (outputs,)), b.h)
    before = copy_of(graph)
    (site,) = fuse(graph)
    assert site.decision == "fused" and site.quantisation == "" and not site.form.endswith("fp8")
    inputs = values(before, SCALE)
    for wanted, got in zip(run_graph(before, inputs), run_graph(graph, inputs), strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0.26, atol=0.02, equal_nan=True)


def test_a_scale_that_is_fetched_after_the_sum_is_too_late() -> None:
    b = Quant()
    y = b.site()
    late = b.graph.get_attr("scale")
    late.meta["val"] = b.scale_input(1).meta["val"]
    (site,) = find_sites(b.finish(b.quantised(y, late)))
    assert isinstance(site, FusionSite) and isinstance(site.quantisation, QuantRefused)
    assert site.quantisation.reason == QuantRefusal.SCALE_NOT_STATIC


def test_the_gpu_does_not_matter_to_a_graph_on_the_cpu() -> None:
    b = Quant()
    (site,) = find_sites(b.finish(b.quantised(b.site(), b.scale_input(1))), (8, 0))
    assert isinstance(site, FusionSite) and site.quantised is not None


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


def test_the_passes_learn_from_the_gate_what_gpu_it_is() -> None:
    config = Config(strict=True)
    with fake_cuda():
        b = Quant()
        b.device = "cuda"
        graph = b.finish(b.quantised(b.site(), b.scale_input(1)), b.h)
        (site,) = TWCompilePass(config).rewrite(graph, own_gate(config, Node((8, 0), False))).sites
    assert site.decision == "fused" and site.quantisation == QuantRefusal.DEVICE_NOT_SUPPORTED
