"""The pass: choose a split, carry it out, order the halves so that they overlap, and say what became of it."""

from __future__ import annotations

import torch.fx as fx

from tw_compile import compat
from tw_compile.config import Config
from tw_compile.graph.copy import copy_of, restore
from tw_compile.passes.reasons import ATTENTION_JOINS, HostAttention, SplitRefused
from tw_compile.passes.split.analysis.choose import HostGraph, NotSplit, choose_split, choose_split_of_host
from tw_compile.passes.split.peephole.expert_keys import narrow_expert_keys
from tw_compile.passes.split.peephole.grouped import use_small_groups
from tw_compile.passes.split.peephole.in_slot import leave_results_in_slots
from tw_compile.passes.split.peephole.residual import narrow_residuals
from tw_compile.passes.split.rewrite.duplicate import split_tokens
from tw_compile.passes.split.rewrite.seams import mend_seams
from tw_compile.passes.split.schedule.budgets import Budgets, reserve_sms
from tw_compile.passes.split.schedule.lock import lock_order
from tw_compile.passes.split.schedule.windows import Window, schedule
from tw_compile.planning import DeviceProfile, PlannedWindow
from tw_compile.report import Overlap, OverlapWindow, Split


def split_graph(
    graph: fx.Graph,
    config: Config,
    profile: DeviceProfile | None,
    host: HostGraph | None = None,
) -> Split:
    """Split ``graph`` in place, as ``config.split`` has it, which is not ``off``.

    A refusal, or an exception, leaves the graph as it was. Nothing may read the graph afterwards: operators may be in subgraphs
    that keep their order.

    Args:
        host: What the graph's host says of it; None for torch.compile.
    """
    device_profile = "" if profile is None else profile.name
    choice = (
        choose_split(graph, config, profile) if host is None else choose_split_of_host(graph, config, profile, host)
    )
    if isinstance(choice, NotSplit):
        return Split(config.split, "off", choice.reason, choice.detail, device_profile=device_profile, plan=choice.plan)
    before = copy_of(graph)
    try:
        result = split_tokens(graph, choice.first, axis=choice.axis, join_attention=choice.join_attention)
        if isinstance(result, SplitRefused):
            return Split(
                config.split, "off", result.reason, result.detail, device_profile=device_profile, plan=choice.plan
            )
        mend_seams(graph)
        use_small_groups(graph)
        narrow_expert_keys(graph)
        piece = host is not None and host.attention is HostAttention.ELSEWHERE
        overlap = _overlap(graph, Budgets(choice.plan, profile), config, piece)
    except Exception:
        restore(graph, before)
        raise
    compat.leave_out_combo_kernels()
    compat.tune_for_examples()
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


def _overlap(graph: fx.Graph, budgets: Budgets, config: Config, piece: bool) -> Overlap:
    """Put the operators of a split graph into the order of the weave, give windows what the plan says, and keep it so."""
    woven = schedule(graph, budgets.overlap_sms, budgets.most_sms, piece)
    if isinstance(woven, SplitRefused):
        return Overlap(refused=f"{woven.reason}: {woven.detail}")
    narrow_residuals(graph)
    in_slot = leave_results_in_slots(graph)
    leaving = reserve_sms(graph, woven, budgets) if config.split_gemm_sms == "auto" else {}
    lock = lock_order(graph)
    windows = tuple(
        _window(window, sms, leaving.get(window.index, ()), budgets.planned(window))
        for window, sms in zip(woven.windows, woven.reserved, strict=True)
    )
    return Overlap(woven.calls, windows, woven.exposures, lock.loose, in_slot=in_slot)


def _window(
    window: Window, sms: int, leaving: tuple[tuple[str, int], ...], planned: PlannedWindow | None
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
