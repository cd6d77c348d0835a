"""One rank of a run: build the sharded decoder, compile it twice, compare with float64, time it.

Both models are compiled cold: Dynamo is reset, the FX graph caches are off, and the caches on disk start empty. The ranks of a
host share the folder of these caches, so a C++ or Triton kernel is still built once, as in production.
"""

from __future__ import annotations

import logging
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tw_compile import collect_reports, compat
from tw_compile.agree import gather
from tw_compile.harness.group import host_group, meet
from tw_compile.harness.launch import Progress
from tw_compile.harness.measure import gpu_us, peak_bytes
from tw_compile.harness.versions import peer_access_word, versions
from tw_compile.kernels.collective.transport import reserved_bytes
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.models.decoder import Decoder
from tw_compile.models.reference import reference_forward, to_double
from tw_compile.report import SCHEMA_VERSION, GraphReport, Site
from tw_compile.runner.model import build_model
from tw_compile.runner.numerics import BUDGET_FACTOR, OutputErrors, digest, finite, worst
from tw_compile.runner.spec import RunSpec
from tw_compile.runner.timeline import Hidden, profile, trace_of_rank
from tw_compile.runner.wires import wire_report
from tw_compile.testing.error_budget import relative_error

ModelOutputs = tuple[torch.Tensor, ...]

OUTPUT_NAMES = ("hidden", "residual")
WARM_UP = 5
ITERATIONS = 20


@dataclass
class Compiled:
    """One compiled model at the token counts of the run; compile seconds, reports and ``hidden`` are of the first count.

    ``peak_bytes``: the peak of what one forward allocates beyond weights, without symmetric memory, on the worst rank.
    """

    outputs: list[ModelOutputs]
    prefill_seconds: list[float]
    compile_seconds: float
    reports: list[GraphReport]
    peak_bytes: list[int] = field(default_factory=list)
    hidden: Hidden | None = None
    wire: dict[str, Any] | None = None

    @property
    def sites(self) -> list[Site]:
        """The sites of all graphs, numbered consecutively: usually there is one graph, but a model may break into several."""
        sites = [site for report in self.reports for site in report.sites]
        return [replace(site, index=index) for index, site in enumerate(sites)]


def run_rank(spec: RunSpec, scratch: Path, progress: Progress) -> dict[str, Any]:
    """Everything one rank does; collective. The report is complete on rank 0.

    ``scratch`` is a folder that exists on every rank, the same one for the ranks of a host.

    Raises:
        UsageError: The model can't be built as asked.
    """
    silence_known_warnings()
    decoder = _build(spec, progress)
    ids = _prompts(spec, decoder)
    progress("float64 reference")
    reference = _reference(decoder, ids)
    progress("unfused model, eager")
    eager = [_run(decoder, prompt) for prompt in ids]

    mode = compat.mode_options(spec.mode)
    ours = {**spec.config.as_options(), **mode}
    with compat.cold_compile(scratch / "warm_up"):
        progress("starting the compiler")
        _start_compiler(ids[0].device)
    # On the CPU only the compile is timed, and one unfused compile is enough.
    compared = ids if spec.device == "cuda" else ids[:1]
    with compat.cold_compile(scratch / "baseline"):
        baseline = _compile_and_run(decoder, compared, "inductor", mode, progress)
    with compat.cold_compile(scratch / "tw_compile"):
        observe = None if spec.wire == EXACT else partial(_observe_wires, spec.wire, decoder.config.num_hidden_layers)
        fused = _compile_and_run(decoder, ids, "tw_compile", ours, progress, _profiler(spec), observe)

    progress("comparing")
    counts = GraphReport(fused.sites).counts
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "run",
        "model": spec.model,
        "layers": decoder.config.num_hidden_layers,
        "world_size": spec.world_size,
        "device": spec.device,
        "device_name": torch.cuda.get_device_name() if spec.device == "cuda" else platform.machine(),
        "dtype": spec.dtype,
        "tokens": list(spec.tokens),
        "mode": spec.mode,
        "peer_access": peer_access_word(),
        "hosts": len(set(gather(platform.node()))),
        "graphs": len(fused.reports),
        "from_cache": sum(report.from_cache for report in fused.reports),
        "warnings": sorted({report.warning for report in fused.reports if report.warning}),
        "sites": [asdict(site) for site in fused.sites],
        "counts": counts,
        "splits": [report.split.as_dict() for report in fused.reports if report.split],
        "passes": [[asdict(done) for done in report.passes] for report in fused.reports],
        "numerics": numerics_report(
            spec, reference, eager, baseline.outputs, fused.outputs, promised=counts["fused"] == counts["all_reduce"]
        ),
        "compile_seconds": {
            "baseline": _slowest(baseline.compile_seconds),
            "tw_compile": _slowest(fused.compile_seconds),
            "passes": _slowest(sum(report.seconds for report in fused.reports)),
        },
        "prefill_seconds": {"baseline": baseline.prefill_seconds, "tw_compile": fused.prefill_seconds}
        if spec.device == "cuda"
        else None,
        "memory": _memory(baseline, fused) if spec.device == "cuda" else None,
        "wire": fused.wire,
        "trace": None if fused.hidden is None or spec.trace is None else _trace(spec.trace, fused.hidden),
        "versions": versions(),
    }


