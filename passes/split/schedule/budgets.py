"""Apply the plan to the windows of a scheduled graph: give SMs to the calls, and plan GEMMs for the SMs that are left.

A GEMM that begins while a call holds SMs is planned for the other SMs where that is faster. A GEMM that begins after the sum
should have arrived is also planned for these SMs, where that costs nothing. Both happen only in windows that have a call of the
other half beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.autotune.measured_reserve import Operand, Reserve, measured_reserve
from tw_compile.graph.predicates import aten, is_call, value
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.spec import MAX_OVERLAP_SMS
from tw_compile.kernels.gemm.mm_leaving_sms import (
    addmm_leaving_sms,
    gated_mm_leaving_sms,
    grouped_mm_leaving_sms,
    joint_mm_leaving_sms,
    mm_leaving_sms,
)
from tw_compile.passes import joint
from tw_compile.passes.nodes import annotation
from tw_compile.passes.split.schedule.windows import DEFAULT_OVERLAP_SMS, Schedule, ScheduledWindow
from tw_compile.planning import DeviceProfile, Plan, PlannedWindow
from tw_compile.planning.communication import elementwise_us

Leaving = dict[int, tuple[tuple[str, int], ...]]
"""By index of a window: its GEMMs, by the planner's names, each with the SMs that it leaves."""

_LEAVING_SMS = {
    **dict.fromkeys(ops.MM_STARTS, mm_leaving_sms),
    aten.mm.default: mm_leaving_sms,
    aten.addmm.default: addmm_leaving_sms,
    grouped_mm_leaving_sms: grouped_mm_leaving_sms,
}
_OPERANDS = {mm_leaving_sms: 2, addmm_leaving_sms: 3, grouped_mm_leaving_sms: 3, gated_mm_leaving_sms: 3}


@dataclass(frozen=True)
class Budgets:
    """The decisions of ``plan``, made for ``profile``; without them every call gets the same number of SMs."""

    plan: Plan | None = None
    profile: DeviceProfile | None = None

    @property
    def most_sms(self) -> int | None:
        """The most SMs that all calls in flight may have together: the operators allow half of the device's SMs."""
        return None if self.profile is None else self.profile.sms // 2

    def planned(self, window: ScheduledWindow) -> PlannedWindow | None:
        """The plan's window for a scheduled window; None if the plan's steady state has no such window."""
        half = 2 if window.kind == "join" else window.computes
        windows = () if self.plan is None else self.plan.windows
        return next((one for one in windows if (one.computes, one.half) == (window.kind, half)), None)

    def overlap_sms(self, window: ScheduledWindow) -> int:
        """SMs of a call that begins to travel in ``window``. Where the plan has none, enough for the plan's shortest window.

        At most ``MAX_OVERLAP_SMS``, and ``DEFAULT_OVERLAP_SMS`` where the plan names no CTAs at all.
        """
        planned = self.planned(window)
        if planned is not None and planned.ctas:
            return min(planned.ctas, MAX_OVERLAP_SMS)
        windows = () if self.plan is None else self.plan.windows
        return min(max((one.ctas for one in windows), default=0) or DEFAULT_OVERLAP_SMS, MAX_OVERLAP_SMS)

    def collective_sms(self, window: ScheduledWindow) -> int:
        """SMs that a collective takes beside ``window``; 0 where the plan has no such window, and so does not know."""
        planned = self.planned(window)
        return 0 if planned is None else planned.ctas

    @property
    def joins(self) -> bool:
        """Whether GEMMs of one input may be computed by our own kernel."""
        return self.profile is not None and self.profile.gemm.own_gemms

    def wants(self, window: ScheduledWindow) -> frozenset[str]:
        """The GEMMs, by the planner's names, that are better planned for the SMs that are left."""
        planned = self.planned(window)
        if planned is None or self.profile is None:
            return frozenset()
        return frozenset(gemm.name for gemm in planned.gemms if gemm.sms < self.profile.sms)


