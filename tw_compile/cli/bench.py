"""``tw-compile bench``: what the passes cost, and how fast the fused operator is beside its peers."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.console import Console

from tw_compile.benchmark.spec import BenchSpec
from tw_compile.benchmark.variants import NORMS, check
from tw_compile.cli import bench_common, common
from tw_compile.cli.bench_common import (
    CsvOption,
    DeviceOption,
    DtypeOption,
    OnlyOption,
    PlotOption,
    RanksOption,
    RepeatsOption,
    SeedOption,
    TimeoutOption,
)
from tw_compile.cli.common import JsonOption, ModelOption
from tw_compile.harness.requests import UsageError
from tw_compile.harness.rows import SCHEMA_VERSION, csv_text
from tw_compile.harness.table import plain_table
from tw_compile.kernels.collective.wires import EXACT, WIRES
from tw_compile.runner.spec import RunSpec

TOKENS = 4096
COLUMNS = ("model", "world_size", "layers", "all_reduces", "fused", "compile_seconds", "passes_seconds", "share")

app = typer.Typer(help="Measure the passes and the fused operator.", no_args_is_help=True)


@app.command()
@common.one_line_errors
def passes(
    model: ModelOption = "llama-3.3-70b",
    tp: Annotated[int, typer.Option(metavar="N", help="Ranks to play.")] = 8,
    layers: Annotated[str, typer.Option(metavar="N[,N...]", help="Layer counts to compile.")] = "20,40,80",
    csv_file: CsvOption = None,
    json_file: JsonOption = None,
) -> None:
    """Time the passes beside the rest of a cold compile, for several depths of one model; needs no GPU.

    The rest is Dynamo, AOTAutograd and Inductor up to its post-grad passes. Scheduling and code generation need the
    GPU and are not in it, so the share of the passes is an upper bound.
    """
    common.ranks("--tp", tp)
    counts = sorted(common.numbers("--layers", layers))
    common.model_file(model, tp, counts[-1])
    common.writable("--csv", csv_file)
    console = common.make_console(json_file)
    with common.stages(console) as progress:
        progress("importing torch and transformers")
        from tw_compile.harness.versions import machine, versions
        from tw_compile.runner.fake import inspect_model

        deepest = RunSpec(model, tp, "cuda", (TOKENS,), "bfloat16", counts[-1])
        bench_common.check_depth(model, counts[-1])
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
        common.write_file("--csv", csv_file, csv_text(rows, {"machine": machine(), **versions()}))


CUDA_SIZES = ("8192", "1,4,16,64,256,1024,4096,16384")
CPU_SIZES = ("512", "1,16,63")
GATED_HIDDEN = "2048,4096,8192"
MOST_AT_ONCE = 4


@app.command()
@common.one_line_errors
def kernel(
    tp: RanksOption = None,
    device: DeviceOption = "cuda",
    hidden: Annotated[
        str | None,
        typer.Option(metavar="N[,N...]", help="Hidden sizes.", show_default=f"{CUDA_SIZES[0]}, {CPU_SIZES[0]} on CPU"),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="N[,N...]", help="Token counts.", show_default=f"{CUDA_SIZES[1]}, {CPU_SIZES[1]} on CPU"),
    ] = None,
    dtype: DtypeOption = "bfloat16",
    only: OnlyOption = None,
    sms: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="SM counts to try, for kernels of tw_compile that take one.")
    ] = None,
    calls: Annotated[int, typer.Option(metavar="N", help="Calls in one CUDA graph.")] = 20,
    repeats: RepeatsOption = 50,
    rotate_from: Annotated[
        int, typer.Option(metavar="BYTES", help="Messages from this size on rotate over more inputs than L2 holds.")
    ] = 2**20,
    seed: SeedOption = 0,
    wire: Annotated[
        str,
        typer.Option(
            metavar="|".join(WIRES) + "[,...]",
            help="How rows travel. Kernels of tw_compile that have a wire are timed with it.",
        ),
    ] = EXACT,
    norm: Annotated[
        str,
        typer.Option(metavar="|".join(NORMS) + "[,...]", help="The norms to time the kernels of tw_compile with."),
    ] = NORMS[0],
    gemm: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="With --prefetch: ours that can prefetch also run with a matmul by N columns behind the call, in its time.",
        ),
    ] = None,
    prefetch: Annotated[
        str | None,
        typer.Option(
            metavar="off|BYTES[,...]", help="With --gemm: how much of its weights the call brings into the L2 cache."
        ),
    ] = None,
    at_once: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Calls that are on their way at a time, on streams of their own, as in a split layer; not peers'.",
        ),
    ] = 1,
    gated: Annotated[
        bool, typer.Option("--gated", help=f"Also time what the gate chooses; hidden is then {GATED_HIDDEN}.")
    ] = False,
    regret_file: Annotated[
        str | None,
        typer.Option(
            "--regret", metavar="FILE.csv", help="With --gated: write how far the gate's choices are from the best."
        ),
    ] = None,
    timeout: TimeoutOption = 1200.0,
    csv_file: CsvOption = None,
    plot_file: PlotOption = None,
    table_file: Annotated[
        str | None,
        typer.Option(
            "--table", metavar="FILE.toml", help="Write which kernel is best for which message (configs/kernels)."
        ),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Time fused all_reduce + residual + RMSNorm beside NCCL, torch's symmetric memory and FlashInfer, in one run.

    Before it is timed, each implementation must stay within an error budget against float64. One that does not gets no time.
    For rows in codes the budget is the error that the same codes make in torch.

    Exit code: 0 tw_compile's kernels passed, 1 one of them failed or sizes are missing, 2 bad input.
    """
    common.positive("--calls", calls)
    common.not_negative("--rotate-from", rotate_from)
    if not 1 <= at_once <= MOST_AT_ONCE:
        raise UsageError(f"--at-once: expected 1 to {MOST_AT_ONCE}, got {at_once}")
    if at_once > 1 and (device != "cuda" or gated or table_file is not None):
        raise UsageError(f"--at-once: expected 1 with --device cpu, --gated and --table, got {at_once}")
    if regret_file is not None and not gated:
        raise UsageError(f"--regret: expected --gated with it, got {regret_file!r} alone")
    default_hidden, default_tokens = CUDA_SIZES if device == "cuda" else CPU_SIZES
    if gated and device == "cuda":
        default_hidden = GATED_HIDDEN
    spec = BenchSpec(
        world_size=0,
        device=device,
        dtype=dtype,
        hidden=common.numbers("--hidden", default_hidden if hidden is None else hidden),
        tokens=common.numbers("--tokens", default_tokens if tokens is None else tokens),
        calls=calls,
        repeats=repeats,
        rotate_from=rotate_from,
        only=bench_common.labels(only),
        sms=() if sms is None else common.numbers("--sms", sms),
        seed=seed,
        timeout=timeout,
        gated=gated,
        wires=tuple(wire.split(",")),
        norms=tuple(norm.split(",")),
        gemms=() if gemm is None else common.numbers("--gemm", gemm),
        prefetch=bench_common.prefetch(prefetch),
        at_once=at_once,
    )
    files = {"--csv": csv_file, "--json": json_file, "--plot": plot_file, "--table": table_file}
    bench_common.check(spec, tp, files | {"--regret": regret_file})
    check(spec)
    if gated:
        common.thresholds()
    spec = dataclasses.replace(spec, world_size=bench_common.ranks_here("bench kernel", tp, device))
    from tw_compile.benchmark.run import run, steps
    from tw_compile.benchmark.table import print_report

    report = bench_common.measure(run, steps(spec), print_report, spec, json_file)
    _write_files(report, csv_file, plot_file, table_file, regret_file)


