"""One rank of a benchmark: check every contender against float64, then time those that passed, side by side."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from tw_compile.benchmark.contender import Contender, ContenderCall, form, form_of_norm
from tw_compile.benchmark.contenders import contenders
from tw_compile.benchmark.gated import set_regret
from tw_compile.benchmark.results import Row, complete
from tw_compile.benchmark.spec import BenchSpec, MessageSize, input_sets
from tw_compile.current import current_node
from tw_compile.harness.launch import Progress
from tw_compile.harness.measure import GraphTimer, LoopTimer, Timer, interleaved, percentiles
from tw_compile.harness.problems import (
    Context,
    Form,
    Problem,
    Results,
    dequantised,
    exact,
    expect_same_on_all_ranks,
    expect_within_budget,
    in_codes,
    make_problem,
    of_exact,
    quantised,
    ulps_of_norm,
    unfused,
)
from tw_compile.harness.ranks import Keep, Ranks, UnavailableError, one_line, work_as_rank
from tw_compile.harness.rows import Outcome
from tw_compile.kernels.collective.fields import RMS_NORM
from tw_compile.kernels.collective.peer_access import peer_access_obstacle
from tw_compile.kernels.collective.spec import row_range
from tw_compile.kernels.collective.wires import EXACT, WIRES

CPU_CACHE_BYTES = 32 * 2**20


def rank_process(spec: BenchSpec, rank: int, scratch: str, messages: Connection) -> None:
    """Entry point of a spawned rank."""
    work_as_rank(spec, rank, scratch, messages, partial(run_rank, spec, contenders))


def run_rank(
    spec: BenchSpec, take_part: Callable[[BenchSpec], list[Contender]], ranks: Ranks, progress: Progress, keep: Keep
) -> dict[str, Any]:
    """Do everything that one rank does. The rows are complete on every rank, and are kept after each size.

    Calls ``progress`` two times less than ``steps`` says.
    """
    on_gpus = spec.device == "cuda"
    cache_bytes = torch.cuda.get_device_properties(ranks.ctx.device).L2_cache_size if on_gpus else CPU_CACHE_BYTES
    everyone = take_part(spec)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "device_class": current_node().device_class if on_gpus else "generic",
        "cache_bytes": cache_bytes,
        "through_host": on_gpus and ranks.agree(peer_access_obstacle(range(spec.world_size))) is not None,
        "rows": rows,
    }
    for size in spec.sizes():
        measured = bench_size(spec, ranks, everyone, size, cache_bytes, progress)
        rows += [asdict(row) for row in complete(measured, size, spec, result["through_host"])]
        keep(result)
    return result


MakeTimer = Callable[[Sequence[Callable[[], object]], int], Timer]
"""Makes a timer of the calls, which run in turn, and their number."""


@dataclass
class ContenderAtSize:
    """A contender at one size; ``timer`` is set if it is to be timed."""

    contender: Contender
    outcome: Outcome
    reason: str | None = None
    timer: Timer | None = None


@dataclass
class SizeReference:
    """The results that calls on the first input set must come near to.

    Attributes:
        want: By norm, ``(hidden, h)`` in float64.
        base: By norm, the results of the unfused way. Their error is the budget.
        coded: By wire, torch's results with rows in codes. Their error is the budget of calls with that wire.
    """

    want: dict[str, Results]
    base: dict[str, Results]
    coded: dict[str, Results] = field(default_factory=dict)

    def base_of(self, contender: Contender) -> Results:
        return self.base[contender.norm] if contender.wire == EXACT else self.coded[contender.wire]


def bench_size(
    spec: BenchSpec, ranks: Ranks, everyone: list[Contender], size: MessageSize, cache_bytes: int, progress: Progress
) -> list[Row]:
    where = f"[{size.tokens}, {size.hidden}]"
    progress(f"{where} float64 reference")
    # Without a reset, Dynamo gives up on the norm after a number of sizes and runs it eagerly.
    torch._dynamo.reset()
    problems = problems_of(spec, ranks, size, cache_bytes)
    reference = reference_of(spec, ranks, problems[0])
    entries = []
    for contender in everyone:
        progress(f"{where} checking {contender.label}")
        entries.append(admit(spec, ranks, contender, size, problems, reference))
    del reference
    progress(f"{where} timing")
    times = interleaved(
        ranks, {entry.contender.label: entry.timer for entry in entries if entry.timer is not None}, spec.repeats
    )
    rows = [row_of(spec, entry, size, len(problems), times.get(entry.contender.label)) for entry in entries]
    if spec.device == "cuda":
        # Wait until all ranks are done with this size's buffers, before any of them is freed.
        torch.cuda.synchronize()
        ranks.barrier()
        del entries, problems
        gc.collect()
        torch.cuda.empty_cache()
    if spec.device == "cuda":
        set_regret(rows)
    return rows


def problems_of(spec: BenchSpec, ranks: Ranks, size: MessageSize, cache_bytes: int) -> list[Problem]:
    """The input sets over which the calls of one size rotate."""
    sets = input_sets(size.nbytes, cache_bytes, spec.calls, spec.rotate_from, spec.at_once)
    plain = Form(getattr(torch, spec.dtype))
    return [
        make_problem(ranks.ctx, size.tokens, size.hidden, plain, spec.seed * spec.calls + index)
        for index in range(sets)
    ]


def reference_of(spec: BenchSpec, ranks: Ranks, problem: Problem) -> SizeReference:
    """What calls on ``problem``, the first input set, must come near to. Collective."""
    coded = {wire: in_codes(ranks.ctx, problem, WIRES[wire]) for wire in spec.wires if wire != EXACT}
    of_norms = {
        norm: replace(problem, form=form_of_norm(problem.x.dtype, norm))
        for norm in dict.fromkeys((RMS_NORM, *spec.norms))  # in one order on all ranks: each norm takes collectives
    }
    want, base = ({norm: way(ranks.ctx, each) for norm, each in of_norms.items()} for way in (exact, unfused))
    return SizeReference(want, base, coded)


def admit(
    spec: BenchSpec,
    ranks: Ranks,
    contender: Contender,
    size: MessageSize,
    problems: list[Problem],
    reference: SizeReference,
    make: MakeTimer | None = None,
) -> ContenderAtSize:
    """Prepare a contender, run it once, check and capture it. An error on one rank ends it on all ranks, with the reason.

    ``make``: makes the timer of its calls; None: the timer for the device.
    """
    make = make or (partial(GraphTimer, at_once=spec.at_once) if spec.device == "cuda" else LoopTimer)
    refusal = ranks.agree(contender.obstacle(size, spec.world_size) or _together(spec, contender, size))
    if refusal is not None:
        return ContenderAtSize(contender, "not served", refusal)
    try:
        calls = ranks.together(lambda: _prepared(spec, ranks, contender, problems))
        _poison(problems[0].x)
        result = ranks.together(lambda: _finished(spec, calls[0]()))
        deviation = ranks.agree(deviation_of(contender, ranks))
        if deviation is not None:
            return ContenderAtSize(contender, "error", deviation)
        if contender.reduces:
            failure = failure_of(ranks, contender, size, result, reference)
            if failure is not None:
                return ContenderAtSize(contender, "numerics failed", failure)
        del result
        # Run every set once: what is compiled or allocated at first use must be there before the capture.
        ranks.together(lambda: [_finished(spec, call()) for call in calls[1:]])
        return ContenderAtSize(contender, "timed", timer=ranks.together(lambda: make(calls, spec.calls)))
    except UnavailableError as error:
        return ContenderAtSize(contender, "error", str(error))


def _together(spec: BenchSpec, contender: Contender, size: MessageSize) -> str | None:
    """Why so many of its calls can't be on their way at a time as are asked for; None if they can."""
    if spec.at_once == 1:
        return None
    if not contender.several:
        return f"{spec.at_once} calls at a time were asked for, and its calls follow each other"
    if contender.kind == "bound":
        return None
    # All CTAs of all calls must be resident at once, or a call waits for ever for a peer's that is not.
    sms, most = contender.num_sms(size, spec.world_size), torch.cuda.get_device_properties("cuda").multi_processor_count
    if sms is None or sms * spec.at_once > most:
        return f"{spec.at_once} calls at a time need {sms or 'unknown'} SMs each, of {most}: see --sms"
    return None


