"""Which all_reduces are found, which are refused, and why."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from graph_builder import EPS_FORMS, NORM_FORMS, ROOTS, GraphBuilder, aten, prims

from tw_compile.passes.fusion.find import FoundSite, FusionSite, RefusedSite, find_sites
from tw_compile.passes.reasons import Refusal
from tw_compile.testing import fake_process_group

T, H = 6, 8


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(4):
        yield


def fused(*sites: FoundSite) -> list[FusionSite]:
    found = [site for site in sites if isinstance(site, FusionSite)]
    assert len(found) == len(sites), sites
    return found


def find(b: GraphBuilder, *outputs: fx.Node) -> list[FoundSite]:
    return find_sites(b.output(*outputs).graph)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", NORM_FORMS)
def test_residual_add_and_norm_of_every_form_and_dtype(form: str, dtype: torch.dtype, swap: bool) -> None:
    b = GraphBuilder()
    x, residual, weight = b.input(T, H, dtype=dtype), b.input(T, H, dtype=dtype), b.input(H, dtype=dtype)
    wait = b.all_reduce(x)
    h = b.add(*((residual, wait) if swap else (wait, residual)))
    normed = b.rms_norm(h, weight, form, swap=swap)
    (site,) = fused(*find(b, normed, h))
    assert site.h is h and site.residuals == (residual,) and site.norm.output is normed
    assert site.norm.weight is (None if form == "no_weight" else weight)
    assert site.norm.weight_offset == (1.0 if form == "gemma" else 0.0)
    expected = {"hf": "hf", "torch": "fp32", "gemma": "gemma", "no_weight": "no_weight"}[form]
    if dtype == torch.float32 and form == "hf":
        expected = "fp32"
    assert site.form == f"all_reduce+residual+rms_norm[{expected}]"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("with_weight", [False, True])
def test_residual_add_and_decomposed_layer_norm(with_weight: bool, dtype: torch.dtype) -> None:
    b = GraphBuilder()
    x, residual, weight = b.input(T, H, dtype=dtype), b.input(T, H, dtype=dtype), b.input(H)
    h = b.add(b.all_reduce(x), residual)
    normed = b.layer_norm(h, weight if with_weight else None, eps=0.25)
    (site,) = fused(*find(b, normed, h))
    assert site.h is h and site.residuals == (residual,) and site.norm.output is normed
    assert (site.norm.epilogue, site.norm.eps) == ("layer_norm", 0.25)
    assert site.norm.weight is (weight if with_weight else None)
    assert site.form == f"all_reduce+residual+layer_norm[{'fp32' if with_weight else 'no_weight'}]"


@pytest.mark.parametrize("form", NORM_FORMS)
@pytest.mark.parametrize("twice", [False, True])
def test_layer_norm_of_a_square_by_hand(twice: bool, form: str) -> None:
    """As Cohere's: the mean is taken off once, or once for the variance and once for the result."""
    b = GraphBuilder()
    h, weight = b.add(b.all_reduce(b.input(T, H)), b.input(T, H)), b.input(H)
    centred = b.centred(h)
    normed = b.rms_norm(centred, weight, form, eps=0.25)
    if twice:
        again = b.call(aten.sub.Tensor, h, centred.args[1])
        (square,) = (user for user in centred.users if user.target is aten.pow.Tensor_Scalar)
        square.replace_input_with(centred, again)
        square.prepend(again)
    (site,) = fused(*find(b, normed, h))
    assert site.h is h and site.norm.output is normed and site.norm.epilogue == "layer_norm"
    assert site.norm.eps == 0.25 and site.norm.weight is (None if form == "no_weight" else weight)


def test_an_rms_norm_beside_a_mean_is_an_rms_norm() -> None:
    b = GraphBuilder()
    h, weight = b.add(b.all_reduce(b.input(T, H)), b.input(T, H)), b.input(H)
    (site,) = fused(*find(b, b.rms_norm(h, weight), b.call(aten.mean.dim, h, [-1], True)))
    assert site.norm.epilogue == "rms_norm"


