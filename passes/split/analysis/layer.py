"""Read the layer that a graph repeats off the graph, in the planner's form. The model's configuration is not known.

    sum | q, k, v GEMMs, attention, o_proj GEMM | sum | gate, up GEMMs, down GEMM | sum | ...

What lies between two sums over ranks is one part of a layer: with an attention operator it is the attention part, else the MLP.
All layers must be alike, and they must have nothing that the planner does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import aten, is_call, operator_name, same_size, value
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.planned_wires import planned_wires
from tw_compile.kernels.collective.transport import group_facts
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.kernels.gemm.mm_leaving_sms import addmm_leaving_sms, mm_leaving_sms
from tw_compile.passes.fusion.forms import host_call
from tw_compile.passes.operators import AllGatherOperator, AttentionOperator, RowWiseOperator, operator_named
from tw_compile.passes.reasons import SplitRefusal, SplitRefused
from tw_compile.passes.split.analysis.token_axis import TokenAxis
from tw_compile.passes.split.rules.attention import SDPA
from tw_compile.passes.split.rules.registry import registered
from tw_compile.planning import ALL_EXACT, FLASH3, Attention, Gemm, LayerShape, Wires, masked_kernel
from tw_compile.planning.links import UNFUSED

_c10d = torch.ops._c10d_functional

_MATRIX = {aten.mm.default: 1, mm_leaving_sms: 1, aten.addmm.default: 2, addmm_leaving_sms: 2}
_MATRIX |= dict.fromkeys(ops.MM_STARTS, 1)
"""Plain GEMMs, and which argument holds the weight ``[depth, columns]``."""

_KERNELS = {
    aten._scaled_dot_product_cudnn_attention.default: "cudnn",
    aten._scaled_dot_product_efficient_attention.default: "efficient",
}
"""The planner's names of their kernels. Other operators are flash, or choose a kernel themselves; both are planned as flash."""

_GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
_COLLECTIVES = {"cuda": UNFUSED, "cpu": "gloo"}
"""The transports that are made of a group's own all_reduce, by device type."""
_UNCOUNTED = frozenset({aten.bmm.default, aten.baddbmm.default, aten._scaled_mm.default})
_UNCOUNTED_NAMESPACES = ("_c10d_functional", "c10d_functional")


@dataclass(frozen=True)
class GraphLayer:
    """One layer, and how its sums travel.

    Attributes:
        transport: The transport of the fused sums; for sums that are not fused, the transport made of the same collective.
        fused: Whether all sums are fused.
        peer_access: Whether kernels on the group's GPUs can work on each other's memory.
        wires: How the rows of fused sums travel.
    """

    shape: LayerShape
    transport: str
    fused: bool = True
    peer_access: bool = True
    wires: Wires = ALL_EXACT


@dataclass(frozen=True)
class _Travel:
    """Columns, dtype and ranks of a sum, how its rows travel, and the rest as :class:`GraphLayer` has it."""

    hidden_size: int
    dtype: torch.dtype
    world_size: int
    transport: str
    fused: bool
    peer_access: bool
    wire: str = EXACT

    def of(self, shape: LayerShape, wires: Wires) -> GraphLayer:
        return GraphLayer(shape, self.transport, self.fused, self.peer_access, wires)


class _NotRecognisedError(Exception):
    """Says what about the graph is not a layer that the planner knows. It never leaves this module."""

    reason = SplitRefusal.LAYER_NOT_RECOGNISED


class _NotMeasuredError(_NotRecognisedError):
    """Says which operation of the graph takes a time that no profile knows."""

    reason = SplitRefusal.ATTENTION_NOT_MEASURED


@dataclass
class _Part:
    """What lies between two sums: GEMMs in order, and how many of them come before attention."""

    gemms: list[Gemm] = field(default_factory=list)
    attention: Attention | None = None
    before_attention: int = 0
    uncounted: str = ""


def layer_of_graph(graph: fx.Graph, axis: TokenAxis) -> GraphLayer | SplitRefused:
    """The layer that ``graph``, as the fusion pass leaves it, repeats. ``graph`` is not changed."""
    try:
        parts, sums, _ = _parts(graph, axis)
        return _layer(parts, sums)
    except _NotRecognisedError as error:
        return SplitRefused(error.reason, str(error))


