"""Rows of the report of ``bench beside``: five times of one size, and what each side costs the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tw_compile.benchmark.beside.spec import CALL_AT_MOST, GEMM_AT_MOST
from tw_compile.benchmark.spec import ContenderKind
from tw_compile.harness.measure import percentiles
from tw_compile.harness.rows import Outcome, csv_of

TIMED = ("gemm", "gemm_leaving", "gemm_beside", "call", "call_beside")
"""What is timed, as in the names of a row's fields: the GEMM on all SMs, the GEMM that leaves the call's SMs, the latter beside
calls; the call alone, and beside GEMMs that leave its SMs."""


@dataclass
class BesideRow:
    """Calls of one size over one transport, and one GEMM.

    Attributes:
        nbytes: Bytes of one rank's message.
        transport: What carries the calls; empty where nothing can.
        kernel: The kernel that was chosen, where the transport has several.
        sms: SMs that the call may have, and that the GEMM leaves. The call takes ``call_sms`` of them.
        sets: Input sets over which the calls rotate.
        reason: Why there is no time, or no ratio.
        numerics: "ok", "failed", or "not checked" where nothing ran. Also calls beside GEMMs are checked, and the products.
        calls, gemms: How many are timed at once.
        covering_calls, covering_gemms: How many ran beside what was timed, but for the first one.
        call_lead_us, call_tail_us: How long GEMMs ran before the timed calls began and after they ended, at least, over all
            runs and ranks. Below 0: the GEMMs ended earlier.
        gemm_lead_us, gemm_tail_us: The same of calls before and after the timed GEMMs.
        covered: Whether the other side ran all the time; None where nothing ran.
        kind: ``bound`` is of bare copies of the call's bytes by copy engines, in the place of the call.
        gated: Whether the GEMM is of gate and up, two matrices of one input.
        gemm_p50_us: Median microseconds of a GEMM, of the slowest rank; p20 and p80 likewise, and so for all of ``TIMED``.
        gemm_factor: The GEMM beside calls against the same GEMM alone, which leaves as many SMs; medians.
        gemm_factor_of_all_sms: The GEMM beside calls against the GEMM alone on all SMs.
        call_factor: The call beside GEMMs against the same call alone.
    """

    tokens: int
    hidden: int
    nbytes: int
    transport: str
    sms: int
    gemm_inner: int
    gemm_columns: int
    gated: bool
    kind: ContenderKind = "ours"
    kernel: str | None = None
    call_sms: int | None = None
    residual_form: str | None = None
    sets: int = 0
    outcome: Outcome = "timed"
    reason: str | None = None
    numerics: str = "not checked"
    calls: int | None = None
    gemms: int | None = None
    covering_calls: int | None = None
    covering_gemms: int | None = None
    call_lead_us: float | None = None
    call_tail_us: float | None = None
    gemm_lead_us: float | None = None
    gemm_tail_us: float | None = None
    covered: bool | None = None
    gemm_p20_us: float | None = None
    gemm_p50_us: float | None = None
    gemm_p80_us: float | None = None
    gemm_leaving_p20_us: float | None = None
    gemm_leaving_p50_us: float | None = None
    gemm_leaving_p80_us: float | None = None
    gemm_beside_p20_us: float | None = None
    gemm_beside_p50_us: float | None = None
    gemm_beside_p80_us: float | None = None
    call_p20_us: float | None = None
    call_p50_us: float | None = None
    call_p80_us: float | None = None
    call_beside_p20_us: float | None = None
    call_beside_p50_us: float | None = None
    call_beside_p80_us: float | None = None
    gemm_factor: float | None = None
    gemm_factor_of_all_sms: float | None = None
    call_factor: float | None = None

    @property
    def size(self) -> str:
        return f"[{self.tokens}, {self.hidden}]"

    @property
    def gemm_shape(self) -> str:
        matrix = f"[{self.gemm_inner}, {self.gemm_columns}]"
        return f"[{self.tokens}, {self.gemm_inner}] x {matrix}" + (f" and {matrix}" if self.gated else "")

    def span(self, timed: str) -> tuple[float | None, float | None, float | None]:
        """p20, p50 and p80 of one of ``TIMED``."""
        p20, p50, p80 = (getattr(self, f"{timed}_{part}_us") for part in ("p20", "p50", "p80"))
        return p20, p50, p80

    def take(self, times: Mapping[str, Sequence[float]]) -> None:
        """Note the times of all of ``TIMED``."""
        for timed in TIMED:
            for part, us in zip(("p20", "p50", "p80"), percentiles(times[timed]), strict=True):
                setattr(self, f"{timed}_{part}_us", us)

    @property
    def within(self) -> bool | None:
        """Whether both factors are at most what is asked; None without factors, and for a bound."""
        if self.gemm_factor is None or self.call_factor is None or self.kind == "bound":
            return None
        return self.gemm_factor <= GEMM_AT_MOST and self.call_factor <= CALL_AT_MOST


def judge(row: BesideRow, failure: str | None, device: str) -> BesideRow:
    """Give a timed row its verdict, and its factors if its results are right and each side had the other one beside it.

    ``failure``: what is wrong with the results; None if they are right. Times of a CPU say nothing, so they get no factors.
    """
    if failure is not None:
        row.outcome, row.numerics, row.reason = "numerics failed", "failed", failure
        return row
    row.numerics = "ok" if row.kind == "ours" else "not checked"
    if not row.covered:
        row.reason = f"no ratio: {_uncovered(row)}"
        return row
    own, leaving, whole = row.gemm_beside_p50_us, row.gemm_leaving_p50_us, row.gemm_p50_us
    if device == "cuda" and own and leaving and whole and row.call_beside_p50_us and row.call_p50_us:
        row.gemm_factor, row.gemm_factor_of_all_sms = own / leaving, own / whole
        row.call_factor = row.call_beside_p50_us / row.call_p50_us
    return row


def _uncovered(row: BesideRow) -> str:
    """Which side was idle while the other one was timed."""
    found = []
    for covering, covered, tail in (("GEMMs", "calls", row.call_tail_us), ("calls", "GEMMs", row.gemm_tail_us)):
        if tail is not None and tail <= 0.0:
            found.append(
                f"in a run the {covering} ended {-tail:.1f} us before the {covered} that were timed beside them"
            )
    return "; ".join(found) or "in a run what was timed may have begun before the other side went on"


def failures(rows: Sequence[BesideRow], device: str) -> list[BesideRow]:
    """The rows that should have ratios and have none; all rows if nothing ran at all.

    On a CPU, which gives no ratios, an idle side is no failure.
    """
    if all(row.outcome == "not served" for row in rows):
        return list(rows)
    return [
        row
        for row in rows
        if row.outcome in ("error", "numerics failed") or (device == "cuda" and row.covered is False)
    ]


def rows_of(report: dict[str, Any]) -> list[BesideRow]:
    return [BesideRow(**row) for row in report["rows"]]


def as_csv(report: dict[str, Any]) -> str:
    """CSV with one line for each row, each with the machine and the versions it was measured with."""
    names = ("machine", "device", "device_name", "world_size", "dtype", "repeats", "seed")
    return csv_of(report, names)
