"""The token split of a report as lines of text, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text


def print_splits(console: Console, splits: Sequence[dict[str, Any]]) -> None:
    """One paragraph for each graph; nothing where the option is off."""
    for split in splits:
        first, *rest = split_lines(split)
        console.print()
        console.print(Text(first, style="bold" if split["mode"] != "off" else "yellow"), soft_wrap=True)
        for line in rest:
            console.print(Text(line), soft_wrap=True)


def split_lines(split: dict[str, Any]) -> Iterator[str]:
    """The decision, what became of the operators, and what was predicted."""
    if split["mode"] == "off":
        yield f"token split off, {split['reason']}: {split['detail']}"
    else:
        first, second = split["sizes"]
        attention = "attention of all tokens" if split["mode"] == "join" else "attention of each half"
        yield f"token split {first} + {second} {split['unit']}s, {attention}"
        joins = ", ".join(f"{count} {reason}" for reason, count in split["joins"].items()) or "none"
        yield (
            f"{split['duplicated']} operators run once for each half, {split['joined']} for both, {split['shared']} are "
            f"shared; joins: {joins}; {split['slices']} values sliced, {split['cats']} put together"
        )
    if split["overlap"] is not None:
        yield _overlap_line(split["overlap"])
    if split["plan"] is not None:
        yield from _plan_lines(split["plan"], split["device_profile"])


def _overlap_line(overlap: dict[str, Any]) -> str:
    if overlap["refused"]:
        return f"halves one after the other, nothing overlaps, {overlap['refused']}"
    exposed = sum(overlap["exposed"].values())
    reasons = "".join(f", {count} {reason}" for reason, count in overlap["exposed"].items())
    return (
        f"{overlap['calls'] - exposed} of {overlap['calls']} calls travel on {overlap['overlap_sms']} SMs while the other half "
        f"computes{reasons}; {overlap['windows']} windows"
    )


def _plan_lines(plan: dict[str, Any], device_profile: str) -> Iterator[str]:
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
    yield f"predicted for {device_profile}, {plan['tokens']} tokens, us a layer: {', '.join(times)}"
    for window in plan["windows"]:
        line = f"  {window['computes']} {window['half']}: computes {window['compute_us']:.0f} us"
        if window["travels"] is not None:
            message = f"{window['message_bytes'] / 2**20:.1f} MiB of half {window['travels']}"
            line += f" while {message} travel on {window['ctas']} CTAs for {window['communication_us']:.0f} us"
        yield line