@pytest.mark.parametrize("eps_form", EPS_FORMS)
@pytest.mark.parametrize("root", ROOTS)
def test_eps_and_root_in_every_form(root: str, eps_form: str) -> None:
    b = GraphBuilder()
    x, weight = b.input(T, H), b.input(H)
    normed = b.rms_norm(b.all_reduce(x), weight, eps=0.25, eps_form=eps_form, root=root, square_mul=True, upcast=False)
    (site,) = fused(*find(b, normed))
    assert site.norm.eps == (0.0 if eps_form == "none" else 0.25)
    assert site.residuals == () and site.form == "all_reduce+rms_norm[fp32]"


def test_views_and_casts_between() -> None:
    b = GraphBuilder()
    x, residual, weight = b.input(T, H, dtype=torch.bfloat16), b.input(2, 3, H), b.input(H)
    wait = b.call(aten.clone.default, b.all_reduce(x))
    h = b.add(residual, b.view(b.cast(wait, torch.float32), 2, 3, H))
    (site,) = fused(*find(b, b.rms_norm(h, weight), h))
    assert site.h is h and site.residuals == (residual,)


def test_row_parallel_bias_before_and_after_the_residual() -> None:
    for bias_first in (True, False):
        b = GraphBuilder()
        x, residual, bias, weight = b.input(T, H), b.input(T, H), b.input(H), b.input(H)
        first, second = (bias, residual) if bias_first else (residual, bias)
        h = b.add(b.add(b.all_reduce(x), first), second)
        (site,) = fused(*find(b, b.rms_norm(h, weight), h))
        assert site.bias is bias and site.residuals == (residual,)


def test_several_residual_addends() -> None:
    b = GraphBuilder()
    x, one, two, weight = b.input(T, H), b.input(T, H), b.input(T, H), b.input(H)
    h = b.add(two, b.add(one, b.all_reduce(x)))
    (site,) = fused(*find(b, b.rms_norm(h, weight), h))
    assert site.residuals == (one, two)


def test_sandwich_norm_before_the_residual_add() -> None:
    b = GraphBuilder()
    x, residual, w1, w2 = b.input(T, H), b.input(T, H), b.input(H), b.input(H)
    wait = b.all_reduce(x)
    stream = b.add(residual, b.rms_norm(wait, w1))
    (site,) = fused(*find(b, b.rms_norm(stream, w2), stream))
    assert site.h is wait and site.norm.weight is w1 and site.residuals == ()


def test_subset_groups_are_sites_of_their_own() -> None:
    b = GraphBuilder()
    pair = dist.new_group([0, 1]).group_name
    x, y, weight = b.input(T, H), b.input(T, H), b.input(H)
    outputs = [b.rms_norm(b.all_reduce(x), weight), b.rms_norm(b.all_reduce(y, pair), weight)]
    assert [site.all_reduce.group_name for site in fused(*find(b, *outputs))] == ["0", pair]


def test_weight_computed_after_the_residual_add() -> None:
    b = GraphBuilder()
    x, weight = b.input(T, H, dtype=torch.bfloat16), b.input(H)
    wait = b.all_reduce(x)
    y = b.cast(b.scale(wait), torch.bfloat16)
    late = b.cast(b.call(aten.mul.Tensor, weight, 2.0), torch.bfloat16)
    (site,) = fused(*find(b, b.call(aten.mul.Tensor, y, late)))
    assert site.norm.weight is late and site.late_weight[-1] is late and len(site.late_weight) == 2


