"""One rank of ``bench beside``: checks calls against float64, then times them and GEMMs, alone and at once."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F

from tw_compile.benchmark.beside.results import BesideRow, judge
from tw_compile.benchmark.beside.sides import Alone, AtOnce, Item, Lane, OnCpu, OnGpu, Sides, Watched
from tw_compile.benchmark.beside.spec import (
    BesideSpec,
    GemmShape,
    call_variant,
    items_to_cover,
    items_to_time,
    transports,
)
from tw_compile.benchmark.contender import Contender
from tw_compile.benchmark.host_copies import HostCopies
from tw_compile.benchmark.ours import Operator
from tw_compile.benchmark.product import product_deviation
from tw_compile.benchmark.spec import MessageSize
from tw_compile.benchmark.worker import (
    CPU_CACHE_BYTES,
    ContenderAtSize,
    SizeReference,
    admit,
    failure_of,
    problems_of,
    reference_of,
    residual_form,
)
from tw_compile.harness.launch import Progress
from tw_compile.harness.measure import Timer, interleaved
from tw_compile.harness.problems import Problem
from tw_compile.harness.ranks import Keep, Ranks, UnavailableError, work_as_rank
from tw_compile.kernels.collective.transport import node_facts
from tw_compile.kernels.collective.transports import TRANSPORTS, choose_transport
from tw_compile.kernels.gemm.mm_leaving_sms import gated_mm_leaving_sms, mm_leaving_sms
from tw_compile.kernels.transports.selection import HOST

_TRIAL_ITEMS, _TRIAL_RUNS = 4, 3
_GROWTHS = 4
"""How often the covering side may be doubled until trial runs are covered."""
_SPARE_TAIL = 0.25
"""In trial runs the covering side must end later by this share of the covered side's time."""


class CallBeside(Operator):
    """Calls beside other work, on at most ``sms`` SMs, over the transport called ``name``.

    The residual has the layout that it has between two calls of a split layer: it stays with the rows' owners, in the model's
    dtype, if the transport can keep it there.
    """

    def __init__(self, device: str, name: str, sms: int) -> None:
        super().__init__(call_variant(device, name))
        self.label = f"calls over {name} on {sms} SMs"
        self.residual_sharded, self.residual_narrow = TRANSPORTS[name].keeps_shards, True
        self._overlap_sms = sms

    def taken_sms(self, size: MessageSize, world_size: int) -> int | None:
        """The SMs that the kernel takes, where it says so. Called after the first call."""
        sms = self.num_sms(size, world_size)
        return None if sms is None else min(sms, self._overlap_sms)


@dataclass(frozen=True)
class Gemms:
    """GEMMs of one input by enough weights that L2 never holds the next ones, as a model's layers have weights of their own.

    Each has one matrix ``[columns, inner]``, or gate and up. They run as in a split layer: gate and up by our own kernel where
    it supports them, others by cuBLAS.
    """

    a: torch.Tensor
    weights: Sequence[tuple[torch.Tensor, ...]]

    def leaving(self, sms: int) -> list[Item]:
        operator = mm_leaving_sms if len(self.weights[0]) == 1 else gated_mm_leaving_sms
        return [partial(operator, self.a, *(one.t() for one in matrices), sms) for matrices in self.weights]

    def deviation(self, product: object) -> str | None:
        """What is wrong with a product by the first weights; None if nothing is."""
        assert isinstance(product, torch.Tensor)
        want, *up = (torch.mm(self.a, one.t()) for one in self.weights[0])
        return product_deviation(product, F.silu(want) * up[0] if up else want)


def make_gemms(shape: GemmShape, x: torch.Tensor, cache_bytes: int) -> Gemms:
    """GEMMs with as many tokens as the message ``x [tokens, hidden]``."""
    generator = torch.Generator(x.device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=x.device, dtype=x.dtype)

    a = normal(x.shape[0], shape.inner)
    first = tuple(normal(shape.columns, shape.inner) for _ in range(1 + shape.gated))
    copies = cache_bytes // sum(one.nbytes for one in first)
    return Gemms(a, [first, *(tuple(one.clone() for one in first) for _ in range(copies))])


def run_rank(spec: BesideSpec, ranks: Ranks, progress: Progress, keep: Keep) -> dict[str, Any]:
    """Do everything that one rank does. The rows are complete on every rank, and are kept after each size."""
    on_gpus = spec.device == "cuda"
    cache_bytes = torch.cuda.get_device_properties(ranks.ctx.device).L2_cache_size if on_gpus else CPU_CACHE_BYTES
    sides: Sides = OnGpu() if on_gpus else OnCpu()
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"cache_bytes": cache_bytes, "rows": rows}
    for size in spec.sizes():
        measured = bench_size(spec, ranks, sides, size, cache_bytes, progress)
        rows += [asdict(row) for row in measured]
        keep(result)
    return result