def layer_of_piece(graph: fx.Graph, axis: TokenAxis, kernel: str = FLASH3) -> GraphLayer | SplitRefused:
    """The layer that a model repeats, read off a piece of the model from behind one attention to before the next.

        o_proj GEMM | sum | gate, up GEMMs, down GEMM | sum | q, k, v GEMMs

    The heads are those of the input ``[tokens, heads, head_dim]`` that o_proj reads, and ``kernel`` is that of the attention.
    """
    try:
        parts, sums, rest = _parts(graph, axis)
        if len(parts) != 2 or not rest.gemms:
            raise _NotRecognisedError(f"{len(parts)} sums behind GEMMs, then {len(rest.gemms)} GEMMs: no whole layer")
        first, second = parts
        travel = _checked_sums([first, second, rest], [*sums, None])
        first.attention = _attention_before(axis, first, kernel)
        first.gemms, first.before_attention = [*rest.gemms, *first.gemms], len(rest.gemms)
        hidden_size = travel.hidden_size
        qkv, attention, o_proj = _attention_part(first, hidden_size)
        shape = LayerShape(travel.world_size, hidden_size, qkv, attention, o_proj, _mlp_part(second, hidden_size))
        return travel.of(shape, _wires(sums, hidden_size))
    except _NotRecognisedError as error:
        return SplitRefused(error.reason, str(error))


def _attention_before(axis: TokenAxis, part: _Part, kernel: str) -> Attention:
    """The attention whose result a part begins with."""
    depth = part.gemms[0].depth
    for node in axis.inputs:
        shape = _shape(node)
        if len(shape) == 3 and same_size(shape[1] * shape[2], depth):
            heads, head_dim = _number(shape[1], node), _number(shape[2], node)
            return Attention(heads, heads, head_dim, kernel=kernel)
    raise _NotRecognisedError(
        f"no input [tokens, heads, head_dim] has the {depth} columns that {part.gemms[0].name} reads"
    )


def _parts(graph: fx.Graph, axis: TokenAxis) -> tuple[list[_Part], list[fx.Node], _Part]:
    """The parts that have GEMMs, and the sum that each ends with; and what follows the last sum."""
    parts, sums = [], []
    part = _Part()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _MATRIX:
            if not _is_outer_product(node):
                part.gemms.append(_plain(node, axis))
        elif isinstance(node.target, compat.OpOverload) and node.target.name().partition(".")[0] in _GROUPED:
            part.gemms.append(_grouped(node, axis))
        elif (attention := _attention(node, axis)) is not None:
            if part.attention is not None:
                raise _NotRecognisedError(f"{node.name} is the second attention between two sums")
            part.attention, part.before_attention = attention, len(part.gemms)
        elif _is_scores(node, axis):
            raise _NotMeasuredError(f"{node.name} begins attention of matmuls and a softmax, of which no time is known")
        elif _is_uncounted(node):
            part.uncounted = part.uncounted or node.name
        if is_call(node, *ops.STARTS, *ops.MM_STARTS, _c10d.all_reduce.default):
            if part.gemms:
                parts.append(part)
                sums.append(node)
            part = _Part()
    return parts, sums, part


def _is_uncounted(node: fx.Node) -> bool:
    """Whether a node may take long and is in none of the planner's formulas: other matmuls and collectives, unknown operators.

    Row-wise operators of hosts are also uncounted, because quantised matmuls and experts are such operators. Nobody has
    measured how these run beside a call, and they can't be told to leave SMs to it.
    """
    if is_call(node, _c10d.all_reduce.default, _c10d.wait_tensor.default, *ops.STARTS, ops.wait_):
        return False
    if node.target in _UNCOUNTED or isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(node.target, compat.OpOverload):
        return False
    if node.target.namespace in _UNCOUNTED_NAMESPACES:
        return True
    if isinstance(operator_named(operator_name(node)), RowWiseOperator | AllGatherOperator):
        return True
    return registered(node.target) is None and any(value(one) is not None for one in node.all_input_nodes)


def _is_scores(node: fx.Node, axis: TokenAxis) -> bool:
    """Whether a matmul has a result for each pair of tokens of a request, as queries by keys where no operator is attention."""
    if not is_call(node, aten.bmm.default, aten.baddbmm.default):
        return False
    seq = axis.tokens // axis.batch
    return all(same_size(size, seq) for size in _shape(node)[-2:])


def _is_outer_product(node: fx.Node) -> bool:
    """Whether a GEMM has depth 1, as for angles of rotary embeddings: it is no more work than a pointwise operator."""
    depth = _shape(node.args[_MATRIX[node.target]])[0]  # type: ignore[index]
    return isinstance(depth, int) and depth == 1