def test_summed_over_another_width() -> None:
    b = GraphBuilder()
    x, residual, weight = b.input(T, H), b.input(T, H), b.input(H)
    half = b.add(b.view(b.all_reduce(x), 2 * T, H // 2), b.view(residual, 2 * T, H // 2))
    check_refused(find(b, b.rms_norm(b.view(half, T, H), weight)), Refusal.RESIDUAL_NOT_PROVABLE)


def check_refused(sites: list[FoundSite], reason: Refusal, words: str = "") -> None:
    (site,) = sites
    assert isinstance(site, RefusedSite), site
    assert (site.refused.reason, words in site.refused.detail) == (reason, True), site.refused
    assert site.refused.detail


Near = Callable[[GraphBuilder], fx.Node | tuple[fx.Node, ...]]
NEAR_MISSES: dict[str, tuple[Refusal, Near]] = {}


def near(reason: Refusal) -> Callable[[Near], Near]:
    def register(function: Near) -> Near:
        NEAR_MISSES[function.__name__] = (reason, function)
        return function

    return register


@near(Refusal.PARTIAL_SUM_USED_ELSEWHERE)
def partial_sum_used_elsewhere(b: GraphBuilder) -> tuple[fx.Node, ...]:
    x = b.call(aten.neg.default, b.input(T, H))
    return b.rms_norm(b.all_reduce(x), b.input(H)), b.call(aten.relu.default, x)


@near(Refusal.PARTIAL_SUM_USED_ELSEWHERE)
def partial_sum_used_elsewhere_through_a_view(b: GraphBuilder) -> tuple[fx.Node, ...]:
    x = b.call(aten.neg.default, b.input(2, 3, H))
    return b.rms_norm(b.all_reduce(b.view(x, T, H)), b.input(H)), x


@near(Refusal.REDUCED_VALUE_USED_ELSEWHERE)
def reduced_value_used_besides_the_add(b: GraphBuilder) -> tuple[fx.Node, ...]:
    wait = b.all_reduce(b.input(T, H))
    return b.rms_norm(b.add(wait, b.input(T, H)), b.input(H)), b.call(aten.relu.default, wait)


@near(Refusal.REDUCED_VALUE_USED_ELSEWHERE)
def two_waits(b: GraphBuilder) -> tuple[fx.Node, ...]:
    issued = b.issue(b.input(T, H))
    return b.rms_norm(b.wait(issued), b.input(H)), b.wait(issued)


@near(Refusal.REDUCE_OP_NOT_SUM)
def maximum(b: GraphBuilder) -> fx.Node:
    return b.rms_norm(b.all_reduce(b.input(T, H), op="max"), b.input(H))


@near(Refusal.REDUCE_OP_NOT_SUM)
def average(b: GraphBuilder) -> fx.Node:
    return b.rms_norm(b.all_reduce(b.input(T, H), op="avg"), b.input(H))


@near(Refusal.DTYPE_NOT_SUPPORTED)
def float64_message(b: GraphBuilder) -> fx.Node:
    return b.rms_norm(b.all_reduce(b.input(T, H, dtype=torch.float64)), b.input(H), upcast=False)


@near(Refusal.DTYPE_NOT_SUPPORTED)
def integer_message(b: GraphBuilder) -> fx.Node:
    return b.rms_norm(b.all_reduce(b.input(T, H, dtype=torch.int32)), b.input(H))


@near(Refusal.DTYPE_NOT_SUPPORTED)
def float64_residual(b: GraphBuilder) -> fx.Node:
    return b.rms_norm(b.add(b.all_reduce(b.input(T, H)), b.input(T, H, dtype=torch.float64)), b.input(H), upcast=False)


@near(Refusal.GROUP_SIZE_1)
def group_of_one(b: GraphBuilder) -> fx.Node:
    return b.rms_norm(b.all_reduce(b.input(T, H), group=dist.new_group([0]).group_name), b.input(H))


@near(Refusal.GROUP_NOT_RESOLVED)
def unknown_group(b: GraphBuilder) -> fx.Node:
    x = b.input(T, H)
    node = b.graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "nowhere"))
    node.meta["val"] = x.meta["val"]
    return b.rms_norm(b.wait(node), b.input(H))


@near(Refusal.NO_RMS_NORM)
def no_norm(b: GraphBuilder) -> fx.Node:
    return b.call(aten.relu.default, b.all_reduce(b.input(T, H)))


@near(Refusal.NO_RMS_NORM)
def graph_output(b: GraphBuilder) -> fx.Node:
    return b.all_reduce(b.input(T, H))


@near(Refusal.LAYER_NORM)
def layer_norm_that_was_not_decomposed(b: GraphBuilder) -> fx.Node:
    normed = b.call(aten.native_layer_norm.default, b.all_reduce(b.input(T, H)), [H], None, None, 1e-5)
    return b.call(operator.getitem, normed, 0)


@near(Refusal.LAYER_NORM)
def layer_norm_of_a_corrected_variance(b: GraphBuilder) -> fx.Node:
    return b.layer_norm(b.all_reduce(b.input(T, H)), correction=1)


@near(Refusal.LAYER_NORM)
def centred_and_scaled_by_what_is_not_centred(b: GraphBuilder) -> fx.Node:
    wait = b.all_reduce(b.input(T, H))
    return b.call(aten.mul.Tensor, b.centred(wait), b.input(H))


