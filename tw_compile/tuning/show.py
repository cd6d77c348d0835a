"""What a tuning found, as text and as a picture."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from tw_compile.benchmark.results import Row, rows_of
from tw_compile.gating.facts import Backend
from tw_compile.gating.table import Entry, size
from tw_compile.harness.plot import new_figure, save
from tw_compile.harness.table import SMOKE_TEST, failed_lines, plain_table, print_verdict
from tw_compile.tuning.decide import Band
from tw_compile.tuning.pairs import PairCost
from tw_compile.tuning.spec import TuneSpec, seconds
from tw_compile.tuning.tables import Derived, changes

_STRIP = [2**power for power in range(12, 29)]
_MARKS = {("fused", True): "█", ("fused", False): "▒", ("left", True): "·", ("left", False): "-"}
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def print_grid(console: Console, spec: TuneSpec) -> None:
    """Print what would be measured, and how long it takes."""
    total = 0.0
    for stage in spec.stages():
        bench, count = stage.bench, stage.contenders
        estimate = seconds(stage)
        total += estimate
        console.print(f"{stage.name}: about {estimate:.0f} s", style="bold", markup=False)
        console.print(
            f"  tokens {', '.join(map(str, bench.tokens))}; hidden {', '.join(map(str, bench.hidden))}; {bench.dtype}; {count} "
            f"contenders; CUDA graphs of {bench.calls} calls, {bench.repeats} replays",
            markup=False,
            soft_wrap=True,
        )
        if stage.kind == "beside":
            console.print(f"  kernels on {', '.join(map(str, bench.sms))} SMs beside GEMMs", markup=False)
        else:
            console.print(f"  {', '.join(bench.only)}", markup=False, soft_wrap=True)
    console.print(
        f"in all about {total / 60:.1f} minutes (an estimate; FlashInfer builds its kernels at first use: minutes)"
    )


def print_report(console: Console, report: dict[str, Any], derived: Derived | None) -> None:
    if derived is None:
        console.print(SMOKE_TEST + ": no table is made of them", style="yellow")
        for name, stage in report["stages"].items():
            timed = sum(row.p50_us is not None for row in rows_of(stage))
            console.print(f"{name}: {timed} of {len(stage['rows'])} rows timed", markup=False)
    else:
        _print_ranges(console, derived)
        _print_pairs(console, derived.pairs)
        console.print("\n[bold]against the shipped tables[/bold]")
        for line in changes(derived) or ["nothing changes: what is shipped stands, or differs by less than the noise"]:
            console.print(line, markup=False, soft_wrap=True)
    failed = [
        line
        for name, stage in report["stages"].items()
        for line in failed_lines(rows_of(stage), functools.partial(_where, name))
    ]
    print_verdict(console, failed)


def _where(stage: str, row: Row) -> str:
    return f"[{row.tokens}, {row.hidden}] ({stage})"


def _print_ranges(console: Console, derived: Derived) -> None:
    first, last = size(_STRIP[0]), size(_STRIP[-1])
    console.print("[bold]fused or left, by bytes of the message[/bold]")
    console.print(
        f"{first} to {last}, each mark twice the one before; measured: █ fused, · left; as shipped: ▒ fused, - left"
    )
    for world_size, backend in derived.bands:
        ranges = derived.table.ranges((world_size, str(backend)))
        console.print(f"TP{world_size}  {backend:<18} {strip(ranges)}", markup=False)
    for entry in derived.table.entries:
        decided = "left" if entry.decision == "left" else f"fused by {entry.transport}"
        why = "measured" if entry.source.kind == "measured" else entry.source.name
        console.print(f"  {entry}: {decided}, {why}", style="dim", markup=False, soft_wrap=True)


def strip(ranges: Sequence[Entry]) -> str:
    """A mark for every power of two from 4 KiB to 256 MiB."""
    marks = []
    for nbytes in _STRIP:
        entry = next(candidate for candidate in reversed(ranges) if candidate.from_bytes <= nbytes)
        marks.append(_MARKS[entry.decision, entry.source.kind == "measured"])
    return "".join(marks)


def _print_pairs(console: Console, pairs: Sequence[PairCost]) -> None:
    if not pairs:
        return
    best: dict[tuple[object, ...], PairCost] = {}
    for pair in pairs:
        key = (pair.world_size, pair.kernel, pair.tokens, pair.gemm)
        if key not in best or min(pair.plain_us, pair.leaving_us) < min(best[key].plain_us, best[key].leaving_us):
            best[key] = pair
    title = "kernel beside a GEMM, us, on the SMs that are best for the pair"
    columns = ("", "tokens", "GEMM", "SMs", "in turn", "longer one", "both", "both, SMs left", "left", "contention")
    table = plain_table(columns, ("", "GEMM"), title, "bold")
    for pair in best.values():
        times = (pair.alone_us, pair.best_us, pair.plain_us, pair.leaving_us)
        table.add_row(
            f"TP{pair.world_size} {pair.kernel}",
            str(pair.tokens),
            pair.gemm,
            str(pair.sms),
            *(f"{us:.0f}" for us in times),
            str(pair.left),
            f"{pair.contention:.2f}",
        )
    console.print()
    console.print(table)


def plot(derived: Derived, path: str) -> None:
    """Plot fused time divided by unfused time over bytes into ``path`` (png or svg).

    There is one panel for each world size, with one line for each backend.
    """
    world_sizes = sorted({world_size for world_size, _ in derived.bands})
    columns = max(1, len(world_sizes))
    figure, panels = new_figure(7 * columns, 5, 1, columns)
    for panel, world_size in zip(panels[0], world_sizes, strict=True):
        own = [(backend, ratios) for (ranks, backend), ratios in derived.bands.items() if ranks == world_size]
        for (backend, ratios), colour in zip(own, _COLOURS, strict=False):
            _draw(panel, derived, world_size, backend, ratios, colour)
        panel.axhline(1.0, color="#000000", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
        panel.set(xlabel="bytes of one rank's message", ylabel="fused by unfused time (band: p20 to p80)")
        panel.xaxis.set_major_formatter(lambda value, position: size(round(value)))
        panel.tick_params(axis="x", labelrotation=45)
        panel.set_title(f"TP{world_size}, {derived.device_name}; dotted: crossovers", loc="left", fontsize=10)
        panel.grid(True, color="#dddddd", linewidth=0.6)
        panel.legend(frameon=False)
    save(figure, path)


def _draw(panel: Any, derived: Derived, world_size: int, backend: Backend, ratios: Band, colour: str) -> None:
    if not ratios.nbytes:
        return
    low, middle, high = ([math.exp(value) for value in values] for values in (ratios.low, ratios.middle, ratios.high))
    panel.plot(ratios.nbytes, middle, marker="o", markersize=4, color=colour, label=str(backend))
    panel.fill_between(ratios.nbytes, low, high, color=colour, alpha=0.15, linewidth=0)
    ranges = derived.table.ranges((world_size, str(backend)))
    for before, after in itertools.pairwise(ranges):
        if before.decision != after.decision:
            panel.axvline(after.from_bytes, color=colour, linestyle=":", linewidth=1.2)