def _plain(node: fx.Node, axis: TokenAxis) -> Gemm:
    place = _MATRIX[node.target]  # type: ignore[index]
    rows, weight = (_shape(node.args[index]) for index in (place - 1, place))
    if not same_size(rows[0], axis.tokens):
        raise _NotRecognisedError(f"{node.name} has {rows[0]} rows, not one for each of {axis.tokens} tokens")
    return Gemm(node.name, _number(weight[1], node), _number(weight[0], node))


def _grouped(node: fx.Node, axis: TokenAxis) -> Gemm:
    rows, weight = (_shape(node.args[index]) for index in (0, 1))
    if len(rows) != 2 or len(weight) != 3:
        raise _NotRecognisedError(f"{node.name} multiplies {list(rows)} by {list(weight)}")
    experts, depth, columns = (_number(size, node) for size in weight)
    per_token = next((count for count in range(1, experts + 1) if same_size(rows[0], count * axis.tokens)), None)
    if per_token is None or experts < 2:
        raise _NotRecognisedError(f"{node.name} has {rows[0]} rows of {axis.tokens} tokens for {experts} experts")
    return Gemm(node.name, columns, depth, experts, per_token)


def _attention(node: fx.Node, axis: TokenAxis) -> Attention | None:
    """Attention with the query's heads. :func:`_attention_part` finds the heads of keys and values by their projections."""
    if is_call(node, *SDPA):
        return _sdpa(node, axis)
    called = host_call(node, AttentionOperator)
    if called is None:
        return None
    heads, head_dim = (_number(size, node) for size in _shape(called.arguments[called.operator.query])[1:])
    return Attention(heads, heads, head_dim, kernel=called.operator.kernel)


def _sdpa(node: fx.Node, axis: TokenAxis) -> Attention:
    query, key = (_shape(node.args[index]) for index in (0, 1))
    if len(query) != 4 or not (same_size(query[0], axis.batch) and same_size(query[0] * query[2], axis.tokens)):
        raise _NotRecognisedError(f"{node.name} has queries {list(query)} of {axis.tokens} tokens")
    if not same_size(query[2], key[2]):
        raise _NotRecognisedError(f"{node.name} has {query[2]} queries and {key[2]} keys a request")
    arguments = arguments_of(node)
    masked = any(arguments.get(name) is not None for name in ("attn_mask", "attn_bias"))
    if not masked and arguments.get("is_causal") is not True:
        raise _NotRecognisedError(f"{node.name} is not causal")
    heads, head_dim = _number(query[1], node), _number(query[3], node)
    kernel = next((name for target, name in _KERNELS.items() if is_call(node, target)), "flash")
    return Attention(heads, heads, head_dim, kernel=masked_kernel(kernel) if masked else kernel, masked=masked)


