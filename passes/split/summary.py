"""Summarise what the passes of the token split have done, for the report."""

from __future__ import annotations

from tw_compile.passes.contract import Context
from tw_compile.passes.reasons import ATTENTION_JOINS, SplitRefused
from tw_compile.passes.split.analysis.choose import NotSplit, SplitChoice
from tw_compile.passes.split.rewrite.duplicate import SplitReport
from tw_compile.passes.split.schedule.budgets import Budgets
from tw_compile.passes.split.schedule.lock import Lock
from tw_compile.passes.split.schedule.windows import Schedule, ScheduledWindow
from tw_compile.passes.split.steps import InSlot, Reserved
from tw_compile.planning import PlannedWindow
from tw_compile.report import Overlap, OverlapWindow, Split


def summarise(context: Context) -> Split | None:
    """The summary of a graph for which all passes of the split have run, or said why not. None if nothing asked for a split."""
    asked = str(context.config.split)
    device_profile = "" if context.profile is None else context.profile.name
    left = context.kept(NotSplit)
    if left is not None:
        return Split(asked, "off", left.reason, left.detail, device_profile=device_profile, plan=left.plan)
    choice, result = context.kept(SplitChoice), context.kept(SplitReport)
    if choice is None or result is None:
        return None
    return Split(
        asked=asked,
        mode="join" if ATTENTION_JOINS & set(result.joins) else "split",
        unit=result.unit,
        sizes=tuple(int(size) if size.isdecimal() else size for size in (result.first, result.second)),
        duplicated=result.duplicated,
        shared=result.shared,
        joined=result.joined,
        slices=result.slices,
        cats=result.cats,
        joins=result.joins,
        join_details=tuple(result.details),
        device_profile=device_profile,
        plan=choice.plan,
        overlap=_overlap(context, Budgets(choice.plan, context.profile)),
    )


def _overlap(context: Context, budgets: Budgets) -> Overlap:
    refused, woven = context.kept(SplitRefused), context.kept(Schedule)
    if refused is not None or woven is None:
        return Overlap(refused="" if refused is None else f"{refused.reason}: {refused.detail}")
    reserved, in_slot, lock = context.kept(Reserved), context.kept(InSlot), context.needed(Lock)
    leaving = {} if reserved is None else reserved.leaving
    windows = tuple(
        _window(window, sms, leaving.get(window.index, ()), budgets.planned(window))
        for window, sms in zip(woven.windows, woven.reserved, strict=True)
    )
    calls_in_slot = 0 if in_slot is None else in_slot.calls
    return Overlap(woven.calls, windows, woven.exposures, lock.loose, in_slot=calls_in_slot)


def _window(
    window: ScheduledWindow, sms: int, leaving: tuple[tuple[str, int], ...], planned: PlannedWindow | None
) -> OverlapWindow:
    return OverlapWindow(
        kind=window.kind,
        computes=window.computes,
        beside=window.beside,
        operators=window.nodes,
        overlap_sms=sms,
        gemms_leaving_sms=leaving,
        compute_us=None if planned is None else planned.compute_us,
        communication_us=None if planned is None else planned.communication_us,
        us=None if planned is None else planned.us,
    )