def _memory(baseline: Compiled, fused: Compiled) -> dict[str, Any]:
    """Peaks by token count, and the bytes of slots. Slots belong to the process: they have grown to what all counts need."""
    slots = max(gather(reserved_bytes()))
    return {"peak_bytes": {"baseline": baseline.peak_bytes, "tw_compile": fused.peak_bytes}, "slot_bytes": slots}


def _trace(file: str, hidden: Hidden) -> dict[str, Any]:
    """The share of communication hidden on the rank that took longest, and the measurements of every rank."""
    ranks: list[Hidden] = gather(hidden)
    slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].span_us)
    return {
        "files": [str(trace_of_rank(file, rank)) for rank in range(len(ranks))],
        "slowest_rank": slowest,
        "hidden_share": ranks[slowest].share,
        "by_rank": [hidden_of_rank.as_dict() for hidden_of_rank in ranks],
    }


def silence_known_warnings() -> None:
    """Silence two warnings that this module causes, as it disables the caches and compiles on machines without a GPU."""
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _build(spec: RunSpec, progress: Progress) -> Decoder:
    progress(f"building {spec.model}")
    device = torch.device(spec.device, torch.cuda.current_device()) if spec.device == "cuda" else torch.device("cpu")
    return build_model(spec, device, checkpoint=checkpoint_folder(spec.model))


def checkpoint_folder(model: str) -> Path | None:
    """The folder to load weights from; None when there are none, then they are random.

    An index alone counts as weights: its files are lacking, and loading them says so.
    """
    folder = Path(model)
    has_weights = folder.is_dir() and (any(folder.glob("*.safetensors*")) or any(folder.glob("*.bin*")))
    return folder if has_weights else None


