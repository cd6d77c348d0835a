"""Rows of the report: what the engines measured, and what follows from it. Imports neither torch nor vLLM."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tw_compile.benchmark.vllm.spec import VariantKind
from tw_compile.benchmark.vllm.traces import ACCURACY, Trace
from tw_compile.harness.rows import csv_of
from tw_compile.kernels.collective.wires import EXACT

NOISE = 3.0
"""Standard errors by which an agreement may be lower than the control's."""
BUDGET = 1.1
"""Our error may be at most this many times the error of "off": the budget of :mod:`tw_compile.testing.error_budget`."""
WIRE_BUDGET = 1.05
"""The budget of ours with a wire, which changes numbers on purpose."""
UNRELATED = 0.5
"""A reference that differs from off by more than this share of its own standard deviation has other weights."""
NO_BASELINE = "no baseline ran"
NO_CONTROL = "no control ran: nothing says how often the tokens of vLLM alone differ"
NO_REFERENCE = "no reference ran beside this and off: nothing says how far from exact vLLM alone is"


@dataclass
class VllmRow:
    """One variant on one trace.

    Attributes:
        kind: "baseline", "control", "ours", "bound" or "reference".
        trace: "prefill", "mixed", "decode", or "accuracy", which has no times.
        chunk: ``max_num_batched_tokens``.
        requests: How many requests the trace has. Those of a decode trace run side by side.
        reason: Why there are no times.
        tokens_per_s: Median over the rounds: prompts' tokens (prefill), all tokens (mixed), or the requests by the median time
            between tokens (decode); ``slowest`` and ``fastest`` are those of single rounds.
        rounds: The same of each timed round, in order.
        ttft_p50_ms: Milliseconds from the start, when all requests are there, to a request's first token.
        tpot_p50_ms: Milliseconds between the later tokens of a request.
        startup_s: Seconds of vLLM's constructor with empty caches. ``compile_s`` is the part that torch.compile takes.
        peak_bytes: Peak of torch's allocator, on the GPU where it is highest.
        compared: Greedy tokens that follow the same tokens as the baseline's. ``differing`` of them differ from the baseline's.
        logprob_error: Root mean square of the differences between the prompts' log-probabilities and the reference's; only
            "accuracy" has it. ``of_off`` is this error divided by the baseline's.
        speedup: Tokens/s divided by the baseline's; ours only, and only where :func:`judge` finds ours as good as vLLM alone.
        speedup_low: The speed-up of our slowest round over the baseline's fastest; ``speedup_high`` is the other way round.
        refused: Why there is no speed-up.
        wire: How rows of large messages travel.
        flashinfer_importable: Whether vLLM found FlashInfer's communication.
        flashinfer_fusion_bytes: Up to how many bytes vLLM's own fusion, by FlashInfer, served this engine; 0: it was off.
    """

    label: str
    kind: VariantKind
    trace: str
    chunk: int
    requests: int
    reason: str | None = None
    tokens_per_s: float | None = None
    slowest: float | None = None
    fastest: float | None = None
    rounds: list[float] = field(default_factory=list)
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p99_ms: float | None = None
    startup_s: float | None = None
    compile_s: float | None = None
    peak_bytes: int | None = None
    compared: int | None = None
    differing: int | None = None
    agreement: float | None = None
    logprob_error: float | None = None
    of_off: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    refused: str | None = None
    wire: str = EXACT
    flashinfer_importable: bool | None = None
    flashinfer_fusion_bytes: int | None = None

    @property
    def tokens(self) -> int:
        """The x of the plots: the chunk size, or a decode trace's batch."""
        return self.requests if self.trace == "decode" else self.chunk


def measure(row: VllmRow, trace: Trace, rounds: Sequence[dict[str, Any]]) -> None:
    """Fill in what follows from the times of ``rounds``, see :mod:`tw_compile.benchmark.vllm.engine`."""
    rates = [_rate(trace, times) for times in rounds]
    row.tokens_per_s, row.slowest, row.fastest = statistics.median(rates), min(rates), max(rates)
    row.rounds = rates
    row.ttft_p50_ms, row.ttft_p99_ms = _percentiles([time for times in rounds for time in times["first"]])
    between = [time for times in rounds for time in times["between"]]
    if between:
        row.tpot_p50_ms, row.tpot_p99_ms = _percentiles(between)


def _rate(trace: Trace, times: dict[str, Any]) -> float:
    if trace.kind == "decode":
        return len(trace.prompts) / statistics.median(times["between"])
    count = sum(trace.prompts) + (sum(trace.outputs) if trace.kind == "mixed" else 0)
    return count / times["seconds"]


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
    return float(p50), float(p99)


