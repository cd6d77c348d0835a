"""Rows of the report: what was measured, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tw_compile.benchmark.labels import HOST_COPIES
from tw_compile.benchmark.spec import TWO_SHOT_BOUND, BenchSpec, MessageSize, bounds_us, bus_bytes
from tw_compile.harness.rows import Outcome, best_peer, csv_of
from tw_compile.kernels.collective.wires import EXACT


@dataclass
class Row:
    """One contender at one size.

    Attributes:
        kind: "ours", "peer" or "bound".
        nbytes: Bytes of one rank's message.
        sets: Input sets over which the calls rotate.
        num_sms: SMs of the communication, where it is known.
        reason: Why there is no time.
        numerics: "ok", "failed", or "not checked" where the results were not compared.
        p50_us: Median microseconds a call, of the slowest rank; p20 and p80 likewise. None without a time.
        bus_gb_per_s: 2 (N-1)/N of the message's bytes divided by the median time.
        share_of_bound: The bound divided by the median time. The bound is the links' two-shot time or, where rows go through
            host memory, the time of bare copies of as many bytes. It is the time of exact rows, whatever the wire.
        speedup: The best peer's median time divided by this row's; ours only, where it gives what the peers give. Peers whose
            results are float8 are left out.
        best_peer: The label of that peer.
        algorithm: The kernel's name in tables of kernels; None where a table can't name it. ``max_sms``: SMs that it may have.
        quantises: Whether normalised rows are float8. These are fewer bytes than the peers' rows, so there is no speed-up.
        chosen: What the gated contender ran, and the table that says so; None for other contenders.
        regret: The gated median time divided by that of ``best``, the fastest contender with the same work, less 1.
        norm: The norm behind the sum. The peers have RMSNorm; with another norm there is no speed-up.
        gemm_columns: Columns of the weights of a matmul behind the call. It is part of the time, so there is no speed-up.
        prefetch_bytes: How many bytes of these weights the call brings into the L2 cache.
        at_once: How many calls were on their way at a time. The time of a call is that of all calls by their number.
        wire: How rows travel. Codes are fewer bytes than the peers' rows, and not as exact, so they have no speed-up.
    """

    label: str
    kind: str
    tokens: int
    hidden: int
    nbytes: int
    sets: int
    residual_form: str
    num_sms: int | None
    outcome: Outcome
    reason: str | None
    numerics: str
    p20_us: float | None = None
    p50_us: float | None = None
    p80_us: float | None = None
    bus_gb_per_s: float | None = None
    share_of_bound: float | None = None
    speedup: float | None = None
    best_peer: str | None = None
    algorithm: str | None = None
    max_sms: int | None = None
    quantises: bool = False
    chosen: str | None = None
    regret: float | None = None
    best: str | None = None
    wire: str = EXACT
    norm: str = "rms_norm"
    gemm_columns: int = 0
    prefetch_bytes: int = 0
    at_once: int = 1

    @property
    def gives_what_peers_give(self) -> bool:
        """Whether it has the peers' norm, exact rows that are not float8, and no matmul behind the call.

        If not, times say nothing beside the peers' times.
        """
        return not self.quantises and not self.gemm_columns and self.wire == EXACT and self.norm == "rms_norm"


def complete(rows: list[Row], size: MessageSize, spec: BenchSpec, through_host: bool = False) -> list[Row]:
    """The rows of one size with everything that follows from their times, and, on GPUs with peer access, the computed bounds.

    ``through_host``: the GPUs can't reach each other's memory. Then the bound is what bare copies took, if they took part.
    Times of gloo ranks on a CPU get no bandwidth, no share and no speed-up: they say nothing about speed.
    """
    if spec.device != "cuda":
        return rows
    bounds = {} if through_host else bounds_us(size.nbytes, spec.world_size)
    copies = next((row.p50_us for row in rows if row.label == HOST_COPIES), None)
    bound = copies if through_host else bounds[TWO_SHOT_BOUND]
    peer = best_peer(row for row in rows if not row.quantises)
    for row in rows:
        if row.p50_us is None or row.kind == "bound":
            continue
        row.bus_gb_per_s = bus_bytes(size.nbytes, spec.world_size) / row.p50_us / 1e3
        row.share_of_bound = None if bound is None else bound / row.p50_us
        comparable = row.kind == "ours" and row.numerics == "ok" and row.gives_what_peers_give
        if comparable and peer is not None and peer.p50_us is not None:
            row.speedup, row.best_peer = peer.p50_us / row.p50_us, peer.label
    return rows + [
        Row(
            label,
            "bound",
            size.tokens,
            size.hidden,
            size.nbytes,
            0,
            "",
            None,
            "computed",
            None,
            "not checked",
            p50_us=us,
        )
        for label, us in bounds.items()
    ]


def bound_of(report: dict[str, Any]) -> str:
    """What ``share_of_bound`` is a share of, in words."""
    if report.get("through_host"):
        return "bare copies of two-shot's bytes to and from host memory"
    return f"two-shot traffic at {report['link_gb_per_s']:.0f} GB/s a direction"


def rows_of(report: dict[str, Any]) -> list[Row]:
    return [Row(**row) for row in report["rows"]]


def as_csv(report: dict[str, Any]) -> str:
    """CSV with one line for each contender and size, each with the machine and the versions it was measured with."""
    names = ("machine", "device", "device_name", "world_size", "dtype", "calls", "repeats", "rotate_from", "seed")
    return csv_of(report, names)
