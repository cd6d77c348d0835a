"""The token split of a report as text, for the terminal and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from tw_compile.harness.table import plain_table

WINDOW_COLUMNS = ("count", "window", "beside", "SMs", "left by", "compute us", "sum us", "us")
"""``SMs`` are for the sum that travels. ``left by`` names the GEMMs that leave SMs to that sum; of a graph that is not
split, the GEMMs and the SMs that they would run on. Times are predicted."""


def print_splits(
    console: Console, splits: Sequence[dict[str, Any]], layers_traced: Sequence[int] | None = None
) -> None:
    """Print a paragraph and the windows of each graph. Prints nothing where the option is off."""
    for split in splits:
        first, *rest = split_lines(split, layers_traced)
        console.print()
        console.print(Text(first, style="bold" if split["mode"] != "off" else "yellow"), soft_wrap=True)
        for line in rest:
            console.print(Text(line), soft_wrap=True)
        rows = window_rows(split)
        if rows:
            table = plain_table(WINDOW_COLUMNS, WINDOW_COLUMNS[1:3] + WINDOW_COLUMNS[4:5])
            for row in rows:
                table.add_row(*map(escape, row))
            console.print(table)


def split_lines(split: dict[str, Any], layers_traced: Sequence[int] | None = None) -> Iterator[str]:
    """The decision, what became of the operators, and the prediction. Counts are for the graph, not scaled to all layers."""
    counted = "" if layers_traced is None else f"in the {len(layers_traced)} layers traced: "
    if split["mode"] == "off":
        yield f"token split off, {split['reason']}: {split['detail']}"
    else:
        first, second = split["sizes"]
        attention = "attention of all tokens" if split["mode"] == "join" else "attention of each half"
        yield f"token split {first} + {second} {split['unit']}s, {attention}"
        joins = ", ".join(f"{count} {reason}" for reason, count in split["joins"].items()) or "none"
        yield (
            f"{counted}{split['duplicated']} operators run once for each half, {split['joined']} for both, {split['shared']} "
            f"are shared; joins: {joins}; {split['slices']} values sliced, {split['cats']} put together"
        )
    if split["overlap"] is not None:
        yield counted + _overlap_line(split["overlap"])
    if split["plan"] is not None:
        yield _plan_line(split["plan"], split["device_profile"])


def window_rows(split: dict[str, Any]) -> list[tuple[str, ...]]:
    """The windows of a split graph, or the plan's windows for a graph that is not split.

    Windows that look the same share a row and are counted. Rows are in the order of their first windows.
    """
    if split["overlap"] is not None:
        return [(str(count), *row) for row, count in Counter(map(_cells, split["overlap"]["windows"])).items()]
    windows = () if split["plan"] is None else split["plan"]["windows"]
    return [("1", *_planned_cells(window)) for window in windows]


def _cells(window: dict[str, Any]) -> tuple[str, ...]:
    computes = window["computes"]
    whose = {"joined": "both", "shared": "-"}.get(str(computes), str(computes))
    return (
        f"{window['kind']} {whose}",
        ", ".join(dict.fromkeys(f"half {half}" if half in (1, 2) else str(half) for _, half in window["beside"]))
        or "-",
        str(window["overlap_sms"] or "-"),
        ", ".join(dict.fromkeys(f"{name} {left}" for name, left in window["gemms_leaving_sms"])) or "-",
        *("-" if window[key] is None else f"{window[key]:.0f}" for key in ("compute_us", "communication_us", "us")),
    )


def _planned_cells(window: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{window['computes']} {window['half']}",
        "-" if window["travels"] is None else f"half {window['travels']}",
        str(window["ctas"] or "-"),
        ", ".join(f"{gemm['name']} on {gemm['sms']}" for gemm in window["gemms"]),
        *(f"{window[key]:.0f}" for key in ("compute_us", "communication_us", "us")),
    )


def _overlap_line(overlap: dict[str, Any]) -> str:
    if overlap["refused"]:
        return f"halves one after the other, nothing overlaps, {overlap['refused']}"
    exposed = sum(overlap["exposed"].values())
    reasons = "".join(f", {count} exposed ({reason})" for reason, count in overlap["exposed"].items())
    return (
        f"{overlap['calls'] - exposed} of {overlap['calls']} calls travel while the other half computes{reasons}, "
        f"{overlap['in_slot']} leave their results in the slot; {len(overlap['windows'])} windows"
    )


def _plan_line(plan: dict[str, Any], device_profile: str) -> str:
    predicted = plan["predicted"]
    times = [
        f"{name} {predicted[key]:.0f}"
        for name, key in (
            ("unfused", "unfused_us"),
            ("fused", "fused_us"),
            ("split and overlapped", "split_us"),
            ("without communication", "no_communication_us"),
        )
        if predicted[key] is not None
    ]
    rates = f" ({plan['rates']})" if plan["rates"] else ""
    return f"predicted for {device_profile}{rates}, {plan['tokens']} tokens, us a layer: {', '.join(times)}"
