"""The passes of the token split, in order: choose a split, carry it out, order both parts so that they overlap, keep the order.

They are one transaction: if one of them fails, the graph is as fusing has left it. What they hand to each other is in the
context: a :class:`SplitChoice`, a :class:`SplitReport`, a :class:`Schedule`, a :class:`Reserved` and a :class:`Lock`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from tw_compile import compat
from tw_compile.passes.contract import Context, InductorNeed, Outcome, Pass
from tw_compile.passes.fusion.forms import read_all_reduce
from tw_compile.passes.fusion.fuse import FusionDecisions
from tw_compile.passes.reasons import SplitRefused
from tw_compile.passes.split.analysis.choose import NotSplit, SplitChoice, choose_split, choose_split_of_host
from tw_compile.passes.split.analysis.token_axis import analyse
from tw_compile.passes.split.peephole.expert_keys import narrow_expert_keys
from tw_compile.passes.split.peephole.grouped import use_small_groups
from tw_compile.passes.split.peephole.in_slot import leave_results_in_slots
from tw_compile.passes.split.peephole.residual import narrow_residuals
from tw_compile.passes.split.rewrite.duplicate import split_tokens
from tw_compile.passes.split.rewrite.seams import mend_seams
from tw_compile.passes.split.schedule.budgets import Budgets, Leaving, reserve_sms
from tw_compile.passes.split.schedule.dependences import find_calls
from tw_compile.passes.split.schedule.lock import lock_order
from tw_compile.passes.split.schedule.windows import Schedule, schedule

TRANSACTION = "split"


@dataclass(frozen=True)
class Reserved:
    """The SMs that GEMMs leave, by window."""

    leaving: Leaving


@dataclass(frozen=True)
class InSlot:
    """How many calls leave their results in the slot's memory."""

    calls: int


def is_wanted(graph: fx.Graph, context: Context) -> bool:
    """Whether option ``split`` asks for a split of ``graph``; ``auto`` only where something is summed over ranks."""
    if context.config.split_tokens is not None:
        return True
    if context.config.split != "auto":
        return False
    decided = context.kept(FusionDecisions)
    if decided is not None:
        return bool(decided.sites)
    return any(read_all_reduce(node) is not None for node in graph.nodes)


def _choose(graph: fx.Graph, context: Context) -> Outcome:
    if not is_wanted(graph, context):
        return Outcome(False, refused="nothing asks for a split of this graph")
    given = graph, context.config, context.profile
    choice = (
        choose_split(*given, context.analysis, context.link)
        if context.host is None
        else choose_split_of_host(*given, context.host, context.analysis, context.link)
    )
    context.keep(choice)
    if isinstance(choice, NotSplit):
        _keep_to_counts(choice)
    return Outcome(False, refused=f"{choice.reason}: {choice.detail}" if isinstance(choice, NotSplit) else "")


def _keep_to_counts(choice: SplitChoice | NotSplit) -> None:
    """Have torch.compile make another graph for token counts that ``choice`` is not for."""
    if choice.counts is not None:
        compat.keep_within(choice.counts.tokens, choice.counts.low, choice.counts.high)


def _split(graph: fx.Graph, context: Context) -> Outcome:
    choice = context.needed(SplitChoice)
    analysis = context.analysis(analyse, graph, choice.axis, join_attention=choice.join_attention)
    result = split_tokens(
        graph, choice.first, axis=choice.axis, join_attention=choice.join_attention, analysis=analysis
    )
    if isinstance(result, SplitRefused):
        context.keep(NotSplit(result.reason, result.detail, choice.plan))
        return Outcome(False, refused=f"{result.reason}: {result.detail}")
    context.keep(result)
    counts = {name: getattr(result, name) for name in ("duplicated", "joined", "shared", "slices", "cats")}
    return Outcome(True, counts)


def _mend(graph: fx.Graph, context: Context) -> Outcome:
    return Outcome(mend_seams(graph))


def _use_small_groups(graph: fx.Graph, context: Context) -> Outcome:
    return _counted("gemms", use_small_groups(graph))