def _layer(parts: list[_Part], sums: list[fx.Node]) -> GraphLayer:
    if not parts:
        raise _NotRecognisedError("no GEMM before a sum over ranks")
    travel = _checked_sums(parts, sums)
    hidden_size = travel.hidden_size
    attention_first = [part.attention is not None for part in parts]
    if len(parts) % 2 or attention_first != [True, False] * (len(parts) // 2):
        raise _NotRecognisedError("sums behind attention and behind MLP do not take turns")
    layers = {
        LayerShape(travel.world_size, hidden_size, *_attention_part(first, hidden_size), _mlp_part(second, hidden_size))
        for first, second in zip(parts[::2], parts[1::2], strict=True)
    }
    if len(layers) > 1:
        raise _NotRecognisedError(f"layers are of {len(layers)} kinds")
    return travel.of(layers.pop(), _wires(sums, hidden_size))


def _wires(sums: Sequence[fx.Node], hidden_size: int) -> Wires:
    """The wires of the sums behind attention and behind the MLP, which take turns."""
    kinds = [{_message(node).wire for node in sums[first::2]} for first in (0, 1)]
    if any(len(kind) > 1 for kind in kinds):
        raise _NotRecognisedError("some sums of a kind travel in codes, and some as they are")
    attention, mlp = (kind.pop() if kind else EXACT for kind in kinds)
    return planned_wires(hidden_size, attention, mlp)


def _checked_sums(parts: list[_Part], sums: Sequence[fx.Node | None]) -> _Travel:
    """How the sums travel that ``parts`` end with; in ``sums``, None stands for a part that does not end with a sum."""
    for part in parts:
        if part.uncounted:
            raise _NotRecognisedError(f"{part.uncounted} is not in the planner's formulas")
    messages = {_message(node) for node in sums if node is not None}
    fused = all(message.fused for message in messages)
    messages = {replace(message, fused=fused, wire=EXACT) for message in messages}  # wires: see _wires
    if len(messages) > 1:
        raise _NotRecognisedError("sums differ in columns, dtype, ranks or transport")
    message = messages.pop()
    if message.dtype.itemsize != 2:
        raise _NotRecognisedError(f"{message.dtype}: plans are for 16 bits")
    return message


def _message(node: fx.Node) -> _Travel:
    """How one sum travels, fused or not."""
    arguments = arguments_of(node)
    fused = is_call(node, *ops.STARTS, *ops.MM_STARTS)
    if not fused and arguments["reduce_op"] != "sum":
        raise _NotRecognisedError(f"{node.name} reduces by {arguments['reduce_op']}")
    last: Any = arguments["b" if is_call(node, *ops.MM_STARTS) else "x" if fused else "input"].meta["val"]
    facts = group_facts(arguments["group_name"], last.device.type)
    transport = arguments["transport"] if fused else _COLLECTIVES[facts.device_type]
    return _Travel(
        _number(last.shape[-1], node),
        last.dtype,
        facts.world_size,
        transport,
        fused,
        facts.peer_access,
        arguments["wire"] if fused else EXACT,
    )


def _attention_part(part: _Part, hidden_size: int) -> tuple[tuple[Gemm, ...], Attention, Gemm]:
    assert part.attention is not None
    before, after = part.gemms[: part.before_attention], part.gemms[part.before_attention :]
    heads, head_dim = part.attention.heads, part.attention.head_dim
    if len(after) != 1 or (after[0].columns, after[0].depth) != (hidden_size, heads * head_dim):
        names = ", ".join(one.name for one in after) or "nothing"
        raise _NotRecognisedError(
            f"{names} between attention and its sum, not one GEMM of {heads} x {head_dim} columns"
        )
    qkv = _named("qkv", before, hidden_size)
    columns = sum(one.columns for one in qkv)
    kv_heads, rest = divmod(columns - heads * head_dim, 2 * head_dim)
    if rest or not 1 <= kv_heads <= heads:
        raise _NotRecognisedError(
            f"{columns} columns before attention are not those of {heads} heads and their keys and values"
        )
    return qkv, replace(part.attention, kv_heads=kv_heads), Gemm("o_proj", hidden_size, heads * head_dim)


def _mlp_part(part: _Part, hidden_size: int) -> tuple[Gemm, ...]:
    grouped = [one for one in part.gemms if one.experts > 1]
    *first, down = grouped or part.gemms
    # The router's GEMM is as wide as there are experts, and too small to count.
    others = [one for one in part.gemms if grouped and one.experts == 1 and one.columns != down.experts]
    if (
        others
        or down.columns != hidden_size
        or len({(one.experts, one.experts_per_token) for one in (*first, down)}) > 1
    ):
        names = ", ".join(one.name for one in part.gemms)
        raise _NotRecognisedError(f"{names} are not the GEMMs of one MLP")
    return *_named("gate_up", first, hidden_size), replace(down, name="down")


def _named(name: str, gemms: list[Gemm], hidden_size: int) -> tuple[Gemm, ...]:
    """GEMMs that read the same hidden states, which the planner calls by one name."""
    if not gemms or any(one.depth != hidden_size for one in gemms):
        names = ", ".join(one.name for one in gemms) or "no GEMM"
        raise _NotRecognisedError(f"{names} where GEMMs of hidden states [tokens, {hidden_size}] are expected")
    return tuple(replace(one, name=name) for one in gemms)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """What an operator is given, by name, defaults included."""
    declared = node.target._schema.arguments  # type: ignore[union-attr]
    given = {one.name: argument for one, argument in zip(declared, node.args, strict=False)}
    defaults = {one.name: one.default_value for one in declared if one.has_default_value()}
    return defaults | given | node.kwargs


def _shape(operand: Any) -> tuple[Any, ...]:
    return tuple(operand.meta["val"].shape)


def _number(size: Any, node: fx.Node) -> int:
    if not isinstance(size, int):
        raise _NotRecognisedError(f"{node.name} has a weight of symbolic size {size}")
    return size