def bench_size(
    spec: BesideSpec, ranks: Ranks, sides: Sides, size: MessageSize, cache_bytes: int, progress: Progress
) -> list[BesideRow]:
    """The rows of one size: all transports, numbers of SMs, and GEMMs."""
    where = f"[{size.tokens}, {size.hidden}]"
    progress(f"{where} float64 reference")
    problems = problems_of(spec.of_kernel(), ranks, size, cache_bytes)
    reference = reference_of(spec.of_kernel(), ranks, problems[0])
    rows: list[BesideRow] = []
    for asked in spec.transports:
        name, why = _transport(spec, ranks, size, asked)
        for sms in spec.sms_of(name or asked):
            blank = partial(BesideRow, size.tokens, size.hidden, size.nbytes, name or asked, sms)
            shapes = spec.gemms_of(size.hidden)
            if name is None:
                unserved = [blank(shape.inner, shape.columns, shape.gated) for shape in shapes]
                for row in unserved:
                    row.outcome, row.reason = "not served", why
                rows += unserved
                continue
            bench = _Bench(spec, ranks, sides, size, problems, reference, cache_bytes)
            contenders: list[Contender] = [CallBeside(spec.device, name, sms)]
            if name == HOST:
                contenders.append(HostCopies())
            for contender in contenders:
                progress(f"{where} checking {contender.label}")
                of_calls = admit(
                    spec.of_kernel(),
                    ranks,
                    contender,
                    size,
                    problems,
                    reference,
                    lambda calls, count: Alone(sides, sides.lane(calls, _TRIAL_ITEMS)),
                )
                for shape in shapes:
                    progress(f"{where} timing {contender.label}, and GEMMs {shape}")
                    row = blank(shape.inner, shape.columns, shape.gated, contender.kind)
                    rows.append(bench.row(row, contender, of_calls, shape))
    return rows


def _transport(spec: BesideSpec, ranks: Ranks, size: MessageSize, asked: str) -> tuple[str | None, str]:
    """The transport of the calls, the same on all ranks; None, and why, if no call can run beside work."""
    choice = choose_transport(node_facts(spec.device, spec.world_size), size.hidden, size.element_bytes, asked)
    name, why = ranks.gather((choice.name, choice.reason))[0]
    if name is not None and name not in transports(spec.device):
        return None, f"{why}, and calls over {name} take no number of SMs"
    return name, why


