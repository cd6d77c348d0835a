"""What the plan gives to the windows of a scheduled graph: SMs to the calls, and GEMMs that are planned for the rest.

A GEMM that begins while a call holds SMs is planned for the others, where that is faster; one that begins after the sum should
have arrived, where it costs nothing. Only in windows that have a call of the other half beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import aten, is_call, value
from tw_compile.kernels.all_reduce_rms_norm import ops
from tw_compile.kernels.all_reduce_rms_norm.spec import MAX_OVERLAP_SMS
from tw_compile.kernels.measured_reserve import Operand, Reserve, measured_reserve
from tw_compile.kernels.mm_leaving_sms import addmm_leaving_sms, grouped_mm_leaving_sms, mm_leaving_sms
from tw_compile.passes.fusion.rewrite import ANNOTATION
from tw_compile.passes.split.schedule import DEFAULT_OVERLAP_SMS, Schedule, Window
from tw_compile.planning import DeviceProfile, Plan
from tw_compile.planning import Window as PlannedWindow

Leaving = dict[int, tuple[tuple[str, int], ...]]
"""For windows by index: GEMMs, by the planner's names, and the SMs that they leave."""

_LEAVING_SMS = {
    ops.mm_start: mm_leaving_sms,
    aten.mm.default: mm_leaving_sms,
    aten.addmm.default: addmm_leaving_sms,
    grouped_mm_leaving_sms: grouped_mm_leaving_sms,
}
_OPERANDS = {mm_leaving_sms: 2, addmm_leaving_sms: 3, grouped_mm_leaving_sms: 3}


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

    def wants(self, window: Window) -> frozenset[str]:
        """The GEMMs, by the planner's names, that are better planned for the SMs that are left."""
        planned = self.planned(window)
        if planned is None or self.profile is None:
            return frozenset()
        return frozenset(gemm.name for gemm in planned.gemms if gemm.sms < self.profile.sms)


Measure = Callable[[fx.Node, int, float, int], Reserve | None]
"""``(GEMM, SMs of the call beside it, for how many microseconds, tokens of its half)``; None where nothing is measured."""


def reserve_sms(graph: fx.Graph, woven: Schedule, budgets: Budgets, measure: Measure | None = None) -> Leaving:
    """Let GEMMs of a scheduled graph leave SMs to the calls beside them; what was done, by window.

    How many is measured; where that is not possible it is what the call has for GEMMs that begin before the sum has arrived.
    GEMMs that Inductor tunes stay as they are: its own kernels know nothing of a budget. Comes before the lock.
    """
    measure = measure or _measure
    done: Leaving = {}
    left_us: dict[int, float] = {}
    for node in graph.nodes:
        name = woven.parts.gemm_of(node)
        index = node.meta[ANNOTATION]["window"] if name is not None else 0
        sms = woven.reserved[index]
        window = woven.windows[index]
        planned = budgets.planned(window)
        if name is None or not sms or planned is None or not _can_leave(node):
            continue
        left = left_us.setdefault(index, planned.communication_us)
        tokens = next((gemm.tokens for gemm in planned.gemms if gemm.name == name), 0)
        best = measure(node, sms, left, tokens)
        if best is not None:
            left_us[index] = max(left - best.us, 0.0)
        reserved = best.sms if best is not None else sms if left and name in budgets.wants(window) else 0
        if reserved:
            _leave(node, reserved)
            done[index] = (*done.get(index, ()), (name, reserved))
    return done


def _measure(node: fx.Node, sms: int, busy_us: float, tokens: int) -> Reserve | None:
    matmul = _LEAVING_SMS[node.target]  # type: ignore[index]
    tensors = [value(one) if isinstance(one, fx.Node) else None for one in node.args[: _OPERANDS[matmul]]]
    operands = []
    for tensor in tensors:
        if tensor is None or not all(isinstance(stride, int) for stride in tensor.stride()):
            return None
        # A size that is not known is the half's tokens, which the plan is made for one number of, or their entries for experts.
        shape = tuple(size if isinstance(size, int) else compat.known_factor(size) * tokens for size in tensor.shape)
        if 0 in shape:
            return None
        operands.append(Operand(shape, tensor.stride(), tensor.dtype))
    device = tensors[0].device  # type: ignore[union-attr]
    return measured_reserve(matmul, tuple(operands), device, sms, busy_us)


def _can_leave(node: fx.Node) -> bool:
    """Not where Inductor tunes, nor for an addmm that scales, which the operator does not."""
    if is_call(node, ops.mm_start, grouped_mm_leaving_sms):
        return True
    return node.target in _LEAVING_SMS and not (compat.tunes_gemms() or node.kwargs)


def _leave(node: fx.Node, sms: int) -> None:
    if is_call(node, ops.mm_start):
        node.update_kwarg("reserved_sms", sms)
        return
    matmul = node.target = _LEAVING_SMS[node.target]  # type: ignore[index]
    node.args = (*node.args[: _OPERANDS[matmul]], sms)
