"""``tw-compile doctor``: what this machine has, and what would run on it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tw_compile.cli import bench_common, common
from tw_compile.cli.common import JsonOption
from tw_compile.environment import PEER_ACCESS
from tw_compile.harness.requests import UsageError
from tw_compile.peer_routes import Tried

if TYPE_CHECKING:
    from tw_compile.runner.machine import Report


VllmOption = Annotated[
    bool, typer.Option("--vllm", help="Show instead what the passes would do in vLLM on this machine.")
]

MeasureOption = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Also time the link between the first two GPUs, in at most 90 seconds. Both should be idle.",
    ),
]


@common.one_line_errors
def doctor(json_file: JsonOption = None, vllm: VllmOption = False, measure: MeasureOption = False) -> None:
    """Show versions, GPUs, the links between them, which transport would run, and why. Changes nothing.

    Exit code: 0 done, 1 a measurement is incomplete, 2 bad input.
    """
    from tw_compile.runner.machine import examine

    console = common.make_console(json_file)
    if measure:
        _check_measure(vllm)
    try:
        report = examine()
        if vllm:
            from tw_compile.hosts.vllm import doctor as of_vllm
            from tw_compile.hosts.vllm.flashinfer import Peers

            reach, atomics = (all(map(all, report[key] or ())) for key in ("peer_access", "native_atomics"))
            peers = Peers(reach, _joined_by_nvlink(report["nvlinks"]), atomics)
            used = report["peer_access_used"]
            report["vllm"] = of_vllm.examine(os.environ, *_first_gpu(report), peers=peers, peers_used=used)
    except ValueError as error:  # a thresholds file that is wrong
        raise UsageError(str(error)) from error
    report["measured_links"] = _measured_links(console) if measure else None
    if vllm:
        _print_sections(console, of_vllm.sections(report["vllm"]))
    else:
        _print(console, report)
    common.write_json(report, json_file)
    if measure and report["measured_links"]["incomplete"]:
        raise typer.Exit(common.EXIT_FAILED)


def _check_measure(vllm: bool) -> None:
    """Raise UsageError where there are fewer than 2 GPUs, under a launcher, and with ``--vllm``, which shows no links."""
    if vllm:
        raise UsageError("--measure: expected no --vllm with it, which shows no links, got both")
    bench_common.refuse_launcher("doctor --measure")
    gpus = common.gpus()
    if gpus < 2:
        raise UsageError(f"--measure: expected 2 GPUs, got {gpus}")


def _measured_links(console: Console) -> dict[str, Any]:
    from tw_compile.benchmark.links import run, steps

    with common.stages(console, steps()) as progress:
        return run(progress)


def _first_gpu(report: Report) -> tuple[tuple[int, int] | None, str | None]:
    """The compute capability and the name of the first GPU. Both are None without a GPU."""
    if not report["gpus"]:
        return None, None
    gpu = report["gpus"][0]
    return (int(gpu["capability"][:-1]), int(gpu["capability"][-1])), gpu["name"]


def _joined_by_nvlink(links: list[list[int]] | None) -> bool:
    """Whether the driver's library says that there are NVLinks between every two GPUs."""
    return links is not None and all(
        count > 0 for own, row in enumerate(links) for other, count in enumerate(row) if own != other
    )


def _print_sections(console: Console, sections: Iterable[tuple[str, str, dict[str, Any] | list[str]]]) -> None:
    """Print sections. Each section has a title, the text beside the title, and its content: values by name, or lines."""
    for title, beside, content in sections:
        if isinstance(content, dict):
            _pairs(console, title, content)
            continue
        console.print(f"\n[bold]{title}[/bold]{beside}")
        for line in content:
            console.print(line, markup=False, soft_wrap=True)


def _print(console: Console, report: Report) -> None:
    _pairs(console, "versions", report["versions"])
    gpus = report["gpus"]
    console.print("\n[bold]GPUs[/bold]")
    if not gpus:
        console.print("none that torch can use: models run on the CPU with gloo; inspect and plan need no GPU")
    for gpu, pcie in zip(gpus, report["pcie"] or [None] * len(gpus), strict=True):
        text = f"{gpu['index']}: {gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, sm{gpu['capability']}"
        console.print(text + pcie_text(pcie), markup=False)
    if len(gpus) > 1:
        _matrix(console, report)
    if not report["peer_access_used"]:
        console.print(f"{PEER_ACCESS}=0: tw_compile leaves peer access unused", style="yellow", markup=False)
    elif line := without_atomics(report):
        console.print(line, markup=False, soft_wrap=True)
    if report["shared_memory"]:
        space = report["shared_memory"]
        free, size = (f"{space[key] / 2**20:.0f} MiB" for key in ("free_bytes", "bytes"))
        console.print(f"\n[bold]shared memory of the host[/bold]\n{space['path']}: {free} of {size} free")
    if report["measured_links"]:
        print_links(console, report["measured_links"])
    _pairs(console, "symmetric memory", report["symmetric_memory"])
    thresholds = report["thresholds"]
    console.print(
        "\n[bold]configuration[/bold], a later layer wins: shipped < calibration < user file < environment < options"
    )
    for title, layers in (
        (f"thresholds for {thresholds['device_class']}", thresholds["layers"]),
        ("kernels", report["kernel_tables"]["layers"]),
        ("device profile", report["device_profile"]["layers"]),
    ):
        console.print(title, markup=False)
        for layer in layers:
            console.print(f"  {layer['layer']:<21}  {layer['from']}: {layer['state']}", markup=False, soft_wrap=True)
    console.print("\n[bold]what would run[/bold]")
    for plan in report["plans"]:
        ranks = f"{plan['world_size']} ranks"
        console.print(f"{ranks}  fused: {plan['transport'] or 'nothing'} ({plan['transport_why']})", markup=False)
        if plan.get("kernels"):
            console.print(f"{'':<{len(ranks)}}  kernels: {plan['kernels']}", markup=False)
        unfused = f"unfused all_reduce: {plan['all_reduce'] or 'none'} ({plan['all_reduce_why']})"
        console.print(f"{'':<{len(ranks)}}  {unfused}", markup=False)
        for line in plan.get("thresholds", ()):
            console.print(f"{'':<{len(ranks)}}  bf16 {line}", markup=False, soft_wrap=True)
    _print_expected(console, [plan for plan in report["plans"] if plan["device"] == "cuda"])


