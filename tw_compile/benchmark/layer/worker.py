"""One rank of a benchmark of layers: compile every variant, hold it to the error budget, time those that passed.

What is timed is a stack of layers from the residual stream to the residual stream, with the final norm: without embedding and
head, every all_reduce of the stack is followed by a residual add and a norm, as in the middle of a model. A layer's time is the
stack's by its number of layers. One norm and the table of the rotary embedding come on top once a stack, for all variants
alike, and so does what a split exposes at its two ends; the difference of two depths would leave these out, but is as
noisy as both together and compiles everything twice.
"""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from tw_compile import Config, collect_reports, compat
from tw_compile.benchmark.contenders import fallback
from tw_compile.benchmark.layer.results import LayerRow, complete
from tw_compile.benchmark.layer.spec import LayerSpec
from tw_compile.benchmark.layer.symmetric import reserve
from tw_compile.benchmark.layer.variants import Variant, variants
from tw_compile.benchmark.measure import GraphTimer, LoopTimer, Timer, interleaved, percentiles
from tw_compile.benchmark.ranks import Ranks, UnavailableError
from tw_compile.benchmark.results import Outcome
from tw_compile.benchmark.spec import ELEMENT_BYTES
from tw_compile.kernels.all_reduce_rms_norm.transport import get_transport
from tw_compile.models import Decoder, build_decoder, load_config, reference_forward, to_double
from tw_compile.report import GraphReport, Split
from tw_compile.runner.launch import report_to_parent
from tw_compile.runner.numerics import Comparison, finite
from tw_compile.runner.spec import UsageError
from tw_compile.runner.worker import process_group, silence_known_warnings
from tw_compile.testing.error_budget import relative_error
from tw_compile.testing.gpu_problems import Context, expect_same_on_all_ranks

Progress = Callable[[str], None]
Outputs = tuple[torch.Tensor, torch.Tensor]

OUTPUT_NAMES = ("hidden", "residual")
MOST_COMPILES = 64


def rank_process(spec: LayerSpec, rank: int, scratch: str, messages: Connection) -> None:
    """Entry point of a spawned rank."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(spec.world_size))

    def work(progress: Progress) -> dict[str, Any]:
        progress("joining")
        with process_group(spec, rank, rank, f"file://{scratch}/store"), torch.no_grad():
            return run_rank(spec, rank, progress)

    report_to_parent(messages, work)


def run_rank(spec: LayerSpec, rank: int, progress: Progress) -> dict[str, Any]:
    """Everything one rank does; the rows are the same on every rank. Calls ``progress`` ``steps`` times less one.

    Raises:
        UsageError: The model can't be built as asked.
    """
    silence_known_warnings()
    if spec.device == "cuda":
        device, device_name = torch.device("cuda", rank), torch.cuda.get_device_name()
    else:
        torch.set_num_threads(1)
        device, device_name = torch.device("cpu"), platform.machine()
    assert dist.group.WORLD is not None
    context = Context(rank, spec.world_size, device, compat.group_name(dist.group.WORLD))
    ranks = Ranks(context, dist.new_group(backend="gloo", timeout=timedelta(seconds=spec.timeout)))
    progress(f"building {spec.layers} layers of {spec.model}")
    stack = build_stack(spec, device)
    double = Stack(to_double(stack.decoder))
    reserve(ranks, max(spec.tokens) * stack.hidden_size * ELEMENT_BYTES[spec.dtype])
    rows: list[LayerRow] = []
    for tokens in spec.tokens:
        # Reports come from compiling: a graph that comes out of a cache has none.
        with compat.cold_compile(None), torch._dynamo.config.patch(recompile_limit=MOST_COMPILES):
            rows += bench_tokens(spec, ranks, variants(spec, tokens), (stack, double), tokens, progress)
    return {"device_name": device_name, "hidden_size": stack.hidden_size, "rows": [asdict(row) for row in rows]}


class Stack(nn.Module):
    """The layers of a decoder and its final norm: residual stream in, normalised output and residual stream out."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    @property
    def hidden_size(self) -> int:
        return self.decoder.config.hidden_size

    def forward(self, residual: torch.Tensor) -> Outputs:
        """``[batch, seq, hidden]`` -> two of the same shape."""
        residual = self.decoder.model(inputs_embeds=residual, use_cache=False).last_hidden_state
        return self.decoder.norm(residual), residual


