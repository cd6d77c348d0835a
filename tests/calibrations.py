"""A calibration that nobody measured, for tests."""

from __future__ import annotations

from tw_compile.calibration import Calibration, MeasuredOn
from tw_compile.gating import Entry, Source, Table
from tw_compile.gating.facts import Node
from tw_compile.kernels.transports.selection import Step

SM90, MULTICAST = Node((9, 0), False), Node((9, 0), True)
HERE = MeasuredOn("A GPU", "sm90", 8, True, False, "570.1", "2.11", "abc")
SOURCE = Source("measured_tp8", "measured", ("8x A GPU", "torch 2.11", "2026-11-24", "tw_compile.calibrate"))
LEFT = Entry(8, "nccl", 0, None, "left", None, SOURCE)
STEPS = (Step(8, 4096, "push_one_shot", 128), Step(8, 8192, "push_two_shot", 128))
FOUND = Calibration(
    HERE, Table("calibration", "sm90", (LEFT,)), STEPS, ("stream is left out: no",), ({"label": "a"},), (2.5, 7.0)
)
