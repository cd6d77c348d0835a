"""The pass: choose a split, carry it out, order the halves so that they overlap, and say what became of it."""

from __future__ import annotations

import torch.fx as fx

from tw_compile.config import Config
from tw_compile.kernels.all_reduce_rms_norm.spec import MAX_OVERLAP_SMS
from tw_compile.passes.base import ATTENTION_JOINS, SplitRefused
from tw_compile.passes.split.choose import NotSplit, choose_split
from tw_compile.passes.split.duplicate import split_tokens
from tw_compile.passes.split.lock import lock_order
from tw_compile.passes.split.schedule import DEFAULT_OVERLAP_SMS, schedule
from tw_compile.planning import DeviceProfile, Plan
from tw_compile.report import Overlap, Split


def split_graph(graph: fx.Graph, config: Config, profile: DeviceProfile | None) -> Split:
    """Split ``graph`` in place, as ``config.split`` has it, which is not ``off``.

    A refusal, or an exception, leaves the graph as it was, or split and right. Nothing may read the graph afterwards: operators
    may be in subgraphs that keep their order.
    """
    device_profile = "" if profile is None else profile.name
    choice = choose_split(graph, config, profile)
    if isinstance(choice, NotSplit):
        return Split(config.split, "off", choice.reason, choice.detail, device_profile=device_profile, plan=choice.plan)
    result = split_tokens(graph, choice.first, axis=choice.axis, join_attention=choice.join_attention)
    if isinstance(result, SplitRefused):
        return Split(config.split, "off", result.reason, result.detail, device_profile=device_profile, plan=choice.plan)
    overlap = _overlap(graph, choice.plan)
    return Split(
        asked=config.split,
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
        overlap=overlap,
    )


def _overlap(graph: fx.Graph, plan: Plan | None) -> Overlap:
    """Put the operators of a split graph into the order of the weave, and keep them there."""
    overlap_sms = _overlap_sms(plan)
    woven = schedule(graph, overlap_sms)
    if isinstance(woven, SplitRefused):
        return Overlap(refused=f"{woven.reason}: {woven.detail}")
    lock = lock_order(graph)
    return Overlap(overlap_sms, woven.calls, len(woven.windows), woven.exposures, lock.loose)


def _overlap_sms(plan: Plan | None) -> int:
    """SMs for communication beside compute: enough for the shortest window of the plan.

    One number, because a call doesn't know which window of the plan it travels in.
    """
    planned = [] if plan is None else [window.ctas for window in plan.windows if window.travels is not None]
    return min(max(planned, default=DEFAULT_OVERLAP_SMS), MAX_OVERLAP_SMS)
