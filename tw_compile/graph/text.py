"""One layer of a graph for people: a line per node, and what changed between two versions of it.

For the exact text of a whole graph, in tests, see :mod:`tw_compile.graph.snapshot`.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.layer import layer_of
from tw_compile.passes.nodes import annotation

Change = Literal["same", "removed", "added", "folded"]

_LEAVING_SMS = {f"{kind}mm_leaving_sms" for kind in ("", "add", "joint_", "gated_", "grouped_")}
MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", *_LEAVING_SMS})

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64"}
_DTYPES |= {torch.int64: "i64", torch.int32: "i32", torch.bool: "b8"}
_OP_NAMES = {
    "convert_element_type": "cast",
    "all_reduce_rms_norm_start": "fused_start",
    "mm_all_reduce_rms_norm_start": "fused_mm_start",
    "all_reduce_layer_norm_start": "fused_start",
    "mm_all_reduce_layer_norm_start": "fused_mm_start",
    "all_reduce_rms_norm_wait_": "fused_wait",
    "_scaled_dot_product_flash_attention": "flash_attention",
    "_scaled_dot_product_cudnn_attention": "cudnn_attention",
}
_NODE_NAMES = (
    ("all_reduce_rms_norm_start_default", "fused_start"),
    ("mm_all_reduce_rms_norm_start_default", "fused_mm_start"),
    ("all_reduce_layer_norm_start_default", "fused_start"),
    ("mm_all_reduce_layer_norm_start_default", "fused_mm_start"),
    ("all_reduce_rms_norm_wait__default", "fused_wait"),
    ("convert_element_type", "cast"),
    ("reshape_default", "reshape"),
    ("_scaled_dot_product_flash_attention", "flash_attention"),
    ("_scaled_dot_product_cudnn_attention", "cudnn_attention"),
)
FUSED_STARTS = ("fused_start", "fused_mm_start")
NO_RESIDUAL = "no residual"
# Arguments of the fused operator that say something about a site. The other arguments are the same at every site.
_TOLD_ARGUMENTS = ("residual_sharded", "residual_out", "transport")


@dataclass(frozen=True)
class Line:
    """One node of a graph.

    ``inputs`` are the names of the nodes it reads. ``detail`` has other arguments that distinguish it from similar nodes.
    ``module`` is the last part of the path of the module it came from. ``half`` is the half of the tokens that it computes, 1
    or 2; None where it computes all tokens. Names are shortened, in the same way everywhere.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    result: str
    detail: str = ""
    module: str = ""
    half: int | None = None

    @property
    def call(self) -> str:
        return f"{self.op}({', '.join([*self.inputs, *filter(None, [self.detail])])})"


@dataclass(frozen=True)
class DiffLine:
    """A line of a difference. A ``folded`` line stands for several unchanged nodes, and has only a text."""

    change: Change
    line: Line | None
    text: str = ""


def op_name(node: fx.Node) -> str:
    """``mm`` for ``aten.mm.default``; placeholders and the output are called by their kind."""
    if node.op != "call_function":
        return node.op
    if isinstance(node.target, compat.OpOverload):
        name = node.target._schema.name.split("::")[1]
        return _OP_NAMES.get(name, name)
    return getattr(node.target, "__name__", str(node.target))


def describe(value: Any) -> str:
    """``bf16[1, 4096, 8192]`` for a tensor; for a tuple of tensors, the same in brackets; empty for all else."""
    if isinstance(value, torch.Tensor):
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, list | tuple):
        return f"({', '.join(filter(None, map(describe, value)))})"
    return ""


def line(node: fx.Node) -> Line:
    inputs = node.all_input_nodes[:2] if op_name(node) == "fused_wait" else node.all_input_nodes
    return Line(
        _short(node.name),
        op_name(node),
        tuple(_short(operand.name) for operand in inputs),
        describe(node.meta.get("val")),
        _detail(node),
        _module(node),
        _half(node),
    )


