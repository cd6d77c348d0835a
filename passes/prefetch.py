"""Let fused calls of few tokens bring the weights of the next matmul into the L2 cache while their message is under way.

    before:  start = all_reduce_rms_norm_start(x, ...); wait_(...); q = mm(start[0], wq); k = mm(start[0], wk)
    after:   start = all_reduce_rms_norm_start(x, ..., prefetch=[wq, wk], prefetch_bytes=8388608)

Weights are inputs of the graph, and the matmul that reads them comes behind the call. So the call waits for nothing more, no
tensor lives longer, and results are the same to the bit. Option ``prefetch``, or the device's profile, says how many bytes.
Matmuls with large weights are left out: measurements showed no gain for them, see :data:`MOST_WEIGHT_BYTES`.
One graph may serve few and many tokens: each call decides by its own token count (``kernels/collective/prefetch.py``).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import aten, is_call, is_cast, is_view, makes_view, value
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.fed_mm import fed_gated_mm, fed_joint_mm
from tw_compile.kernels.collective.prefetch import MOST_TENSORS, MOST_TOKENS, MOST_WEIGHT_BYTES, is_dense
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.gemm.by_rows import gated_mm_by_rows, joint_mm_by_rows
from tw_compile.passes.contract import Context, Outcome, Pass, TokenRange
from tw_compile.passes.fusion.forms import host_call, read_all_reduce
from tw_compile.passes.joint import given_as, matrix_of
from tw_compile.passes.operators import MadeQuantOperator, QuantOperator, RowWiseOperator
from tw_compile.passes.split.analysis.layer import arguments_of
from tw_compile.passes.split.rewrite.duplicate import SplitReport
from tw_compile.report import GraphReport

_STARTS = (*ops.STARTS, *ops.MM_STARTS)


@dataclass(frozen=True)
class Prefetches:
    """The weights that calls can prefetch, and how many calls do (``prefetching``).

    ``counts`` also counts the other calls, by the reason: ``many_tokens``, ``transport``, ``no_weight``, ``many_weights``.
    """

    weights: dict[fx.Node, list[fx.Node]]
    counts: Counter[str]


def prefetch_weights(graph: fx.Graph, budget: int, tokens: TokenRange | None) -> Counter[str]:
    """Let calls prefetch the weights that :func:`find_prefetches` finds, and return its counts."""
    return _ask(find_prefetches(graph, budget, tokens), budget)


def find_prefetches(graph: fx.Graph, budget: int, tokens: TokenRange | None) -> Prefetches:
    """The weights that each call that may have few tokens can prefetch, up to ``budget`` bytes.

    ``tokens``: as :attr:`Context.tokens`.
    """
    result = Prefetches({}, Counter[str]())
    for start in graph.nodes:
        if not is_call(start, *_STARTS):
            continue
        found: list[fx.Node] = []
        if not TRANSPORTS[arguments_of(start)["transport"]].prefetches:
            why = "transport"
        elif _fewest_rows(start, tokens) > MOST_TOKENS:
            why = "many_tokens"
        else:
            found, left = _weights_behind(start, budget)
            why = "prefetching" if found else left
        result.counts[why] += 1
        if found:
            result.weights[start] = found
    return result


def _fewest_rows(start: fx.Node, tokens: TokenRange | None) -> int:
    rows = start.meta["val"][0].shape[0]
    if tokens is not None and compat.is_symbol(rows):
        return tokens[0]
    return compat.size_bounds(rows)[0]


def _weights_behind(start: fx.Node, budget: int) -> tuple[list[fx.Node], str]:
    """The weights (graph inputs) that matmuls of the call's result read, in graph order, until they have ``budget`` bytes.

    If there are none, the string says why.
    """
    device, found, total, why = start.meta["val"][0].device, list[fx.Node](), 0, "no_weight"
    matmuls = _matmuls_of(start)
    for node in _until_next_call(start):
        weights = [weight for weight in dict.fromkeys(matmuls.get(node, ())) if _can_prefetch(weight, device)]
        if sum(weight.meta["val"].nbytes for weight in weights) > MOST_WEIGHT_BYTES:
            why = "many_weights"
            break
        for weight in weights:
            if weight in found:
                continue
            if total >= budget or len(found) == MOST_TENSORS:
                return found, why
            found.append(weight)
            total += weight.meta["val"].nbytes
    return found, why


def _can_prefetch(weight: fx.Node, device: torch.device) -> bool:
    tensor = value(weight)
    return tensor is not None and tensor.device == device and _is_fixed(tensor)


def _is_fixed(tensor: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride())) and is_dense(tensor)


def _until_next_call(start: fx.Node) -> Iterator[fx.Node]:
    """The nodes behind ``start`` up to the next sum over the ranks. That sum can prefetch the weights of what follows it."""
    node = start.next
    while node.op != "output" and not is_call(node, *_STARTS) and read_all_reduce(node) is None:
        yield node
        node = node.next


def _matmuls_of(start: fx.Node) -> dict[fx.Node, list[fx.Node]]:
    """The matmuls that read the normalised rows, or rows made from these one by one, each with the weights that it reads."""
    found: dict[fx.Node, list[fx.Node]] = {}
    pending = [user for user in start.users if is_call(user, operator.getitem) and user.args[1] != 1]
    seen = set(pending)
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            seen.add(user)
            weights = _weights_of(user)
            if weights is not None:
                found[user] = weights
            elif _hands_rows_on(user):
                pending.append(user)
    return found


def _weights_of(node: fx.Node) -> list[fx.Node] | None:
    """The graph inputs that a matmul multiplies by; empty if its factors are computed. None if ``node`` is no matmul."""
    factors: list[Any]
    if is_call(node, aten.mm.default, aten.addmm.default):
        factors = [matrix_of(node)]
    elif is_call(node, aten._scaled_mm.default):
        factors = [node.args[1]]
    elif is_call(node, joint_mm_by_rows, fed_joint_mm):
        factors = [*node.args[1]]  # type: ignore[misc]
    elif is_call(node, gated_mm_by_rows, fed_gated_mm):
        factors = [*node.args[1:3]]
    else:
        largest = _largest_matrix(node)
        return None if largest is None else [largest]
    return [given for given in map(given_as, factors) if given is not None]


def _largest_matrix(node: fx.Node) -> fx.Node | None:
    """The largest two-dimensional input of the graph that a host's row-wise operator reads beside its rows: its weight."""
    called = host_call(node, RowWiseOperator)
    if called is None:
        return None
    of_rows = {*called.operator.reads, *called.operator.results, *called.operator.scales}
    arguments = called.arguments if called.operator.writes else arguments_of(node)
    others = [one for name, one in arguments.items() if name not in of_rows and isinstance(one, fx.Node)]
    matrices = [given for given in map(given_as, others) if given is not None and _dims(given) == 2]
    return max(matrices, key=lambda one: one.meta["val"].nbytes if _is_fixed(one.meta["val"]) else 0, default=None)