def _print_expected(console: Console, plans: Sequence[dict[str, Any]]) -> None:
    """Print what prefills are predicted to gain, for each group of GPUs."""
    from tw_compile.runner.expected import TOKENS, in_words

    if not plans:
        return
    console.print(f"\n[bold]what a layer is predicted to gain by default[/bold], a prefill of {TOKENS} tokens, bf16")
    for plan in plans:
        known = (
            in_words(plan["expected"]) or "not known: nothing has been measured on this GPU. Its first use does that"
        )
        console.print(f"{plan['world_size']} ranks  {known}", markup=False, soft_wrap=True)
    if any(row["wire"] != "exact" for plan in plans for row in plan["expected"]):
        console.print("wire int8 sends rows in 8 bits, which changes results a little: docs/wires.md", style="dim")


def print_links(console: Console, measured: dict[str, Any]) -> None:
    """Print a line for each way to move data: the rate of each of the two GPUs alone, or why that rate is not known."""
    console.print("\n[bold]link between GPU 0 and GPU 1, measured[/bold]")
    rows = measured["rows"]
    for way in dict.fromkeys(row["way"] for row in rows):
        of_gpus = "; ".join(_figure(row) for row in rows if row["way"] == way)
        console.print(f"{way:<9}  {of_gpus}", markup=False, soft_wrap=True)
    if measured["incomplete"]:
        console.print(f"INCOMPLETE  {measured['incomplete']}", style="red", markup=False, soft_wrap=True)


def _figure(row: dict[str, Any]) -> str:
    who = "" if row["gpu"] is None else f"GPU {row['gpu']}: "
    if row["reason"] is not None:
        return f"{who}not measured, {row['reason']}"
    return who + (f"{row['us']:.1f} us one way" if row["gb_per_s"] is None else f"{row['gb_per_s']:.1f} GB/s")


def _pairs(console: Console, title: str, values: dict[str, Any]) -> None:
    width = max(map(len, values))
    console.print(f"\n[bold]{title}[/bold]")
    for name, value in values.items():
        shown = {None: "-", True: "yes", False: "no"}.get(value, value)
        console.print(f"{name:<{width}}  {shown}", markup=False)


def _matrix(console: Console, report: Report) -> None:
    table = Table(
        title="peer access, link, native atomics", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    count = len(report["gpus"])
    for name in ("", *map(str, range(count))):
        table.add_column(name, header_style="dim")
    for row in range(count):
        cells = ["-" if row == column else _link(report, row, column) for column in range(count)]
        table.add_row(str(row), *cells)
    console.print()
    console.print(table)


def _link(report: Report, row: int, column: int) -> str:
    """The text for two GPUs, such as ``yes NVLink 18x atomics``. What is not known is left out."""
    words = ["yes" if report["peer_access"][row][column] else "[red]no[/red]"]
    if report["nvlinks"]:
        links = report["nvlinks"][row][column]
        words.append(f"NVLink {links}x" if links else "PCIe")
    if report["native_atomics"] and report["native_atomics"][row][column]:
        words.append("atomics")
    return " ".join(words)


def without_atomics(report: Report) -> str:
    """A line for GPUs that reach each other over a link without native atomics: what runs there and why. Empty if none do."""
    native = report["native_atomics"]
    if native is None or not all(map(all, report["peer_access"])):
        return ""
    pairs = [(a, b) for a, row in enumerate(native) for b, has in enumerate(row) if not has]
    if not pairs:
        return ""
    a, b = pairs[0]
    links = report["nvlinks"]
    over = "over PCIe" if links and not links[a][b] else "over a link"
    reaches = f"GPU {a} reaches the memory of GPU {b} {over} without native atomics"
    if report["routes_tried"] is not None:
        return f"{reaches}: {Tried(**report['routes_tried']).line}"
    return (
        f"{reaches}, which most kernels over peer memory (p2p) need. Nobody has tried the others there yet: the first compile "
        "on all ranks does, and so does tw-compile tune --quick. Until then groups with both GPUs send fused rows through host "
        "memory"
    )


def pcie_text(figures: dict[str, int | None] | None) -> str:
    """The largest PCIe generation and width of a GPU, and the current width where the slot has fewer lanes."""
    if figures is None or figures["max_generation"] is None:
        return ""
    width = figures["width"] or figures["max_width"]
    at_most = figures["max_width"]
    lanes = "" if width is None else f" x{width}" + (f" of x{at_most}" if at_most and at_most != width else "")
    return f", PCIe {figures['max_generation']}{lanes}"