def build_stack(spec: LayerSpec, device: torch.device) -> Stack:
    try:
        decoder = build_decoder(
            load_config(spec.model),
            device=device,
            dtype=getattr(torch, spec.dtype),
            num_layers=spec.layers,
            seed=spec.seed,
        )
    except ValueError as error:
        raise UsageError(f"--model {spec.model} --tp {spec.world_size}: {error}") from error
    return Stack(decoder)


@dataclass
class Reference:
    """What a run on ``residual`` must come near to, in float64, and how far the eager unfused one on this rank is from it."""

    residual: torch.Tensor
    want: Outputs
    unfused_errors: tuple[float, ...]


class Run:
    """One run of a compiled stack; ``outputs`` are the last one's, or where the replays of a captured one write."""

    def __init__(self, compiled: Callable[[torch.Tensor], Outputs], residual: torch.Tensor) -> None:
        self._compiled = compiled
        self._residual = residual
        self.outputs: Outputs | None = None

    def __call__(self) -> Outputs:
        self.outputs = None  # before the next ones are allocated
        self.outputs = self._compiled(self._residual)
        return self.outputs


@dataclass
class Entry:
    """A variant at one number of tokens; ``timer`` is there when it is to be timed."""

    variant: Variant
    row: LayerRow
    run: Run | None = None
    timer: Timer | None = None

    def fail(self, outcome: Outcome, reason: str) -> Entry:
        self.row.outcome, self.row.reason, self.timer = outcome, reason, None
        return self


def bench_tokens(
    spec: LayerSpec,
    ranks: Ranks,
    everyone: list[Variant],
    stacks: tuple[Stack, Stack],
    tokens: int,
    progress: Progress,
) -> list[LayerRow]:
    """The rows of one number of tokens; ``stacks``: the model, and the same in float64."""
    stack, double = stacks
    progress(f"{tokens} tokens: float64 reference")
    nbytes = tokens * stack.hidden_size * ELEMENT_BYTES[spec.dtype]
    entries = [Entry(one, LayerRow(one.label, one.kind, tokens, nbytes, "timed")) for one in everyone]
    try:
        reference = ranks.together(lambda: _reference(spec, ranks, stack, double, tokens))
    except UnavailableError as error:
        for entry in entries:
            progress(f"{tokens} tokens: skipping {entry.variant.label}")
            entry.fail("error", f"no reference: {error}")
        progress(f"{tokens} tokens: nothing to time")
        return [entry.row for entry in entries]
    for entry in entries:
        progress(f"{tokens} tokens: compiling and checking {entry.variant.label}")
        _admit(spec, ranks, entry, stack, reference)
    progress(f"{tokens} tokens: timing")
    _time(spec, ranks, entries, reference)
    rows = [entry.row for entry in entries]
    if spec.device == "cuda":
        # Peers are done with what the graphs use before any of it is freed.
        torch.cuda.synchronize()
        ranks.barrier()
        del entry, entries, reference
        gc.collect()
        torch.cuda.empty_cache()
    return complete(rows, spec.device)


