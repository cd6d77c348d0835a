"""``tw-compile bench layer``, ``gemm-site`` and ``model``: what the passes make of a model, beside the unfused ways."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from tw_compile.benchmark.layer.spec import WITHOUT_SITES, LayerSpec, Scope, refuse_sites
from tw_compile.benchmark.layer.variants import variants
from tw_compile.cli import bench_common, common
from tw_compile.cli.bench_common import (
    CsvOption,
    DeviceOption,
    DtypeOption,
    OnlyOption,
    PlotOption,
    PrefetchOption,
    RanksOption,
    RepeatsOption,
    SeedOption,
    TimeoutOption,
    WiresOption,
)
from tw_compile.cli.common import JsonOption
from tw_compile.harness.requests import UsageError
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.model_file import read_model_file, text_part

CUDA_MODEL, CPU_MODEL = "llama-3.3-70b", "tiny-llama"
CPU_TOKENS, CPU_LAYERS = "8", 1
CUDA_TOKENS: dict[Scope, str] = {
    "layer": "512,1024,2048,4096,8192",
    "gemm-site": "256,512,1024,2048,4096,8192",
    "model": "512,1024,2048,4096,8192,16384,32768",
}
CUDA_LAYERS: dict[Scope, int] = {"layer": 4, "gemm-site": 4, "model": 16}

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|config.json|DIR",
        help="The model whose layers are timed; the weights are random.",
        show_default=f"{CUDA_MODEL}, {CPU_MODEL} on CPU",
    ),
]
BatchOption = Annotated[
    int, typer.Option("--batch", metavar="N", help="Sequences of equal length that share the tokens.")
]


def _tokens_option(scope: Scope) -> typer.models.OptionInfo:
    default = f"{CUDA_TOKENS[scope]}, {CPU_TOKENS} on CPU"
    return typer.Option(
        "--tokens", metavar="N[,N...]", help="Tokens of a prefill, over all sequences.", show_default=default
    )


def _layers_option(scope: Scope) -> typer.models.OptionInfo:
    default = f"{CUDA_LAYERS[scope]}, {CPU_LAYERS} on CPU"
    return typer.Option("--layers", metavar="N", help="Keep only the first N layers.", show_default=default)


@common.one_line_errors
def layer(
    model: ModelOption = None,
    tp: RanksOption = None,
    device: DeviceOption = "cuda",
    tokens: Annotated[str | None, _tokens_option("layer")] = None,
    batch: BatchOption = 1,
    layers: Annotated[int | None, _layers_option("layer")] = None,
    dtype: DtypeOption = "bfloat16",
    only: OnlyOption = None,
    sweep_split: Annotated[
        bool,
        typer.Option(
            "--sweep-split", help="Also split at up to 15 other places, and compare them with the planned one."
        ),
    ] = False,
    wire: WiresOption = EXACT,
    prefetch: PrefetchOption = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            "--kernels",
            metavar="NAME[,...]",
            help="Variants all of whose calls one of these kernels serves take part beside the others.",
        ),
    ] = None,
    repeats: RepeatsOption = 50,
    seed: SeedOption = 0,
    timeout: TimeoutOption = 1800.0,
    csv_file: CsvOption = None,
    plot_file: PlotOption = None,
    json_file: JsonOption = None,
) -> None:
    """Time a stack of sharded decoder layers, fused and split, beside Inductor with the best unfused all_reduce, in one run.

    Before it is timed, each variant must stay within the error budget of `run`. One that does not gets no time. With a wire the
    budget is the error of the unfused graph whose rows go through the same codes in torch.

    Exit code: 0 tw_compile's variants passed, 1 one of them failed or token counts are missing, 2 bad input.
    """
    spec = _spec("layer", model, device, tokens, batch, layers, dtype, only, wire, prefetch, repeats, seed, timeout)
    spec = dataclasses.replace(spec, sweep_split=sweep_split, kernels=_kernels(kernels, device))
    _bench(spec, tp, csv_file, plot_file, json_file)


@common.one_line_errors
def gemm_site(
    model: ModelOption = None,
    tp: RanksOption = None,
    device: DeviceOption = "cuda",
    tokens: Annotated[str | None, _tokens_option("gemm-site")] = None,
    layers: Annotated[int | None, _layers_option("gemm-site")] = None,
    dtype: DtypeOption = "bfloat16",
    only: OnlyOption = None,
    wire: WiresOption = EXACT,
    prefetch: PrefetchOption = None,
    repeats: RepeatsOption = 50,
    seed: SeedOption = 0,
    timeout: TimeoutOption = 1800.0,
    csv_file: CsvOption = None,
    plot_file: PlotOption = None,
    json_file: JsonOption = None,
) -> None:
    """Time GEMM, all_reduce, residual, norm and the GEMMs behind it, beside torch's GEMMs that communicate, in one run.

    The sites are the MLPs of a model, one behind the other, without attention. Among the peers are NCCL's reduce_scatter and
    all_gather, and torch's fused_matmul_reduce_scatter and fused_all_gather_matmul.

    Before it is timed, each variant must stay within the error budget of `run`. One that does not gets no time.

    Exit code: 0 tw_compile's variants passed, 1 one of them failed or token counts are missing, 2 bad input.
    """
    spec = _spec("gemm-site", model, device, tokens, 1, layers, dtype, only, wire, prefetch, repeats, seed, timeout)
    _bench(spec, tp, csv_file, plot_file, json_file)


@common.one_line_errors
def model(
    model: ModelOption = None,
    tp: RanksOption = None,
    device: DeviceOption = "cuda",
    tokens: Annotated[str | None, _tokens_option("model")] = None,
    batch: BatchOption = 1,
    layers: Annotated[int | None, _layers_option("model")] = None,
    dtype: DtypeOption = "bfloat16",
    only: OnlyOption = None,
    wire: WiresOption = EXACT,
    prefetch: PrefetchOption = None,
    repeats: RepeatsOption = 50,
    seed: SeedOption = 0,
    timeout: TimeoutOption = 3600.0,
    csv_file: CsvOption = None,
    plot_file: PlotOption = None,
    json_file: JsonOption = None,
) -> None:
    """Time a sharded model, cut to its first layers, from token ids to the final norm, compiled as `bench layer` does it.

    Before it is timed, each variant must stay within the error budget of `run`. One that does not gets no time. With a wire the
    budget is the error of the unfused graph whose rows go through the same codes in torch.

    Exit code: 0 tw_compile's variants passed, 1 one of them failed or token counts are missing, 2 bad input.
    """
    spec = _spec("model", model, device, tokens, batch, layers, dtype, only, wire, prefetch, repeats, seed, timeout)
    _bench(spec, tp, csv_file, plot_file, json_file)


def _spec(
    scope: Scope,
    model: str | None,
    device: str,
    tokens: str | None,
    batch: int,
    layers: int | None,
    dtype: str,
    only: str | None,
    wire: str,
    prefetch: str | None,
    repeats: int,
    seed: int,
    timeout: float,
) -> LayerSpec:
    """The spec of what was asked for. Its world size is 0 until the number of ranks is known."""
    on_gpus = device == "cuda"
    default_model, default_tokens = (CUDA_MODEL, CUDA_TOKENS[scope]) if on_gpus else (CPU_MODEL, CPU_TOKENS)
    common.positive("--batch", batch)
    common.positive("--layers", layers)
    spec = LayerSpec(
        scope=scope,
        model=default_model if model is None else model,
        world_size=0,
        device=device,
        dtype=dtype,
        tokens=common.numbers("--tokens", default_tokens if tokens is None else tokens),
        batch=batch,
        layers=layers or (CUDA_LAYERS[scope] if on_gpus else CPU_LAYERS),
        repeats=repeats,
        only=bench_common.labels(only),
        prefetch=bench_common.prefetch(prefetch),
        seed=seed,
        timeout=timeout,
    )
    for count in spec.tokens:
        if count % batch:
            raise UsageError(f"--tokens: expected multiples of --batch, {batch}, got {count}")
    return dataclasses.replace(spec, wires=bench_common.wires(wire, spec.model, dtype))


def _kernels(text: str | None, device: str) -> tuple[str, ...]:
    """The kernels that ``--kernels`` names.

    Raises:
        UsageError: There is no such kernel, or no GPU runs it.
    """
    names = bench_common.labels(text)
    known = [entry.name for entry in ALGORITHMS if not entry.feeds]
    if len(set(names)) < len(names) or not set(names) <= set(known):
        raise UsageError(f"--kernels: expected different ones of {', '.join(known)}, got {text!r}")
    if names and device != "cuda":
        raise UsageError(f"--kernels: expected --device cuda, as kernels run on GPUs, got --device {device}")
    return names


def _bench(spec: LayerSpec, tp: int | None, csv_file: str | None, plot_file: str | None, json_file: str | None) -> None:
    bench_common.check(spec, tp, {"--csv": csv_file, "--json": json_file, "--plot": plot_file})
    variants(spec, max(spec.tokens))
    common.model_file(spec.model, tp, spec.layers)
    model_type = text_part(read_model_file(spec.model)[0]).get("model_type")
    if spec.scope == "gemm-site" and model_type in WITHOUT_SITES:
        refuse_sites(model_type)
    common.thresholds()
    ranks = bench_common.ranks_here(f"bench {spec.scope}", tp, spec.device)
    common.model_file(spec.model, ranks)
    bench_common.check_depth(spec.model, spec.layers)
    spec = dataclasses.replace(spec, world_size=ranks)
    from tw_compile.benchmark.layer.plot import plot
    from tw_compile.benchmark.layer.results import as_csv, rows_of
    from tw_compile.benchmark.layer.run import run, steps
    from tw_compile.benchmark.layer.table import print_report
    from tw_compile.harness.rows import failures

    report = bench_common.measure(run, steps(spec), print_report, spec, json_file)
    bench_common.finish(report, failures(rows_of(report)), as_csv, csv_file, plot, plot_file)
