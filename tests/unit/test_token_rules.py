"""What token rules refuse, of operators that they know: each half would compute other rows than the whole has."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.fx as fx
from graph_builder import GraphBuilder, aten, prims
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import Library

from tw_compile.kernels.collective import ops
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split import (
    Join,
    OperatorCall,
    Rows,
    SplitReport,
    Verdict,
    analyse,
    declare_attention,
    find_token_axis,
    restored_rules,
    rules_identity,
    split_tokens,
    token_rule,
)
from tw_compile.passes.split.analysis.token_axis import Analysis, TokenAxis
from tw_compile.passes.split.schedule.dependences import argument
from tw_compile.testing.graphs import find_ops

TOKENS, CHOSEN, EXPERTS, WIDTH = 6, 2, 4, 8
ENTRIES = TOKENS * CHOSEN
BF16, INT = torch.bfloat16, torch.int64


class Tokens(GraphBuilder):
    """``ids [1, tokens]``, and what is looked up by them."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = self.input(1, TOKENS, dtype=INT)
        self.rows = self.looked_up(WIDTH, dtype=BF16)

    def looked_up(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        """``[tokens, *shape]``."""
        columns = int(torch.tensor(shape).prod())
        found = self.call(aten.embedding.default, self.input(50, columns, dtype=dtype), self.ids)
        return self.view(found, TOKENS, *shape)

    def analysed(self, *outputs: fx.Node) -> Analysis:
        self.finish(*outputs)
        axis = find_token_axis(self.graph, tokens=TOKENS)
        assert isinstance(axis, TokenAxis)
        return analyse(self.graph, axis)

    def reason(self, node: fx.Node) -> JoinReason:
        verdict = self.analysed(node).verdicts[node]
        assert isinstance(verdict, Join), verdict
        return verdict.reason

    # Routing

    def sort(self) -> tuple[fx.Node, fx.Node]:
        """Experts of the tokens in order, and the permutation that has put them there."""
        scores = self.call(aten.mm.default, self.rows, self.input(WIDTH, EXPERTS, dtype=BF16))
        chosen = self.call(operator.getitem, self.call(aten.topk.default, scores, CHOSEN), 1)
        sort = self.call(aten.sort.default, self.view(chosen, ENTRIES))
        return self.call(operator.getitem, sort, 0), self.call(operator.getitem, sort, 1)

    def ordered(self, permutation: fx.Node, each: int = CHOSEN) -> fx.Node:
        token = self.call(aten.div.Tensor_mode, permutation, each, rounding_mode="floor")
        return self.call(aten.index.Tensor, self.rows, [token])

    def inverse(self, permutation: fx.Node, descending: bool = False) -> fx.Node:
        return self.call(operator.getitem, self.call(aten.sort.default, permutation, -1, descending), 1)

    def written(self, permutation: fx.Node, accumulate: bool = False, start: int = 0, step: int = 1) -> fx.Node:
        """The inverse as ``inverse[permutation] = 0, 1, 2, ...``."""
        made = {"dtype": INT, "device": torch.device("cpu")}
        empty = self.call(aten.empty.memory_format, [ENTRIES], pin_memory=False, **made)
        count = self.call(prims.iota.default, ENTRIES, start=start, step=step, requires_grad=False, **made)
        return self.call(aten.index_put.default, empty, [permutation], count, accumulate)

    def ends(self, keys: fx.Node, low: int = 0, high: int = EXPERTS - 1) -> fx.Node:
        """Of the groups of rows, by expert."""
        sizes = self.call(aten.histc.default, self.cast(keys, torch.float32), EXPERTS, low, high)
        return self.call(aten.cumsum.default, sizes, 0, dtype=torch.int32)

    def experts(self, ordered: fx.Node, ends: fx.Node) -> fx.Node:
        return self.call(aten._grouped_mm.default, ordered, self.input(EXPERTS, WIDTH, WIDTH, dtype=BF16), ends)

    def undone(self, rows: fx.Node, inverse: fx.Node) -> fx.Node:
        return self.call(aten.index.Tensor, rows, [inverse])


@pytest.fixture
def b(two_ranks: None) -> Tokens:
    return Tokens()


def _sorted(b: Tokens) -> fx.Node:
    _, permutation = b.sort()
    return b.undone(b.ordered(permutation), b.inverse(permutation))


def _written(b: Tokens) -> fx.Node:
    _, permutation = b.sort()
    return b.undone(b.ordered(permutation), b.written(permutation))


def _grouped(b: Tokens) -> fx.Node:
    keys, permutation = b.sort()
    return b.undone(b.experts(b.ordered(permutation), b.ends(keys)), b.inverse(permutation))


@pytest.mark.parametrize("make", [_sorted, _written, _grouped])
def test_a_half_routes_its_own_tokens_and_puts_them_back(b: Tokens, make: Callable[[Tokens], fx.Node]) -> None:
    back = make(b)
    analysis = b.analysed(back)
    assert analysis.joins == {} and analysis.layouts[back] == Rows(0, CHOSEN)


def _from_the_last(b: Tokens) -> fx.Node:
    _, permutation = b.sort()
    return b.undone(b.ordered(permutation), b.inverse(permutation, descending=True))


def _by_another_sort(b: Tokens) -> fx.Node:
    (_, permutation), (_, other) = b.sort(), b.sort()
    return b.undone(b.ordered(permutation), b.inverse(other))


def _of_other_tokens(b: Tokens) -> fx.Node:
    _, permutation = b.sort()
    return b.undone(b.ordered(permutation, each=2 * CHOSEN), b.inverse(permutation))


def _added_up(b: Tokens) -> fx.Node:
    _, permutation = b.sort()
    return b.undone(b.ordered(permutation), b.written(permutation, accumulate=True))


def _counted_from_one(b: Tokens) -> fx.Node:
    _, permutation = b.sort()
    return b.undone(b.ordered(permutation), b.written(permutation, start=1))


def _counted_by_twos(b: Tokens) -> fx.Node:
    _, permutation = b.sort()
    return b.undone(b.ordered(permutation), b.written(permutation, step=2))


def _written_to_what_others_read(b: Tokens) -> fx.Node:
    _, permutation = b.sort()
    inverse = b.written(permutation)
    others = b.add(inverse.args[0], 1)
    return b.add(b.undone(b.ordered(permutation), inverse), b.view(others, ENTRIES, 1))


def _viewed_as_other_rows(b: Tokens) -> fx.Node:
    _, permutation = b.sort()
    return b.undone(b.view(b.ordered(permutation), 2 * ENTRIES, WIDTH // 2), b.inverse(permutation))


def _beside_rows_in_their_own_order(b: Tokens) -> fx.Node:
    _, permutation = b.sort()
    both = b.call(aten.cat.default, [b.ordered(permutation), b.input(ENTRIES, WIDTH, dtype=BF16)], 1)
    return b.undone(both, b.inverse(permutation))


def _summed_over_ranks(b: Tokens) -> fx.Node:
    _, permutation = b.sort()
    return b.undone(b.all_reduce(b.ordered(permutation)), b.inverse(permutation))


def _by_groups_of_another_sort(b: Tokens) -> fx.Node:
    (_, permutation), (other, _) = b.sort(), b.sort()
    return b.undone(b.experts(b.ordered(permutation), b.ends(other)), b.inverse(permutation))


def _without_the_first_group(b: Tokens) -> fx.Node:
    keys, permutation = b.sort()
    return b.undone(b.experts(b.ordered(permutation), b.ends(keys, low=1)), b.inverse(permutation))


def _with_two_groups_as_one(b: Tokens) -> fx.Node:
    keys, permutation = b.sort()
    return b.undone(b.experts(b.ordered(permutation), b.ends(keys, high=EXPERTS - 2)), b.inverse(permutation))


@pytest.mark.parametrize(
    "make",
    [
        _from_the_last,
        _by_another_sort,
        _of_other_tokens,
        _added_up,
        _counted_from_one,
        _counted_by_twos,
        _written_to_what_others_read,
        _viewed_as_other_rows,
        _beside_rows_in_their_own_order,
        _summed_over_ranks,
        _by_groups_of_another_sort,
        _without_the_first_group,
        _with_two_groups_as_one,
    ],
)
def test_what_may_not_put_a_halfs_rows_back_is_routed_once(b: Tokens, make: Callable[[Tokens], fx.Node]) -> None:
    back = make(b)
    analysis = b.analysed(back)
    assert analysis.layouts.get(back) is None
    assert {"routing_not_undone", "reshapes_tokens", "operands_disagree", "reduces_tokens"} & analysis.joins.keys()


def test_a_norm_over_all_tokens_joins(b: Tokens) -> None:
    out = b.call(aten.native_layer_norm.default, b.rows, [TOKENS, WIDTH], None, None, 1e-5)
    assert b.reason(out) is JoinReason.REDUCES_TOKENS


def test_entries_that_are_gathered_from_other_tokens_join(b: Tokens) -> None:
    out = b.call(aten.gather.default, b.rows, 0, b.view(b.ids, TOKENS, 1))
    assert b.reason(out) is JoinReason.SELECTS_TOKENS


def test_rows_that_a_mask_of_tokens_selects_join(b: Tokens) -> None:
    b.fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    b.ids.meta["val"] = b.fake_mode.from_tensor(torch.zeros(1, TOKENS, dtype=INT))
    mask = b.view(b.call(aten.gt.Scalar, b.ids, 3), TOKENS)
    out = b.call(aten.index.Tensor, b.input(TOKENS, WIDTH), [mask])
    assert b.reason(out) is JoinReason.SELECTS_TOKENS


def test_a_product_over_tokens_joins_though_others_are_its_batch(b: Tokens) -> None:
    turned = b.call(aten.permute.default, b.looked_up(TOKENS, 5), [1, 0, 2])
    assert b.reason(b.call(aten.bmm.default, b.looked_up(4, TOKENS), turned)) is JoinReason.CONTRACTS_TOKENS


def batched(b: Tokens, rows: fx.Node, scores: fx.Node) -> tuple[fx.Node, ...]:
    weights = b.input(1, TOKENS, TOKENS)
    return weights, b.view(rows, 1, TOKENS, TOKENS), weights


@pytest.mark.parametrize(
    ("target", "operands"),
    [
        (aten.mm.default, lambda b, rows, scores: (scores, scores)),
        (aten.addmm.default, lambda b, rows, scores: (scores, rows, scores)),
        (aten.addmm.default, lambda b, rows, scores: (scores, scores, b.call(aten.permute.default, rows, [1, 0]))),
        (aten.baddbmm.default, batched),
    ],
    ids=["both factors", "addend and second factor", "addend and first factor", "addend and batch of factors"],
)
def test_a_product_joins_if_a_half_would_read_one_operand_as_rows_and_as_a_whole(
    b: Tokens, target: Any, operands: Callable[[Tokens, fx.Node, fx.Node], tuple[fx.Node, ...]]
) -> None:
    """There are as many columns as tokens."""
    rows = b.looked_up(TOKENS)
    out = b.call(target, *operands(b, rows, b.call(aten.cumsum.default, rows, 0)))
    analysis = b.analysed(out)
    assert analysis.layouts.get(out) is None
    assert isinstance(split_tokens(b.graph, 2, axis=analysis.axis, analysis=analysis), SplitReport)


def test_a_fused_product_joins_if_its_matrix_is_also_the_residual(b: Tokens) -> None:
    """There are as many columns as tokens."""
    x = b.looked_up(TOKENS)
    whole = b.call(aten.tril.default, x)
    dtype = x.meta["val"].dtype
    norm = (None, b.input(TOKENS), 1e-5, 0.0, None, dtype, dtype, False, "sharded", "0", "gloo", 0)
    assert b.reason(b.call(ops.mm_start, x, whole, whole, *norm)) is JoinReason.OPERANDS_DISAGREE


def started(b: Tokens, x: fx.Node, residual: fx.Node | None, weight: fx.Node) -> fx.Node:
    dtype = x.meta["val"].dtype
    return b.call(ops.start, x, residual, None, weight, 1e-5, 0.0, None, dtype, dtype, False, "sharded", "0", "gloo", 0)


def test_a_norm_whose_weight_is_made_of_tokens_joins(b: Tokens) -> None:
    x = b.looked_up(TOKENS)
    assert b.reason(started(b, x, None, b.call(aten.sum.dim_IntList, x, [1]))) is JoinReason.OPERANDS_DISAGREE


def test_each_half_keeps_its_rows_of_a_whole_residual_until_its_wait(b: Tokens) -> None:
    x = b.looked_up(TOKENS)
    whole = b.call(aten.tril.default, x)
    start = started(b, x, whole, b.input(TOKENS))
    hidden, residual = (b.call(operator.getitem, start, index) for index in (0, 1))
    b.call(ops.wait_, hidden, residual, [x, whole], "0", 0)
    b.finish(hidden)
    axis = find_token_axis(b.graph, tokens=TOKENS)
    assert isinstance(axis, TokenAxis) and isinstance(split_tokens(b.graph, 2, axis=axis), SplitReport)
    starts, waits = (find_ops(b.graph, f"all_reduce_rms_norm_{name}") for name in ("start", "wait_"))
    assert [argument(one, "keep") for one in waits] == [list(one.args[:2]) for one in starts]
    assert len({one.args[1] for one in starts}) == 2


@pytest.fixture
def noise() -> Iterator[Any]:
    library = Library("tw_compile_test_noise", "DEF")
    tags = (torch.Tag.pointwise, torch.Tag.nondeterministic_seeded)
    library.define("noise(Tensor x) -> Tensor", tags=tags)
    torch.library.register_fake("tw_compile_test_noise::noise", lambda x: x.clone(), lib=library)
    yield torch.ops.tw_compile_test_noise.noise.default
    library._destroy()


def test_halves_draw_no_random_numbers_of_their_own(b: Tokens, noise: Any) -> None:
    assert b.reason(b.call(noise, b.rows)) is JoinReason.UNKNOWN_OPERATOR


# Squeezes


@pytest.mark.parametrize(
    ("shape", "overload", "dims", "half_shape"),
    [
        ((TOKENS, WIDTH), "dim", 0, (1, WIDTH)),  # the only token of a half is no reason to lose its dim
        ((TOKENS, WIDTH), "dims", [0, 1], (1, WIDTH)),
        ((TOKENS, 1, WIDTH), "dims", [0, 1], (1, WIDTH)),
        ((TOKENS, 1, WIDTH), "dim", 1, (1, WIDTH)),
    ],
)
def test_a_half_squeezes_what_the_whole_squeezes(
    b: Tokens, shape: tuple[int, ...], overload: str, dims: int | list[int], half_shape: tuple[int, ...]
) -> None:
    viewed = b.view(b.rows, *shape)
    squeezed = b.call(getattr(aten.squeeze, overload), viewed, dims)
    b.finish(b.call(aten.neg.default, squeezed))
    axis = find_token_axis(b.graph, tokens=TOKENS)
    assert isinstance(axis, TokenAxis) and isinstance(split_tokens(b.graph, 1, axis=axis), SplitReport)
    first, second = find_ops(b.graph, "neg")
    assert first.meta["val"].shape == half_shape
    assert second.meta["val"].shape == (TOKENS - 1, WIDTH)


# Scaled products

DEPTH = 32


def scaled(b: Tokens, scale: fx.Node, column_scale: fx.Node) -> fx.Node:
    """``[tokens, DEPTH]`` in float8, with a scale for each row, by a weight with a scale for each column."""
    float8 = torch.float8_e4m3fn
    columns = column_scale.meta["val"].shape[1]
    weight = b.call(aten.permute.default, b.input(columns, DEPTH, dtype=float8), [1, 0])
    rows = b.cast(b.looked_up(DEPTH), float8)
    return b.call(aten._scaled_mm.default, rows, weight, scale, column_scale, None, None, BF16)


def test_each_half_has_the_scales_of_its_own_rows(b: Tokens) -> None:
    own = scaled(b, b.looked_up(1), b.input(1, DEPTH))
    given = scaled(b, b.input(TOKENS, 1), b.input(1, DEPTH))
    analysis = b.analysed(own, given)
    assert analysis.joins == {} and analysis.layouts[own] == analysis.layouts[given] == Rows(0)
    verdict = analysis.verdicts[given]
    assert not isinstance(verdict, Join) and [one.meta["val"].shape for one in verdict.slices] == [(TOKENS, 1)]


def test_scales_of_columns_that_are_made_of_tokens_join(b: Tokens) -> None:
    columns = b.call(aten.permute.default, b.looked_up(1), [1, 0])
    assert b.reason(scaled(b, b.looked_up(1), columns)) is JoinReason.OPERANDS_DISAGREE


def test_rules_of_a_test_are_taken_out_again_also_behind_an_error() -> None:
    before = rules_identity()

    def rule(call: OperatorCall) -> Verdict:
        return call.row_wise_over(0, dim=0)

    with pytest.raises(KeyError), restored_rules():
        token_rule("mylib::of_a_test")(rule)
        declare_attention("mylib::of_a_test")
        assert rules_identity() != before
        raise KeyError
    assert rules_identity() == before
