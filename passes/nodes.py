"""Nodes that passes add to a graph: the one way to add them, and what passes note on them for each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.passes.fake_results import FakeResults

_KEY = "tw_compile"
"""The key of ``node.meta`` under which the annotation is."""

_PROVENANCE = ("nn_module_stack", "stack_trace", "seq_nr", "original_aten")

Part = Literal[1, 2, "joined", "shared"]
"""Whose tokens an operator of a split graph works on: one half's, those of both, or no tokens."""


class Annotation(TypedDict, total=False):
    """What passes note on a node. All of them, and ``tw_compile.testing.annotation``, read and write these fields only.

    Fields:
        site: Index of the all_reduce that the node was made for, as in the report; None if the all_reduce is in another graph.
        role: What the node is for: ``start``, ``hidden``, ``residual``, ``wait``, ``view``, ``slice``, ``cat``, ``clone``, ...
        stream: 0, the stream that the graph runs on, until the graph is scheduled; then ``communication`` or ``compute``.
        stream_dtype: On a start: the dtype in which the model keeps its residual.
        split: Whose tokens the node works on.
        reason: Why a joined node runs once for all tokens (:class:`tw_compile.passes.reasons.JoinReason`, or ``graph_output``).
        window: Index of the window of the schedule that the node runs in.
    """

    site: int | None
    role: str
    stream: int | str
    stream_dtype: torch.dtype
    split: Part
    reason: str
    window: int


_FIELDS = frozenset(Annotation.__annotations__)
_NOTHING = Annotation()


def annotation(node: fx.Node) -> Annotation:
    """The annotation of a node; empty if there is none. Do not change the result: use :func:`annotate`."""
    noted: Annotation = node.meta.get(_KEY, _NOTHING)
    return noted


def is_annotated(node: fx.Node) -> bool:
    return _KEY in node.meta


def annotate(node: fx.Node, **fields: Unpack[Annotation]) -> None:
    """Note ``fields`` on a node, beside what is noted there already.

    Raises:
        TypeError: A field is not one of :class:`Annotation`.
    """
    if not fields.keys() <= _FIELDS:
        unknown = ", ".join(sorted(fields.keys() - _FIELDS))
        raise TypeError(f"annotate: expected fields of Annotation ({', '.join(sorted(_FIELDS))}), got {unknown}")
    # A new dictionary: copies of a node share the old one.
    node.meta[_KEY] = {**node.meta.get(_KEY, _NOTHING), **fields}


_COMPUTED: Any = object()


class Inserter:
    """Adds operators at the graph's current insertion point (``graph.inserting_before``), and can remove them again."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.new: list[fx.Node] = []
        self._results = FakeResults(compat.graph_fake_mode(graph))

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        like: fx.Node | None = None,
        noted: Annotation = _NOTHING,
        result: Any = _COMPUTED,
    ) -> fx.Node:
        """A new call of ``target`` with the metadata that Inductor and other passes look for.

        Args:
            like: The node that says where in the model the new node comes from.
            noted: The annotation of the new node.
            result: The fake result, if the caller knows it; otherwise ``target`` computes it from the operands' fake results.
        """
        node = self.graph.call_function(target, args, dict(kwargs or {}))
        self.new.append(node)
        if like is not None:
            node.meta.update((key, like.meta[key]) for key in _PROVENANCE if key in like.meta)
        if noted:
            annotate(node, **noted)
        node.meta["val"] = self.fake(target, args, kwargs or {}) if result is _COMPUTED else result
        return node

    def fake(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What ``target`` computes from the fake results of its operands."""
        return self._results.compute(target, args, kwargs)

    def roll_back(self) -> None:
        """Remove all added nodes. No other node may read them."""
        for node in reversed(self.new):
            self.graph.erase_node(node)
        self.new.clear()