def _dims(node: fx.Node) -> int:
    tensor = value(node)
    return 0 if tensor is None else tensor.dim()


def _hands_rows_on(node: fx.Node) -> bool:
    """Whether a node makes its rows from the rows that it reads: views, selections of rows, elementwise work, quantisation."""
    if is_view(node) or is_cast(node) or is_call(node, operator.getitem, aten.index.Tensor):
        return True
    quantises = host_call(node, QuantOperator) is not None or host_call(node, MadeQuantOperator) is not None
    if quantises or host_call(node, RowWiseOperator) is not None:
        return True
    if not isinstance(node.target, compat.OpOverload):
        return False
    return makes_view(node) or torch.Tag.pointwise in node.target.tags


def _ask(found: Prefetches, budget: int) -> Counter[str]:
    for start, weights in found.weights.items():
        for weight in weights:
            if start < weight:  # a get_attr node need not be at the beginning of the graph
                start.prepend(weight)
        start.kwargs = {**start.kwargs, "prefetch": weights, "prefetch_bytes": budget}
        start.meta.pop("eager_input_vals", None)  # it describes the old arguments
    return found.counts


def _look(graph: fx.Graph, context: Context) -> Outcome | None:
    if context.config.prefetch == "off":
        return Outcome(False, refused="tw_compile.prefetch is off")
    if not context.prefetch_bytes:
        return Outcome(False, refused="no profile of this device has prefetch_bytes: nobody has measured that it pays")
    if context.kept(SplitReport) is not None:
        return Outcome(False, refused="the graph is split, and steps of few tokens never are")
    found = context.analysis(find_prefetches, graph, context.prefetch_bytes, context.tokens)
    return None if found.weights else Outcome(False, found.counts)


def _run(graph: fx.Graph, context: Context) -> Outcome:
    found = context.analysis(find_prefetches, graph, context.prefetch_bytes, context.tokens)
    return Outcome(True, _ask(found, context.prefetch_bytes))


PREFETCH = Pass("prefetch_weights", _run, look=_look)


def prefetching_calls(reports: Iterable[GraphReport]) -> int:
    """How many calls of the reported graphs prefetch weights."""
    passes = (each for report in reports for each in report.passes if each.name == PREFETCH.name)
    return sum(each.counts.get("prefetching", 0) for each in passes)