def _narrow_expert_keys(graph: fx.Graph, context: Context) -> Outcome:
    return _counted("sorts", narrow_expert_keys(graph))


def _schedule(graph: fx.Graph, context: Context) -> Outcome:
    budgets = _budgets(context)
    is_piece = context.host is not None and context.host.is_piece
    calls = context.analysis(find_calls, graph)
    woven = schedule(graph, budgets.overlap_sms, budgets.most_sms, is_piece, calls, budgets.collective_sms)
    context.keep(woven)
    if isinstance(woven, SplitRefused):
        return Outcome(False, refused=f"{woven.reason}: {woven.detail}")
    return Outcome(True, {"calls": woven.calls, "exposed": len(woven.exposed), "windows": len(woven.windows)})


def _narrow_residuals(graph: fx.Graph, context: Context) -> Outcome:
    return _counted("calls", narrow_residuals(graph))


def _leave_in_slots(graph: fx.Graph, context: Context) -> Outcome:
    in_slot = leave_results_in_slots(graph, context.analysis(find_calls, graph))
    context.keep(InSlot(in_slot))
    return _counted("calls", in_slot)


def _reserve(graph: fx.Graph, context: Context) -> Outcome:
    if context.config.split_gemm_sms != "auto":
        return Outcome(False, refused=f"tw_compile.split_gemm_sms is {context.config.split_gemm_sms}")
    leaving = reserve_sms(graph, context.needed(Schedule), _budgets(context))
    context.keep(Reserved(leaving))
    # Even if no GEMM leaves SMs, matrices may have been moved, for GEMMs that were tried as one.
    return Outcome(True, {"gemms": sum(map(len, leaving.values()))})


def _lock(graph: fx.Graph, context: Context) -> Outcome:
    lock = lock_order(graph, context.analysis(find_calls, graph))
    context.keep(lock)
    _keep_to_counts(context.needed(SplitChoice))  # last, as a graph that could not be split is for all counts
    counts = {"kept": lock.kept, "ordered": lock.ordered, "cloned": lock.cloned, "loose": len(lock.loose)}
    return Outcome(True, counts)


def _budgets(context: Context) -> Budgets:
    return Budgets(context.needed(SplitChoice).plan, context.profile)


def _counted(what: str, number: int) -> Outcome:
    """The outcome of a pass that has changed the graph exactly if ``number`` is not 0."""
    return Outcome(bool(number), {what: number})


_CHOICE, _TOKENS, _ORDER = "choose_split", "split_tokens", "schedule"
_ALONE = "the parts would run one after the other, and nothing would be hidden"

SPLIT: tuple[Pass, ...] = (
    Pass(_CHOICE, _choose, TRANSACTION, indispensable="nothing says where to split", edits=False),
    Pass(
        _TOKENS,
        _split,
        TRANSACTION,
        needs=(_CHOICE,),
        indispensable="there is nothing to order",
        inductor=(InductorNeed.NO_COMBO_KERNELS, InductorNeed.TUNE_FOR_EXAMPLES),
    ),
    Pass(
        "mend_seams",
        _mend,
        TRANSACTION,
        needs=(_TOKENS,),
        indispensable="the next graph of a host would take apart what this one has put together",
    ),
    Pass("use_small_groups", _use_small_groups, TRANSACTION, needs=(_TOKENS,)),
    Pass("narrow_expert_keys", _narrow_expert_keys, TRANSACTION, needs=(_TOKENS,)),
    Pass(_ORDER, _schedule, TRANSACTION, needs=(_TOKENS,), indispensable=_ALONE, keeps=(find_calls,)),
    Pass("narrow_residuals", _narrow_residuals, TRANSACTION, needs=(_ORDER,), keeps=(find_calls,)),
    Pass("leave_results_in_slots", _leave_in_slots, TRANSACTION, needs=(_ORDER,), keeps=(find_calls,)),
    Pass("reserve_sms", _reserve, TRANSACTION, needs=(_ORDER,), keeps=(find_calls,)),
    Pass(
        "lock_order",
        _lock,
        TRANSACTION,
        needs=(_ORDER,),
        indispensable="Inductor would undo the order, and give away memory that calls still read",
    ),
)
