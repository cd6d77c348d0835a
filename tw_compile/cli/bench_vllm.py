"""``tw-compile bench vllm``: vLLM engines without the passes and with them."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tw_compile.benchmark.vllm.spec import KINDS, VllmSpec
from tw_compile.cli import bench_common, common
from tw_compile.cli.bench_common import (
    CsvOption,
    DtypeOption,
    OnlyOption,
    PlotOption,
    PrefetchOption,
    SeedOption,
    WiresOption,
)
from tw_compile.cli.common import JsonOption, LayersOption
from tw_compile.config import whole_number
from tw_compile.environment import peer_access
from tw_compile.harness.requests import UsageError
from tw_compile.kernels.collective.wires import EXACT

MOST_GIB = 2**20
START_SECONDS = 120.0
"""How long an engine takes to start, compiling included.

It was 107 to 136 seconds in benchmarks/results/2026-11-22-2xh200-vllm-llama-3.1-8b-8192-tp2-groups.json.
"""
CHUNKS, BATCHES = "1024,2048,4096,8192", "1,8,64,256"


@common.one_line_errors
def vllm(
    model: Annotated[
        str, typer.Option(metavar="NAME|config.json|DIR", help="The model; its weights are random.")
    ] = "llama-3.3-70b",
    tp: Annotated[int | None, typer.Option(metavar="N", help="Ranks.", show_default="the GPUs that are there")] = None,
    layers: LayersOption = None,
    dtype: DtypeOption = "bfloat16",
    chunks: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Values of max_num_batched_tokens; each gets an engine.")
    ] = CHUNKS,
    batches: Annotated[str, typer.Option(metavar="N[,N...]", help="Requests of the decode traces.")] = BATCHES,
    traces: Annotated[str, typer.Option(metavar="KIND[,...]", help="Kinds of traces to time.")] = ",".join(KINDS),
    prompts: Annotated[int, typer.Option(metavar="N", help="Requests of the prefill trace.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each of them.")] = 2048,
    requests: Annotated[int, typer.Option(metavar="N", help="Requests of the mixed trace.")] = 512,
    decode_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens that a request of decode generates.")] = 128,
    repeats: Annotated[int, typer.Option(metavar="N", help="Timed rounds, after one round of warm-up.")] = 3,
    split: Annotated[
        str, typer.Option(metavar="auto|N", help="Where the variants that split do so: as planned, or after N tokens.")
    ] = "auto",
    only: OnlyOption = None,
    wire: WiresOption = EXACT,
    prefetch: PrefetchOption = None,
    kv_cache_gib: Annotated[float, typer.Option(metavar="GIB", help="KV cache on each GPU.")] = 8.0,
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="Start the engines of a chunk size at once; they share the GPUs' memory and take turns, so that what drifts "
            "hits all alike. Start-up seconds are those of a loaded machine.",
        ),
    ] = False,
    engine: Annotated[
        str, typer.Option(metavar="JSON", help="Further arguments of vllm.LLM, for every engine.")
    ] = "{}",
    seed: SeedOption = 0,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Give up an engine after this time.")] = 900.0,
    logs: Annotated[str | None, typer.Option(metavar="DIR", help="Keep what the engines print.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run; needs no GPU and no vLLM.")] = False,
    csv_file: CsvOption = None,
    plot_file: PlotOption = None,
    json_file: JsonOption = None,
) -> None:
    """Run vLLM without the passes, fusing, and fusing and splitting, in turn, on the same traces.

    An engine with the passes gets no speed-up where the error of its log-probabilities against float32 exceeds 1.1x (with a
    wire: 1.05x) that of vLLM alone. With more than 2 ranks and no wire, its greedy tokens must also agree with vLLM's as often
    as those of vLLM with another all_reduce do, where such an engine runs. Exit code: 0 all ran and none of ours was found
    worse than vLLM alone, 1 an engine failed or ours are worse, 2 bad input.
    """
    spec = VllmSpec(
        model=model,
        world_size=0 if tp is None else tp,
        dtype=dtype,
        layers=layers,
        chunks=common.numbers("--chunks", chunks),
        batches=common.numbers("--batches", batches),
        kinds=tuple(traces.split(",")),
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        requests=requests,
        decode_tokens=decode_tokens,
        repeats=repeats,
        split=split,
        only=bench_common.labels(only),
        wires=bench_common.wires(wire, model, dtype),
        prefetch=bench_common.prefetch(prefetch),
        kv_cache_bytes=_bytes(kv_cache_gib),
        engine=_table(engine),
        peer_access=peer_access(),
        together=together,
        seed=seed,
        timeout=timeout,
    )
    _check(spec, tp)
    common.model_file(model, layers=layers)  # without tp: vLLM copies key heads if ranks outnumber them
    bench_common.check_run(spec, {"--csv": csv_file, "--json": json_file, "--plot": plot_file})
    if logs is not None:
        logs = str(common.folder("--logs", logs))
    spec = _with_ranks(spec, tp, dry_run)
    if dry_run:
        _show(common.make_console(json_file), spec, json_file)
        return
    if logs is not None:
        _make_folder(logs)
    _bench(spec, logs, csv_file, plot_file, json_file)


def _bytes(gib: float) -> int:
    if not 2.0**-30 <= gib <= MOST_GIB:
        raise UsageError(f"--kv-cache-gib: expected a positive number of at most {MOST_GIB}, got {gib}")
    return int(gib * 2**30)


def _make_folder(logs: str) -> None:
    try:
        Path(logs).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--logs: expected a folder that is there or can be made, got {logs!r} ({error})") from error


def _table(text: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except json.JSONDecodeError:
        table = None
    if not isinstance(table, dict):
        raise UsageError(f"--engine: expected a JSON object, got {text!r}")
    from tw_compile.config import Config
    from tw_compile.hosts.vllm.options import asked_options

    try:  # with wrong options the engines would start all the same, but without the passes
        Config.from_mapping(asked_options(table.get("additional_config"), {}) or {})
    except (TypeError, ValueError) as error:
        raise UsageError(f"--engine: {error}") from None
    return table


def _check(spec: VllmSpec, tp: int | None) -> None:
    from tw_compile.benchmark.vllm.spec import variants

    for option, number in (
        ("--layers", spec.layers),
        ("--prompts", spec.prompts),
        ("--prompt-tokens", spec.prompt_tokens),
        ("--requests", spec.requests),
        ("--repeats", spec.repeats),
    ):
        common.positive(option, number)
    for kind in spec.kinds:
        if kind not in KINDS:
            raise UsageError(f"--traces: expected some of {', '.join(KINDS)}, got {kind!r}")
    common.ranks("--tp", tp, least=2)
    if spec.split != "auto" and not whole_number(spec.split):
        raise UsageError(f"--split: expected auto or a positive number of tokens, got {spec.split!r}")
    if not 2 <= spec.decode_tokens <= common.MOST:
        raise UsageError(f"--decode-tokens: expected 2 to {common.MOST}, got {spec.decode_tokens}")
    variants(spec)
    common.thresholds()


def _with_ranks(spec: VllmSpec, tp: int | None, dry_run: bool) -> VllmSpec:
    """The spec with its number of ranks: ``tp``, or as many as there are GPUs for. Without GPUs a dry run defaults to 2."""
    import dataclasses

    from tw_compile.benchmark.vllm.run import require_vllm

    gpus = common.gpus()
    ranks = tp or next((ranks for ranks in bench_common.CUDA_RANKS if ranks <= gpus), 2)
    if not dry_run:
        require_vllm()
        if ranks > gpus:
            raise UsageError(f"bench vllm: expected {ranks} GPUs for --tp {ranks}, got {gpus}")
    return dataclasses.replace(spec, world_size=ranks)


def _show(console: Console, spec: VllmSpec, json_file: str | None) -> None:
    """What would run, engine by engine."""
    from tw_compile.benchmark.vllm.run import described, write_model
    from tw_compile.benchmark.vllm.spec import engines
    from tw_compile.benchmark.vllm.traces import ACCURACY

    with tempfile.TemporaryDirectory(prefix="tw_compile_") as folder:
        write_model(spec, Path(folder))
        plan = [described(engine) for engine in engines(spec, "MODEL")]
    how = "those of a chunk size at once, taking turns" if spec.together else "one after the other"
    console.print(f"{len(plan)} starts of vLLM with {spec.world_size} ranks, {how}; {1 + spec.repeats} rounds each")
    console.print(_estimate(spec, len(plan)), markup=False)
    shared = {
        name: value for name, value in plan[0]["arguments"].items() if all(_has(engine, name, value) for engine in plan)
    }
    console.print(f"all: vllm.LLM({_arguments(shared)})", markup=False, soft_wrap=True)
    starts = Counter(engine["variant"] for engine in plan)
    for variant, count in starts.items():
        first = next(engine for engine in plan if engine["variant"] == variant)
        own = {
            name: value for name, value in first["arguments"].items() if name not in shared and name not in _OF_CHUNK
        }
        environment = " ".join(f"{name}={value}" for name, value in first["environment"].items())
        times = f" ({count} starts)" if count > 1 else ""
        console.print(f"{variant}{times}: {environment} {_arguments(own)}".rstrip(), markup=False, soft_wrap=True)
    for chunk in spec.chunks:
        traces: dict[str, str] = {}
        for engine in plan:
            if engine["chunk"] == chunk:
                traces |= {trace["trace"]: _trace(trace, ACCURACY) for trace in engine["traces"]}
        console.print(f"{chunk} tokens a step: {'; '.join(traces.values())}", markup=False, soft_wrap=True)
    common.write_json({"schema_version": 1, "command": "bench vllm --dry-run", "engines": plan}, json_file)


_OF_CHUNK = ("max_num_batched_tokens", "max_num_seqs", "max_model_len")


def _has(engine: dict[str, Any], name: str, value: Any) -> bool:
    return bool(engine["arguments"].get(name) == value)


def _arguments(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _trace(trace: dict[str, Any], once: str) -> str:
    text = f"{trace['trace']}: {trace['requests']} requests, {trace['prompt_tokens']} tokens in, {trace['output_tokens']} out"
    return text + (", once" if trace["trace"] == once else "")


def _estimate(spec: VllmSpec, starts: int) -> str:
    """How long the run takes, as far as that is known. Starting the engines takes most of the time."""
    waits = len(spec.chunks) if spec.together else starts
    return (
        f"about {waits * START_SECONDS / 60:.0f} minutes of starts, at {START_SECONDS:.0f} s each as llama-3.1-8b takes on two "
        f"H200, more for larger models; the traces come on top. An engine is given up after {spec.timeout:.0f} s (--timeout)"
    )


def _bench(
    spec: VllmSpec, logs: str | None, csv_file: str | None, plot_file: str | None, json_file: str | None
) -> None:
    from tw_compile.benchmark.vllm.plot import plot
    from tw_compile.benchmark.vllm.results import as_csv, failures, rows_of
    from tw_compile.benchmark.vllm.run import run, steps
    from tw_compile.benchmark.vllm.table import print_report

    report = bench_common.measure(partial(run, logs=logs), steps(spec), print_report, spec, json_file)
    bench_common.finish(report, failures(rows_of(report)), as_csv, csv_file, plot, plot_file)