def _prompts(spec: RunSpec, decoder: Decoder) -> list[torch.Tensor]:
    """Random token ids ``[1, tokens]``, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    device = next(decoder.parameters()).device
    vocabulary = decoder.config.vocab_size
    return [torch.randint(vocabulary, (1, tokens), generator=generator).to(device) for tokens in spec.tokens]


def _reference(decoder: Decoder, ids: list[torch.Tensor]) -> list[ModelOutputs]:
    """The outputs in float64. They are kept on the CPU, so that they take no device memory while the models run."""
    double = to_double(decoder)
    return [tuple(output.cpu() for output in reference_forward(double, prompt)) for prompt in ids]


@torch.no_grad()
def _run(model: Callable[[torch.Tensor], ModelOutputs], ids: torch.Tensor) -> ModelOutputs:
    torch.compiler.cudagraph_mark_step_begin()
    return tuple(output.clone() for output in model(ids))


def _start_compiler(device: torch.device) -> None:
    """Compile once, to pay for what only the first compile of a process or a machine does: imports, workers, C++ headers."""
    torch.compile(lambda x: torch.softmax(x.float() + 1, -1), dynamic=False)(torch.ones(4, 64, device=device))


def _compile_and_run(
    decoder: Decoder,
    ids: list[torch.Tensor],
    backend: str,
    options: dict[str, Any],
    progress: Progress,
    profiler: Callable[[Callable[[], ModelOutputs]], Hidden] | None = None,
    observe: Callable[[Compiled, Callable[[], ModelOutputs]], None] | None = None,
) -> Compiled:
    """Compile for every token count, one graph each, so that every report has static sizes.

    ``profiler`` and ``observe`` run the model of the first token count.
    """
    result = Compiled([], [], 0.0, [])
    for index, prompt in enumerate(ids):
        tokens = prompt.shape[1]
        progress(f"compiling with {backend} for {tokens} tokens")
        torch._dynamo.reset()
        model = torch.compile(decoder, dynamic=False, backend=backend, options=options)
        dist.barrier()
        with collect_reports() as reports:
            begin = time.perf_counter()
            outputs = _run(model, prompt)
            _synchronise(prompt.device)
            seconds = time.perf_counter() - begin
        if index == 0:
            result.compile_seconds, result.reports = seconds, reports
        if prompt.is_cuda:
            # The second run's peak: a mode with CUDA graphs captures in this run, and later replays allocate nothing.
            result.peak_bytes.append(max(gather(peak_bytes(partial(_run, model, prompt)))))
            progress(f"timing {backend} at {tokens} tokens")
            result.prefill_seconds.append(_time(model, prompt))
            outputs = _run(model, prompt)
        if index == 0 and profiler is not None:
            progress(f"tracing {backend} at {tokens} tokens")
            result.hidden = profiler(partial(_run, model, prompt))
        if index == 0 and observe is not None:
            progress(f"calls of {backend} at {tokens} tokens against float64")
            observe(result, partial(_run, model, prompt))
        result.outputs.append(outputs)
    return result


def _profiler(spec: RunSpec) -> Callable[[Callable[[], ModelOutputs]], Hidden] | None:
    """A function that traces a forward as ``spec.trace`` says; None where no trace was asked for. Collective."""
    if spec.trace is None:
        return None
    return partial(profile, file=trace_of_rank(spec.trace, dist.get_rank()), meet=partial(meet, host_group(spec)))


def _observe_wires(wire: str, layers: int, compiled: Compiled, forward: Callable[[], ModelOutputs]) -> None:
    group = dist.group.WORLD
    assert group is not None
    compiled.wire = wire_report(wire, compiled.sites, layers, forward, group)


def _time(model: Callable[[torch.Tensor], Any], ids: torch.Tensor) -> float:
    """Median seconds of one prefill on the slowest rank."""
    seconds = []
    with torch.no_grad():
        for iteration in range(WARM_UP + ITERATIONS):
            dist.barrier()
            torch.compiler.cudagraph_mark_step_begin()
            us = gpu_us(partial(model, ids))
            if iteration >= WARM_UP:
                seconds.append(us / 1e6)
    return _slowest(statistics.median(seconds))


def numerics_report(
    spec: RunSpec,
    reference: list[ModelOutputs],
    eager: list[ModelOutputs],
    baseline: list[ModelOutputs],
    fused: list[ModelOutputs],
    promised: bool,
) -> dict[str, Any]:
    """Errors of the worst rank, per token count and for the token count that uses most of its budget.

    The budget comes from the unfused model run eagerly, which rounds where the model's code says so. Inductor's unfused
    kernels skip some of these roundings; where they were run, the report has their error, too. Equal bits on all ranks are
    ``promised`` where every all_reduce is fused: other norms are Inductor's, which tunes its reductions on each rank. With a
    wire there is no such budget: the errors of each call have their own budget (``wires.py``).
    """
    table: list[dict[str, Any]] = []
    comparisons: dict[str, list[OutputErrors]] = {name: [] for name in OUTPUT_NAMES}
    factor = BUDGET_FACTOR if spec.wire == EXACT else math.inf
    for index, tokens in enumerate(spec.tokens):
        row: dict[str, Any] = {"tokens": tokens}
        for position, name in enumerate(OUTPUT_NAMES):
            runs = [outputs[index][position] for outputs in (fused, eager, baseline) if index < len(outputs)]
            ranks = gather([relative_error(run, reference[index][position]) for run in runs])
            error, unfused_error, *inductor_error = map(_largest, zip(*ranks, strict=True))
            comparisons[name].append(OutputErrors(error, unfused_error, factor))
            row[name] = comparisons[name][-1].as_dict() | {
                "inductor_error": finite(inductor_error[0]) if inductor_error else None
            }
        row["bitwise_equal_across_ranks"] = len(set(gather(digest(fused[index])))) == 1
        table.append(row)
    identical = all(row["bitwise_equal_across_ranks"] for row in table)
    within = all(comparison.passed for entries in comparisons.values() for comparison in entries)
    result: dict[str, Any] = {name: worst(entries).as_dict() for name, entries in comparisons.items()}
    return result | {
        "bitwise_equal_across_ranks": identical,
        "bitwise_equal_promised": promised,
        "passed": within and (identical or not promised),
        "by_tokens": table,
    }


def _largest(errors: Iterable[float]) -> float:
    """The largest of ``errors``; infinite when any of them is NaN."""
    return max(error if math.isfinite(error) else math.inf for error in errors)


def _slowest(seconds: float) -> float:
    return max(gather(seconds))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
