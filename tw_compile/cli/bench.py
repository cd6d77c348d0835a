"""``tw-compile bench``: what the passes cost."""

from __future__ import annotations

import csv
import io
import os
import platform
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tw_compile.cli import common
from tw_compile.cli.common import JsonOption, ModelOption
from tw_compile.runner.spec import RunSpec, UsageError

SCHEMA_VERSION = 1
TOKENS = 4096
COLUMNS = ("model", "world_size", "layers", "all_reduces", "fused", "compile_seconds", "passes_seconds", "share")

app = typer.Typer(help="Measure what the passes cost.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Measure what the passes cost."""


@app.command()
@common.one_line_errors
def passes(
    model: ModelOption = "llama-3.3-70b",
    tp: Annotated[int, typer.Option(metavar="N", help="Ranks to play.")] = 8,
    layers: Annotated[str, typer.Option(metavar="N[,N...]", help="Layer counts to compile.")] = "20,40,80",
    csv_file: Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write the table as CSV.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Time the passes beside the rest of a cold compile, for several depths of one model; needs no GPU.

    The rest is Dynamo, AOTAutograd and Inductor up to its post-grad passes. Scheduling and code generation need the
    GPU and are not in it, so the share of the passes is an upper bound.
    """
    common.positive("--tp", tp)
    counts = sorted(common.numbers("--layers", layers))
    console = common.make_console(json_file)
    with common.stages(console) as progress:
        progress("importing torch and transformers")
        from tw_compile.runner.fake import inspect_model
        from tw_compile.runner.versions import versions

        deepest = RunSpec(model, tp, "cuda", (TOKENS,), "bfloat16", counts[-1])
        _check_depth(deepest)
        progress("warming up on one layer")
        inspect_model(_with_layers(deepest, 1))
        rows = []
        for count in counts:
            progress(f"compiling {count} layers of {model}")
            rows.append(_row(deepest, count, inspect_model(_with_layers(deepest, count))))
    growth = (rows[-1]["passes_seconds"] / counts[-1]) / (rows[0]["passes_seconds"] / counts[0])
    report = {
        "schema_version": SCHEMA_VERSION,
        "command": "bench passes",
        "model": model,
        "world_size": tp,
        "device": "cuda",
        "device_name": "fake",
        "tokens": [TOKENS],
        "rows": rows,
        "seconds_per_layer_growth": growth,
        "versions": versions(),
    }
    _print(console, report, counts)
    common.write_json(report, json_file)
    if csv_file is not None:
        common.write_file("--csv", csv_file, _csv(rows, report["versions"]))


def _with_layers(spec: RunSpec, layers: int) -> RunSpec:
    import dataclasses

    return dataclasses.replace(spec, layers=layers)


def _check_depth(spec: RunSpec) -> None:
    from tw_compile.models import load_config

    try:
        depth = load_config(spec.model).num_hidden_layers
    except ValueError as error:
        raise UsageError(f"--model {spec.model}: {error}") from error
    if spec.layers is not None and spec.layers > depth:
        raise UsageError(f"--layers: expected at most {depth}, the layers of {spec.model}, got {spec.layers}")


def _row(spec: RunSpec, layers: int, inspection: Any) -> dict[str, Any]:
    counts, seconds = inspection.result.counts, inspection.result.seconds
    values = (
        spec.model,
        spec.world_size,
        layers,
        counts["all_reduce"],
        counts["fused"],
        inspection.compile_seconds,
        seconds,
        seconds / inspection.compile_seconds,
    )
    return dict(zip(COLUMNS, values, strict=True))


def _csv(rows: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """The rows, each with the machine and the versions it was measured with."""
    made_with = {"machine": f"{platform.machine()} {os.cpu_count()} cpus", **versions}
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, *made_with], lineterminator="\n")
    writer.writeheader()
    writer.writerows(row | made_with for row in rows)
    return text.getvalue()


def _print(console: Console, report: dict[str, Any], counts: list[int]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("layers", "fused", "compile without codegen", "passes", "share"):
        table.add_column(name, justify="right")
    for row in report["rows"]:
        table.add_row(
            str(row["layers"]),
            f"{row['fused']} of {row['all_reduces']}",
            f"{row['compile_seconds']:.2f} s",
            f"{row['passes_seconds']:.3f} s",
            f"{row['share']:.2%}",
        )
    console.print(
        f"{report['model']}, {report['world_size']} fake ranks, torch {report['versions']['torch']}", style="bold"
    )
    console.print(table)
    console.print("the compile is a lower bound, Dynamo to post-grad; so the share is an upper bound", style="dim")
    if len(counts) > 1:
        ratio = report["seconds_per_layer_growth"]
        console.print(
            f"seconds of passes per layer, {counts[-1]} against {counts[0]} layers: {ratio:.2f}x (1 is linear)"
        )
