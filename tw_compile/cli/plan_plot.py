"""Plans as a picture: speed-up against tokens, and the timeline of one layer. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tw_compile.harness.plot import new_figure, save
from tw_compile.planning import Mode, Plan

WHY_FASTER_THAN_SILENT = (
    "A split layer can be faster than one without communication. Without communication every rank normalises all tokens, and "
    "in a fused layer\neach rank normalises only its share. The halves' GEMMs and attention also run on other kernels."
)
# Okabe and Ito's colours.
_HALVES = {1: "#0072B2", 2: "#D55E00"}
_LINES = (
    ("as planned", "#009E73", "o", "-"),
    ("fused, not split", "#CC79A7", "s", "--"),
    ("no communication", "#777777", None, ":"),
)


def plot(plans: Sequence[Plan], title: str, path: str) -> None:
    """Two panels, written to ``path`` (png or svg): all plans, and the windows of the split that gains most."""
    split = [plan for plan in plans if plan.mode is not Mode.OFF]
    figure, ((left, *right),) = new_figure(13 if split else 7, 4.8, 1, 2 if split else 1)
    _speedups(left, plans)
    if split:
        _timeline(right[0], max(split, key=lambda plan: plan.gain))
    if any(plan.us < plan.predicted.no_communication_us for plan in split):
        figure.text(0.01, -0.01, WHY_FASTER_THAN_SILENT, ha="left", va="top", fontsize=8, color="#555555")
    save(figure, path, title)


def _speedups(panel: Any, plans: Sequence[Plan]) -> None:
    tokens = [plan.tokens for plan in plans]
    gains = (
        [plan.gain for plan in plans],
        [plan.predicted.unfused_us / plan.predicted.fused_us for plan in plans],
        [plan.predicted.unfused_us / plan.predicted.no_communication_us for plan in plans],
    )
    for (label, colour, marker, line), values in zip(_LINES, gains, strict=True):
        panel.plot(tokens, values, label=label, color=colour, marker=marker, linestyle=line)
    panel.axhline(1.0, color="#000000", linewidth=0.6)
    panel.set_xscale("log", base=2)
    panel.set_xticks(tokens, [str(count) for count in tokens])
    panel.minorticks_off()
    panel.set(xlabel="tokens", ylabel="predicted speed-up over the unfused layer")
    panel.grid(True, color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=9)


def _timeline(panel: Any, plan: Plan) -> None:
    """Draw compute above and communication below. The colour says which half a bar belongs to."""
    begin = 0.0
    for window in plan.windows:
        bars = [(1.0, window.half, window.compute_us, window.computes)]
        if window.travels is not None:
            bars.append((0.0, window.travels, window.communication_us, f"{window.ctas} CTAs"))
        for height, half, us, text in bars:
            panel.barh(height, us, 0.6, begin, color=_HALVES[half], edgecolor="white")
            panel.text(begin + us / 2, height, text, ha="center", va="center", color="white", fontsize=8, clip_on=True)
        begin += window.us
    panel.set_yticks([0.0, 1.0], ["travels", "computes"])
    panel.set(xlim=(0, begin), ylim=(-0.6, 1.6), xlabel="predicted µs of one layer")
    panel.set_title(f"{plan.tokens} tokens as {' + '.join(map(str, plan.sizes))}", loc="left", fontsize=10)
    handles = [panel.barh(0, 0, color=colour, label=f"half {half}") for half, colour in _HALVES.items()]
    panel.legend(handles=handles, frameon=False, fontsize=9, ncols=2, loc="upper right")
    panel.spines[["top", "right", "left"]].set_visible(False)