def compare(tokens: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Count the tokens that follow equal tokens, and how many of these differ: at most one for each request.

    After the first difference, the two requests continue different texts, so nothing more is compared.
    """
    compared = differing = 0
    for own, other in zip(tokens, others, strict=True):
        equal = next((at for at, pair in enumerate(zip(own, other, strict=True)) if pair[0] != pair[1]), None)
        compared += len(own) if equal is None else equal + 1
        differing += equal is not None
    return compared, differing


def noise(compared: int, differing: int, compared_of_control: int, differing_of_control: int) -> float:
    """By how much two measured agreements may differ though the true rate is the same: ``NOISE`` standard errors."""
    both = compared + compared_of_control
    rate = (differing + differing_of_control) / both
    return NOISE * math.sqrt(rate * (1 - rate) * (1 / compared + 1 / compared_of_control))


def logprob_error(logprobs: Sequence[float], reference: Sequence[float]) -> float:
    """Root of the mean square of the differences."""
    return float(np.sqrt(np.mean(np.subtract(logprobs, reference) ** 2)))


def unrelated(logprobs: Sequence[float], reference: Sequence[float]) -> str | None:
    """Why ``reference`` can't be a reference for the baseline's ``logprobs``; None if it can."""
    error, deviation = logprob_error(logprobs, reference), float(np.std(reference))
    if error <= UNRELATED * deviation:
        return None
    return f"no reference: {error:.3g} away from off (rms), and its log-probabilities vary by {deviation:.3g} (std)"


def judge(rows: Sequence[VllmRow], world_size: int) -> None:
    """Fill in agreements and errors, and the speed-ups of variants that are good enough.

    A variant's log-probabilities must be as near to the reference's as off's are, within ``BUDGET``, or ``WIRE_BUDGET`` with a
    wire. With a wire nothing else is checked, because codes change tokens more often than another order of a sum does. Without
    a wire and with more than two ranks, the variant's tokens must agree with off's as often as a control's do, within noise,
    for each trace and for all traces together. If a reference ran, a control need not.
    """
    errors = {row.label: row.logprob_error for row in rows if row.trace == ACCURACY and row.reason is None}
    off = next((errors.get(row.label) for row in rows if row.kind == "baseline"), None)
    referred = any(row.kind == "reference" and row.label in errors for row in rows)
    for row in rows:
        if row.compared and row.differing is not None:
            row.agreement = 1 - row.differing / row.compared
        if row.logprob_error is not None and off:
            row.of_off = row.logprob_error / off
    for row in rows:
        if row.kind != "ours" or row.tokens_per_s is None:
            continue
        here = [
            other
            for other in rows
            if (other.trace, other.chunk, other.requests) == (row.trace, row.chunk, row.requests)
        ]
        baseline = next((other for other in here if other.kind == "baseline" and other.tokens_per_s is not None), None)
        if baseline is None:
            row.refused = NO_BASELINE
            continue
        # A sum of two numbers has one order. So with two ranks every all_reduce gives the same bits, controls say nothing
        # about rounding, and all depends on the reference.
        row.refused = None
        if referred or world_size == 2 or row.wire != EXACT:
            budget = BUDGET if row.wire == EXACT else WIRE_BUDGET
            row.refused = _inexact(errors.get(row.label), off if referred else None, budget)
        controls = _controls(rows)
        if row.refused is None and world_size > 2 and row.wire == EXACT and (controls or not referred):
            everywhere = [other for other in rows if other.label == row.label]
            row.refused = _refusal([row], _controls(here)) or _refusal(everywhere, controls, " over all traces")
        if row.refused is None:
            assert baseline.tokens_per_s and baseline.fastest and baseline.slowest and row.slowest and row.fastest
            row.speedup = row.tokens_per_s / baseline.tokens_per_s
            row.speedup_low = row.slowest / baseline.fastest
            row.speedup_high = row.fastest / baseline.slowest


def _inexact(error: float | None, off: float | None, budget: float) -> str | None:
    """Why log-probabilities with this error are not as good as those of vLLM itself."""
    if error is None or off is None:
        return NO_REFERENCE
    if error <= budget * off:
        return None
    return f"its log-probabilities are {error:.3g} away from float32's (rms), off's {off:.3g}, and {budget}x is allowed"


def _controls(rows: Iterable[VllmRow]) -> dict[str, list[VllmRow]]:
    controls: dict[str, list[VllmRow]] = {}
    for row in rows:
        if row.kind == "control":
            controls.setdefault(row.label, []).append(row)
    return controls


def _refusal(ours: Sequence[VllmRow], controls: dict[str, list[VllmRow]], where: str = "") -> str | None:
    """Why the tokens of ``ours`` are not as good as those of vLLM itself, by the control that agrees least."""
    counts = {label: _counts(rows) for label, rows in controls.items()}
    counts = {label: count for label, count in counts.items() if count[0]}
    if not counts:
        return NO_CONTROL
    label, control = max(counts.items(), key=lambda item: item[1][1] / item[1][0])
    own = _counts(ours)
    allowed = noise(*own, *control)
    if own[1] / own[0] <= control[1] / control[0] + allowed:
        return None
    agree, expected = 1 - own[1] / own[0], 1 - control[1] / control[0]
    return (
        f"{agree:.3%} of its tokens{where} are those of off, of {label} {expected:.3%}, "
        f"and no more than {allowed:.3%} can be noise"
    )


def _counts(rows: Sequence[VllmRow]) -> tuple[int, int]:
    timed = [row for row in rows if row.compared]
    return sum(row.compared or 0 for row in timed), sum(row.differing or 0 for row in timed)


def failures(rows: Iterable[VllmRow]) -> list[VllmRow]:
    """The rows without times, and rows of ours that are not good enough. To leave out a variant is no failure."""
    fine = (None, NO_BASELINE, NO_CONTROL, NO_REFERENCE)
    return [row for row in rows if row.reason is not None or row.refused not in fine]


def rows_of(report: dict[str, Any]) -> list[VllmRow]:
    return [VllmRow(**row) for row in report["rows"]]


def as_csv(report: dict[str, Any]) -> str:
    """CSV with one line for each variant and trace, each with the machine and the versions it was measured with.

    Rates of rounds are in one column, with spaces between them.
    """
    rows = [row | {"rounds": " ".join(f"{rate:.0f}" for rate in row["rounds"])} for row in report["rows"]]
    names = ("machine", "device_name", "model", "world_size", "dtype", "layers", "repeats", "seed")
    return csv_of(report, names, rows)
