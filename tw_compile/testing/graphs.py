"""Questions that tests ask of FX graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.fx as fx

from tw_compile import compat
from tw_compile.passes import nodes

Target = Any
"""An operator overload, a function, or the name of one: ``all_reduce``, ``aten.add.Tensor``, ``getitem``."""


def find_ops(graph: fx.Graph, target: Target) -> list[fx.Node]:
    """The nodes that call ``target``, in graph order. A name may leave out the namespace and the overload."""
    return [node for node in graph.nodes if node.op == "call_function" and _calls(node.target, target)]


def count_ops(graph: fx.Graph, target: Target) -> int:
    """How many nodes call ``target``."""
    return len(find_ops(graph, target))


def assert_order(graph: fx.Graph, first: Target | fx.Node, second: Target | fx.Node) -> None:
    """Every ``first`` comes before every ``second``; each is a node, an operator or a name, and must be there."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    places = []
    for what in (first, second):
        nodes = [what] if isinstance(what, fx.Node) else find_ops(graph, what)
        assert nodes, f"no node calls {what}"
        places.append([(position[node], node.name) for node in nodes])
    (last, last_name), (begin, begin_name) = max(places[0]), min(places[1])
    assert last < begin, f"{last_name} (position {last}) comes after {begin_name} (position {begin})"


def annotation(node: fx.Node) -> Mapping[str, Any] | None:
    """The annotation that the passes put on a node, as a mapping (``site``, ``role``, ...); None where there is none.

    :class:`tw_compile.passes.nodes.Annotation` has all fields.
    """
    return nodes.annotation(node) if nodes.is_annotated(node) else None


def assert_annotation(node: fx.Node, **expected: Any) -> None:
    """The node's annotation has (at least) these values: ``assert_annotation(node, role="start")``."""
    found = annotation(node)
    assert found is not None, f"{node.name} has no annotation"
    different = {key: (found.get(key), value) for key, value in expected.items() if found.get(key) != value}
    assert not different, f"{node.name}: (found, expected) differ: {different}"


def _calls(callee: Any, target: Target) -> bool:
    if not isinstance(target, str):
        return callee is target or (isinstance(target, compat.OpOverloadPacket) and _packet(callee) is target)
    if not isinstance(callee, compat.OpOverload):
        return target == getattr(callee, "__name__", None)
    namespace, _, name = callee.name().partition("::")
    name = name.partition(".")[0]
    return target in (name, f"{namespace}.{name}", str(callee), str(callee).removeprefix(f"{namespace}."))


def _packet(callee: Any) -> Any:
    return callee.overloadpacket if isinstance(callee, compat.OpOverload) else None
