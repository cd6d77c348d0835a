"""What the plan gives to the windows of a scheduled graph: SMs to the calls, and GEMMs that are planned for the rest.

A GEMM that begins while a call holds SMs is planned for the others, where the plan has it so; one that begins after the sum has
arrived is not. Only in windows that have a call of the other half beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import aten, is_call
from tw_compile.kernels.all_reduce_rms_norm import ops
from tw_compile.kernels.all_reduce_rms_norm.spec import MAX_OVERLAP_SMS
from tw_compile.kernels.mm_leaving_sms import addmm_leaving_sms, mm_leaving_sms
from tw_compile.passes.fusion.rewrite import ANNOTATION
from tw_compile.passes.split.schedule import DEFAULT_OVERLAP_SMS, Schedule, Window
from tw_compile.planning import DeviceProfile, Plan
from tw_compile.planning import Window as PlannedWindow

_LEAVING_SMS = {aten.mm.default: mm_leaving_sms, aten.addmm.default: addmm_leaving_sms}


@dataclass(frozen=True)
class Budgets:
    """The decisions of ``plan``, made for ``profile``; without them every call gets the same number of SMs."""

    plan: Plan | None = None
    profile: DeviceProfile | None = None

    @property
    def most_sms(self) -> int | None:
        """Of all calls in flight: what the operators allow."""
        return None if self.profile is None else self.profile.sms // 2

    def planned(self, window: Window) -> PlannedWindow | None:
        """The plan's window that a scheduled one is; None for those that its steady state does not have."""
        half = 2 if window.kind == "join" else window.computes
        windows = () if self.plan is None else self.plan.windows
        return next((one for one in windows if (one.computes, one.half) == (window.kind, half)), None)

    def overlap_sms(self, window: Window) -> int:
        """SMs of a call that begins to travel in ``window``; where the plan has none, enough for the shortest window of it."""
        planned = self.planned(window)
        if planned is not None and planned.ctas:
            return min(planned.ctas, MAX_OVERLAP_SMS)
        windows = () if self.plan is None else self.plan.windows
        return min(max((one.ctas for one in windows), default=0) or DEFAULT_OVERLAP_SMS, MAX_OVERLAP_SMS)

    def left_by_gemms(self, sms: int) -> int:
        """What GEMMs leave to calls on ``sms`` SMs: as many as these, and those that they leave without their pair."""
        return sms if self.profile is None else self.profile.sms - self.profile.sms_in_pairs(sms)

    def wants(self, window: Window) -> frozenset[str]:
        """The GEMMs, by the planner's names, that are better planned for the SMs that are left."""
        planned = self.planned(window)
        if planned is None or self.profile is None:
            return frozenset()
        return frozenset(gemm.name for gemm in planned.gemms if gemm.sms < self.profile.sms)


def reserve_sms(graph: fx.Graph, woven: Schedule, budgets: Budgets) -> dict[int, tuple[str, ...]]:
    """Let GEMMs of a scheduled graph leave SMs to the calls beside them; what was done, by window, in the planner's names.

    GEMMs that Inductor tunes stay as they are: its own kernels know nothing of a budget. Comes before the lock.
    """
    done: dict[int, tuple[str, ...]] = {}
    wanted = [
        budgets.wants(window) if sms else frozenset() for window, sms in zip(woven.windows, woven.reserved, strict=True)
    ]
    for node in graph.nodes:
        name = woven.parts.gemm_of(node)
        if name is None:
            continue
        window = node.meta[ANNOTATION]["window"]
        if name in wanted[window] and _leave(node, budgets.left_by_gemms(woven.reserved[window])):
            done[window] = (*done.get(window, ()), name)
    return done


def _leave(node: fx.Node, sms: int) -> bool:
    if is_call(node, ops.mm_start):
        node.update_kwarg("reserved_sms", sms)
        return True
    if compat.tunes_gemms() or node.kwargs:  # addmm may scale, which the operator does not
        return False
    node.target = _LEAVING_SMS[node.target]  # type: ignore[index]
    node.args = (*node.args, sms)
    return True
