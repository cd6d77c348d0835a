"""GEMMs of one input where nothing is split: which our kernel gets, for how many rows, and that it computes the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import given
from hypothesis import strategies as st
from joint_graphs import products, swiglu
from split_graphs import WORLD_SIZE, family_graph, random_values, run_alone, sizes_of_symbols

from tw_compile import Config
from tw_compile.autotune.turns import MOST_ROWS, Gemms, measured_turns, rows_to_measure, turns_of
from tw_compile.current import current_gate
from tw_compile.kernels.gemm import by_rows
from tw_compile.kernels.gemm.by_rows import is_ours
from tw_compile.passes import manager
from tw_compile.passes.contract import Context
from tw_compile.passes.join import JOIN, join_gemms
from tw_compile.passes.split import SplitReport
from tw_compile.testing import fake_process_group
from tw_compile.testing.graphs import find_ops

BF16 = torch.bfloat16
FAMILY = {"hidden_size": 64, "intermediate_size": 128, "dtype": BF16}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(WORLD_SIZE):
        yield


class Measured:
    """Answers as a device would, and remembers the questions."""

    def __init__(self, turns: tuple[int, ...] | None = (0,)) -> None:
        self.turns = turns
        self.asked: list[tuple[Gemms, tuple[int, ...]]] = []

    def __call__(self, gemms: Gemms, rows: Sequence[int], device: torch.device) -> tuple[int, ...] | None:
        self.asked.append((gemms, tuple(rows)))
        return self.turns


def joined(graph: fx.Graph) -> list[list[int]]:
    """The turns of every joint and of every gated GEMM."""
    return [node.args[-1] for name in ("joint_mm_by_rows", "gated_mm_by_rows") for node in find_ops(graph, name)]  # type: ignore[misc]


def test_what_is_faster_is_joined_and_computes_the_same() -> None:
    graph = family_graph("llama", 2, 8, **FAMILY)
    values = random_values(graph)
    expected = run_alone(graph, values)
    measure = Measured()
    done = join_gemms(graph, None, measure)
    graph.lint()
    assert len(find_ops(graph, "joint_mm_by_rows")) == 2 and len(find_ops(graph, "gated_mm_by_rows")) == 2
    assert not find_ops(graph, "aten.exp")
    assert {gemms.gated for gemms, _ in done.turns} == {False, True} and len(done.turns) == 4
    assert {rows for _, rows in measure.asked} == {(16,)}
    for one, other in zip(expected, run_alone(graph, values), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("turns", [(), None], ids=("slower", "not measured"))
def test_the_graph_stays_where_nothing_is_faster(turns: tuple[int, ...] | None) -> None:
    graph = family_graph("llama", 2, 8, **FAMILY)
    before = str(graph)
    measure = Measured(turns)
    assert join_gemms(graph, None, measure).turns == () and len(measure.asked) == 4
    assert str(graph) == before


@pytest.mark.full
def test_a_graph_for_many_token_counts_is_measured_for_those_that_its_host_runs() -> None:
    graph = family_graph("llama", 2, 8, dynamic=True, **FAMILY)
    values = random_values(graph, sizes_of_symbols(graph, 8))
    expected = run_alone(graph, values)
    measure = Measured((64, 2048))
    join_gemms(graph, (1, 512), measure)
    assert {rows[-1] for _, rows in measure.asked} <= {512, 1024}
    assert joined(graph) == [[64, 2048]] * 4
    for one, other in zip(expected, run_alone(graph, values), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_one_matrix_that_holds_gate_and_up_is_gated() -> None:
    graph, mode, (product,) = products((128,))
    halves = []
    for begin in (0, 64):
        with graph.inserting_after(product):
            node = graph.call_function(torch.ops.aten.slice.Tensor, (product, 1, begin, begin + 64))
        with mode:
            node.meta["val"] = product.meta["val"][:, begin : begin + 64]
        halves.append(node)
    result = swiglu(graph, mode, *halves)
    graph.output(result)
    measure = Measured()
    join_gemms(graph, None, measure)
    assert measure.asked == [(Gemms(64, (64, 64), gated=True, halves=True), (32,))]
    assert len(find_ops(graph, "gated_mm_by_rows")) == 1


def test_a_gemm_alone_is_not_measured() -> None:
    graph, _, (product,) = products((128,))
    graph.output(product)
    measure = Measured()
    join_gemms(graph, None, measure)
    assert not measure.asked


def test_float32_is_left_to_the_library() -> None:
    graph = family_graph("llama", 2, 8, **{**FAMILY, "dtype": torch.float32})
    measure = Measured()
    join_gemms(graph, None, measure)
    assert not measure.asked


def test_split_graphs_are_left_to_the_split() -> None:
    context = Context(Config(), current_gate(Config()))
    context.keep(SplitReport.__new__(SplitReport))
    (report,) = manager.run(fx.Graph(), context, (JOIN,)).reports
    assert report.outcome == "refused" and "split" in report.detail


def test_nothing_is_measured_without_a_gpu() -> None:
    assert measured_turns(Gemms(64, (64, 64)), (16,), torch.device("cpu")) is None


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 50))
def test_a_result_holds_down_to_the_next_smaller_number_of_rows(ours: list[bool], step: int) -> None:
    rows = [step * (index + 1) for index in range(len(ours))]
    turns = turns_of(rows, ours)
    assert list(turns) == sorted(set(turns))
    for index, is_our in enumerate(ours):
        first = rows[index - 1] + 1 if index else 1
        assert {is_ours(count, turns) for count in range(first, rows[index] + 1)} == {is_our}
    assert is_ours(rows[-1] * 3, turns) == ours[-1]


@given(st.integers(1, 20000), st.one_of(st.none(), st.integers(1, 20000)))
def test_rows_are_measured_within_the_range(least: int, more: int | None) -> None:
    most = None if more is None else least + more
    rows = rows_to_measure(least, most)
    assert list(rows) == sorted(set(rows)) and rows[-1] == min(most or MOST_ROWS, MOST_ROWS)
    assert rows[0] == min(least, MOST_ROWS)


def test_without_our_kernel_the_operators_are_the_librarys() -> None:
    torch.manual_seed(0)
    a = torch.randn(5, 64, dtype=BF16)
    both = torch.randn(256, 64, dtype=BF16)
    gate, up = (half.t() for half in both.split(128))
    apart: Any = up.contiguous().t().contiguous().t()
    expected = torch.nn.functional.silu(a @ gate) * (a @ up)
    for other in (up, apart):
        result = by_rows.gated_mm_by_rows(a, gate, other, [0])
        assert result.is_contiguous()
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    bias = torch.randn(128, dtype=BF16)
    q, k = by_rows.joint_mm_by_rows(a, [gate, up], [bias, bias], [0])
    assert torch.equal(q, torch.addmm(bias, a, gate)) and torch.equal(k, torch.addmm(bias, a, up))
    with pytest.raises(ValueError, match="one for each of 2 matrices, got 1"):
        by_rows.joint_mm_by_rows(a, [gate, up], [bias], [0])
