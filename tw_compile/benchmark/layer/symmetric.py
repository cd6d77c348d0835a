"""torch's all_reduces over symmetric memory in a compiled graph: what an unfused model could have without our kernels.

Inductor of torch 2.11 lowers to the one-shot kernel alone, and gives the buffers of different graphs the same allocation id.
So this module rewrites the graph to operators that do what Inductor would do: the matmul writes its partial sums to symmetric
memory without a copy, and two-shot sums are read where they lie.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
import torch.fx as fx
from torch.library import Library

from tw_compile import compat
from tw_compile.benchmark.spec import SYMM_MEM_ONE_SHOT_MAX_BYTES
from tw_compile.graph.predicates import aten, is_call, is_view
from tw_compile.harness.ranks import Ranks, symmetric_memory

SymmetricKernel = Literal["one_shot", "two_shot"]

_c10d = torch.ops._c10d_functional
_library = Library("tw_compile_bench", "DEF")
_library.define("all_reduce(Tensor x, str kind, str group_name, int site) -> Tensor")
_library.define("mm_all_reduce(Tensor a, Tensor b, str kind, str group_name, int site) -> Tensor")


class Slots:
    """Symmetric memory of one group: for each all_reduce of a graph a buffer of ``capacity`` bytes, less for one-shot.

    A two-shot sum stays in its buffer. The graph takes the buffer for a tensor of its own until the next run of the graph. So
    no two all_reduces of a graph share a buffer, and neither do a one-shot graph and a two-shot graph.
    """

    def __init__(self, ranks: Ranks, capacity: int) -> None:
        self.capacity = capacity
        self._ranks = ranks
        self.buffers: dict[tuple[str, int], tuple[torch.Tensor, Any]] = {}

    def view(self, kind: str, site: int, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """The first bytes of a buffer as ``shape`` in the dtype of ``like``. Collective where the buffer is new."""
        nbytes = math.prod(shape) * like.element_size()
        if nbytes > self.capacity:
            raise ValueError(f"shape: expected at most {self.capacity} bytes, got {list(shape)} of {like.dtype}")
        if (kind, site) not in self.buffers:
            most = self.capacity if kind == "two_shot" else min(self.capacity, SYMM_MEM_ONE_SHOT_MAX_BYTES)
            self.buffers[kind, site] = symmetric_memory(self._ranks, most, like.device)
        buffer, _ = self.buffers[kind, site]
        return buffer[:nbytes].view(like.dtype).view(shape)


slots_of_group: dict[str, Slots] = {}


def reserve(ranks: Ranks, capacity: int) -> None:
    """Give the group of ``ranks`` slots of ``capacity`` bytes, for the operators of this module."""
    slots_of_group[ranks.ctx.group_name] = Slots(ranks, capacity)


def reduce_slot(slot: torch.Tensor, kind: str, group_name: str) -> torch.Tensor:
    if kind == "one_shot":
        return torch.ops.symm_mem.one_shot_all_reduce(slot, "sum", group_name)
    return torch.ops.symm_mem.two_shot_all_reduce_(slot, "sum", group_name)


def _all_reduce(x: torch.Tensor, kind: str, group_name: str, site: int) -> torch.Tensor:
    slot = slots_of_group[group_name].view(kind, site, tuple(x.shape), x)
    return reduce_slot(slot.copy_(x), kind, group_name)


def _mm_all_reduce(a: torch.Tensor, b: torch.Tensor, kind: str, group_name: str, site: int) -> torch.Tensor:
    slot = slots_of_group[group_name].view(kind, site, (a.shape[0], b.shape[1]), a)
    return reduce_slot(torch.mm(a, b, out=slot), kind, group_name)


for _key in ("CPU", "CUDA"):
    _library.impl("all_reduce", _all_reduce, _key)
    _library.impl("mm_all_reduce", _mm_all_reduce, _key)


@torch.library.register_fake("tw_compile_bench::all_reduce", lib=_library)
def _all_reduce_fake(x: torch.Tensor, kind: str, group_name: str, site: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("tw_compile_bench::mm_all_reduce", lib=_library)
def _mm_all_reduce_fake(a: torch.Tensor, b: torch.Tensor, kind: str, group_name: str, site: int) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


all_reduce = torch.ops.tw_compile_bench.all_reduce.default
mm_all_reduce = torch.ops.tw_compile_bench.mm_all_reduce.default


class CountAllReduces(compat.CustomGraphPass):
    """Change nothing. ``seen`` counts the all_reduces in the graphs of one model, also in the passes below."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, graph: fx.Graph) -> None:
        for node in [node for node in graph.nodes if is_call(node, _c10d.all_reduce.default)]:
            self.change(graph, node)
            self.seen += 1

    def change(self, graph: fx.Graph, node: fx.Node) -> None:
        """Rewrite one all_reduce. This class leaves it as it is."""

    def uuid(self) -> None:
        """None: Inductor does not cache graphs that went through this pass."""


class DropAllReduces(CountAllReduces):
    """Take every partial sum for the sum, so that the graph has no communication. Its outputs are not results."""

    def change(self, graph: fx.Graph, node: fx.Node) -> None:
        replace_sum(graph, node, node.args[0])


class UseSymmetricMemory(CountAllReduces):
    """Replace every all_reduce, and the matmul before it, by the operators of this module. For graphs of static sizes."""

    def __init__(self, kind: SymmetricKernel) -> None:
        super().__init__()
        self.kind = kind

    def change(self, graph: fx.Graph, node: fx.Node) -> None:
        operands: tuple[Any, ...] = node.args
        message, operation, group_name = operands
        if operation != "sum":
            raise ValueError(f"all_reduce: expected a sum, as symmetric memory has no other, got {operation!r}")
        where = (self.kind, group_name, self.seen)
        gemm = _gemm_of(message)
        with graph.inserting_before(node):
            if gemm is None:
                reduced = graph.call_function(all_reduce, (message, *where))
            else:
                reduced = graph.call_function(mm_all_reduce, (*gemm.args, *where))
                reduced = graph.call_function(aten.reshape.default, (reduced, list(message.meta["val"].shape)))
        replace_sum(graph, node, reduced)


use_one_shot, use_two_shot = partial(UseSymmetricMemory, "one_shot"), partial(UseSymmetricMemory, "two_shot")


def _gemm_of(message: fx.Node) -> fx.Node | None:
    """The ``mm`` that makes the message; None if anything else reads its result, or a view between the two."""
    node = message
    while is_view(node) and len(node.users) == 1:
        node = node.args[0]  # type: ignore[assignment]
    return node if is_call(node, aten.mm.default) and len(node.users) == 1 else None


def replace_sum(graph: fx.Graph, node: fx.Node, by: Any) -> None:
    """Put ``by`` in the place of the all_reduce ``node`` and its waits. ValueError if anything but waits reads ``node``."""
    for wait in list(node.users):
        if not is_call(wait, _c10d.wait_tensor.default):
            raise ValueError(f"all_reduce: expected to be read by wait_tensor alone, got {wait.format_node()}")
        wait.replace_all_uses_with(by)
        graph.erase_node(wait)
    graph.erase_node(node)
    graph.eliminate_dead_code()  # removes the matmul that was replaced