def _prepared(spec: BenchSpec, ranks: Ranks, contender: Contender, problems: list[Problem]) -> list[ContenderCall]:
    calls = []
    for index, problem in enumerate(problems):
        contender.lane = index % spec.at_once
        calls.append(contender.prepare(ranks, problem))
    return calls


def deviation_of(contender: Contender, ranks: Ranks) -> str | None:
    """The contender's deviation on this rank. If an error keeps the contender from telling, the error is the deviation."""
    try:
        return contender.deviation(ranks)
    except Exception as error:
        return one_line(error)


def _poison(x: torch.Tensor) -> None:
    """Fill with NaN what the allocator will hand out next, so that rows nobody writes are seen."""
    poisoned = [torch.full_like(x, float("nan")) for _ in range(2)]
    del poisoned


def _finished(spec: BenchSpec, result: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    if spec.device == "cuda":
        torch.cuda.synchronize()
    return result


def failure_of(
    ranks: Ranks,
    contender: Contender,
    size: MessageSize,
    result: tuple[torch.Tensor, torch.Tensor],
    reference: SizeReference,
) -> str | None:
    """Why the result is not good enough, the same on all ranks; None when it is."""
    ctx = ranks.ctx
    checked = Context(ctx.rank, ctx.world_size, ctx.device, ctx.group_name)
    (hidden, residual), (want_hidden, want_h) = result, reference.want[contender.norm]
    base_hidden, base_h = reference.base_of(contender)
    budget = "unfused" if contender.wire == EXACT else f"torch in {contender.wire}"
    if contender.residual_sharded:
        begin, end = row_range(size.tokens, ctx.world_size, ctx.rank)
        residual, want_h, base_h = residual[: end - begin], want_h[begin:end], base_h[begin:end]
    asked = form(contender, base_hidden.dtype)
    if not asked.quantises:
        ulps = ulps_of_norm(hidden.dtype)
        expect_within_budget(checked, "hidden", hidden, base_hidden, want_hidden, budget=budget, ulps=ulps)
    else:
        base_hidden = quantised(base_hidden, asked)
        got, base = (dequantised(tensor, asked) for tensor in (hidden, base_hidden))
        expect_within_budget(checked, "hidden", got, base, want_hidden, at_best=of_exact(want_hidden, asked))
    expect_within_budget(checked, "residual", residual, base_h, want_h, budget=budget)
    if contender.kind == "ours":
        expect_same_on_all_ranks(checked, "hidden", hidden)
        if not contender.residual_sharded:
            expect_same_on_all_ranks(checked, "residual", residual)
    return ranks.agree("; ".join(checked.failures) or None)


def residual_form(contender: Contender, size: MessageSize) -> str:
    if not contender.residual_sharded:
        return f"replicated {size.dtype}"
    return f"sharded {size.dtype if contender.residual_narrow else 'float32'}"


def row_of(spec: BenchSpec, entry: ContenderAtSize, size: MessageSize, sets: int, times: list[float] | None) -> Row:
    contender = entry.contender
    p20, p50, p80 = (None, None, None) if times is None else percentiles(times)
    return Row(
        label=contender.label,
        kind=contender.kind,
        tokens=size.tokens,
        hidden=size.hidden,
        nbytes=size.nbytes,
        sets=sets,
        residual_form=residual_form(contender, size),
        num_sms=contender.num_sms(size, spec.world_size),
        outcome=entry.outcome,
        reason=entry.reason,
        numerics=_numerics(entry),
        p20_us=p20,
        p50_us=p50,
        p80_us=p80,
        algorithm=contender.algorithm,
        max_sms=contender.max_sms,
        quantises=contender.hidden_scale is not None or bool(contender.scales),
        chosen=contender.choice(),
        wire=contender.wire,
        norm=contender.norm,
        gemm_columns=contender.gemm_columns,
        prefetch_bytes=contender.prefetch_bytes,
        at_once=spec.at_once,
    )


def _numerics(entry: ContenderAtSize) -> str:
    if entry.outcome == "numerics failed":
        return "failed"
    return "ok" if entry.outcome == "timed" and entry.contender.reduces else "not checked"
