"""Masks that look causal and are not, and the same masks where they are: what is proven is what the numbers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from graph_builder import GraphBuilder, aten, prims, run_graph

from tw_compile.passes.split.analysis.causal_mask import objection_to

TOKENS = 6
CPU, INT, BF16 = torch.device("cpu"), torch.int64, torch.bfloat16
INFINITE = float("-inf")


class Mask(GraphBuilder):
    """Matrices ``[queries, keys]``."""

    def __init__(self, tokens: int = TOKENS) -> None:
        super().__init__()
        self.tokens = tokens

    def full(self, number: float, dtype: torch.dtype = torch.float32) -> fx.Node:
        return self.call(aten.full.default, [], number, dtype=dtype, device=CPU, pin_memory=False)

    def positions(self) -> fx.Node:
        options = {"start": 0, "step": 1, "dtype": INT, "device": CPU, "requires_grad": False}
        return self.call(prims.iota.default, self.tokens, **options)

    def keys(self) -> fx.Node:
        return self.call(aten.unsqueeze.default, self.positions(), 0)

    def queries(self) -> fx.Node:
        return self.call(aten.unsqueeze.default, self.positions(), 1)

    def later(self) -> fx.Node:
        """Whether the key is behind the query."""
        return self.call(aten.gt.Tensor, self.keys(), self.queries())

    def hiding(self, condition: fx.Node, number: float = INFINITE) -> fx.Node:
        return self.call(aten.where.self, condition, self.full(number), self.full(0.0))

    def whole(self, mask: fx.Node) -> fx.Node:
        return self.call(aten.expand.default, mask, [self.tokens, self.tokens])


def hidden_by_a_cast(known: bool) -> tuple[Mask, fx.Node]:
    b = Mask()
    given = b.later() if known else b.input(TOKENS, TOKENS, dtype=torch.bool)
    return b, b.whole(b.hiding(b.cast(b.cast(given, INT), torch.bool)))


def padded_and_cut(behind: bool) -> tuple[Mask, fx.Node]:
    b = Mask()
    wide = b.call(aten.constant_pad_nd.default, b.hiding(b.later()), [0 if behind else 1, 3])
    return b, b.call(aten.slice.Tensor, wide, -1, 0, TOKENS)


def every_key_of_a_padded_mask(all_of_them: bool) -> tuple[Mask, fx.Node]:
    b = Mask(2)
    wide = b.call(aten.constant_pad_nd.default, b.hiding(b.later()), [0, 2])
    cut = b.call(aten.slice.Tensor, wide, -1, 0, 2, 1 if all_of_them else 2)
    return b, b.call(aten.where.self, b.later(), cut, b.full(0.0))


def queries_in_a_column(along_rows: bool) -> tuple[Mask, fx.Node]:
    b = Mask()
    queries = b.queries() if along_rows else b.call(aten.unsqueeze.default, b.queries(), 2)
    hidden = b.hiding(b.call(aten.gt.Tensor, b.keys(), queries))
    return b, b.call(aten.add.Tensor, hidden, b.call(aten.where.self, b.later(), b.full(0.0), b.full(0.0)))


def sums_that_fit(fit: bool) -> tuple[Mask, fx.Node]:
    b = Mask()
    number = b.full(100, INT if fit else torch.int8)
    return b, b.whole(b.hiding(b.call(aten.gt.Scalar, b.add(number, number), 0)))


def logic_of_bools(bools: bool) -> tuple[Mask, fx.Node]:
    b = Mask()
    if bools:
        return b, b.hiding(b.call(aten.bitwise_and.Tensor, b.later(), b.later()))
    both = b.call(aten.bitwise_and.Tensor, b.full(5, INT), b.full(2, INT))
    return b, b.whole(b.hiding(b.call(aten.gt.Scalar, both, 1)))


def added_as_it_is(once: bool) -> tuple[Mask, fx.Node]:
    b = Mask()
    return b, b.add(b.full(0.0), b.hiding(b.later(), -1e38), **({} if once else {"alpha": -1}))


def positions_less_positions(once: bool) -> tuple[Mask, fx.Node]:
    b = Mask()
    behind = b.call(aten.sub.Tensor, b.keys(), b.queries(), **({} if once else {"alpha": 2}))
    return b, b.hiding(b.call(aten.gt.Scalar, behind, 0))


def number_that_a_cast_keeps(whole: bool) -> tuple[Mask, fx.Node]:
    b = Mask()
    number = b.full(-1, torch.int32) if whole else b.full(-0.5)
    return b, b.whole(b.hiding(b.call(aten.lt.Scalar, b.call(prims.convert_element_type.default, number, INT), 0)))


CASES = [
    hidden_by_a_cast,
    padded_and_cut,
    every_key_of_a_padded_mask,
    queries_in_a_column,
    sums_that_fit,
    logic_of_bools,
    added_as_it_is,
    positions_less_positions,
]


def shows_later(b: Mask, mask: fx.Node) -> bool:
    """Whether a token sees a later one, by the numbers."""
    (numbers,) = run_graph(b.finish(mask), [torch.zeros(TOKENS, TOKENS, dtype=torch.bool) for _ in b.inputs])
    later = torch.ones(numbers.shape[-2:], dtype=torch.bool).triu(1)
    return bool(numbers[..., later].gt(-1.0).any())


@pytest.mark.parametrize("case", CASES)
def test_what_hides_later_tokens_is_proven_and_what_almost_does_is_not(case: Callable[[bool], Any]) -> None:
    for causal in (True, False):
        b, mask = case(causal)
        assert (objection_to(mask) is None) is causal
        assert shows_later(b, mask) is not causal


def test_casts_that_round_are_not_seen_through() -> None:
    b, mask = number_that_a_cast_keeps(False)
    assert objection_to(mask) is not None and shows_later(b, mask)


def test_numbers_that_the_dtype_of_what_they_are_compared_with_does_not_have_prove_nothing() -> None:
    """It is the kernel's affair which of both is rounded."""
    for number, proven in ((1.001, False), (2.0, True)):
        b = Mask()
        assert (objection_to(b.whole(b.hiding(b.call(aten.lt.Scalar, b.full(1.0, BF16), number)))) is None) is proven


def test_positions_that_are_drawn_anew_prove_nothing() -> None:
    """Not even where they can only be drawn as zeros."""
    b = Mask()
    options = {"dtype": INT, "device": CPU, "pin_memory": False}
    drawn = b.call(aten.unsqueeze.default, b.call(aten.randint.low, 0, 1, [TOKENS], **options), 1)
    for queries, proven in ((b.queries(), True), (b.add(b.queries(), drawn), False)):
        assert (objection_to(b.hiding(b.call(aten.gt.Tensor, b.keys(), queries))) is None) is proven
