"""Who takes part: the operator's transports, the ways of others, and what the same work costs without communication.

A contender turns a :class:`Problem` into a function that enqueues one call and returns ``(hidden, residual)``. The function is
captured in a CUDA graph and replayed thousands of times, so it must not wait on the host and its inputs must stay sane:
contenders that reduce in place let the norm write ``hidden`` over their input. That is what inference engines do, it moves no
byte more than any other place for ``hidden``, and the next call adds up normalised rows. Sums of sums would be infinite
after some dozens of calls.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.benchmark.ranks import Ranks
from tw_compile.benchmark.spec import BenchSpec, Size
from tw_compile.kernels.all_reduce_rms_norm.algorithm import Algorithm
from tw_compile.kernels.all_reduce_rms_norm.spec import Request
from tw_compile.kernels.all_reduce_rms_norm.transport import Transport, get_transport
from tw_compile.runner.spec import UsageError
from tw_compile.testing.gpu_problems import EPS, Form, Problem

Call = Callable[[], tuple[torch.Tensor, torch.Tensor]]
Kind = Literal["ours", "peer", "bound"]

FP8_SCALE = 0.02
"""Few of the products of normal numbers that the norm gives here are beyond 448 times this."""
SYMM_MEM_ONE_SHOT_MAX_BYTES = 32 * 2**20


class Contender(ABC):
    """One way to do the work.

    Attributes:
        kind: "ours", "peer", or "bound" for what is no way to do it but a limit.
        residual_sharded: Residual in and out are this rank's rows; else all rows.
        residual_narrow: A sharded residual is in the message's dtype, as calls beside other work keep it, not in float32.
        hidden_scale: Of float8 results; None where they have the message's dtype.
        reduces: False for a bound that leaves the communication out, whose result is no result.
        algorithm: What a table of ``configs/kernels`` calls its kernel, and the SMs that it may have; None if it can't.
    """

    label: str
    kind: ClassVar[Kind] = "peer"
    residual_sharded: bool = False
    residual_narrow: bool = False
    hidden_scale: float | None = None
    reduces: ClassVar[bool] = True
    algorithm: str | None = None
    max_sms: int | None = None

    def obstacle(self, size: Size, world_size: int) -> str | None:
        """Why it does not serve this size; None when it does. Asked before anything is prepared."""
        return None

    def num_sms(self, size: Size, world_size: int) -> int | None:
        """SMs that its communication occupies; None when it does not say."""
        return None

    @abstractmethod
    def prepare(self, ranks: Ranks, problem: Problem) -> Call:
        """Everything that one call needs, made beforehand. On all ranks at once; nothing may be in flight on return."""

    def deviation(self, ranks: Ranks) -> str | None:
        """What ran instead of what the label says; None when nothing did. Asked after the first call."""
        return None

    def choice(self) -> str | None:
        """What it chose to run at this size, and why; None where it has no choice. Asked after the first call."""
        return None


def form(contender: Contender, dtype: torch.dtype) -> Form:
    """The operator's form between two fused sites: as Hugging Face Llama's norm, residual in and out laid out alike."""
    if not contender.residual_sharded:
        return Form(dtype, hidden_scale=contender.hidden_scale)
    kept = dtype if contender.residual_narrow else torch.float32
    return Form(dtype, "sharded", "sharded", residual_dtype=kept, hidden_scale=contender.hidden_scale)


@dataclass(frozen=True)
class Variant:
    """One way to run the operator.

    Attributes:
        transport: Makes it for a number of CTAs.
        sharded, narrow: The residual that is natural to it, see :attr:`Contender.residual_sharded`.
        sms: How many it has unless ``--sms`` says otherwise; None for those that choose themselves.
        most_sms: How many it can have.
        algorithm: What a table of ``configs/kernels`` calls it; None for what no table can ask for.
        hidden_scale: See :attr:`Contender.hidden_scale`.
        in_slot: ``x`` lies in the slot's symmetric memory already, as if its producer had written it there, and the results
            stay there.
    """

    label: str
    transport: Callable[[int | None], Transport]
    sharded: bool
    sms: int | None = None
    most_sms: int = 0
    algorithm: str | None = None
    in_slot: bool = False
    hidden_scale: float | None = None
    narrow: bool = False


class Operator(Contender):
    """The fused operator, run as ``variant`` on ``sms`` SMs."""

    kind = "ours"

    def __init__(self, variant: Variant, sms: int | None = None) -> None:
        self.label = variant.label if sms is None else f"{variant.label}-{sms}sm"
        self.residual_sharded, self.residual_narrow = variant.sharded, variant.narrow
        self.hidden_scale = variant.hidden_scale
        self._variant, self._sms = variant, sms or variant.sms
        self.algorithm, self.max_sms = variant.algorithm, self._sms
        self._slots = itertools.count()
        self._request: Request | None = None
        self._algorithm: Algorithm | None = None
        self._overlap_sms = 0

    @functools.cached_property
    def _transport(self) -> Transport:
        return self._variant.transport(self._sms)

    def num_sms(self, size: Size, world_size: int) -> int | None:
        return self._sms if self._algorithm is None else self._algorithm.sms(size.tokens, world_size)

    def prepare(self, ranks: Ranks, problem: Problem) -> Call:
        own_form = form(self, problem.x.dtype)
        residual = problem.residual.to(own_form.norm().residual_dtype)
        request = replace(problem, form=own_form, residual=residual).request(ranks.ctx)
        request = replace(request, overlap_sms=self._overlap_sms)
        meanwhile = self.meanwhile(problem)
        transport = self._transport
        if self._variant.in_slot:
            request = self._in_slot(transport, request)
        self._request = request

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            started = transport.start(request)
            meanwhile()
            if started.finish is not None:
                started.finish()
            return started.hidden, started.residual

        return call

    def meanwhile(self, problem: Problem) -> Callable[[], None]:
        """What the current stream does between start and finish of a call."""
        return lambda: None

    def kernel_name(self) -> str | None:
        """The kernel that the P2P transport took; None before it has, and of other transports."""
        return None if self._algorithm is None else self._algorithm.name

    def _in_slot(self, transport: Transport, request: Request) -> Request:
        """Each input set has a slot of its own."""
        request = replace(request, slot=next(self._slots), results_in_slot=True)
        buffer = transport.message_buffer(request)
        return request if buffer is None else replace(request, x=buffer.copy_(request.x))

    def deviation(self, ranks: Ranks) -> str | None:
        from tw_compile.kernels.all_reduce_rms_norm.p2p import P2PTransport

        transport = self._transport
        if not isinstance(transport, P2PTransport):
            return None
        obstacle = fallback(ranks, transport)
        if obstacle is not None:
            return obstacle
        assert self._request is not None
        state = transport._states[ranks.ctx.group_name, ranks.ctx.device]
        self._algorithm = state.selector.choose(self._request, state)
        if transport.algorithm is None or transport.algorithm is self._algorithm:
            return None
        return f"fell back to another kernel: {transport.algorithm.obstacle(self._request, state)}"


def fallback(ranks: Ranks, transport: Transport) -> str | None:
    """That the P2P transport has given up and NCCL runs instead; None when that is not so."""
    from tw_compile.kernels.all_reduce_rms_norm.p2p import P2PTransport

    if not isinstance(transport, P2PTransport):
        return None
    obstacle = transport._states[ranks.ctx.group_name, ranks.ctx.device].obstacle
    return None if obstacle is None else f"fell back to NCCL: {obstacle}"


def add_rms_norm_(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``h = residual + x`` is returned, its norm (Hugging Face Llama's) is written to ``x``; all ``[tokens, hidden]``."""
    h = residual + x
    y = h.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    x.copy_(weight * y.to(x.dtype))
    return h


