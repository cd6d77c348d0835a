"""One rank of a benchmark of layers or of a model: compile every variant, check its error, and time those that pass."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from tw_compile import Config, collect_reports, compat, make_backend
from tw_compile.benchmark.layer.coded import outputs_in_codes
from tw_compile.benchmark.layer.forced import Forced
from tw_compile.benchmark.layer.results import LayerRow, complete
from tw_compile.benchmark.layer.spec import LayerSpec
from tw_compile.benchmark.layer.subject import CompiledRun, HiddenAndResidual, Subject
from tw_compile.benchmark.layer.subjects import build_subject
from tw_compile.benchmark.layer.symmetric import reserve
from tw_compile.benchmark.layer.variants import LayerVariant, variants
from tw_compile.benchmark.ours import fallback
from tw_compile.benchmark.short_kernels import ShortKernels
from tw_compile.harness.launch import Progress
from tw_compile.harness.measure import Timer, interleaved, peak_bytes, percentiles
from tw_compile.harness.problems import Context, expect_same_on_all_ranks
from tw_compile.harness.ranks import Keep, Ranks, UnavailableError, work_as_rank
from tw_compile.harness.rows import Outcome
from tw_compile.harness.spec import ELEMENT_BYTES
from tw_compile.kernels.collective.transport import get_transport
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.kernels.registry import load
from tw_compile.models.reference import reference_forward
from tw_compile.passes.prefetch import prefetching_calls
from tw_compile.report import GraphReport, Site, Split
from tw_compile.runner.numerics import OutputErrors, finite
from tw_compile.runner.worker import silence_known_warnings
from tw_compile.testing.error_budget import relative_error

OUTPUT_NAMES = ("hidden", "residual")
MOST_COMPILES = 64


def rank_process(spec: LayerSpec, rank: int, scratch: str, messages: Connection) -> None:
    """Entry point of a spawned rank."""
    work_as_rank(spec, rank, scratch, messages, partial(run_rank, spec))


def run_rank(spec: LayerSpec, ranks: Ranks, progress: Progress, keep: Keep) -> dict[str, Any]:
    """Do everything that one rank does. The rows are the same on every rank, and are kept after each token count.

    Calls ``progress`` two times less than ``steps`` says.

    Raises:
        UsageError: The model can't be built as asked.
    """
    silence_known_warnings()
    short = ShortKernels(ranks.ctx.device) if spec.device == "cuda" else None
    progress(f"building {spec.layers} layers of {spec.model}")
    subject = build_subject(spec, ranks.ctx.device)
    references = references_of(spec, ranks, subject, progress)
    reserve(ranks, max(spec.tokens) * subject.hidden_size * ELEMENT_BYTES[spec.dtype])
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"hidden_size": subject.hidden_size, "rows": rows}
    forced = {kernel: Forced(kernel) for kernel in spec.kernels}
    for reference in references:
        # Compiling makes the reports: a graph that comes from a cache has no report.
        with compat.cold_compile(None), torch._dynamo.config.patch(recompile_limit=MOST_COMPILES):
            done = bench_tokens(spec, ranks, variants(spec, reference.tokens), subject, reference, progress, forced)
        rows += [asdict(row) for row in done]
        result["short_kernel_us"] = None if short is None else short.again()
        keep(result)
    return result


@dataclass
class TokensReference:
    """The float64 outputs that a run on ``inputs`` must come near to, and the errors of the eager unfused run on this rank.

    ``coded_errors``: by wire, the errors of the unfused run whose rows travel in codes, where they were needed. ``obstacle``:
    why there is no reference.
    """

    tokens: int
    inputs: torch.Tensor | None = None
    want: HiddenAndResidual | None = None
    unfused_errors: tuple[float, ...] = ()
    coded_errors: dict[str, tuple[float, ...]] = field(default_factory=dict)
    obstacle: str | None = None

    def errors_of(self, wire: str) -> tuple[float, ...]:
        """The errors that the budget of a variant with this wire is made of."""
        return self.unfused_errors if wire == EXACT else self.coded_errors[wire]

    def to(self, device: torch.device) -> TokensReference:
        """The same reference with all tensors on ``device``."""
        if self.inputs is None or self.want is None:
            return self
        hidden, residual = self.want
        return replace(self, inputs=self.inputs.to(device), want=(hidden.to(device), residual.to(device)))


@dataclass
class VariantAtTokens:
    """A variant at one number of tokens; ``timer`` is set if it is to be timed, and ``forced`` if one kernel serves it."""

    variant: LayerVariant
    row: LayerRow
    run: CompiledRun | None = None
    timer: Timer | None = None
    forced: Forced | None = None

    def fail(self, outcome: Outcome, reason: str) -> VariantAtTokens:
        self.row.outcome, self.row.reason, self.timer = outcome, reason, None
        return self


def bench_tokens(
    spec: LayerSpec,
    ranks: Ranks,
    everyone: list[LayerVariant],
    subject: Subject,
    reference: TokensReference,
    progress: Progress,
    forced: Mapping[str, Forced] | None = None,
) -> list[LayerRow]:
    """Check and time all variants at the number of tokens of ``reference``, and return their rows.

    ``forced``: the transports of variants that one kernel serves, by its name.
    """
    tokens = reference.tokens
    nbytes = tokens * subject.hidden_size * ELEMENT_BYTES[spec.dtype]
    entries = [
        VariantAtTokens(variant, LayerRow(variant.label, variant.kind, tokens, nbytes, "timed", wire=variant.wire))
        for variant in everyone
    ]
    if reference.obstacle is not None:
        for entry in entries:
            progress(f"{tokens} tokens: skipping {entry.variant.label}")
            entry.fail("error", f"no reference: {reference.obstacle}")
        progress(f"{tokens} tokens: nothing to time")
        return [entry.row for entry in entries]
    reference = reference.to(ranks.ctx.device)
    for entry in entries:
        progress(f"{tokens} tokens: compiling and checking {entry.variant.label}")
        entry.forced = None if entry.variant.kernel is None else (forced or {})[entry.variant.kernel]
        with entry.forced.serving() if entry.forced else contextlib.nullcontext():
            _admit(spec, ranks, entry, subject, reference)
    progress(f"{tokens} tokens: timing")
    _time(spec, ranks, entries, subject, reference)
    rows = [entry.row for entry in entries]
    if spec.device == "cuda":
        # Wait until all ranks are done with the memory that the graphs use, before any of it is freed.
        torch.cuda.synchronize()
        ranks.barrier()
        del entry, entries, reference
    _release_memory()
    return complete(rows, spec.device)


def _release_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def references_of(spec: LayerSpec, ranks: Ranks, subject: Subject, progress: Progress) -> list[TokensReference]:
    """A reference for each number of tokens, on the CPU. The float64 model is freed before the variants need the memory."""
    double = subject.in_float64()
    references = []
    for tokens in spec.tokens:
        progress(f"{tokens} tokens: float64 reference")
        try:
            reference = ranks.together(partial(_reference, spec, ranks, subject, double, tokens))
        except UnavailableError as error:
            reference = TokensReference(tokens, obstacle=str(error))
        references.append(reference)
    del double
    _release_memory()
    return references


def _reference(spec: LayerSpec, ranks: Ranks, subject: Subject, double: Subject, tokens: int) -> TokensReference:
    inputs = subject.inputs(spec, ranks.ctx, tokens)
    want = reference_forward(double, inputs.double() if inputs.is_floating_point() else inputs)
    return TokensReference(tokens, inputs, want, _errors(subject(inputs), want)).to(torch.device("cpu"))


def _errors(outputs: HiddenAndResidual, want: HiddenAndResidual) -> tuple[float, ...]:
    return tuple(relative_error(output, exact) for output, exact in zip(outputs, want, strict=True))


def _admit(spec: LayerSpec, ranks: Ranks, entry: VariantAtTokens, subject: Subject, reference: TokensReference) -> None:
    """Compile, run, check and capture a variant. An error on one rank ends it on all ranks, with the reason."""
    inputs = reference.inputs
    assert inputs is not None
    refusal = ranks.agree(entry.variant.obstacle(entry.row.tokens, entry.row.nbytes, spec.dtype, spec.world_size))
    if refusal is not None:
        entry.fail("not served", refusal)
        return
    try:
        with collect_reports() as reports:
            entry.run, entry.row.all_reduces = ranks.together(lambda: compile_variant(entry.variant, subject, inputs))
        deviation = ranks.agree(deviation_of(ranks, entry, reports))
        if deviation is not None:
            entry.fail("error", deviation)
            return
        wire = entry.variant.wire
        if wire != EXACT and wire not in reference.coded_errors:
            assert reference.want is not None
            coded = ranks.together(partial(outputs_in_codes, wire, subject, inputs))
            reference.coded_errors[wire] = _errors(coded, reference.want)
            del coded
        if not _passes(ranks, entry, reference):
            return
        run = entry.run
        peaks = ranks.gather(ranks.together(lambda: _peak_bytes(run)) if spec.device == "cuda" else None)
        entry.row.peak_bytes = peaks[0] if None in peaks else max(peaks)
        entry.timer = ranks.together(lambda: subject.timer(run))
        other = ranks.agree(None if entry.forced is None else entry.forced.deviation())
        if other is not None:
            entry.fail("error", other)
    except UnavailableError as error:
        entry.fail("error", str(error))


def compile_variant(variant: LayerVariant, subject: Subject, inputs: torch.Tensor) -> tuple[CompiledRun, int | None]:
    """Compile ``subject`` and run it once. Also returns its number of all_reduces; None for ours, whose reports say it."""
    graph_pass = None if variant.kind == "ours" else load(variant.make_pass)()
    if graph_pass is None:
        batch, seq = inputs.shape[:2]
        # A backend of its own for each variant: for an equal one torch would take what it has compiled for another variant.
        backend: Any = make_backend(Config(strict=True, **variant.options(batch * seq, batch)))
        options = None
    else:
        backend, options = "inductor", {compat.POST_GRAD_HOOK: graph_pass}
    compiled = subject if variant.module is None else load(variant.module)(subject)
    run = CompiledRun(torch.compile(compiled, dynamic=False, backend=backend, options=options), inputs)
    _finished(run)
    return run, None if graph_pass is None else graph_pass.seen


def _finished(run: CompiledRun) -> HiddenAndResidual:
    outputs = run()
    if outputs[0].is_cuda:
        torch.cuda.synchronize()
    return outputs


def deviation_of(ranks: Ranks, entry: VariantAtTokens, reports: list[GraphReport]) -> str | None:
    """What ran instead of what the label says; None when nothing else ran. Also counts the all_reduces that are fused."""
    entry.row.fused = 0
    if entry.variant.kind == "ours":
        sites = [site for report in reports for site in report.sites]
        entry.row.all_reduces = len(sites)
        entry.row.fused = sum(site.decision == "fused" for site in sites)
        if entry.variant.wire != EXACT and (exact := _exact_sites(sites, entry.variant.wire)) is not None:
            return exact
        if entry.variant.prefetches and not prefetching_calls(reports):
            return "no call prefetches anything"
        splits = [report.split for report in reports if report.split is not None]
        entry.row.split = "; ".join(_split(split) for split in splits) or None
        entry.row.gemms = gemms_leaving_sms(splits)
        for split in splits:
            if split.mode == "off" and split.asked != "auto":
                return f"tokens are not split, {split.reason}: {split.detail}"
        for transport in {site.transport for site in sites if site.transport is not None}:
            reason = fallback(ranks, get_transport(transport))
            if reason is not None:
                return reason
    return None if entry.row.all_reduces else "the graph that was compiled has no all_reduce"


def _exact_sites(sites: list[Site], wire: str) -> str | None:
    """Why not all fused sums have their rows in the codes of ``wire``, or why nothing is fused; None when all have."""
    fused = [site for site in sites if site.decision == "fused"]
    exact = [site for site in fused if site.wire != wire]
    if fused and not exact:
        return None
    if not fused:
        left = next((f", {site.reason}: {site.detail}" for site in sites), "")
        return f"nothing is fused, so no rows travel in {wire}{left}"
    return f"rows of {len(exact)} of {len(fused)} fused sums are exact, {exact[0].wire_refusal}: {exact[0].detail}"


def _split(split: Split) -> str:
    return f"off: {split.reason}" if split.mode == "off" else f"{split.sizes[0]} + {split.sizes[1]} {split.unit}s"


def gemms_leaving_sms(splits: Iterable[Split]) -> str | None:
    """The GEMMs that leave SMs to calls, by window; where layers differ, all that there are."""
    found: dict[str, dict[str, None]] = {}
    for split in splits:
        for window in () if split.overlap is None else split.overlap.windows:
            sms: dict[str, list[str]] = {}
            for name, left in window.gemms_leaving_sms:
                sms.setdefault(name, []).append(str(left))
            if sms:
                here = ", ".join(f"{name} {' + '.join(left)}" for name, left in sms.items())
                found.setdefault(f"{window.kind} {window.computes}", {})[here] = None
    return "; ".join(f"{window}: {' or '.join(here)}" for window, here in found.items()) or None


def _passes(ranks: Ranks, entry: VariantAtTokens, reference: TokensReference) -> bool:
    """Check the last run's outputs against the error budget of ``tw-compile run``, and fused ones for equal bits on all ranks.

    Returns False for a variant that fails, which then gets no time.
    """
    if not entry.variant.reduces:
        return True
    assert entry.run is not None and entry.run.outputs is not None and reference.want is not None
    ctx, outputs = ranks.ctx, entry.run.outputs
    wire = entry.variant.wire
    errors = ranks.gather((_errors(outputs, reference.want), reference.errors_of(wire)))
    failures = []
    worst = []
    for index, name in enumerate(OUTPUT_NAMES):
        # max() would lose a NaN.
        error, unfused = (sorted((rank[which][index] for rank in errors), key=_badness)[-1] for which in (0, 1))
        worst.append(error)
        if not OutputErrors(error, unfused).passed:
            base = "unfused" if wire == EXACT else f"torch in {wire}"
            failures.append(f"{name}: error {error:.3e}, {base} {unfused:.3e}")
    checked = Context(ctx.rank, ctx.world_size, ctx.device, ctx.group_name)
    for name, output in zip(OUTPUT_NAMES, outputs, strict=True):
        expect_same_on_all_ranks(checked, name, output)
    unequal = ranks.agree("; ".join(checked.failures) or None)
    row = entry.row
    # Only the fused operator promises equal bits. Inductor makes a norm that is not fused, and tunes its reductions on each
    # rank separately. So ranks may round differently there, both in unfused variants and in ours that only split.
    if unequal is not None and row.fused == row.all_reduces:
        failures.append(unequal)
    elif unequal is not None:
        row.reason = f"within budget, but {unequal}"
    row.numerics = "failed" if failures else "ok"
    row.hidden_error, row.residual_error = (finite(error) for error in worst)
    if failures:
        entry.fail("numerics failed", "; ".join(failures))
    return not failures


def _badness(error: float) -> tuple[bool, float]:
    return (error != error, error)


def _peak_bytes(run: CompiledRun) -> int:
    run.outputs = None
    return peak_bytes(run)


def _time(
    spec: LayerSpec, ranks: Ranks, entries: list[VariantAtTokens], subject: Subject, reference: TokensReference
) -> None:
    """Fill in the times of the variants whose outputs are still good enough after the timed runs."""
    timers = {entry.variant.label: entry.timer for entry in entries if entry.timer is not None}
    times = interleaved(ranks, timers, spec.repeats)
    for entry in entries:
        if entry.timer is None:
            continue
        # Run it once more: the graphs share the slots of our operators, and other graphs have run since this one.
        entry.timer.run()
        if _passes(ranks, entry, reference):
            parts = [microseconds / subject.parts(spec) for microseconds in times[entry.variant.label]]
            entry.row.p20_us, entry.row.p50_us, entry.row.p80_us = percentiles(parts)
