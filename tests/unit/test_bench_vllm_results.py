"""What follows from the measurements of ``tw-compile bench vllm``: rates, agreements, errors, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tw_compile.benchmark.vllm.results import (
    NO_BASELINE,
    NO_CONTROL,
    NO_REFERENCE,
    VllmRow,
    compare,
    failures,
    judge,
    logprob_error,
    measure,
    noise,
    unrelated,
)
from tw_compile.benchmark.vllm.traces import ACCURACY, Trace


def vllm_row(
    label: str, kind: Any, rate: float | None, compared: int = 1000, differing: int = 0, **rest: Any
) -> VllmRow:
    found = VllmRow(label, kind, "mixed", 1024, 64, **rest)
    if rate is not None:
        found.tokens_per_s, found.slowest, found.fastest = rate, 0.9 * rate, 1.1 * rate
        if kind != "baseline":
            found.compared, found.differing = compared, differing
    return found


def judged(*rows: VllmRow, world_size: int = 4) -> dict[str, VllmRow]:
    judge(rows, world_size)
    return {row.label: row for row in rows if row.trace != ACCURACY}


def accuracy(label: str, kind: Any, error: float | None = None, **rest: Any) -> VllmRow:
    return VllmRow(label, kind, ACCURACY, 8192, 32, logprob_error=error, **rest)


def test_tokens_are_compared_up_to_the_first_difference() -> None:
    assert compare([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]]) == (5, 0)
    assert compare([[1, 2, 3], [4, 5]], [[1, 9, 3], [8, 5]]) == (3, 2)


def test_rates_and_percentiles() -> None:
    rounds = [
        {"seconds": 2.0, "first": [0.1, 0.3], "between": [0.01, 0.03]},
        {"seconds": 1.0, "first": [0.1, 0.3], "between": [0.01, 0.05]},
        {"seconds": 4.0, "first": [0.1, 0.3], "between": [0.01, 0.01]},
    ]
    rates = {}
    for kind in ("prefill", "mixed", "decode"):
        row = VllmRow("off", "baseline", kind, 64, 2)
        measure(row, Trace(kind, (30, 10), (5, 5)), rounds)
        rates[kind] = (row.tokens_per_s, row.slowest, row.fastest)
        assert row.rounds[1] == row.fastest or kind == "decode"
        assert (len(row.rounds), min(row.rounds)) == (3, row.slowest)
        assert (row.ttft_p50_ms, row.tpot_p50_ms) == pytest.approx((200, 10))
        assert row.tpot_p99_ms == pytest.approx(49)
    assert rates["prefill"] == (20, 10, 40)
    assert rates["mixed"] == (25, 12.5, 50)
    assert rates["decode"] == pytest.approx((2 / 0.02, 2 / 0.03, 2 / 0.01))
    single = VllmRow("off", "baseline", "prefill", 64, 2)
    measure(single, Trace("prefill", (30, 10), (1, 1)), [{"seconds": 1.0, "first": [0.1, 0.1], "between": []}])
    assert single.tpot_p50_ms is None and single.ttft_p99_ms == pytest.approx(100)


def test_speedup_where_tokens_agree_as_often_as_the_controls() -> None:
    rows = judged(
        vllm_row("off", "baseline", 100.0),
        vllm_row("fuse", "ours", 120.0, 1000, 12),
        vllm_row("off-nccl", "control", 80.0, 1000, 10),
    )
    assert rows["fuse"].speedup == pytest.approx(1.2) and rows["fuse"].refused is None
    assert rows["fuse"].speedup_low == pytest.approx(108 / 110)
    assert rows["fuse"].speedup_high == pytest.approx(132 / 90)
    assert rows["fuse"].agreement == pytest.approx(0.988)
    assert rows["off-nccl"].speedup is None and not failures(rows.values())


def test_no_speedup_where_tokens_agree_less_often_than_noise_allows() -> None:
    rows = judged(
        vllm_row("off", "baseline", 100.0),
        vllm_row("fuse", "ours", 120.0, 1000, 40),
        vllm_row("off-nccl", "control", 80.0, 1000, 10),
        vllm_row("off-nccl-tree", "control", 80.0, 1000, 2),
    )
    fuse = rows["fuse"]
    assert fuse.speedup is None and fuse.refused is not None
    assert (
        "96.000% of its tokens are those of off, of off-nccl 99.000%" in fuse.refused
    )  # the control that agrees least
    assert failures(rows.values()) == [fuse]


def test_few_differences_on_every_trace_are_many_together() -> None:
    rows = []
    for requests in range(1, 21):
        for label, kind, differing in (("off", "baseline", 0), ("fuse", "ours", 6), ("off-nccl", "control", 2)):
            row = vllm_row(label, kind, 100.0, 1000, differing)
            row.requests = requests
            rows.append(row)
    judge(rows, 4)
    refused = {row.refused for row in rows if row.kind == "ours"}
    assert len(refused) == 1 and "over all traces" in str(refused)
    judge(alone := rows[:3], 4)
    assert alone[1].refused is None


def test_noise_is_three_standard_errors_of_the_difference() -> None:
    assert noise(400, 4, 400, 4) == pytest.approx(3 * (0.01 * 0.99 * 2 / 400) ** 0.5)
    assert noise(64, 0, 64, 0) == 0.0


def test_no_speedup_without_a_baseline_or_a_control() -> None:
    alone = judged(vllm_row("off", "baseline", 100.0), vllm_row("fuse", "ours", 120.0))["fuse"]
    assert (alone.speedup, alone.refused) == (None, NO_CONTROL)
    lost = judged(
        vllm_row("off", "baseline", None, reason="vLLM ended with 1"),
        vllm_row("fuse", "ours", 120.0),
        vllm_row("off-nccl", "control", 100.0),
    )
    assert (lost["fuse"].speedup, lost["fuse"].refused) == (None, NO_BASELINE)
    assert failures([alone]) == [] and failures(lost.values()) == [lost["off"]]


def test_errors_against_the_reference_are_root_mean_squares() -> None:
    assert logprob_error([1.0, 2.0, 3.0], [1.0, 5.0, 7.0]) == pytest.approx((25 / 3) ** 0.5)


@pytest.mark.parametrize(
    ("off", "ours", "good"), [(0.01, 0.0109, True), (0.01, 0.0111, False), (0.01, 0.002, True), (0.01, math.nan, False)]
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_log_probabilities_may_be_as_far_from_the_references_as_1_1x_offs(
    off: float, ours: float, good: bool, world_size: int
) -> None:
    everything = [
        accuracy("off", "baseline", off),
        accuracy("fuse", "ours", ours),
        accuracy("reference", "reference"),
        vllm_row("off", "baseline", 100.0),
        vllm_row("fuse", "ours", 120.0, 1000, 10),
        vllm_row("off-nccl", "control", 80.0, 1000, 10),
    ]
    fuse = judged(*everything, world_size=world_size)["fuse"]
    assert (fuse.speedup is not None, fuse.refused is None, failures(everything) == []) == (good,) * 3
    assert good or f"{ours:.3g} away from float32's (rms), off's 0.01" in str(fuse.refused)
    assert everything[1].of_off == pytest.approx(ours / off, nan_ok=True) and everything[2].of_off is None


def test_with_two_ranks_the_controls_tokens_say_nothing_and_with_more_they_do() -> None:
    def refused(world_size: int) -> str | None:
        return judged(
            accuracy("off", "baseline", 0.01),
            accuracy("fuse", "ours", 0.01),
            accuracy("reference", "reference"),
            vllm_row("off", "baseline", 100.0),
            vllm_row("fuse", "ours", 120.0, 1000, 90),
            vllm_row("off-nccl", "control", 80.0, 1000, 10),
            world_size=world_size,
        )["fuse"].refused

    assert refused(2) is None and "of off-nccl 99.000%" in str(refused(4))


@pytest.mark.parametrize(("error", "good"), [(0.0109, True), (0.0111, False)])
def test_where_a_reference_ran_four_ranks_need_no_control(error: float, good: bool) -> None:
    fuse = judged(
        accuracy("off", "baseline", 0.01),
        accuracy("fuse", "ours", error),
        accuracy("reference", "reference"),
        vllm_row("off", "baseline", 100.0),
        vllm_row("fuse", "ours", 120.0, 1000, 90),
        world_size=4,
    )["fuse"]
    assert (fuse.speedup == pytest.approx(1.2)) if good else (fuse.speedup is None and "rms" in str(fuse.refused))


@pytest.mark.parametrize("missing", ["off", "fuse", "reference"])
def test_no_speedup_with_two_ranks_where_the_reference_has_nothing_to_compare(missing: str) -> None:
    rows = [accuracy("off", "baseline", 0.01), accuracy("fuse", "ours", 0.01), accuracy("reference", "reference")]
    timed = (
        vllm_row("off", "baseline", 100.0),
        vllm_row("fuse", "ours", 120.0),
        vllm_row("off-nccl", "control", 80.0),
    )
    fuse = judged(*(row for row in rows if row.label != missing), *timed, world_size=2)["fuse"]
    assert (fuse.speedup, fuse.refused) == (None, NO_REFERENCE) and not failures(timed)
    failed = accuracy(missing, next(row.kind for row in rows if row.label == missing), reason="vLLM ended with 1")
    fuse = judged(*(row for row in rows if row.label != missing), failed, *timed, world_size=2)["fuse"]
    assert (fuse.speedup, fuse.refused) == (None, NO_REFERENCE)


def test_a_reference_of_other_weights_is_none() -> None:
    reference = [-1.0, -2.0, -3.0, -4.0]
    assert unrelated([-1.1, -2.1, -2.9, -3.9], reference) is None
    assert unrelated([-4.0, -1.0, -2.0, -3.0], reference) == (
        "no reference: 1.73 away from off (rms), and its log-probabilities vary by 1.12 (std)"
    )
