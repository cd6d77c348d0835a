"""What the check of a calibration on GPUs says of the times that it is given, and what tables it leaves."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from gpu import calibrated_choices as checked
from gpu.calibrated_choices import compared, judged, table, without_tables

from tw_compile.benchmark.results import Row
from tw_compile.calibration import Calibration, MeasuredOn, text_of
from tw_compile.gating.table import Table
from tw_compile.kernels.transports.selection import shipped_steps
from tw_compile.tuning.tables import shipped_gate

CHOSEN: dict[int, checked.Choice] = {1024: ("push_one_shot", "", 128), 4096: (None, "nccl+norm", None)}


def row(label: str, nbytes: int, us: float, algorithm: str | None = None, numerics: str = "ok") -> Row:
    kind, sms = ("peer", None) if algorithm is None else ("ours", 128)
    form = ("replicated bfloat16", sms, "timed", None, numerics, us, us, us)
    return Row(label, kind, 1, nbytes // 2, nbytes, 1, *form, algorithm=algorithm, max_sms=sms)  # type: ignore[arg-type]


ROWS = [
    row("nccl+norm", 1024, 30.0),
    row("tw-push-one-shot", 1024, 5.1, "push_one_shot"),
    row("tw-push-two-shot", 1024, 5.0, "push_two_shot"),
    row("tw-stream", 1024, 1.0, "stream", numerics="failed"),
    row("nccl+norm", 4096, 10.0),
    row("tw-push-two-shot", 4096, 9.0, "push_two_shot"),
]


def test_a_choice_is_held_against_the_fastest_that_is_right() -> None:
    small, large = compared(ROWS, CHOSEN)
    assert (small["chosen_us"], small["best"], small["best_us"]) == (5.1, "tw-push-two-shot", 5.0)
    assert small["slower"] == pytest.approx(0.02)
    assert (large["chosen"], large["slower"]) == ("nccl+norm", pytest.approx(1 / 9))
    (missing,) = compared(ROWS, {1024: ("multimem", "", 16)})
    assert missing["chosen_us"] is None and missing["slower"] is None


def found(**values: Any) -> dict[str, Any]:
    here = MeasuredOn("A GPU", "sm90", 2, True, False, "570.1", "2.11", "abc")
    text = text_of(Calibration(here, Table("calibration", "sm90", ()), (), ("stream is left out: no",), (), (2.5, 7.0)))
    return {
        "calibrations": [text, text],
        "choices": [CHOSEN, CHOSEN],
        "rows": [asdict(each) for each in ROWS],
        "device_name": "A GPU",
        "multicast": False,
        "kept_bytes": 0,
        "compile_seconds": 12.0,
        "bench_seconds": 20.0,
        **values,
    }


def test_what_is_not_as_it_should_be_is_named() -> None:
    run = judged(found())
    (line,) = run["failures"]
    assert line == "4.0 KiB: nccl+norm is 11.1% slower than tw-push-two-shot"
    assert run["calibration"]["seconds"] == [2.5, 7.0]
    slow = json.dumps(json.loads(found()["calibrations"][0]) | {"seconds": [4.0, 1.0]})
    other = {**CHOSEN, 1024: ("stream", "", 128)}
    bad = found(calibrations=[slow, None], choices=[CHOSEN, other], multicast=True)
    assert judged(bad)["failures"][:4] == [
        "measuring took 4.00 s, limit 3.5 s",
        "ranks have different calibrations",
        "ranks choose differently",
        "multicast is on",
    ]
    assert judged(found(calibrations=[None, None]))["failures"][0] == "nothing was measured"
    shown = "\n".join(table("NVLink", 2, run))
    for part in ("measured in 2.50 s after 7.0 s", "push_one_shot (128 SMs)", "2.0%", "stream is left out: no", line):
        assert part in shown


def test_without_tables_nothing_shipped_counts() -> None:
    def measured() -> bool:
        return any(entry.source.kind == "measured" for entry in shipped_gate("sm90").entries(2, "nccl"))

    assert measured() and shipped_steps("NVIDIA H200", 2)
    with without_tables():
        assert not measured() and shipped_steps("NVIDIA H200", 2) == ()
    assert measured() and shipped_steps("NVIDIA H200", 2)
