"""Find which dim of every value of a graph holds tokens, and which operators may work on half of the tokens.

One pass goes over the nodes in order. If an operator has a split operand, its rule says whether it may run once for each half,
and where the tokens of its result are. An operator that may not runs once, on joined halves. So does everything after it, until
a matmul, an all_reduce or a fused operator that has one row for each token: there the halves begin again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.fx as fx

from tw_compile.graph.predicates import aten, is_call, is_cast, same_size, value
from tw_compile.kernels.collective import ops
from tw_compile.kernels.gemm.mm_leaving_sms import addmm_leaving_sms, mm_leaving_sms
from tw_compile.passes.reasons import JoinReason, SplitRefusal, SplitRefused
from tw_compile.passes.split.analysis.layout import Join, Layout, Local, Rows, RowWise, Size, Verdict
from tw_compile.passes.split.rules.registry import OperatorCall, registered

Unit = Literal["token", "request"]

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class TokenAxis:
    """What is split: ``size`` units, tokens or whole requests, and the graph inputs that hold them.

    ``tokens`` counts the tokens of all ``batch`` requests, which are of one length.
    """

    unit: Unit
    tokens: Size
    batch: Size
    inputs: Mapping[fx.Node, Rows]

    @property
    def size(self) -> Size:
        return self.tokens if self.unit == "token" else self.batch

    def rows_of_shape(self, shape: tuple[Size, ...]) -> Rows | None:
        """How the tokens lie in a value that has one entry, or one row, for each of them; None if it doesn't."""
        if len(shape) >= 2 and same_size(shape[0], self.batch) and same_size(shape[1], self.tokens // self.batch):
            # A dim of one token each is broadcast by operators, so it can't hold all of a half's tokens.
            if self.unit == "request" or same_size(self.tokens, self.batch):
                return Rows(0)
            return Rows(1) if same_size(self.batch, 1) else Rows(1, 1, 0)
        if len(shape) >= 1 and same_size(shape[0], self.tokens):
            return Rows(0, self.tokens // self.size)
        return None


@dataclass
class Analysis:
    """What was found of each node.

    ``verdicts`` has an entry for every operator with a split operand: each half runs its own (:class:`RowWise`), or it runs
    once (:class:`Join`). Nodes without an entry run once and read nothing that is split. ``layouts`` are those of the results,
    inputs that hold tokens included. ``token_dependent`` are the operators that read tokens, split or not.
    """

    axis: TokenAxis
    join_attention: bool = False
    verdicts: dict[fx.Node, Verdict] = field(default_factory=dict)
    layouts: dict[fx.Node, Layout | tuple[Layout, ...]] = field(default_factory=dict)
    token_dependent: set[fx.Node] = field(default_factory=set)

    @property
    def joins(self) -> dict[str, int]:
        """How many operators join the halves, by reason, most frequent first."""
        reasons = Counter(str(one.reason) for one in self.verdicts.values() if isinstance(one, Join))
        return dict(reasons.most_common())

    def row_wise(self, node: fx.Node) -> RowWise | None:
        found = self.verdicts.get(node)
        return found if isinstance(found, RowWise) else None


def find_token_axis(
    graph: fx.Graph, *, unit: Unit = "token", tokens: Size | None = None, piece: bool = False
) -> TokenAxis | SplitRefused:
    """The token axis of a graph, by the sizes of what the ranks add up: ``[tokens, hidden]`` or ``[batch, seq, hidden]``.

    The inputs that hold tokens are the integer inputs with one entry for each token. If there are none, they are the floating
    point inputs that are no matmul's weight. A wrong guess costs joins, not correctness.

    Args:
        unit: ``request`` splits between requests, and needs at least two.
        tokens: The number of tokens, if no collective tells it.
        piece: The graph is a piece of a model: dim 0 of its inputs holds tokens, of hidden states and integers alike.
    """
    if tokens is None:
        tokens = _tokens_of_messages(graph)
    if tokens is None:
        return SplitRefused(SplitRefusal.NO_TOKEN_AXIS, "no all_reduce says how many tokens there are")
    placeholders = [node for node in graph.find_nodes(op="placeholder") if value(node) is not None]
    batches = {node: requests for node in placeholders if (requests := _batch(node, tokens, piece)) is not None}
    integer = [node for node in batches if not node.meta["val"].is_floating_point()]
    floating = [node for node in batches if node.meta["val"].is_floating_point()]
    hidden = [node for node in floating if node.meta["val"].dim() >= 2 and not _is_weight(node)]
    found = [*integer, *hidden] if piece else integer or hidden
    batch = next((batches[node] for node in found if not same_size(batches[node], 1)), 1)
    axis = TokenAxis(unit, tokens, batch, {})
    inputs = {node: rows for node in found if (rows := axis.rows_of_shape(tuple(node.meta["val"].shape))) is not None}
    if not inputs:
        return SplitRefused(SplitRefusal.NO_TOKEN_AXIS, f"no input has {tokens} tokens")
    if same_size(axis.size, 1):
        return SplitRefused(SplitRefusal.TOO_FEW_TOKENS, f"one {unit} can't be split")
    return TokenAxis(unit, tokens, batch, inputs)


def _tokens_of_messages(graph: fx.Graph) -> Size | None:
    """The number of rows of messages that are summed over ranks; the most frequent number if messages differ."""
    counts: list[tuple[Size, int]] = []
    for node in graph.nodes:
        if not is_call(node, *ops.STARTS, *ops.MM_STARTS, _c10d.all_reduce.default):
            continue
        message = value(node.args[0])  # type: ignore[arg-type]
        if message is None or message.dim() < 2:
            continue
        rows = message.numel() // message.shape[-1]
        place = next((index for index, (size, _) in enumerate(counts) if same_size(size, rows)), None)
        if place is None:
            counts.append((rows, 1))
        else:
            counts[place] = (rows, counts[place][1] + 1)
    return max(counts, key=lambda one: one[1])[0] if counts else None


def _batch(node: fx.Node, tokens: Size, piece: bool) -> Size | None:
    """The requests of an input with one entry, or row, per token; None if it is no such input."""
    shape = node.meta["val"].shape
    if not piece and len(shape) >= 2 and same_size(shape[0] * shape[1], tokens):
        return shape[0]
    return 1 if len(shape) >= 1 and same_size(shape[0], tokens) else None


_WEIGHT_PLACES = (
    (aten.mm.default, 1),
    (aten.bmm.default, 1),
    (aten.addmm.default, 2),
    (mm_leaving_sms, 1),
    (addmm_leaving_sms, 2),
    *((mm_start, 1) for mm_start in ops.MM_STARTS),
    (aten.embedding.default, 0),
    (aten.index_select.default, 0),
    (aten.index.Tensor, 0),
)


def _is_weight(node: fx.Node) -> bool:
    """Whether a matmul takes the input as its second factor, or a lookup as its table."""
    for user in node.users:
        if is_call(user, aten.permute.default, aten.t.default, aten.transpose.int) or is_cast(user):
            if _is_weight(user):
                return True
        elif any(is_call(user, target) and user.args[place] is node for target, place in _WEIGHT_PLACES):
            return True
    return False


def analyse(graph: fx.Graph, axis: TokenAxis, *, join_attention: bool = False) -> Analysis:
    """Follow the token axis through ``graph``, which is not changed. Linear in the number of nodes.

    A value that a sort, a gather or a sharded residual has made for one half may only be read within this half. If something
    else reads it, the pass is repeated with the node that made it joined. If this brings up more such nodes, the pass is
    repeated with all nodes of this kind joined.

    Args:
        join_attention: Attention runs once also where it could be cut into prefix and suffix.
    """
    joined: set[fx.Node] = set()
    analysis, escaped = _pass(graph, Analysis(axis, join_attention), joined)
    rounds = 1
    while escaped:
        joined |= escaped
        if rounds > 1:
            joined |= {one.owner for one in _parts(analysis) if isinstance(one, Local)}
        analysis, escaped = _pass(graph, Analysis(axis, join_attention), joined)
        rounds += 1
    return analysis


def _parts(analysis: Analysis) -> list[Layout]:
    parts: list[Layout] = []
    for layout in analysis.layouts.values():
        parts += layout if isinstance(layout, tuple) else (layout,)
    return parts


def _pass(graph: fx.Graph, analysis: Analysis, joined: set[fx.Node]) -> tuple[Analysis, set[fx.Node]]:
    """One walk over the nodes, noted in ``analysis``; also the owners of local values that something else reads."""
    analysis.layouts.update(analysis.axis.inputs)
    escaped: set[fx.Node] = set()
    for node in graph.nodes:
        operands = node.all_input_nodes
        split = [one for one in operands if analysis.layouts.get(one) is not None]
        depends = split or any(one in analysis.token_dependent for one in operands)
        if depends and not is_call(node, aten.sym_size.int):
            analysis.token_dependent.add(node)
        if node.op == "output":
            escaped |= {owner for one in operands if (owner := _owner(analysis.layouts.get(one))) is not None}
        if node.op != "call_function":
            continue
        verdict = _ask(node, analysis, split, joined)
        if verdict is None:
            continue
        analysis.verdicts[node] = verdict
        if isinstance(verdict, RowWise):
            analysis.layouts[node] = verdict.out
        else:
            escaped |= {owner for one in split if (owner := _owner(analysis.layouts[one])) is not None}
    return analysis, escaped


def _ask(node: fx.Node, analysis: Analysis, split: list[fx.Node], joined: set[fx.Node]) -> Verdict | None:
    """The verdict on a node; None if it has no split operand and does not begin to be split."""
    if is_call(node, aten.sym_size.int):
        return None
    rule = registered(node.target)
    if not split and (rule is None or not rule.enters or node not in analysis.token_dependent):
        return None
    call = OperatorCall(
        node, analysis.axis, analysis.layouts, analysis.token_dependent, analysis.row_wise, analysis.join_attention
    )
    if node in joined:
        reason = (
            JoinReason.RESIDUAL_SHARDS if is_call(node, *ops.STARTS, *ops.MM_STARTS) else JoinReason.ROUTING_NOT_UNDONE
        )
        verdict: Verdict = call.join(reason, "what it makes is read outside of its half")
    elif rule is None:
        verdict = call.join(JoinReason.UNKNOWN_OPERATOR)
    elif not isinstance(node.meta.get("val"), torch.Tensor | list | tuple | None):
        verdict = call.join(JoinReason.UNKNOWN_OPERATOR, "the result is no tensor")
    else:
        verdict = rule.rule(call)
        if not isinstance(verdict, Verdict):
            raise TypeError(f"token rule of {node.target}: expected it to return RowWise or Join, got {verdict!r}")
        forgotten = [operand.name for operand in split if operand not in call.considered]
        if isinstance(verdict, RowWise) and forgotten:
            detail = f"its token rule did not look at {', '.join(forgotten)}, which varies with the token"
            verdict = call.join(JoinReason.UNKNOWN_OPERATOR, detail)
    return None if isinstance(verdict, Join) and not split else verdict


def _owner(layout: Layout | tuple[Layout, ...]) -> fx.Node | None:
    """The node that must run joined if a value of this layout is to be read whole."""
    if isinstance(layout, tuple):
        return next((owner for one in layout if (owner := _owner(one)) is not None), None)
    if isinstance(layout, Local):
        return layout.owner
    return layout.order if layout is not None else None