def joint_mm_of(a: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    """``joint_mm_leaving_sms`` with flat arguments ``(a, *matrices, *biases, SMs to leave)``, as measurements call it."""
    *operands, reserved_sms = rest
    matrices, biases = ([one for one in operands if one.dim() == dims] for dims in (2, 1))
    return joint_mm_leaving_sms(a, matrices, biases, reserved_sms)


_MATMULS: dict[Any, Any] = {
    **_LEAVING_SMS,
    gated_mm_leaving_sms: gated_mm_leaving_sms,
    joint_mm_leaving_sms: joint_mm_of,
}
"""The function that is measured for each operator."""

Measure = Callable[[fx.Node, int, float, int], Reserve | None]
"""``(GEMM, SMs of the call beside it, microseconds that the call has them, tokens of its half)``; None: nothing is measured."""


def reserve_sms(graph: fx.Graph, woven: Schedule, budgets: Budgets, measure: Measure | None = None) -> Leaving:
    """Let GEMMs of a scheduled graph leave SMs to the calls beside them. Returns the SMs that GEMMs leave, by window.

    Measurements say how many SMs a GEMM leaves. Without a measurement, a GEMM that begins before the sum has arrived leaves the
    call's SMs. GEMMs of one input are computed jointly where measurements, or the plan if nothing can be measured, say that
    this is faster. GEMMs that Inductor tunes stay as they are: Inductor's kernels know nothing of a budget. Comes before the
    lock.
    """
    measure = measure or measure_reserve
    done: Leaving = {}
    waiting: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if woven.parts.gemm_of(node) is not None and _can_leave(node):
            waiting.setdefault(annotation(node)["window"], []).append(node)
    for index, gemms in waiting.items():
        window, sms = woven.windows[index], woven.reserved[index]
        planned = budgets.planned(window)
        if not sms or planned is None:
            continue
        beside = Beside(sms, planned, budgets, window, measure)
        while gemms:
            name = woven.parts.gemm_of(gemms[0])
            assert name is not None
            same = [node for node in gemms[1:] if woven.parts.gemm_of(node) == name]
            together = joint.beside(gemms[0], same) if budgets.joins else []
            nodes = together or gemms[:1]
            gemms = [node for node in gemms if node not in nodes]
            found = beside.reserve(name, nodes, bool(together))
            if found:
                done[index] = (*done.get(index, ()), *((name, reserved) for reserved in found))
    return done


class Beside:
    """GEMMs of one window, in their order, while the call beside them has SMs."""

    def __init__(
        self, sms: int, planned: PlannedWindow, budgets: Budgets, window: ScheduledWindow, measure: Measure
    ) -> None:
        self._sms, self._planned, self._wants, self._measure = sms, planned, budgets.wants(window), measure
        self._profile = budgets.profile
        self._left_us = planned.communication_us

    def reserve(self, name: str, nodes: list[fx.Node], may_join: bool) -> list[int]:
        """Let ``nodes`` leave SMs, each by itself or all as one GEMM. Returns the numbers of SMs, without zeros."""
        left, found = self._left_us, []
        for node in nodes:
            sms, us = self._find(name, node, left)
            found.append((sms, us))
            left = max(left - (us or 0.0), 0.0)
        if may_join:
            together = joint.join(nodes)
            sms, us = self._find(name, together.node, self._left_us)
            if self.joins(name, us, [us for _, us in found], self._saved_us(name, together.node)):
                nodes, found, left = [together.adopt()], [(sms, us)], max(self._left_us - (us or 0.0), 0.0)
            else:
                together.discard()
        self._left_us = left
        for node, (sms, _) in zip(nodes, found, strict=True):
            if sms:
                _leave(node, sms)
        return [sms for sms, _ in found if sms]

    def _find(self, name: str, node: fx.Node, left_us: float) -> tuple[int, float | None]:
        """SMs to leave and, if measured, the microseconds that the GEMM then takes."""
        best = self._measure(node, self._sms, left_us, self._tokens(name))
        if best is None:
            return self._sms if left_us and name in self._wants else 0, None
        return best.sms, best.us

    def _tokens(self, name: str) -> int:
        return next((gemm.tokens for gemm in self._planned.gemms if gemm.name == name), 0)

    def _saved_us(self, name: str, node: fx.Node) -> float:
        """The time of ``silu(gate) * up`` as a kernel of its own, by the profile; 0 if ``node`` does not store this product."""
        if not is_call(node, gated_mm_leaving_sms):
            return 0.0
        assert self._profile is not None  # else nothing is joined
        return elementwise_us(self._profile, 3.0 * self._tokens(name) * node.meta["val"].shape[1])

    def joins(self, name: str, joint_us: float | None, each_us: list[float | None], saved_us: float) -> bool:
        """Whether GEMMs are faster as one, by measurements (separate GEMMs also take ``saved_us``), or else by the plan.

        The plan's joint gate and up store ``silu(gate) * up``. So it says nothing about those that can't.
        """
        measured = [us for us in each_us if us is not None]
        if joint_us is None or len(measured) < len(each_us):
            known = saved_us > 0.0 or name != "gate_up"
            return known and any(gemm.name == name and gemm.joint == len(each_us) for gemm in self._planned.gemms)
        return joint_us < sum(measured) + saved_us


def measure_reserve(node: fx.Node, sms: int, busy_us: float, tokens: int) -> Reserve | None:
    """The SMs to leave by :func:`measured_reserve`."""
    matmul, arguments = _MATMULS[node.target], list[Any](node.args)
    given = [arguments[0], *arguments[1], *arguments[2]] if matmul is joint_mm_of else arguments[: _OPERANDS[matmul]]
    tensors = [value(one) if isinstance(one, fx.Node) else None for one in given]
    operands = []
    for tensor in tensors:
        if tensor is None or not all(isinstance(stride, int) for stride in tensor.stride()):
            return None
        # A symbolic size is that of the half's tokens, or of their entries for experts. The plan is for one number of tokens.
        shape = tuple(size if isinstance(size, int) else compat.known_factor(size) * tokens for size in tensor.shape)
        if 0 in shape:
            return None
        operands.append(Operand(shape, tensor.stride(), tensor.dtype))
    device = tensors[0].device  # type: ignore[union-attr]
    return measured_reserve(matmul, tuple(operands), device, sms, busy_us)


def _can_leave(node: fx.Node) -> bool:
    """Whether a GEMM can leave SMs: not where Inductor tunes GEMMs, and not an addmm that scales, as our operator doesn't."""
    if is_call(node, *ops.MM_STARTS, grouped_mm_leaving_sms):
        return True
    return node.target in _LEAVING_SMS and not (compat.tunes_gemms() or node.kwargs)


def _leave(node: fx.Node, sms: int) -> None:
    if is_call(node, *ops.MM_STARTS):
        node.update_kwarg("reserved_sms", sms)
        return
    if is_call(node, joint_mm_leaving_sms, gated_mm_leaving_sms):
        node.args = (*node.args[:-1], sms)
        return
    matmul = node.target = _LEAVING_SMS[node.target]
    node.args = (*node.args[: _OPERANDS[matmul]], sms)
