"""Reports as text: tables and verdicts for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from tw_compile.cli.render_split import print_splits
from tw_compile.cli.render_wire import print_wire
from tw_compile.harness.table import plain_table
from tw_compile.kernels.collective.wires import EXACT

STYLES = {"fused": "green", "refused": "yellow", "gated": "cyan"}
GROUP_KEYS = ("form", "bytes", "transport", "wire", "decision", "reason", "producer", "consumer")


def ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2, 5"``."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def size(count: int | None) -> str:
    """``33554432`` -> ``"32.0 MiB"``; None is a size that depends on the token count."""
    if count is None:
        return "dynamic"
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def group_sites(sites: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge sites with equal ``GROUP_KEYS`` into one entry with ``count`` and ``layers``, in order of appearance."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for site in sites:
        groups.setdefault(tuple(site[key] for key in GROUP_KEYS), []).append(site)
    result = []
    for members in groups.values():
        layers = [layer for site in members for layer in layers_of(site)]
        entry = {key: members[0][key] for key in GROUP_KEYS}
        count = sum(map(count_of, members))
        entry |= {"count": count, "layers": ranges(layers) or "-", "why": members[0]["detail"]}
        result.append(entry)
    return result


def carrier(site: dict[str, Any]) -> str:
    """The transport of a fused site, and its wire if the rows do not travel exact."""
    if site["transport"] is None:
        return "-"
    return str(site["transport"]) if site["wire"] == EXACT else f"{site['transport']}, {site['wire']}"


def print_header(console: Console, report: dict[str, Any]) -> None:
    versions = report["versions"]
    layers = f", {report['layers']} layers" if report.get("layers") else ""
    ranks = f"{report['world_size']} ranks"
    if report.get("hosts", 1) > 1:
        ranks += f" on {report['hosts']} hosts"
    console.print(Text(f"{report['model']}{layers}, {report['dtype']}", style="bold"))
    line = traced_line(report)
    if line is not None:
        console.print(Text(line, style="yellow"), soft_wrap=True)
    console.print(
        f"{ranks} on {escape(device(report))}, torch {versions['torch']}, transformers {versions['transformers']}"
    )


def absorbed(sites: list[dict[str, Any]]) -> int:
    """How many fused operators include the GEMM that computes their message."""
    return sum(count_of(site) for site in sites if site["producer"] == "mm")


def fed_line(sites: list[dict[str, Any]]) -> str | None:
    """How many norms have GEMMs that are fed, and how many have none, by the reason. None where nobody has asked."""
    counts = Counter[str]()
    for site in sites:
        name = "fed" if site["consumer"] == "fed" else site["feed_refusal"]
        counts[name] += count_of(site) if name else 0
    return f"feed_mm: {', '.join(f'{name} {count}' for name, count in (+counts).most_common())}" if +counts else None


def layers_of(site: dict[str, Any]) -> list[int]:
    """The layers that a site stands for: its own layer, and layers that were not traced because they are like this layer."""
    if site.get("stands_for"):
        return list(site["stands_for"])
    return [] if site["layer"] is None else [site["layer"]]


def count_of(site: dict[str, Any]) -> int:
    """How many all_reduces of the whole model a site stands for."""
    return len(layers_of(site)) or 1


def traced_line(report: dict[str, Any]) -> str | None:
    """A line that says which layers were traced and what the counts are for. None where every layer was traced."""
    traced = report.get("layers_traced")
    if traced is None:
        return None
    return (
        f"traced: layers {ranges(traced)}, of {report['layers']} layers; each other layer is like one of these, and the counts "
        "are for all layers (--all-layers traces every one)"
    )


def device(report: dict[str, Any]) -> str:
    name = report.get("device_name")
    return f"{report['device']} ({name})" if name else str(report["device"])


def print_sites(console: Console, report: dict[str, Any]) -> None:
    """Print the decisions, grouped, and then a line for every site that was refused or gated."""
    counts = report["counts"]
    title = f"all_reduces at {report['tokens'][0]} tokens"
    columns = ("sites", "layers", "form", "bytes", "transport", "decision")
    table = plain_table(columns, ("layers", "form", "transport", "decision"), title, "bold", overflow="fold")
    for group in group_sites(report["sites"]):
        absorbs = "+mm" if group["producer"] == "mm" else ""
        feeds = "+fed" if group["consumer"] == "fed" else ""
        decision = Text(group["decision"] + absorbs + feeds, style=STYLES[group["decision"]])
        if group["reason"]:
            decision.append(f": {group['reason']}")
        table.add_row(
            str(group["count"]),
            group["layers"],
            escape(group["form"]),
            size(group["bytes"]),
            carrier(group),
            decision,
        )
    console.print()
    console.print(table)
    for transport, why in sorted({(s["transport"], s["detail"]) for s in report["sites"] if s["transport"]}):
        if not why.startswith("travels with"):
            console.print(f"{transport}: {why}", style="dim", markup=False)
    fed = fed_line(report["sites"])
    if fed is not None:
        console.print(fed, style="dim", markup=False, soft_wrap=True)
    for entry, backend, source in dict.fromkeys(
        (s["entry"], s["backend"], s["source"]) for s in report["sites"] if s["entry"]
    ):
        console.print(f"thresholds: {entry}; unfused {backend}; {source}", style="dim", markup=False, soft_wrap=True)
    for site in report["sites"]:
        if site["decision"] != "fused":
            layers = layers_of(site)
            where = f"layer{'s'[: len(layers) > 1]} {ranges(layers)}" if layers else "outside of layers"
            line = Text(f"site {site['index']}, {where}: ")
            line.append(f"{site['decision']}, {site['reason']}", style=STYLES[site["decision"]])
            console.print(line.append(f": {site['detail']}"), soft_wrap=True)
    if report.get("from_cache"):
        console.print(f"from cache: {report['from_cache']} of {report['graphs']} graphs, with the reports kept of them")
    console.print(
        f"{counts['all_reduce']} all_reduces: {counts['fused']} fused ({absorbed(report['sites'])} with their GEMM), "
        f"{counts['refused']} refused, {counts['gated']} gated"
    )
    for warning in report.get("warnings", ()):
        console.print(Text(f"warning: a pass failed and left its graph as it was: {warning}", style="red"))


def print_run(console: Console, report: dict[str, Any]) -> None:
    """Print everything that ``tw-compile run`` found, the verdict last."""
    print_header(console, report)
    print_sites(console, report)
    print_splits(console, report["splits"])
    wire = report.get("wire")
    _print_numerics(console, report["numerics"], exact=wire is None)
    if wire is not None:
        print_wire(console, wire)
    _print_times(console, report)
    _print_memory(console, report)
    _print_trace(console, report["trace"])
    console.print()
    console.print(verdict(report))


def verdict(report: dict[str, Any]) -> Text:
    counts, numerics = report["counts"], report["numerics"]
    wire = report.get("wire")
    passed = numerics["passed"] and (wire is None or wire["passed"])
    problems = [f"{name} error over budget" for name in ("hidden", "residual") if not numerics[name]["passed"]]
    identical, promised = numerics["bitwise_equal_across_ranks"], numerics["bitwise_equal_promised"]
    if promised and not identical:
        problems.append("ranks differ")
    if wire is not None and not wire["passed"]:
        problems.append(f"calls with {wire['wire']} cost more than its codes do, or ranks differ")
    ranks = "ranks identical" if identical else "ranks round differently where sums are not fused"
    line = Text("PASSED" if passed else "FAILED", style="bold green" if passed else "bold red")
    line.append(f"  {counts['fused']} of {counts['all_reduce']} all_reduces fused; ", style="default")
    line.append(", ".join(problems) or f"numerics within budget, {ranks}", style="default")
    return line


def _print_numerics(console: Console, numerics: dict[str, Any], exact: bool) -> None:
    """Print the errors of the outputs. With a wire (``exact`` is False) the outputs of a whole model have no budget."""
    columns = ("tokens", "output", "tw_compile", "budget", "unfused", "inductor", "ok", "ranks")
    title = "relative error against float64, worst rank"
    table = plain_table(columns, ("output", "ok", "ranks"), title, "bold")
    differ = Text("DIFFER", style="bold red") if numerics["bitwise_equal_promised"] else Text("differ", style="yellow")
    for row in numerics["by_tokens"]:
        for output in ("hidden", "residual"):
            errors = row[output]
            same = row["bitwise_equal_across_ranks"]
            table.add_row(
                str(row["tokens"]),
                output,
                _error(errors["error"]),
                _error(errors["budget"]) if exact else "-",
                _error(errors["unfused_error"]),
                "-" if errors["inductor_error"] is None else _error(errors["inductor_error"]),
                Text("yes", style="green") if errors["passed"] else Text("NO", style="bold red"),
                Text("identical", style="green") if same else differ,
            )
    console.print()
    console.print(table)
    budget = (
        "budget: 1.1 x the unfused model in eager mode; " if exact else "no budget: a wire costs what its codes cost; "
    )
    console.print(f"{budget}inductor: the unfused model compiled", style="dim")


def _error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3e}"


def _print_times(console: Console, report: dict[str, Any]) -> None:
    seconds = report["compile_seconds"]
    share = seconds["passes"] / seconds["tw_compile"]
    console.print()
    baseline, ours, passes = (duration(seconds[key]) for key in ("baseline", "tw_compile", "passes"))
    console.print(f"cold compile for {report['tokens'][0]} tokens: inductor {baseline}, tw_compile {ours}")
    console.print(f"of which passes: {passes} ({share:.2%})")
    prefill = report["prefill_seconds"]
    if prefill:
        for tokens, before, after in zip(report["tokens"], prefill["baseline"], prefill["tw_compile"], strict=True):
            console.print(
                f"prefill of {tokens} tokens: inductor {duration(before)}, tw_compile {duration(after)} "
                f"({before / after:.2f}x)"
            )


def _print_memory(console: Console, report: dict[str, Any]) -> None:
    memory = report["memory"]
    if memory:
        peaks = memory["peak_bytes"]
        for tokens, before, after in zip(report["tokens"], peaks["baseline"], peaks["tw_compile"], strict=True):
            console.print(f"peak memory at {tokens} tokens: inductor {size(before)}, tw_compile {size(after)}")
        console.print(f"slots of symmetric memory beside it: {size(memory['slot_bytes'])}", markup=False)


def _print_trace(console: Console, trace: dict[str, Any] | None) -> None:
    if trace is None:
        return
    slowest = trace["by_rank"][trace["slowest_rank"]]
    spent, share = slowest["communication_us"] / 1e6, trace["hidden_share"]
    hidden = (
        "no communication in the trace"
        if share is None
        else f"{share:.0%} of {duration(spent)} of communication hidden"
    )
    where = f"rank {trace['slowest_rank']}, the slowest, took {duration(slowest['span_us'] / 1e6)}"
    console.print(f"traced: {hidden}; {where}; {trace['files'][0]}", markup=False, soft_wrap=True)