def _reference(spec: LayerSpec, ranks: Ranks, stack: Stack, double: Stack, tokens: int) -> Reference:
    shape = (spec.batch, tokens // spec.batch, stack.hidden_size)
    generator = ranks.ctx.generator(spec.seed, tokens)
    residual = torch.randn(shape, generator=generator, device=ranks.ctx.device).to(getattr(torch, spec.dtype))
    want = reference_forward(double, residual.double())
    return Reference(residual, want, _errors(stack(residual), want))


def _errors(outputs: Outputs, want: Outputs) -> tuple[float, ...]:
    return tuple(relative_error(output, exact) for output, exact in zip(outputs, want, strict=True))


def _admit(spec: LayerSpec, ranks: Ranks, entry: Entry, stack: Stack, reference: Reference) -> None:
    """Compile, run, check, capture. What goes wrong on one rank ends it on all, with the reason."""
    refusal = entry.variant.obstacle(entry.row.nbytes, spec.dtype)
    if refusal is not None:
        entry.fail("not served", refusal)
        return
    try:
        with collect_reports() as reports:
            entry.run, entry.row.all_reduces = ranks.together(
                lambda: _compiled(entry.variant, stack, reference.residual)
            )
        deviation = ranks.agree(_deviation(ranks, entry, reports))
        if deviation is not None:
            entry.fail("error", deviation)
            return
        if not _passes(ranks, entry, reference):
            return
        run = entry.run
        peaks = ranks.gather(ranks.together(lambda: _peak_bytes(run)) if spec.device == "cuda" else None)
        entry.row.peak_bytes = peaks[0] if None in peaks else max(peaks)
        make = GraphTimer if spec.device == "cuda" else LoopTimer
        entry.timer = ranks.together(lambda: make([run], 1))
    except UnavailableError as error:
        entry.fail("error", str(error))


def _compiled(variant: Variant, stack: Stack, residual: torch.Tensor) -> tuple[Run, int | None]:
    """The stack, compiled and run once, and how many all_reduces it had; None for ours, whose reports say."""
    if variant.kind == "ours":
        batch, seq, _ = residual.shape
        options = Config(strict=True, **variant.options(batch * seq, batch)).as_options()
        run = Run(torch.compile(stack, dynamic=False, backend="tw_compile", options=options), residual)
        _finished(run)
        return run, None
    graph_pass = variant.make_pass()
    options = {compat.POST_GRAD_HOOK: graph_pass}
    run = Run(torch.compile(stack, dynamic=False, backend="inductor", options=options), residual)
    _finished(run)
    return run, graph_pass.seen


def _finished(run: Run) -> Outputs:
    outputs = run()
    if outputs[0].is_cuda:
        torch.cuda.synchronize()
    return outputs


def _deviation(ranks: Ranks, entry: Entry, reports: list[GraphReport]) -> str | None:
    """What ran instead of what the label says; None when nothing did. Counts the all_reduces that are fused."""
    entry.row.fused = 0
    if entry.variant.kind == "ours":
        sites = [site for report in reports for site in report.sites]
        entry.row.all_reduces = len(sites)
        entry.row.fused = sum(site.decision == "fused" for site in sites)
        splits = [report.split for report in reports if report.split is not None]
        entry.row.split = "; ".join(_split(one) for one in splits) or None
        for one in splits:
            if one.mode == "off" and one.asked != "auto":
                return f"tokens are not split, {one.reason}: {one.detail}"
        for transport in {site.transport for site in sites if site.transport is not None}:
            reason = fallback(ranks, get_transport(transport))
            if reason is not None:
                return reason
    return None if entry.row.all_reduces else "the graph that was compiled has no all_reduce"


def _split(split: Split) -> str:
    return f"off: {split.reason}" if split.mode == "off" else f"{split.sizes[0]} + {split.sizes[1]} {split.unit}s"


def _passes(ranks: Ranks, entry: Entry, reference: Reference) -> bool:
    """Hold the outputs of the last run to the error budget of ``run``, and to equal bits on all ranks; else no time."""
    if not entry.variant.reduces:
        return True
    assert entry.run is not None and entry.run.outputs is not None
    ctx, outputs = ranks.ctx, entry.run.outputs
    errors = ranks.gather((_errors(outputs, reference.want), reference.unfused_errors))
    failures = []
    worst = []
    for index, name in enumerate(OUTPUT_NAMES):
        # max() would lose what is not a number.
        error, unfused = (sorted((rank[which][index] for rank in errors), key=_badness)[-1] for which in (0, 1))
        worst.append(error)
        if not Comparison(error, unfused).passed:
            failures.append(f"{name}: error {error:.3e}, unfused {unfused:.3e}")
    checked = Context(ctx.rank, ctx.world_size, ctx.device, ctx.group_name)
    for name, output in zip(OUTPUT_NAMES, outputs, strict=True):
        expect_same_on_all_ranks(checked, name, output)
    unequal = ranks.agree("; ".join(checked.failures) or None)
    failures += [] if unequal is None else [unequal]
    row = entry.row
    row.numerics = "failed" if failures else "ok"
    row.hidden_error, row.residual_error = (finite(error) for error in worst)
    if failures:
        entry.fail("numerics failed", "; ".join(failures))
    return not failures


def _badness(error: float) -> tuple[bool, float]:
    return (error != error, error)


def _peak_bytes(run: Run) -> int:
    run.outputs = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _finished(run)
    return torch.cuda.max_memory_allocated() - before


def _time(spec: LayerSpec, ranks: Ranks, entries: list[Entry], reference: Reference) -> None:
    """Fill in the times, unless what the last timed run computed is not good enough either."""
    timers = {entry.variant.label: entry.timer for entry in entries if entry.timer is not None}
    times = interleaved(ranks, timers, spec.repeats)
    for entry in entries:
        if entry.timer is None:
            continue
        # Once more: the graphs share the slots of our operators, and those after this one have run since.
        entry.timer.run()
        if _passes(ranks, entry, reference):
            layers = [microseconds / spec.layers for microseconds in times[entry.variant.label]]
            entry.row.p20_us, entry.row.p50_us, entry.row.p80_us = percentiles(layers)
