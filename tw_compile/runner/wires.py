"""Measure what a wire costs in a run: the errors of each call against float64, by what feeds the sum and by depth.

The float64 reference has the same operands. The calls are recorded during one more forward, in which a recording transport
replaces the transport that serves the model's calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from tw_compile.agree import gather
from tw_compile.kernels.collective import transport as transports
from tw_compile.kernels.collective.spec import FP8, Request
from tw_compile.kernels.collective.transport import Started, Transport, get_transport
from tw_compile.kernels.collective.wire_reference import add_in_rank_order, all_reduce_with_wire, sums_of_owners
from tw_compile.kernels.collective.wires import EXACT, WIRES
from tw_compile.kernels.epilogues import EPILOGUES
from tw_compile.kernels.registry import load
from tw_compile.report import Site
from tw_compile.runner.numerics import BUDGET_FACTOR, digest
from tw_compile.testing.error_budget import relative_error

CLASSES = {"attention": "o_proj", "mlp": "down_proj", "attention+mlp": "o_proj + down_proj", "": "other"}
"""Maps what feeds a sum to the name of the sum in the report."""
THIRDS = ("first", "middle", "last")
QUANTITIES = ("sum", "hidden", "residual")


@dataclass(frozen=True)
class RecordedCall:
    """Copies of a call's operands from before the call, and of its results on this rank."""

    request: Request
    hidden: torch.Tensor
    residual: torch.Tensor


class RecordingTransport(Transport):
    """Serves calls by another transport, and keeps operands and results. Every call is served as the first of its form."""

    def __init__(self, served_by: Transport) -> None:
        self.name, self._served_by = served_by.name, served_by
        self.calls: list[RecordedCall] = []

    def message_buffer(self, request: Request) -> torch.Tensor | None:
        return self._served_by.message_buffer(request)

    def start(self, request: Request) -> Started:
        residual = None if request.residual is None else request.residual.clone()
        kept = replace(request, x=request.x.clone(), residual=residual)
        started = self._served_by.start(request)

        def finish() -> None:
            if started.finish is not None:
                started.finish()
            self.calls.append(RecordedCall(kept, started.hidden.clone(), started.residual.clone()))

        return replace(started, finish=finish, call=None)


@contextmanager
def recording(name: str) -> Iterator[list[RecordedCall]]:
    """The calls that the transport ``name`` serves inside of a ``with`` block, in the order in which they finish."""
    before = get_transport(name)
    recorder = transports.instances[name] = RecordingTransport(before)
    try:
        yield recorder.calls
    finally:
        transports.instances[name] = before


def wire_report(
    wire: str, sites: Sequence[Site], layers: int, forward: Callable[[], object], group: dist.ProcessGroup
) -> dict[str, Any]:
    """Run ``forward``, whose calls are those of ``sites`` in order, and say what their wire costs. Collective.

    Where tokens are split there are more calls than sites. A call's site is then unknown, and all calls are in one class.
    """
    fused = [site for site in sites if site.decision == "fused" and not site.form.startswith("merged into")]
    names = {site.transport for site in fused if site.transport is not None}
    calls: list[RecordedCall] = []
    for name in sorted(names):
        with recording(name) as recorded:
            forward()
        calls += recorded
    told_apart = len(calls) == len(fused) and len(names) == 1
    rows: dict[tuple[str, str], list[dict[str, dict[str, float]]]] = {}
    identical = True
    for index, call in enumerate(calls):
        if call.request.wire == EXACT:
            continue
        site = fused[index] if told_apart else None
        identical &= len(set(gather(digest([call.hidden])))) == 1
        rows.setdefault(_class_of(site, layers), []).append(_errors(call, group))
    classes = [
        {"feeds": feeds, "third": third, "calls": len(errors), **_worst(errors)}
        for (feeds, third), errors in sorted(rows.items(), key=lambda item: _order(item[0]))
    ]
    within = all(row[name]["passed"] for row in classes for name in ("hidden", "residual") if row[name] is not None)
    return {
        "wire": wire,
        "calls": sum(row["calls"] for row in classes),
        "exact_calls": sum(call.request.wire == EXACT for call in calls),
        "classes": classes,
        "bitwise_equal_across_ranks": identical,
        "passed": within and identical,
    }


def _class_of(site: Site | None, layers: int) -> tuple[str, str]:
    if site is None:
        return "all", ""
    third = "" if site.layer is None else THIRDS[min(site.layer * 3 // layers, 2)]
    return CLASSES[site.feeds], third


def _order(key: tuple[str, str]) -> tuple[int, int]:
    feeds, third = key
    known = [*CLASSES.values(), "all"]
    return known.index(feeds), THIRDS.index(third) if third in THIRDS else -1


def _worst(errors: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """For each quantity the errors of the call with the largest error; None where no call has that quantity."""
    result: dict[str, Any] = {}
    for name in QUANTITIES:
        calls = [call[name] for call in errors if name in call]
        result[name] = max(calls, key=lambda call: call["error"]) if calls else None
        if result[name] is not None:
            budgets = [call["error"] <= call["budget"] for call in calls]
            result[name] = result[name] | {"passed": all(budgets)}
    return result


def _errors(call: RecordedCall, group: dist.ProcessGroup) -> dict[str, dict[str, float]]:
    """Relative RMS errors against float64, of the call's results and of the results that an exact wire would give.

    The budget comes from the error of the reference with the same wire: kernels may not add errors to those of the codes.
    """
    request = call.request
    tokens = request.x.shape[0]
    partials = _of_ranks(request.x, group)
    residual = request.residual
    if residual is not None and request.residual_sharded:
        residual = torch.cat(_of_ranks(residual, group))[:tokens]
    given = (residual, request.bias, request.weight)
    add_and_normalise = load(EPILOGUES[request.norm.epilogue].reference)
    wide = replace(request.norm, hidden_dtype=torch.float64, residual_dtype=torch.float64, cast_before_weight=None)
    true_sum = add_in_rank_order([partial.double() for partial in partials])
    last = (request.hidden_scale, request.norm_bias)
    true_hidden, true_h = add_and_normalise(true_sum, *given, wide, None, request.norm_bias)
    rounded = true_sum.to(request.x.dtype)
    exact_hidden, exact_h = add_and_normalise(rounded, *given, request.norm, *last)
    coded_hidden, coded_h = all_reduce_with_wire(partials, *given, request.norm, request.wire, *last)
    coded_sum = sums_of_owners(partials, WIRES[request.wire].sums)
    errors = {"sum": _compared(coded_sum, rounded, coded_sum, true_sum)}
    if call.hidden.dtype != FP8:
        errors["hidden"] = _compared(call.hidden, exact_hidden, coded_hidden, true_hidden)
    if request.residual_out != "none":
        kept = call.residual
        if request.residual_out == "sharded":
            kept = torch.cat(_of_ranks(kept, group))[:tokens]
        errors["residual"] = _compared(kept, exact_h, coded_h, true_h)
    return errors


def _compared(ours: torch.Tensor, exact: torch.Tensor, reference: torch.Tensor, true: torch.Tensor) -> dict[str, float]:
    budget = BUDGET_FACTOR * relative_error(reference, true)
    return {"error": relative_error(ours, true), "exact_error": relative_error(exact, true), "budget": budget}


def _of_ranks(own: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    of_ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(of_ranks, own.contiguous(), group=group)
    return of_ranks
