"""Rows of the report: what was measured, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tw_compile.benchmark.layer.variants import FUSED, NO_COMMUNICATION, PLANNED, SWEPT
from tw_compile.harness.rows import Outcome, best_peer, csv_of
from tw_compile.kernels.collective.wires import EXACT


@dataclass
class LayerRow:
    """One variant at one number of tokens.

    Attributes:
        kind: "ours", "peer" or "bound".
        nbytes: Bytes of one rank's message.
        all_reduces: How many all_reduces the graph has. A fused operator does ``fused`` of them.
        reason: Why there is no time, or a remark about the row.
        numerics: "ok", "failed", or "not checked" where the outputs were not compared.
        hidden_error: The relative error of the normalised output against float64, on the worst rank. ``residual_error`` is
            the same of the residual stream.
        peak_bytes: What one run allocates beyond weights and input at its peak; without symmetric memory, which is
            allocated once.
        p50_us: Median microseconds a layer, or a run of the model, of the slowest rank; p20 and p80 likewise. None without
            a time.
        speedup: The best peer's median time divided by this one's; ours only.
        best_peer: The label of that peer.
        communication_hidden: The best peer needs longer than the bound without communication. This is the share of the
            difference that ours saves; ours only.
        wire: How rows of fused sums travel. The error budget of rows in codes is the error of the same codes in torch.
        of_exact: The median time of the same variant with exact rows divided by this row's; only for rows with a wire.
        split: What the halves are, or why there are none; None where no split was asked for.
        gemms: The GEMMs that leave SMs to calls, and how many, by window; None where none does. Separate GEMMs of one input
            have a number each, and GEMMs that are computed as one have one number. When a graph is compiled, times decide.
    """

    label: str
    kind: str
    tokens: int
    nbytes: int
    outcome: Outcome
    reason: str | None = None
    numerics: str = "not checked"
    all_reduces: int | None = None
    fused: int | None = None
    hidden_error: float | None = None
    residual_error: float | None = None
    peak_bytes: int | None = None
    p20_us: float | None = None
    p50_us: float | None = None
    p80_us: float | None = None
    speedup: float | None = None
    best_peer: str | None = None
    communication_hidden: float | None = None
    split: str | None = None
    gemms: str | None = None
    wire: str = EXACT
    of_exact: float | None = None

    @property
    def is_swept(self) -> bool:
        """Whether the row is there only for comparison with the planned split."""
        return self.label.startswith(SWEPT)


def complete(rows: list[LayerRow], device: str) -> list[LayerRow]:
    """The rows of one number of tokens with everything that follows from their times.

    Times of gloo ranks on a CPU say nothing about speed, so nothing is derived from them.
    """
    if device == "cuda":
        _compare_wires(rows)
    peer = best_peer(rows)
    if device != "cuda" or peer is None or peer.p50_us is None:
        return rows
    alone = next((row.p50_us for row in rows if row.label == NO_COMMUNICATION), None)
    for row in rows:
        if row.kind == "ours" and row.numerics == "ok" and row.p50_us is not None:
            row.speedup, row.best_peer = peer.p50_us / row.p50_us, peer.label
            if alone is not None and alone < peer.p50_us:
                row.communication_hidden = (peer.p50_us - row.p50_us) / (peer.p50_us - alone)
    return rows


def _compare_wires(rows: list[LayerRow]) -> None:
    times = {row.label: row.p50_us for row in rows}
    for row in rows:
        exact = times.get(row.label.removesuffix(f"-{row.wire}"))
        if row.wire != EXACT and row.p50_us is not None and exact is not None:
            row.of_exact = exact / row.p50_us


def sweeps(rows: list[LayerRow]) -> list[dict[str, Any]]:
    """For each number of tokens, what the plan chose beside the fastest choice of all that were timed. One is not to split.

    ``excess``: how much longer what was planned takes, as a share.
    """
    swept = []
    for tokens in dict.fromkeys(row.tokens for row in rows):
        timed = {row.label: row for row in rows if row.tokens == tokens and row.p50_us is not None}
        planned = timed.get(PLANNED.label)
        others = [row for row in timed.values() if row.is_swept or row.label == FUSED.label]
        if planned is None or planned.p50_us is None or not others:
            continue
        best = min((planned, *others), key=lambda row: row.p50_us or math.inf)
        assert best.p50_us is not None
        swept.append(
            {
                "tokens": tokens,
                "planned": planned.split,
                "planned_us": planned.p50_us,
                "best": best.split or "off",
                "best_us": best.p50_us,
                "compared": 1 + len(others),
                "excess": planned.p50_us / best.p50_us - 1.0,
            }
        )
    return swept


def rows_of(report: dict[str, Any]) -> list[LayerRow]:
    return [LayerRow(**row) for row in report["rows"]]


def as_csv(report: dict[str, Any]) -> str:
    """CSV with one line for each variant and number of tokens, each with the machine and the versions it was measured with."""
    asked = ("model", "world_size", "dtype", "batch", "layers", "repeats", "seed")
    return csv_of(report, ("command", "machine", "device", "device_name", *asked))
