"""``tw-compile run``: a tensor-parallel decoder on real ranks, compiled with and without the passes, and checked."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Any

import typer
from rich.console import Console

from tw_compile.cli import common
from tw_compile.cli.common import (
    DeviceProfileOption,
    JsonOption,
    LayersOption,
    ModelOption,
    SplitOption,
    TransportOption,
    WireOption,
    WireSitesOption,
)
from tw_compile.cli.wire_cost import MAX_DNLL, TEXT_TOKENS, WireCostOptions, show_cost
from tw_compile.harness.requests import UsageError
from tw_compile.kernels.collective.transports import AUTO, names_for
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.leave import leave
from tw_compile.runner.spec import DTYPES, MODES, RunSpec

CPU_TOKENS = "64,63,1"
CUDA_TOKENS = "4096,1023,1"
CPU_RANKS = 2
DEFAULT_MODEL = "tiny-llama"
START_SECONDS = 20.0
COMPILE_SECONDS = 10.0
"""How long a cold compile of tiny-llama takes on a CPU of its own: Dynamo, Inductor and the C++ compiler."""
CUDA_RANKS = (8, 4, 2)


@common.one_line_errors
def run(
    model: ModelOption = DEFAULT_MODEL,
    tp: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks.", show_default="the GPUs that are there, 2 on CPU")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="Where to run.", show_default="cuda with 2 or more GPUs")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="N[,N...]", help="Prompt lengths.", show_default=f"{CPU_TOKENS} or {CUDA_TOKENS}"),
    ] = None,
    layers: LayersOption = None,
    transport: TransportOption = "auto",
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES))] = "bfloat16",
    mode: Annotated[str, typer.Option(metavar="|".join(MODES), help="torch.compile's mode.")] = "default",
    split: SplitOption = "auto",
    device_profile: DeviceProfileOption = "auto",
    wire: WireOption = EXACT,
    wire_sites: WireSitesOption = "all",
    wire_min_bytes: Annotated[
        int,
        typer.Option(metavar="N", help="Smaller messages travel exact. 0: every message has the wire, to show it."),
    ] = 0,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --wire and --checkpoint: the cost in nats for each token of this text. Ranks are simulated on the CPU.",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|FILE.gguf|PACKAGE", help="With --text: a model with weights, or a package that holds one."
        ),
    ] = None,
    text_tokens: Annotated[
        int, typer.Option(metavar="N", help="With --text: how many of its tokens to use.")
    ] = TEXT_TOKENS,
    max_dnll: Annotated[
        float,
        typer.Option(metavar="NATS", help="With --text: the most that the wire may cost. Above it the exit code is 1."),
    ] = MAX_DNLL,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.json",
            help="Profile one forward at the first prompt length, write FILE.rankN.json for Perfetto, and say how much of "
            "the communication is hidden.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Give up after this time.")] = 1800.0,
    json_file: JsonOption = None,
) -> None:
    """Run a tensor-parallel decoder with the fused operators, check it against float64, and show what was fused.

    It starts the ranks itself; under torchrun it is one of them. With --wire it also shows the error that the codes add to each
    kind of sum. With --text it runs no ranks and shows what the codes cost a model.

    Exit code: 0 passed, 1 numerics failed or ranks differ, 2 bad input.
    """
    from tw_compile.harness.launch import spawn_ranks, torchrun_world_size
    from tw_compile.harness.variables import for_runs
    from tw_compile.runner.ranks import run_in_process_group

    common.wires(wire, wire_sites, wire_min_bytes)
    if text is not None or checkpoint is not None:
        wanted = WireCostOptions(wire, wire_sites, text, checkpoint, text_tokens, max_dnll, tp)
        raise typer.Exit(show_cost(wanted, json_file))
    common.splitting(split, device_profile)
    common.writable("--trace", trace)
    spec = resolve(model, tp, device, tokens, layers, transport, dtype, mode, timeout)
    spec = dataclasses.replace(
        spec,
        split=split,
        device_profile=device_profile,
        trace=trace,
        wire=wire,
        wire_sites=wire_sites,
        wire_min_bytes=None if wire == EXACT else wire_min_bytes,
    )
    console = common.make_console(json_file)
    if torchrun_world_size() is not None:
        with for_runs():
            report = _join(spec, console)
        leave(0 if report is None else _show(report, console, json_file))
    if spec.device == "cpu":
        console.print(_estimate(spec), style="dim", markup=False)
    with common.stages(console, spec.steps) as progress, for_runs():
        progress(f"starting {spec.world_size} ranks")
        report = spawn_ranks(spec, progress, run_in_process_group)
    raise typer.Exit(_show(report, console, json_file))


def _estimate(spec: RunSpec) -> str:
    """How long a run on the CPU takes. C++ compilers take most of that time."""
    seconds = (START_SECONDS + COMPILE_SECONDS * spec.compiles) * max(1.0, spec.world_size / (os.cpu_count() or 1))
    return (
        f"{spec.compiles} models are compiled on each of {spec.world_size} ranks, on {os.cpu_count()} CPUs: for "
        f"{DEFAULT_MODEL} about {round(seconds, -1):.0f} seconds, fewer models with --tokens of one length"
    )


def _show(report: dict[str, Any], console: Console, json_file: str | None) -> int:
    """Print and write the report. Returns the exit code."""
    from tw_compile.cli.render import print_run

    print_run(console, report)
    common.write_json(report, json_file)
    wire = report.get("wire")
    return 0 if report["numerics"]["passed"] and (wire is None or wire["passed"]) else common.EXIT_FAILED


def _join(spec: RunSpec, console: Console) -> dict[str, Any] | None:
    """Run as one rank of torchrun. Only rank 0 shows progress and gets the report."""
    from tw_compile.runner.ranks import join_ranks

    if os.environ["RANK"] != "0":
        return join_ranks(spec, lambda what: None)
    with common.stages(console) as progress:
        return join_ranks(spec, progress)


def resolve(
    model: str,
    tp: int | None,
    device: str | None,
    tokens: str | None,
    layers: int | None,
    transport: str,
    dtype: str,
    mode: str,
    timeout: float,
) -> RunSpec:
    """Fill in the values that depend on the machine, and refuse values that are impossible.

    Raises:
        UsageError: An option has a value that makes no sense here.
    """
    common.one_of("--dtype", dtype, DTYPES)
    common.one_of("--mode", mode, MODES)
    common.one_of("--transport", transport, common.TRANSPORTS)
    common.ranks("--tp", tp)
    common.positive("--layers", layers)
    if device is not None:
        common.one_of("--device", device, ("cpu", "cuda"))
    common.seconds("--timeout", timeout)
    common.thresholds()
    common.model_file(model, tp, layers)
    asked_tokens = common.numbers("--tokens", tokens) if tokens is not None else None
    if device == "cpu" and transport not in (of_cpu := (AUTO, *names_for("cpu"))):
        raise UsageError(f"--transport: expected {' or '.join(of_cpu)} with --device cpu, got {transport!r}")
    gpus = 0 if device == "cpu" else common.gpus()
    if device == "cuda" and gpus == 0:
        raise UsageError("--device: expected cpu, as torch finds no GPU here, got 'cuda'")
    chosen = device or ("cuda" if gpus >= _ranks_here() else "cpu")
    if chosen == "cpu" and transport not in (AUTO, *names_for("cpu")):
        why = "--device cpu" if device else f"the CPU, which is taken as there are {gpus} GPUs"
        raise UsageError(f"--transport: expected auto or gloo with {why}, got {transport!r}")
    world_size = _world_size(tp, chosen, gpus)
    common.model_file(model, world_size, layers)
    return RunSpec(
        model=model,
        world_size=world_size,
        device=chosen,
        tokens=asked_tokens or common.numbers("--tokens", CUDA_TOKENS if chosen == "cuda" else CPU_TOKENS),
        dtype=dtype,
        layers=layers,
        transport=transport,
        mode=mode,
        timeout=timeout,
    )


def _world_size(tp: int | None, device: str, gpus: int) -> int:
    from tw_compile.harness.launch import torchrun_world_size

    launched = torchrun_world_size()
    if launched is not None:
        if tp not in (None, launched):
            raise UsageError(f"--tp: expected {launched}, the number of processes that torchrun started, got {tp}")
        return launched
    if device == "cpu":
        common.cpu_ranks("--tp", tp)
        return tp or CPU_RANKS
    common.ranks_of_gpus(tp, gpus)
    return tp or next((ranks for ranks in CUDA_RANKS if ranks <= gpus), gpus)


def _ranks_here() -> int:
    """How many GPUs this machine must have for the ranks to go to GPUs by default."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