def _free(ranks: Ranks, device: str) -> None:
    """Give memory back. Waits until all ranks are done with buffers that others read, before any of them is freed."""
    if device == "cuda":
        torch.cuda.synchronize()
        ranks.barrier()
        gc.collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Bench:
    """What all rows of one size share."""

    spec: BesideSpec
    ranks: Ranks
    sides: Sides
    size: MessageSize
    problems: Sequence[Problem]
    reference: SizeReference
    cache_bytes: int

    def row(self, row: BesideRow, contender: Contender, of_calls: ContenderAtSize, shape: GemmShape) -> BesideRow:
        """Fill the row, whatever became of the contender."""
        row.sets, row.outcome, row.reason = len(self.problems), of_calls.outcome, of_calls.reason
        row.numerics = "failed" if of_calls.outcome == "numerics failed" else "not checked"
        if isinstance(of_calls.timer, Alone):
            if isinstance(contender, CallBeside):
                row.kernel = contender.kernel_name()
                row.call_sms = contender.taken_sms(self.size, self.spec.world_size)
                row.residual_form = residual_form(contender, self.size)
            try:
                self.measure(row, contender, of_calls.timer, shape)
            except UnavailableError as error:
                row.outcome, row.reason = "error", str(error)
        _free(self.ranks, self.spec.device)
        return row

    def measure(self, row: BesideRow, contender: Contender, trial: Alone, shape: GemmShape) -> None:
        """Fill the row with times, evidence and verdict.

        Raises:
            UnavailableError: Something could not be made or captured, on all ranks alike.
        """
        ranks, sides, sms = self.ranks, self.sides, row.sms
        gemms = ranks.together(lambda: make_gemms(shape, self.problems[0].x, self.cache_bytes))
        on_all, leaving, calls = gemms.leaving(0), gemms.leaving(sms), trial.lane.calls
        # What is chosen or allocated at first use must be there before the capture.
        ranks.together(lambda: [multiply() for multiply in (*on_all, *leaving)])
        trials = {"call": trial, "gemm": Alone(sides, self._lane(leaving, _TRIAL_ITEMS))}
        us = {label: statistics.median(times) for label, times in interleaved(ranks, trials, _TRIAL_RUNS).items()}
        timed_calls, timed_gemms = items_to_time(us["call"]), items_to_time(us["gemm"])
        row.calls, row.gemms = timed_calls, timed_gemms

        timed_call, covering_call, product = Watched(calls[0]), Watched(calls[0]), Watched(leaving[0])
        call = self._lane([timed_call, *calls[1:]], timed_calls)
        gemm = self._lane([product, *leaving[1:]], timed_gemms)
        on_all_sms = self._lane(on_all, timed_gemms)
        beside_gemms = self._covered(call, leaving, items_to_cover(us["call"] * (timed_calls + 1), us["gemm"]))
        beside_calls = self._covered(
            gemm, [covering_call, *calls[1:]], items_to_cover(us["gemm"] * (timed_gemms + 1), us["call"])
        )
        row.covering_gemms, row.covering_calls = beside_gemms.covering.count, beside_calls.covering.count

        timers: dict[str, Timer] = {
            "gemm": Alone(sides, on_all_sms),
            "gemm_leaving": Alone(sides, gemm),
            "gemm_beside": beside_calls,
            "call": Alone(sides, call),
            "call_beside": beside_gemms,
        }
        row.take(interleaved(ranks, timers, self.spec.repeats))

        wrong = [
            self._wrong(contender, beside_gemms, timed_call, None),
            self._wrong(contender, beside_calls, covering_call, product),
            ranks.agree(gemms.deviation(product.result)),
        ]
        row.call_lead_us, row.call_tail_us, calls_covered = self._evidence(beside_gemms)
        row.gemm_lead_us, row.gemm_tail_us, gemms_covered = self._evidence(beside_calls)
        row.covered = calls_covered and gemms_covered
        judge(row, next((why for why in wrong if why is not None), None), self.spec.device)

    def _wrong(self, contender: Contender, timer: AtOnce, call: Watched, product: Watched | None) -> str | None:
        """What is wrong with the last call of one more run at once; None if nothing is, and for a bound, which adds nothing up.

        The run writes over NaN, so that rows which nobody writes are seen.
        """
        watched = (call, product) if contender.reduces else (product,)
        poison(*(one.result for one in watched if one is not None))
        self.ranks.barrier()
        timer.run()
        if not contender.reduces:
            return None
        failure = failure_of(self.ranks, contender, self.size, _pair(call.result), self.reference)
        return None if failure is None else f"of a call that ran beside GEMMs: {failure}"

    def _lane(self, calls: Sequence[Item], count: int) -> Lane:
        return self.ranks.together(lambda: self.sides.lane(calls, count))

    def _covered(self, covered: Lane, calls: Sequence[Item], count: int) -> AtOnce:
        """``covered`` with ``count`` items of ``calls`` beside it, or more of them if trial runs are not covered."""
        for _ in range(_GROWTHS):
            timer = AtOnce(self.sides, self._lane(calls, count), covered)
            for _ in range(_TRIAL_RUNS):
                self.ranks.barrier()
                timer.run()
            # The first run of a graph is slow, and says nothing.
            spare = min(run.tail_us - _SPARE_TAIL * run.us * covered.count for run in timer.runs[1:])
            if min(self.ranks.gather(spare)) > 0.0:
                break
            count *= 2
        timer.runs.clear()
        return timer

    def _evidence(self, timer: AtOnce) -> tuple[float, float, bool]:
        """The least lead and tail over the runs that count and all ranks, and whether all these runs were covered."""
        runs = timer.runs[-self.spec.repeats - 1 :]  # those behind the warm-up, and the one that was checked
        own = min(run.lead_us for run in runs), min(run.tail_us for run in runs), all(run.whole for run in runs)
        leads, tails, whole = zip(*self.ranks.gather(own), strict=True)
        return min(leads), min(tails), all(whole)


def poison(*results: object) -> None:
    """Fill results, which lie in memory that replays write to, with NaN."""
    for result in results:
        for tensor in result if isinstance(result, tuple) else (result,):
            assert isinstance(tensor, torch.Tensor)
            tensor.fill_(float("nan"))


def _pair(result: object) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(result, tuple)
    hidden, residual = result
    return hidden, residual


def rank_process(spec: BesideSpec, rank: int, scratch: str, messages: Connection) -> None:
    """Entry point of a spawned rank."""
    work_as_rank(spec, rank, scratch, messages, partial(run_rank, spec))
