"""``tw-compile doctor``: what this machine has, and what would run on it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tw_compile.cli import common
from tw_compile.cli.common import JsonOption
from tw_compile.runner.spec import UsageError

if TYPE_CHECKING:
    from tw_compile.runner.machine import Report


VllmOption = Annotated[bool, typer.Option("--vllm", help="What vLLM would do with the passes here, instead.")]


@common.one_line_errors
def doctor(json_file: JsonOption = None, vllm: VllmOption = False) -> None:
    """Show versions, GPUs, the links between them, and which transport would run, and why. Changes nothing."""
    from tw_compile.runner.machine import examine

    console = common.make_console(json_file)
    try:
        report = examine()
        if vllm:
            report["vllm"] = _examine_vllm(report)
    except ValueError as error:  # a thresholds file that is wrong
        raise UsageError(str(error)) from error
    if vllm:
        print_vllm(console, report["vllm"])
    else:
        _print(console, report)
    common.write_json(report, json_file)


def _examine_vllm(report: Report) -> Report:
    from tw_compile.hosts.vllm.doctor import examine

    if not report["gpus"]:
        return examine(os.environ, None)
    gpu = report["gpus"][0]
    return examine(os.environ, (int(gpu["capability"][:-1]), int(gpu["capability"][-1])), gpu["name"])


def print_vllm(console: Console, report: Report) -> None:
    _pairs(
        console,
        "vLLM",
        {
            "installed": report["installed"] or "no: what follows is what it would do",
            "dispatch": report["dispatch"],
            "plugin": report["plugin"],
            "enabled": report["enabled"],
        },
    )
    _pairs(console, "its all_reduces, by environment", report["settings"])
    for group in report["groups"]:
        console.print(f"\n[bold]{group['world_size']} ranks[/bold], hidden 8192, bf16")
        ends = ", ".join(map(str, group["ranges_end_at"])) or "none"
        console.print(f"token ranges added, ending at: {ends}", markup=False)
        layers = group["groups_of_layers"]
        first = (
            f"steps of {layers['from_tokens']} tokens and more"
            if "from_tokens" in layers
            else f"no, {layers['detail']}"
        )
        console.print(f"by groups of layers, where no CUDA graphs are captured: {first}", markup=False, soft_wrap=True)
        console.print(group["split"], markup=False, soft_wrap=True)
        limit, default = group["flashinfer_fusion_bytes"], group["flashinfer_fusion_bytes_of_vllm"]
        if default is not None:
            of_vllm = "as in vLLM" if limit == default else f"vLLM has {default}"
            console.print(f"FlashInfer's fusion, where it is installed: up to {limit} bytes ({of_vllm})", markup=False)
        for device_class, stretches in group["thresholds"].items():
            for one in stretches:
                decided = f"{'fused' if one['fused'] else 'gated'}, unfused {one['backend']}"
                line = f"{device_class}: from {one['from_tokens']} tokens {decided}: {one['entry']}; {one['source']}"
                console.print(line, markup=False, soft_wrap=True)


def _print(console: Console, report: Report) -> None:
    _pairs(console, "versions", report["versions"])
    gpus = report["gpus"]
    console.print("\n[bold]GPUs[/bold]")
    if not gpus:
        console.print("none that torch can use: models run on the CPU with gloo, inspect works as everywhere")
    for gpu in gpus:
        console.print(f"{gpu['index']}: {gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, sm{gpu['capability']}")
    if len(gpus) > 1:
        _matrix(console, report)
    _pairs(console, "symmetric memory", report["symmetric_memory"])
    thresholds = report["thresholds"]
    console.print("\n[bold]configuration[/bold], a later layer wins: shipped < user file < environment < options")
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


def _pairs(console: Console, title: str, values: dict[str, Any]) -> None:
    width = max(map(len, values))
    console.print(f"\n[bold]{title}[/bold]")
    for name, value in values.items():
        shown = {None: "-", True: "yes", False: "no"}.get(value, value)
        console.print(f"{name:<{width}}  {shown}", markup=False)


def _matrix(console: Console, report: Report) -> None:
    table = Table(title="peer access; NVLinks", title_justify="left", title_style="bold", box=None, pad_edge=False)
    count = len(report["gpus"])
    for name in ("", *map(str, range(count))):
        table.add_column(name, header_style="dim")
    for row in range(count):
        cells = ["-" if row == column else _link(report, row, column) for column in range(count)]
        table.add_row(str(row), *cells)
    console.print()
    console.print(table)


def _link(report: Report, row: int, column: int) -> str:
    access = "yes" if report["peer_access"][row][column] else "[red]no[/red]"
    links = report["nvlinks"]
    return f"{access} {links[row][column]}x" if links else access