@near(Refusal.MEAN_DIM)
def layer_norm_over_tokens(b: GraphBuilder) -> fx.Node:
    return b.layer_norm(b.all_reduce(b.input(T, H)), dim=0)


@near(Refusal.NORM_INTERMEDIATE_USED)
def centred_rows_are_returned(b: GraphBuilder) -> tuple[fx.Node, ...]:
    centred = b.centred(b.all_reduce(b.input(T, H)))
    return b.rms_norm(centred, b.input(H)), centred


@near(Refusal.NORM_INTERMEDIATE_USED)
def mean_is_returned(b: GraphBuilder) -> tuple[fx.Node, ...]:
    centred = b.centred(b.all_reduce(b.input(T, H)))
    return b.rms_norm(centred, b.input(H)), centred.args[1]


@near(Refusal.MEAN_DIM)
def mean_over_tokens(b: GraphBuilder) -> fx.Node:
    wait = b.all_reduce(b.input(T, H))
    variance = b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, wait, 2), [0], True)
    return b.call(aten.mul.Tensor, wait, b.call(aten.rsqrt.default, b.add(variance, 1e-5)))


@near(Refusal.MEAN_DIM)
def mean_over_two_dims(b: GraphBuilder) -> fx.Node:
    wait = b.all_reduce(b.input(2, 3, H))
    variance = b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, wait, 2), [-2, -1], True)
    return b.call(aten.mul.Tensor, wait, b.call(aten.rsqrt.default, b.add(variance, 1e-5)))


@near(Refusal.HIDDEN_SIZE_NOT_SUPPORTED)
def norm_over_heads(b: GraphBuilder) -> fx.Node:
    return b.rms_norm(b.view(b.all_reduce(b.input(T, H)), T, 2, H // 2), b.input(H // 2))


@near(Refusal.EPS_NOT_CONSTANT)
def eps_from_an_input(b: GraphBuilder) -> fx.Node:
    wait, eps = b.all_reduce(b.input(T, H)), b.input(1)
    variance = b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, wait, 2), [-1], True)
    return b.call(aten.mul.Tensor, wait, b.call(aten.rsqrt.default, b.add(variance, eps)))


@near(Refusal.EPS_NOT_CONSTANT)
def eps_computed_in_the_graph(b: GraphBuilder) -> fx.Node:
    wait, eps = b.all_reduce(b.input(T, H)), b.call(aten.neg.default, b.input())
    variance = b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, wait, 2), [-1], True)
    return b.call(aten.mul.Tensor, wait, b.call(aten.rsqrt.default, b.add(variance, eps)))


@near(Refusal.EPS_NOT_CONSTANT)
def eps_with_alpha(b: GraphBuilder) -> fx.Node:
    wait = b.all_reduce(b.input(T, H))
    variance = b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, wait, 2), [-1], True)
    return b.call(aten.mul.Tensor, wait, b.call(aten.rsqrt.default, b.add(variance, 1e-5, alpha=2)))


@near(Refusal.NORM_INTERMEDIATE_USED)
def inverse_root_used(b: GraphBuilder) -> tuple[fx.Node, ...]:
    wait = b.all_reduce(b.input(T, H))
    variance = b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, wait, 2), [-1], True)
    inverse = b.call(aten.rsqrt.default, b.add(variance, 1e-5))
    return b.call(aten.mul.Tensor, wait, inverse), inverse


@near(Refusal.WEIGHT_NOT_PROVABLE)
def integer_weight(b: GraphBuilder) -> fx.Node:
    return b.rms_norm(b.all_reduce(b.input(T, H)), b.input(H, dtype=torch.int64))


@near(Refusal.WEIGHT_NOT_PROVABLE)
def weight_computed_from_the_sum(b: GraphBuilder) -> fx.Node:
    wait = b.all_reduce(b.input(T, H))
    return b.call(aten.mul.Tensor, b.scale(wait), b.call(aten.mean.dim, wait, [0]))


@near(Refusal.WEIGHT_NOT_PROVABLE)
def weight_is_the_only_row_of_the_sum(b: GraphBuilder) -> fx.Node:
    wait = b.all_reduce(b.input(1, H))
    return b.call(aten.mul.Tensor, b.scale(wait), b.view(wait, H))


