"""Find the part of a layer to which each operator of a scheduled graph belongs, and with the operators each window.

A part is what a half computes between two starts. A part with an attention operator has projections before and behind it. Any
other part with a GEMM is an MLP. The planner's windows have the same names. What follows a half's last start is the epilogue.
The part decides what a window runs with and what it is called, never what is computed. Rules say which operators are attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import aten, is_call, makes_view, operator_name, value
from tw_compile.kernels.collective import ops
from tw_compile.kernels.gemm.mm_leaving_sms import grouped_mm_leaving_sms
from tw_compile.passes.nodes import Part, annotation
from tw_compile.passes.split.rules.registry import is_attention
from tw_compile.passes.split.schedule.dependences import CommunicationCall

Kind = Literal["prologue", "attention", "qkv", "join", "o_proj", "mlp", "epilogue"]
"""As the planner's windows. ``attention`` is a whole attention part. ``join`` is attention of all tokens and what runs with it;
``qkv`` and ``o_proj`` are then the projections before and behind it. ``prologue``: nothing is in flight yet, or there is no
GEMM, as with embeddings."""


_GROUPED_GEMMS = ("aten::_grouped_mm", "aten::_scaled_grouped_mm", "transformers::grouped_mm_fallback")


def half_of(node: fx.Node) -> Part:
    """Whose tokens an operator works on."""
    return annotation(node).get("split", "shared")


def computes(node: fx.Node) -> bool:
    """Whether an operator reads values and makes others: views, sizes, parts of tuples and constants don't."""
    if not isinstance(node.target, compat.OpOverload):
        return compat.is_higher_order(node.target)
    made = value(node) is not None or isinstance(node.meta.get("val"), list | tuple)
    return made and not makes_view(node) and any(value(one) is not None for one in node.all_input_nodes)


def is_plain_gemm(node: fx.Node) -> bool:
    return is_call(node, aten.mm.default, aten.addmm.default, *ops.MM_STARTS)


def _is_grouped_gemm(node: fx.Node) -> bool:
    return node.target is grouped_mm_leaving_sms or operator_name(node) in _GROUPED_GEMMS


@dataclass(eq=False)
class _Part:
    has_attention: bool = False
    plain: list[fx.Node] = field(default_factory=list)
    grouped: list[fx.Node] = field(default_factory=list)

    @property
    def gemms(self) -> list[fx.Node]:
        """The GEMMs that are planned: the grouped ones or, if there are none, the plain ones."""
        return self.grouped or self.plain


class Parts:
    """The parts of ``order``, whose calls are ``calls``.

    With ``piece``, each half begins behind one attention and ends before the next, and both are outside of the graph. What
    comes before a half's first start is its o_proj, and what follows its last start is its qkv. If a half has only one start,
    as behind the embedding, it has no o_proj.
    """

    def __init__(self, order: Sequence[fx.Node], calls: Sequence[CommunicationCall], piece: bool = False) -> None:
        self._part: dict[fx.Node, _Part | None] = {}
        self._behind_attention: set[fx.Node] = set()
        starts = {call.start for call in calls}
        of_half: dict[Part, _Part] = {1: _Part(True), 2: _Part(True)} if piece else {}
        started = Counter(half_of(start) for start in starts)
        nearest: _Part | None = None
        o_proj: list[_Part] = []
        for node in reversed(order):
            half = half_of(node)
            if node in starts:
                started[half] -= 1
                behind_attention = piece and not started[half] and len(starts) > 2
                of_half[half] = nearest = _Part(behind_attention)
                if behind_attention:
                    o_proj.append(nearest)
            if not (computes(node) or node in starts):
                continue
            part = of_half.get(half) if half in (1, 2) else nearest
            self._part[node] = part
            if part is None:
                continue
            if is_attention(node):
                for one in [part] if half in (1, 2) else of_half.values():
                    one.has_attention = True
            elif not part.has_attention or part in o_proj:
                self._behind_attention.add(node)
            if _is_grouped_gemm(node):
                part.grouped.insert(0, node)
            elif is_plain_gemm(node):
                part.plain.insert(0, node)

    def kind_of(self, nodes: Sequence[fx.Node]) -> Kind:
        """The kind of a window of these operators, in their order, where a call has been started before."""
        attention = [node for node in nodes if is_attention(node)]
        if attention:
            return "attention" if all(half_of(node) in (1, 2) for node in attention) else "join"
        own = [node for node in nodes if half_of(node) != "shared"] or nodes
        part = self._part.get(own[-1]) if own else None
        if part is None:
            return "epilogue"
        if not part.has_attention:
            return "mlp" if part.gemms else "prologue"
        return "o_proj" if own[-1] in self._behind_attention else "qkv"

    def gemm_of(self, node: fx.Node) -> str | None:
        """The planner's name of a GEMM; None for a node that is not planned."""
        part = self._part.get(node)
        if part is None or node not in part.gemms:
            return None
        if part.has_attention:
            return "o_proj" if node in self._behind_attention else "qkv"
        return "down" if node is part.gemms[-1] else "gate_up"