def _write_files(
    report: dict[str, Any],
    csv_file: str | None,
    plot_file: str | None,
    table_file: str | None,
    regret_file: str | None,
) -> None:
    """Write the files that were asked for beside the JSON. Then exit with 1 when a kernel of ours failed or sizes are missing.

    The files of ``--regret`` and ``--table`` are not written where sizes are missing: they would say nothing about those sizes.
    """
    from tw_compile.benchmark.plot import plot
    from tw_compile.benchmark.results import as_csv, rows_of
    from tw_compile.harness.rows import failures

    if report["incomplete"] is not None:
        for option, file in (("--regret", regret_file), ("--table", table_file)):
            if file is not None:
                typer.echo(f"{option}: {file!r} is not written, as the run is incomplete", err=True)
        regret_file = table_file = None
    if regret_file is not None:
        from tw_compile.benchmark.gated import regret_csv

        common.write_file("--regret", regret_file, regret_csv(report))
    if table_file is not None:
        from tw_compile.benchmark.tune import table_of

        try:
            common.write_file("--table", table_file, table_of(report))
        except ValueError as error:
            raise UsageError(f"--table: {error}") from error
    bench_common.finish(report, failures(rows_of(report)), as_csv, csv_file, plot, plot_file)


def _with_layers(spec: RunSpec, layers: int) -> RunSpec:
    return dataclasses.replace(spec, layers=layers)


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


def _print(console: Console, report: dict[str, Any], counts: list[int]) -> None:
    table = plain_table(("layers", "fused", "compile without codegen", "passes", "share"))
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