@near(Refusal.RESIDUAL_NOT_PROVABLE)
def broadcast_residual(b: GraphBuilder) -> fx.Node:
    return b.rms_norm(b.add(b.all_reduce(b.input(T, H)), b.input(1, H)), b.input(H))


@near(Refusal.RESIDUAL_NOT_PROVABLE)
def doubled(b: GraphBuilder) -> fx.Node:
    wait = b.all_reduce(b.input(T, H))
    return b.rms_norm(b.add(wait, wait), b.input(H))


@near(Refusal.RESIDUAL_NOT_PROVABLE)
def two_biases(b: GraphBuilder) -> fx.Node:
    return b.rms_norm(b.add(b.add(b.all_reduce(b.input(T, H)), b.input(H)), b.input(H)), b.input(H))


@near(Refusal.NO_RMS_NORM)
def residual_with_alpha(b: GraphBuilder) -> fx.Node:
    return b.rms_norm(b.add(b.all_reduce(b.input(T, H)), b.input(T, H), alpha=2), b.input(H))


@near(Refusal.MISSING_METADATA)
def partial_without_metadata(b: GraphBuilder) -> fx.Node:
    x = b.call(aten.neg.default, b.input(T, H))
    normed = b.rms_norm(b.all_reduce(x), b.input(H))
    del x.meta["val"]
    return normed


@near(Refusal.WEIGHT_NOT_PROVABLE)
def weight_without_metadata(b: GraphBuilder) -> fx.Node:
    weight = b.input(H)
    normed = b.rms_norm(b.all_reduce(b.input(T, H)), weight)
    del weight.meta["val"]
    return normed


@near(Refusal.HIDDEN_SIZE_NOT_SUPPORTED)
def one_dimensional_message(b: GraphBuilder) -> fx.Node:
    return b.rms_norm(b.all_reduce(b.input(H)), b.input(H))


@near(Refusal.HIDDEN_SIZE_NOT_SUPPORTED)
def sum_flattened_into_other_rows(b: GraphBuilder) -> fx.Node:
    flat = b.call(aten.relu.default, b.input(T * H))
    wait = b.all_reduce(b.view(flat, T // 2, 2 * H))
    return b.rms_norm(b.add(b.view(wait, T, H), b.input(T, H)), b.input(H))


@near(Refusal.NOT_ROW_MAJOR)
def stream_laid_out_by_columns(b: GraphBuilder) -> tuple[fx.Node, ...]:
    h = b.add(b.call(aten.t.default, b.input(H, T)), b.all_reduce(b.input(T, H)))
    assert h.meta["val"].stride() == (1, T)
    return b.rms_norm(h, b.input(H)), h


@near(Refusal.NOT_ROW_MAJOR)
def memory_of_a_stream_of_other_strides_is_read(b: GraphBuilder) -> tuple[fx.Node, ...]:
    residual = b.call(aten.transpose.int, b.input(T, 2, H), 0, 1)
    h = b.add(residual, b.all_reduce(b.input(2, T, H)))
    view = b.call(aten.unsqueeze.default, h, 0)
    return b.rms_norm(h, b.input(H)), b.call(aten.as_strided.default, view, [2 * T * H], [1], 0)


@near(Refusal.NO_RMS_NORM)
def sum_rounded_to_float8(b: GraphBuilder) -> fx.Node:
    wait = b.all_reduce(b.input(T, H, dtype=torch.bfloat16))
    rounded = b.call(prims.convert_element_type.default, wait, torch.float8_e4m3fn)
    rounded = b.call(prims.convert_element_type.default, rounded, torch.bfloat16)
    return b.rms_norm(b.add(rounded, b.input(T, H, dtype=torch.bfloat16)), b.input(H, dtype=torch.bfloat16))


@near(Refusal.REDUCE_OP_NOT_SUM)
def operation_without_a_name(b: GraphBuilder) -> fx.Node:
    issued = b.issue(b.input(T, H))
    issued.args = (issued.args[0], None, "0")
    return b.rms_norm(b.wait(issued), b.input(H))


@near(Refusal.GROUP_NOT_RESOLVED)
def group_without_a_name(b: GraphBuilder) -> fx.Node:
    issued = b.issue(b.input(T, H))
    issued.args = (issued.args[0], "sum", 0)
    return b.rms_norm(b.wait(issued), b.input(H))


@near(Refusal.DTYPE_NOT_SUPPORTED)
def float64_residual_of_a_narrower_stream(b: GraphBuilder) -> fx.Node:
    h = b.add(b.all_reduce(b.input(T, H)), b.input(T, H, dtype=torch.float64))
    return b.rms_norm(b.cast(h, torch.float32), b.input(H))


@near(Refusal.DTYPE_NOT_SUPPORTED)
def float64_stream(b: GraphBuilder) -> fx.Node:
    h = b.add(b.cast(b.all_reduce(b.input(T, H)), torch.float64), b.input(T, H))
    return b.call(aten.mul.Tensor, b.cast(b.scale(h, upcast=False), torch.float32), b.input(H))


@near(Refusal.DTYPE_NOT_SUPPORTED)
def float64_norm(b: GraphBuilder) -> fx.Node:
    wide = b.cast(b.all_reduce(b.input(T, H)), torch.float64)
    return b.rms_norm(wide, b.input(H, dtype=torch.float64), upcast=False)


@near(Refusal.REDUCED_VALUE_USED_ELSEWHERE)
def token_count_of_the_sum_is_returned(b: GraphBuilder) -> tuple[fx.Node, ...]:
    wait = b.all_reduce(b.input(T, H))
    return b.rms_norm(b.add(wait, b.input(T, H)), b.input(H)), b.call(aten.sym_size.int, wait, 0)


@near(Refusal.MEAN_DIM)
def square_matrix_scaled_by_columns(b: GraphBuilder) -> fx.Node:
    wait = b.all_reduce(b.input(H, H))
    variance = b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, wait, 2), [-1])
    return b.call(aten.mul.Tensor, wait, b.call(aten.rsqrt.default, b.add(variance, 1e-5)))