@functools.cache
def compiled_add_rms_norm_() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """:func:`add_rms_norm_` by Inductor: one kernel, for each shape its own."""
    return torch.compile(add_rms_norm_, dynamic=False, fullgraph=True)


def _norm_after(reduce: Callable[[], torch.Tensor], problem: Problem) -> Call:
    """``reduce()`` and then residual add and norm, compiled on GPUs."""
    norm = compiled_add_rms_norm_() if problem.x.is_cuda else add_rms_norm_

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        reduced = reduce()
        return reduced, norm(reduced, problem.residual, problem.weight)

    return call


class AllReduce(Contender):
    """The process group's all_reduce in place (NCCL or gloo), then add and norm: the unfused way."""

    def __init__(self, label: str) -> None:
        self.label = label

    def prepare(self, ranks: Ranks, problem: Problem) -> Call:
        x = problem.x.clone()

        def reduce() -> torch.Tensor:
            dist.all_reduce(x)
            return x

        return _norm_after(reduce, problem)


class SymmetricMemory(Contender):
    """torch's own kernels over symmetric memory, then add and norm. The input lies in symmetric memory already, no copy."""

    def __init__(self, label: str, one_shot: bool) -> None:
        self.label = label
        self._one_shot = one_shot
        # Never given back: a pool hands freed blocks out again in an order that ranks need not share.
        self._kept: list[tuple[torch.Tensor, Any]] = []

    def obstacle(self, size: Size, world_size: int) -> str | None:
        if self._one_shot and size.nbytes > SYMM_MEM_ONE_SHOT_MAX_BYTES:
            return f"every rank would read all messages whole: tried up to {SYMM_MEM_ONE_SHOT_MAX_BYTES // 2**20} MiB"
        return None

    def prepare(self, ranks: Ranks, problem: Problem) -> Call:
        x, name = self._symmetric_copy(ranks, problem.x), ranks.ctx.group_name
        if self._one_shot:
            return _norm_after(lambda: torch.ops.symm_mem.one_shot_all_reduce(x, "sum", name), problem)
        return _norm_after(lambda: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", name), problem)

    def _symmetric_copy(self, ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
        # Ranks meet after the part that can fail on one of them alone: the rendezvous waits for all.
        buffer = ranks.together(lambda: compat.symm_mem_empty(x.nbytes, x.device))
        handle, *_ = compat.symm_mem_rendezvous(buffer, ranks.ctx.group_name)
        self._kept.append((buffer, handle))
        return buffer.view(x.dtype).view(x.shape).copy_(x)


class NoCommunication(Contender):
    """Add and norm of rows that are there already, alone: what is left when communication is free."""

    label = "no-communication"
    kind = "bound"
    reduces = False

    def prepare(self, ranks: Ranks, problem: Problem) -> Call:
        x = problem.x.clone()
        return _norm_after(lambda: x, problem)


def _named(name: str) -> Callable[[int | None], Transport]:
    return lambda sms: get_transport(name)


def _only(make: Callable[[int], Algorithm]) -> Callable[[int | None], Transport]:
    """The P2P transport with one algorithm alone."""

    def transport(sms: int | None) -> Transport:
        from tw_compile.kernels.all_reduce_rms_norm.p2p import P2PTransport

        assert sms is not None
        return P2PTransport("p2p", make(sms))

    return transport


def _push(sms: int, one_shot: bool) -> Algorithm:
    from tw_compile.kernels.all_reduce_rms_norm.push import Push

    return Push(one_shot, sms)


def _stream(sms: int) -> Algorithm:
    from tw_compile.kernels.all_reduce_rms_norm.stream import Stream

    return Stream(sms)


OURS = (
    Variant("tw-p2p", _named("p2p"), sharded=True),
    Variant("tw-p2p-replicated", _named("p2p"), sharded=False),
    Variant("tw-push-one-shot", _only(partial(_push, one_shot=True)), False, 128, 128, "push_one_shot"),
    Variant("tw-push-two-shot", _only(partial(_push, one_shot=False)), True, 128, 128, "push_two_shot"),
    Variant("tw-stream", _only(_stream), True, 16, 32, "stream", narrow=True),
    Variant("tw-stream-in-slot", _only(_stream), True, 16, 32, in_slot=True, narrow=True),
    Variant(
        "tw-push-two-shot-fp8",
        _only(partial(_push, one_shot=False)),
        sharded=True,
        sms=128,
        most_sms=128,
        hidden_scale=FP8_SCALE,
    ),
    Variant("tw-nccl", _named("nccl"), sharded=False),
)
OURS_ON_CPU = (Variant("tw-gloo", _named("gloo"), sharded=False),)


def contenders(spec: BenchSpec) -> list[Contender]:
    """Who takes part, in the order of the report.

    Raises:
        UsageError: ``--only`` names nobody, or ``--sms`` is for nobody.
    """
    gated: list[Contender] = []
    if spec.gated:
        from tw_compile.benchmark.gated import Gated

        gated.append(Gated())
    if spec.device == "cpu":
        return select(spec, OURS_ON_CPU, [AllReduce("gloo+norm")]) + gated
    from tw_compile.benchmark.copy_engines import CopyEngines
    from tw_compile.benchmark.flashinfer_peers import FlashInfer

    others = [
        AllReduce("nccl+norm"),
        SymmetricMemory("symm-one-shot+norm", one_shot=True),
        SymmetricMemory("symm-two-shot+norm", one_shot=False),
        FlashInfer("flashinfer-one-shot", one_shot=True, most_tokens=max(spec.tokens)),
        FlashInfer("flashinfer-two-shot", one_shot=False, most_tokens=max(spec.tokens)),
        CopyEngines(),
        NoCommunication(),
    ]
    return select(spec, OURS, others) + gated


def select(spec: BenchSpec, ours: Sequence[Variant], others: Sequence[Contender]) -> list[Contender]:
    """Those that ``spec`` asks for; a variant that takes a number of SMs, once for each of ``spec.sms``."""
    known = [variant.label for variant in ours] + [other.label for other in others]
    for label in spec.only:
        if label not in known:
            raise UsageError(f"--only: expected some of {', '.join(known)}, got {label!r}")
    wanted = set(spec.only or known)
    variants = [variant for variant in ours if variant.label in wanted]
    takers = [variant.label for variant in variants if variant.sms is not None]
    if spec.sms and not takers:
        given = ",".join(map(str, spec.sms))
        raise UsageError(f"--sms: expected no value, as no contender here takes a number of SMs, got {given}")
    operators: list[Contender] = [
        Operator(variant, sms)
        for variant in variants
        for sms in (spec.sms if spec.sms and variant.sms is not None else (None,))
        if sms is None or sms <= variant.most_sms
    ]
    return operators + [other for other in others if other.label in wanted]
