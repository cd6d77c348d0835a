"""What the plan gives to the windows of a scheduled graph: SMs to the calls, and GEMMs that are planned for the rest.

A GEMM that begins while a call holds SMs is planned for the others, where that is faster; one that begins after the sum should
have arrived, where it costs nothing. Only in windows that have a call of the other half beside them.
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
"""For windows by index: GEMMs, by the planner's names, and the SMs that they leave."""

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
        """Of all calls in flight: what the operators allow."""
        return None if self.profile is None else self.profile.sms // 2

    def planned(self, window: ScheduledWindow) -> PlannedWindow | None:
        """The plan's window that a scheduled one is; None for those that its steady state does not have."""
        half = 2 if window.kind == "join" else window.computes
        windows = () if self.plan is None else self.plan.windows
        return next((one for one in windows if (one.computes, one.half) == (window.kind, half)), None)

    def overlap_sms(self, window: ScheduledWindow) -> int:
        """SMs of a call that begins to travel in ``window``; where the plan has none, enough for the shortest window of it."""
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
    """``joint_mm_leaving_sms`` of ``(a, *matrices, *biases, SMs to leave)``, as it is measured."""
    *operands, reserved_sms = rest
    matrices, biases = ([one for one in operands if one.dim() == dims] for dims in (2, 1))
    return joint_mm_leaving_sms(a, matrices, biases, reserved_sms)


_MATMULS: dict[Any, Any] = {
    **_LEAVING_SMS,
    gated_mm_leaving_sms: gated_mm_leaving_sms,
    joint_mm_leaving_sms: joint_mm_of,
}
"""What is measured for an operator."""

Measure = Callable[[fx.Node, int, float, int], Reserve | None]
"""``(GEMM, SMs of the call beside it, for how many microseconds, tokens of its half)``; None where nothing is measured."""


def reserve_sms(graph: fx.Graph, woven: Schedule, budgets: Budgets, measure: Measure | None = None) -> Leaving:
    """Let GEMMs of a scheduled graph leave SMs to the calls beside them; what was done, by window.

    How many is measured; where that is not possible it is what the call has for GEMMs that begin before the sum has arrived.
    Those of one input are computed jointly where that is measured to be faster, or planned if it can't be measured. GEMMs that
    Inductor tunes stay as they are: its own kernels know nothing of a budget. Comes before the lock.
    """
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
        beside = Beside(sms, planned, budgets, window, measure or measure_reserve)
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
        """The SMs, none of them 0, that ``nodes`` now leave: each, or all as one."""
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
        """SMs to leave and, if measured, the microseconds that it then takes."""
        best = self._measure(node, self._sms, left_us, self._tokens(name))
        if best is None:
            return self._sms if left_us and name in self._wants else 0, None
        return best.sms, best.us

    def _tokens(self, name: str) -> int:
        return next((gemm.tokens for gemm in self._planned.gemms if gemm.name == name), 0)

    def _saved_us(self, name: str, node: fx.Node) -> float:
        """What ``silu(gate) * up`` takes as a kernel of its own, by the profile, where ``node`` stores it."""
        if not is_call(node, gated_mm_leaving_sms):
            return 0.0
        assert self._profile is not None  # else nothing is joined
        return elementwise_us(self._profile, 3.0 * self._tokens(name) * node.meta["val"].shape[1])

    def joins(self, name: str, joint_us: float | None, each_us: list[float | None], saved_us: float) -> bool:
        """Whether GEMMs are faster as one: as measured, with ``saved_us`` for those apart, or else as planned."""
        measured = [us for us in each_us if us is not None]
        if joint_us is None or len(measured) < len(each_us):
            return any(gemm.name == name and gemm.joint == len(each_us) for gemm in self._planned.gemms)
        return joint_us < sum(measured) + saved_us


def measure_reserve(node: fx.Node, sms: int, busy_us: float, tokens: int) -> Reserve | None:
    matmul, arguments = _MATMULS[node.target], list[Any](node.args)
    given = [arguments[0], *arguments[1], *arguments[2]] if matmul is joint_mm_of else arguments[: _OPERANDS[matmul]]
    tensors = [value(one) if isinstance(one, fx.Node) else None for one in given]
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
