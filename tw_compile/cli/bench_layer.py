"""``tw-compile bench layer``: what the passes make of a model's layers, beside the unfused ways."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from tw_compile.benchmark.layer.spec import LayerSpec
from tw_compile.cli import bench, common
from tw_compile.cli.common import JsonOption
from tw_compile.runner.spec import DTYPES, RunSpec, UsageError

CUDA_MODEL, CPU_MODEL = "llama-3.3-70b", "tiny-llama"
CUDA_TOKENS, CPU_TOKENS = "512,1024,2048,4096,8192", "8"
CUDA_LAYERS, CPU_LAYERS = 4, 1


@common.one_line_errors
def layer(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|config.json|DIR",
            help="Whose layers; the weights are random.",
            show_default=f"{CUDA_MODEL}, {CPU_MODEL} on CPU",
        ),
    ] = None,
    tp: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks.", show_default="the GPUs that are there, 2 on CPU")
    ] = None,
    device: Annotated[str, typer.Option(metavar="cuda|cpu", help="cpu is a smoke test on gloo ranks.")] = "cuda",
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]", help="Tokens of a prefill, in all.", show_default=f"{CUDA_TOKENS}, {CPU_TOKENS} on CPU"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences that the tokens are.")] = 1,
    layers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Layers in the stack.", show_default=f"{CUDA_LAYERS}, {CPU_LAYERS} on CPU"),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES))] = "bfloat16",
    only: Annotated[str | None, typer.Option(metavar="LABEL[,...]", help="Variants that take part.")] = None,
    sweep_split: Annotated[
        bool, typer.Option("--sweep-split", help="Split at up to 15 other places, too, and compare the planned one.")
    ] = False,
    repeats: Annotated[int, typer.Option(metavar="N", help=f"Timed runs, at least {bench.MIN_REPEATS}.")] = 50,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the random weights and inputs.")] = 0,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Give up after so long.")] = 1800.0,
    csv_file: Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write the rows as CSV.")] = None,
    plot_file: Annotated[
        str | None, typer.Option("--plot", metavar="FILE.png|svg", help="Draw times and speed-ups.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Time a stack of sharded decoder layers, fused and split, beside Inductor with the best unfused all_reduce, in one run.

    Every variant is held to the error budget of `run` first; who fails it gets no time. Exit code: 0 ours passed, 1 one of
    ours failed, 2 bad input.
    """
    common.one_of("--device", device, ("cuda", "cpu"))
    common.one_of("--dtype", dtype, DTYPES)
    for option, number in (("--tp", tp), ("--batch", batch), ("--layers", layers)):
        common.positive(option, number)
    if repeats < bench.MIN_REPEATS:
        raise UsageError(f"--repeats: expected at least {bench.MIN_REPEATS}, got {repeats}")
    if seed < 0:
        raise UsageError(f"--seed: expected 0 or more, got {seed}")
    if timeout <= 0:
        raise UsageError(f"--timeout: expected a positive number of seconds, got {timeout}")
    on_gpus = device == "cuda"
    spec = LayerSpec(
        model=model or (CUDA_MODEL if on_gpus else CPU_MODEL),
        world_size=0,
        device=device,
        dtype=dtype,
        tokens=common.numbers("--tokens", tokens or (CUDA_TOKENS if on_gpus else CPU_TOKENS)),
        batch=batch,
        layers=layers or (CUDA_LAYERS if on_gpus else CPU_LAYERS),
        repeats=repeats,
        only=tuple(only.split(",")) if only else (),
        sweep_split=sweep_split,
        seed=seed,
        timeout=timeout,
    )
    for count in spec.tokens:
        if count % batch:
            raise UsageError(f"--tokens: expected multiples of --batch, {batch}, got {count}")
    for option, file in (("--csv", csv_file), ("--json", json_file), ("--plot", plot_file)):
        common.writable(option, file)
    if plot_file is not None:
        from tw_compile.benchmark.plot import require

        require(plot_file)
    spec = dataclasses.replace(spec, world_size=bench.ranks_here("bench layer", tp, device))
    bench.check_depth(RunSpec(spec.model, spec.world_size, device, spec.tokens, dtype, spec.layers))
    _finish(_bench_layer(spec, json_file), csv_file, plot_file)


def _bench_layer(spec: LayerSpec, json_file: str | None) -> dict[str, Any]:
    from tw_compile.benchmark.layer.run import run, steps
    from tw_compile.benchmark.layer.table import print_report

    console = common.make_console(json_file)
    with common.stages(console, steps(spec)) as progress:
        report = run(spec, progress)
    print_report(console, report)
    common.write_json(report, json_file)
    return report


def _finish(report: dict[str, Any], csv_file: str | None, plot_file: str | None) -> None:
    """What was asked for beside the JSON; then exits with 1 when one of ours failed."""
    from tw_compile.benchmark.layer.results import as_csv, rows_of
    from tw_compile.benchmark.results import failures

    if csv_file is not None:
        common.write_file("--csv", csv_file, as_csv(report))
    if plot_file is not None:
        from tw_compile.benchmark.layer.plot import plot

        plot(report, plot_file)
    if failures(rows_of(report)):
        raise typer.Exit(common.EXIT_FAILED)
