"""``tw-compile bench beside``: what a fused call and a GEMM cost each other when both run at once."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated

import typer

from tw_compile.benchmark.beside.spec import BesideSpec, GemmShape, check, most_steps
from tw_compile.cli import bench_common, common
from tw_compile.cli.bench_common import (
    CsvOption,
    DeviceOption,
    DtypeOption,
    PlotOption,
    RanksOption,
    RepeatsOption,
    SeedOption,
    TimeoutOption,
)
from tw_compile.cli.common import JsonOption
from tw_compile.config import whole_number
from tw_compile.harness.requests import UsageError
from tw_compile.kernels.collective.transports import AUTO

CUDA_SIZES = ("8192", "1024,4096,16384")
CPU_SIZES = ("256", "16,48")


@common.one_line_errors
def beside(
    tp: RanksOption = None,
    device: DeviceOption = "cuda",
    hidden: Annotated[
        str | None,
        typer.Option(metavar="N[,N...]", help="Hidden sizes.", show_default=f"{CUDA_SIZES[0]}, {CPU_SIZES[0]} on CPU"),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Tokens of a message, and rows of the GEMM beside it.",
            show_default=f"{CUDA_SIZES[1]}, {CPU_SIZES[1]} on CPU",
        ),
    ] = None,
    gemm: Annotated[
        str | None,
        typer.Option(
            metavar="KxN|KxN+N[,...]",
            help="GEMMs [tokens, K] x [K, N] of a rank; N+N are gate and up, multiplied with SiLU.",
            show_default="gate and up, and down, of Llama 3: hidden x 3.5 hidden / ranks",
        ),
    ] = None,
    sms: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="SMs that a call may have, and that the GEMM leaves.",
            show_default="what the transport's calls take beside work: 4 and 8 over host, 16 over p2p",
        ),
    ] = None,
    transport: Annotated[
        str,
        typer.Option(metavar="auto|p2p|host[,...]", help="What carries the calls; auto is what would run here."),
    ] = AUTO,
    dtype: DtypeOption = "bfloat16",
    repeats: RepeatsOption = 50,
    seed: SeedOption = 0,
    timeout: TimeoutOption = 1200.0,
    csv_file: CsvOption = None,
    plot_file: PlotOption = None,
    json_file: JsonOption = None,
) -> None:
    """Time a fused call and a GEMM alone and at once, as in a split layer, in one run.

    The call is like those of a split layer: few SMs, a side stream, a residual that stays with its owners. The GEMM leaves
    these SMs. While one of them is timed, the other one runs back to back, from before its begin to behind its end. Both ends
    are measured. A row where one side was idle has no ratio, nor has one whose results are wrong, alone or at once.

    Asked are a GEMM that takes at most 1.05x as long as alone, and a call that takes at most 1.15x.

    Exit code: 0 all that ran has ratios (on a CPU: right results), 1 something failed, was idle or is missing, 2 bad input.
    """
    default_hidden, default_tokens = CUDA_SIZES if device == "cuda" else CPU_SIZES
    spec = BesideSpec(
        world_size=0,
        device=device,
        dtype=dtype,
        hidden=common.numbers("--hidden", default_hidden if hidden is None else hidden),
        tokens=common.numbers("--tokens", default_tokens if tokens is None else tokens),
        transports=tuple(transport.split(",")),
        gemms=() if gemm is None else gemm_shapes(gemm),
        sms=() if sms is None else common.numbers("--sms", sms),
        repeats=repeats,
        seed=seed,
        timeout=timeout,
    )
    bench_common.check(spec, tp, {"--csv": csv_file, "--json": json_file, "--plot": plot_file})
    check(spec)
    spec = dataclasses.replace(spec, world_size=bench_common.ranks_here("bench beside", tp, device))
    from tw_compile.benchmark.beside.plot import plot
    from tw_compile.benchmark.beside.results import as_csv, failures, rows_of
    from tw_compile.benchmark.beside.run import run
    from tw_compile.benchmark.beside.table import print_report

    report = bench_common.measure(run, most_steps(spec), print_report, spec, json_file)
    bench_common.finish(report, failures(rows_of(report), device), as_csv, csv_file, plot, plot_file)


def gemm_shapes(text: str) -> tuple[GemmShape, ...]:
    """``"8192x14336+14336,14336x8192"`` -> gate and up, and one matrix.

    Raises:
        UsageError: The text is something else, or names a shape twice.
    """
    found = []
    for part in text.split(","):
        sides = re.fullmatch(r"(\d+)x(\d+)(\+\2)?", part.strip())
        inner, columns = (whole_number(side) for side in sides.groups()[:2]) if sides else (None, None)
        if sides is None or not inner or not columns:
            expected = "shapes KxN or KxN+N of positive numbers, separated by commas"
            raise UsageError(f"--gemm: expected {expected}, got {text!r}")
        found.append(GemmShape(inner, columns, gated=sides[3] is not None))
    if len(set(found)) < len(found):
        raise UsageError(f"--gemm: expected different shapes, got {text!r}")
    return tuple(found)
