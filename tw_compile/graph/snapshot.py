"""Graphs as stable text: equal text means equal graphs, whatever the nodes are called."""

from __future__ import annotations

import difflib
from typing import Any

import torch
import torch.fx as fx

from tw_compile import compat

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64"}


def snapshot(graph: fx.Graph) -> str:
    """One line per node: ``%3 = aten.add.Tensor(%1, %2) : bf16[8, 64]``; nodes are numbered in graph order."""
    numbers = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    return "\n".join(_line(node, numbers) for node in graph.nodes)


def diff(before: fx.Graph, after: fx.Graph) -> str:
    """Unified difference of the two graphs, empty when they are equal.

    Nodes are named after their operator and its occurrence, so that an insertion doesn't renumber all that follows.
    """
    return "\n".join(difflib.unified_diff(_lines(before), _lines(after), "before", "after", lineterm="", n=2))


def _lines(graph: fx.Graph) -> list[str]:
    names = _names(graph)
    return [_line(node, names) for node in graph.nodes]


def _names(graph: fx.Graph) -> dict[fx.Node, str]:
    seen: dict[str, int] = {}
    names = {}
    for node in graph.nodes:
        stem = _target(node).removesuffix(".default").split(".")[1 if "." in _target(node) else 0]
        seen[stem] = seen.get(stem, 0) + 1
        names[node] = f"%{stem}" if seen[stem] == 1 else f"%{stem}_{seen[stem]}"
    return names


def _target(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    name = getattr(node.target, "__name__", None)
    return str(node.target) if isinstance(node.target, compat.OpOverload) or name is None else name


def _line(node: fx.Node, names: dict[fx.Node, str]) -> str:
    if node.op in ("placeholder", "get_attr"):
        call = f"{node.op} {node.target}" if node.op == "get_attr" else "input"
    else:
        parts = [_argument(arg, names) for arg in node.args]
        parts += [f"{key}={_argument(arg, names)}" for key, arg in sorted(node.kwargs.items())]
        call = f"{_target(node)}({', '.join(parts)})"
    described = _describe(node.meta.get("val"))
    return f"{names[node]} = {call}" + (f" : {described}" if described else "")


def _argument(arg: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(arg, fx.Node):
        return names[arg]
    if isinstance(arg, list | tuple):
        return "[" + ", ".join(_argument(item, names) for item in arg) + "]"
    if isinstance(arg, dict):
        return "{" + ", ".join(f"{key}: {_argument(item, names)}" for key, item in arg.items()) + "}"
    return str(arg) if isinstance(arg, torch.dtype) else repr(arg)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_describe(item) for item in value) + ")"
    return str(value) if isinstance(value, torch.SymInt) else ""