@near(Refusal.NORM_INTERMEDIATE_USED)
def square_used(b: GraphBuilder) -> tuple[fx.Node, ...]:
    wait = b.all_reduce(b.input(T, H))
    normed = b.rms_norm(wait, b.input(H))
    return normed, next(user for user in wait.users if user.target is aten.pow.Tensor_Scalar)


@near(Refusal.NORM_INTERMEDIATE_USED)
def norm_without_weight_used_in_float32(b: GraphBuilder) -> fx.Node:
    return b.scale(b.all_reduce(b.input(T, H, dtype=torch.bfloat16)))


@near(Refusal.WEIGHT_NOT_PROVABLE)
def weight_computed_from_the_stream(b: GraphBuilder) -> fx.Node:
    h = b.add(b.all_reduce(b.input(T, H)), b.input(T, H))
    return b.call(aten.mul.Tensor, b.scale(h), b.call(aten.mean.dim, h, [0]))


@near(Refusal.WEIGHT_NOT_PROVABLE)
def random_weight(b: GraphBuilder) -> fx.Node:
    y = b.scale(b.all_reduce(b.input(T, H)))
    return b.call(aten.mul.Tensor, y, b.call(aten.rand.default, [H], device=b.device))


@near(Refusal.WEIGHT_NOT_PROVABLE)
def weight_gathered_from_the_ranks(b: GraphBuilder) -> fx.Node:
    shard = b.input(H // 4)
    y = b.scale(b.all_reduce(b.input(T, H)))
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    return b.call(aten.mul.Tensor, y, b.call(gather, shard, 4, "0"))


@near(Refusal.RESIDUAL_NOT_PROVABLE)
def vector_that_widens_the_rows(b: GraphBuilder) -> fx.Node:
    return b.rms_norm(b.add(b.view(b.all_reduce(b.input(T, H)), T * H, 1), b.input(H)), b.input(H))


@near(Refusal.RESIDUAL_NOT_PROVABLE)
def bias_over_heads(b: GraphBuilder) -> fx.Node:
    heads = b.add(b.view(b.all_reduce(b.input(T, H)), T, 2, H // 2), b.input(H // 2))
    return b.rms_norm(b.view(heads, T, H), b.input(H))


@near(Refusal.RESIDUAL_NOT_PROVABLE)
def scaled_after_the_bias(b: GraphBuilder) -> fx.Node:
    return b.rms_norm(b.call(aten.mul.Tensor, b.add(b.all_reduce(b.input(T, H)), b.input(H)), 0.5), b.input(H))


@near(Refusal.RESIDUAL_NOT_PROVABLE)
def scaled_after_the_residual(b: GraphBuilder) -> fx.Node:
    return b.rms_norm(b.call(aten.mul.Tensor, b.add(b.all_reduce(b.input(T, H)), b.input(T, H)), 0.5), b.input(H))


@near(Refusal.NOT_ROW_MAJOR)
def memory_of_a_norm_of_other_strides_is_read(b: GraphBuilder) -> fx.Node:
    h = b.add(b.call(aten.transpose.int, b.input(T, 2, H), 0, 1), b.all_reduce(b.input(2, T, H)))
    return b.call(aten.as_strided.default, b.rms_norm(h, b.input(H)), [2 * T * H], [1], 0)


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_refused_by_name(name: str) -> None:
    reason, build = NEAR_MISSES[name]
    b = GraphBuilder()
    outputs = build(b)
    check_refused(find(b, *(outputs if isinstance(outputs, tuple) else (outputs,))), reason)


def test_a_stream_of_other_strides_is_fused_where_a_view_comes_between() -> None:
    b = GraphBuilder()
    h = b.add(b.call(aten.transpose.int, b.input(T, 2, H), 0, 1), b.all_reduce(b.input(2, T, H)))
    assert h.meta["val"].stride() == (H, 2 * H, 1)
    fused(*find(b, b.rms_norm(h, b.input(H)), h))


@pytest.mark.parametrize("other", [(), (T,)])
def test_a_sum_of_numbers_is_refused_and_the_rest_is_fused(other: tuple[int, ...]) -> None:
    b = GraphBuilder()
    number = b.add(b.all_reduce(b.input()), b.input(*other) if other else b.all_reduce(b.input()))
    normed = b.rms_norm(b.add(b.all_reduce(b.input(T, H)), b.input(T, H)), b.input(H))
    *numbers, site = find(b, number, normed)
    fused(site)
    assert numbers and all(isinstance(one, RefusedSite) for one in numbers)


def test_constant_factors_of_the_sum_multiply() -> None:
    b = GraphBuilder()
    wait, residual = b.all_reduce(b.input(T, H)), b.input(T, H)
    scaled = b.call(aten.mul.Tensor, b.call(aten.mul.Tensor, wait, 2.0), 3.0)
    (site,) = fused(*find(b, b.rms_norm(b.add(scaled, residual), b.input(H))))
    assert site.scale == 6.0 and site.form == "all_reduce+scale+residual+rms_norm[fp32]"


@pytest.mark.parametrize(("steps", "found"), [(8, True), (9, False)])
def test_a_late_weight_is_computed_in_a_few_steps(steps: int, found: bool) -> None:
    b = GraphBuilder()
    weight = b.input(H)
    y = b.scale(b.all_reduce(b.input(T, H)))
    for _ in range(steps):
        weight = b.call(aten.neg.default, weight)
    (site,) = find(b, b.call(aten.mul.Tensor, y, weight))
    assert isinstance(site, FusionSite) == found


@pytest.mark.parametrize("alpha", [1, 3])
def test_an_offset_that_is_scaled_is_not_the_offset(alpha: int) -> None:
    b = GraphBuilder()
    weight = b.call(aten.add.Scalar, b.input(H), 1.0, alpha)
    (site,) = fused(*find(b, b.rms_norm(b.all_reduce(b.input(T, H)), weight)))
    assert site.norm.weight_offset == (1.0 if alpha == 1 else 0.0)


def test_every_refusal_of_finding_has_a_near_miss() -> None:
    elsewhere = {
        Refusal.TRAINING_GRAPH,  # test_rewrite.py
        Refusal.REWRITE_FAILED,  # test_rewrite.py
        Refusal.TRANSPORT_NOT_AVAILABLE,  # test_rewrite.py
        Refusal.NORM_ALREADY_FUSED,  # test_find_merged.py
        Refusal.SIZE_NOT_AVAILABLE,  # test_fusion_sizes.py
        Refusal.QUANTISATION_NOT_PROVABLE,  # test_quant.py
    }
    assert {reason for reason, _ in NEAR_MISSES.values()} == set(Refusal) - elsewhere
