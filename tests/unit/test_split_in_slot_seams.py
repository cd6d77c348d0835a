"""Results that stay in a slot's memory from one of a host's graphs to the next, which is as this one is."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
import torch.fx as fx
from graph_builder import GraphBuilder, aten

from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.seam import arrive_, enter_layers, leave_halves
from tw_compile.passes.nodes import annotate
from tw_compile.passes.split.peephole.in_slot import leave_results_in_slots
from tw_compile.passes.split.schedule.dependences import argument
from tw_compile.testing import fake_process_group, find_ops

WIDTH, ROWS, GROUP = 8, 4, "0"


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(2):
        yield


class Halves(GraphBuilder):
    """Two sums and two matmuls of each half, which has a slot of its own; half 2's last sum is waited for in the next graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.input(WIDTH, WIDTH)
        self.scale = self.input(WIDTH)
        self.entered: dict[int, tuple[fx.Node, fx.Node]] = {}

    def enter(self, half: int) -> None:
        node = self.call(enter_layers, self.input(ROWS, WIDTH), GROUP)
        annotate(node, split=half)
        self.entered[half] = self._both(node)
        if half == 2:
            self.call(arrive_, *self.entered[half], [], GROUP, half)

    def matmul(self, rows: fx.Node) -> fx.Node:
        return self.call(aten.mm.default, rows, self.weight)

    def start(self, half: int, x: fx.Node, residual: fx.Node, sharded: bool) -> tuple[fx.Node, fx.Node]:
        norm = (None, self.scale, 1e-5, 0.0, None, torch.float32, torch.float32)
        where = (sharded, "sharded", GROUP, "gloo", half)
        return self._both(self.call(ops.start, x, residual, *norm, *where, overlap_sms=4))

    def wait(self, half: int, results: tuple[fx.Node, fx.Node]) -> None:  # type: ignore[override]
        self.call(ops.wait_, *results, [], GROUP, half)

    def leave(self, first: tuple[fx.Node, fx.Node], second: tuple[fx.Node, fx.Node]) -> fx.Graph:
        left = self.call(leave_halves, *second, [], GROUP, 2, *first, True, 2 * ROWS)
        return self.finish(left)

    def _both(self, node: fx.Node) -> tuple[fx.Node, fx.Node]:
        return self.call(operator.getitem, node, 0), self.call(operator.getitem, node, 1)


def layer(reads_late: bool = False, reads_what_is_left: bool = False) -> fx.Graph:
    """``reads_late``: half 1 reads what it entered with behind its first sum, too; ``reads_what_is_left``: half 2 what half 1
    leaves."""
    b = Halves()
    left: list[tuple[fx.Node, fx.Node]] = []
    for half in (1, 2):
        b.enter(half)
        hidden, residual = b.entered[half]
        first = b.start(half, b.matmul(hidden), residual, sharded=False)
        b.wait(half, first)
        x = b.matmul(first[0])
        if half == 1 and reads_late:
            x = b.add(x, b.matmul(hidden))
        if half == 2 and reads_what_is_left:
            x = b.add(x, b.matmul(left[0][0]))
        left.append(b.start(half, x, first[1], sharded=True))
        if half == 1:
            b.wait(half, left[0])
    return b.leave(*left)


def stays(graph: fx.Graph) -> list[bool]:
    leave_results_in_slots(graph)
    return [bool(argument(node, "results_in_slot")) for node in find_ops(graph, "all_reduce_rms_norm_start")]


def test_what_halves_leave_stays_where_matmuls_read_it_before_the_slots_first_call() -> None:
    assert stays(layer()) == [True] * 4


def test_what_the_next_graph_reads_behind_its_first_call_of_the_slot_is_copied() -> None:
    assert stays(layer(reads_late=True)) == [True, False, True, True]


def test_what_is_left_and_also_read_here_is_copied() -> None:
    assert stays(layer(reads_what_is_left=True)) == [True, False, True, True]