def _short(name: str) -> str:
    for long, short in _NODE_NAMES:
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def layer_nodes(graph: fx.Graph, layer: int) -> list[fx.Node]:
    """The nodes from the first matmul of decoder layer ``layer`` up to the first matmul of a later layer.

    They include both all_reduces of the layer, and the norm behind each. The norm before the first matmul belongs to the
    all_reduce of the layer before.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    matmuls = [(index, layer_of(node)) for index, node in enumerate(nodes) if op_name(node) in MATMULS]
    first = next((index for index, owner in matmuls if owner == layer), None)
    if first is None:
        return []
    last = next((index for index, owner in matmuls if owner is not None and owner > layer), len(nodes))
    return nodes[first:last]


def layer_lines(graph: fx.Graph, layer: int) -> list[Line]:
    return [line(node) for node in layer_nodes(graph, layer)]


def diff(before: Sequence[Line], after: Sequence[Line], context: int = 2) -> list[DiffLine]:
    """What changed, by node name; runs of unchanged nodes are folded down to ``context`` nodes around each change."""
    matcher = difflib.SequenceMatcher(
        None, [line.name for line in before], [line.name for line in after], autojunk=False
    )
    result: list[DiffLine] = []
    blocks = matcher.get_opcodes()
    for index, (tag, i1, i2, j1, j2) in enumerate(blocks):
        if tag == "equal":
            head = 0 if index == 0 else context
            tail = 0 if index == len(blocks) - 1 else context
            result += _fold(after[j1:j2], head, tail)
        else:
            result += [DiffLine("removed", line) for line in before[i1:i2]]
            result += [DiffLine("added", line) for line in after[j1:j2]]
    return result


def aligned(diff_lines: Sequence[DiffLine], width: int = 100) -> list[tuple[Change, str]]:
    """Each line as text, ``name = call`` in one column and the result's type in the next."""
    marks = {"same": " ", "removed": "-", "added": "+", "folded": " "}
    names = max((len(entry.line.name) for entry in diff_lines if entry.line is not None), default=0)
    calls = min(max((len(entry.line.call) for entry in diff_lines if entry.line is not None), default=0), width - names)
    rows: list[tuple[Change, str]] = []
    for entry in diff_lines:
        if entry.line is None:
            rows.append((entry.change, f"  {entry.text}"))
        else:
            text = f"{marks[entry.change]} {entry.line.name:<{names}} = {entry.line.call:<{calls}}  {entry.line.result}"
            rows.append((entry.change, text.rstrip()))
    return rows


def _fold(same: Sequence[Line], head: int, tail: int) -> list[DiffLine]:
    hidden = same[head : len(same) - tail]
    if len(hidden) < 2:
        return [DiffLine("same", line) for line in same]
    counts = Counter(line.op for line in hidden)
    told = ", ".join(f"{count} {name}" if count > 1 else name for name, count in counts.most_common())
    fold = DiffLine("folded", None, f"... {len(hidden)} unchanged: {told}")
    kept = [DiffLine("same", line) for line in same]
    return [*kept[:head], fold, *kept[len(same) - tail :]]


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    path = str(list(stack.values())[-1][0]) if stack else ""
    words = re.findall(r"[A-Za-z_]\w*", path)
    return words[-1] if words else ""


def _half(node: fx.Node) -> int | None:
    part = annotation(node).get("split")
    return part if isinstance(part, int) else None


def _detail(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return str(node.args[1])
    if not isinstance(node.target, compat.OpOverload):
        return ""
    schema = node.target._schema
    if op_name(node) in FUSED_STARTS:
        named = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
        told = [f"{name}={value}" for name, value in named.items() if name in _TOLD_ARGUMENTS]
        return ", ".join([*told, *([] if named["residual"] is not None else [NO_RESIDUAL])])
    if op_name(node) in ("add", "mul", "pow", "sub"):
        return ", ".join(str(arg) for arg in node.args if isinstance(arg, int | float))
    if op_name(node) in ("mean", "sum"):
        return f"dim={node.args[1]}" if len(node.args) > 1 else ""
    return ""
