"""The contenders of a calibration: the unfused way, and every registered kernel of the node's transports.

For the planner there is also a norm. On a device without a profile there are a GEMM alone, and the kernels that run beside
other work, on fewer SMs. All of these are timed at a few sizes.

They are contenders of ``tw-compile bench kernel``, with two differences. None of them can wait for ever. And none uses
Inductor, because a calibration runs inside of Inductor's caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.distributed as dist

from tw_compile.benchmark.contender import Contender, ContenderCall
from tw_compile.benchmark.labels import NCCL
from tw_compile.benchmark.ours import Operator
from tw_compile.benchmark.spec import ContenderKind
from tw_compile.benchmark.variants import Variant, alone_over
from tw_compile.harness.problems import Problem
from tw_compile.harness.ranks import Ranks, one_line
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.collective.peer_access import local_world_size, plain_route
from tw_compile.kernels.collective.reference import add_rms_norm
from tw_compile.kernels.collective.transport import Transport
from tw_compile.kernels.epilogues import EPILOGUES
from tw_compile.kernels.registry import load
from tw_compile.kernels.transports.selection import HOST
from tw_compile.kernels.transports.slot_transport import SlotTransport
from tw_compile.tuning.estimate import GEMM
from tw_compile.tuning.profile import NORM_ALONE

BESIDE_TOKENS = (256, 1024)
NORM_TOKENS = (16, 256, 1024, 4096)
BESIDE_SMS = {"stream": 8, "push_two_shot": 32}
"""A second number of SMs for kernels that device profiles know. From the times on two numbers the rate of one SM follows."""
SPIN_LIMIT = 500_000
"""Polls, of about 1 us each. Ranks meet before each call, so a rank that waits longer than this for a peer waits for ever."""


class NormAlone(Contender):
    """Residual add and norm in place, in one kernel like the one that Inductor generates for an unfused graph.

    The kernel is the ``nccl`` transport's own. To have Inductor compile one would take longer than everything else.
    """

    label = NORM_ALONE
    tokens: tuple[int, ...] | None = NORM_TOKENS
    kind: ClassVar[ContenderKind] = "bound"
    reduces = False

    def reduce(self, x: torch.Tensor) -> None:
        """The all_reduce before the norm; here there is none."""

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        x = problem.x.clone()
        request = problem.request(ranks.ctx)
        residual = torch.empty_like(problem.residual)
        operands = (x, request.residual, request.bias, request.weight, request.norm)
        kernel = EPILOGUES[request.norm.epilogue].local_kernel

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            self.reduce(x)
            if x.is_cuda and kernel is not None:
                load(kernel)(*operands, x, residual, None)
                return x, residual
            hidden, h = add_rms_norm(*operands)
            return x.copy_(hidden), h

        return call


class Unfused(NormAlone):
    """The process group's all_reduce in place, then residual add and norm as in :class:`NormAlone`."""

    label = NCCL
    tokens = None
    kind = "peer"
    reduces = True

    def reduce(self, x: torch.Tensor) -> None:
        """See :class:`NormAlone`."""
        dist.all_reduce(x)


class GemmAlone(Contender):
    """The projection behind attention: ``[tokens, hidden / world_size] @ [hidden / world_size, hidden]``."""

    label = GEMM
    kind = "bound"
    reduces = False
    tokens = BESIDE_TOKENS

    _weight: torch.Tensor | None = None

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        hidden = problem.x.shape[1]
        inner = hidden // ranks.ctx.world_size
        a = problem.x[:, :inner].contiguous()
        if self._weight is None:  # all sizes share one weight, because it is large
            self._weight = torch.randn((inner, hidden), device=a.device).to(a.dtype)
        b = self._weight

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            product = torch.mm(a, b)
            return product, product

        return call


class Bounded(Operator):
    """An operator whose kernels give up if a peer does not come. All ranks load the kernels before any rank launches one."""

    _loaded = False

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        call = super().prepare(ranks, problem)
        if isinstance(self.transport, SlotTransport) and self._request is not None and not self._loaded:
            self.transport.load(self._request)
            self._loaded = True  # for messages of other sizes, too
        return call

    def deviation(self, ranks: Ranks) -> str | None:
        """See :class:`Contender`. A wait that gave up is reported, too."""
        if isinstance(self.transport, SlotTransport):
            try:
                self.transport.check()
            except RuntimeError as error:
                return one_line(error)
        return super().deviation(ranks)


def candidates(transports: Sequence[str]) -> list[Contender]:
    """All contenders that can serve messages over ``transports``, which are names of the registry."""
    return [Unfused(), *map(_operator, _variants(transports))]


def for_planner(transports: Sequence[str], has_profile: bool) -> list[Contender]:
    """The contenders that the planner needs besides :func:`candidates`.

    They give the rates of the link if messages go through host memory, and those of a device without a profile.
    """
    norm: list[Contender] = [NormAlone()] if "host" in transports or not has_profile else []
    return norm if has_profile else [*norm, GemmAlone(), *_beside(_variants(transports))]


def _variants(transports: Sequence[str]) -> list[Variant]:
    """Those that may run: over a link without native atomics only the kernels of the route that was tried there."""
    listed = [variant for name in transports for variant in alone_over(name)]
    route = plain_route(range(local_world_size())) if torch.cuda.is_initialized() else ""
    return [variant for variant in listed if not route or variant.over == HOST or _goes_by(route, variant)]


def _goes_by(route: str, variant: Variant) -> bool:
    return variant.algorithm is not None and ALGORITHMS[variant.algorithm].plain_link == route


def _beside(ours: Sequence[Variant]) -> list[Contender]:
    listed: list[Contender] = []
    for variant in ours:
        if variant.algorithm in BESIDE_SMS:
            listed.append(_operator(variant, BESIDE_SMS[variant.algorithm]))
            listed[-1].tokens = BESIDE_TOKENS
    return listed


def _operator(variant: Variant, sms: int | None = None) -> Contender:
    return Bounded(replace(variant, transport=_bounded(variant.transport)), sms)


def _bounded(make: Callable[[int | None], Transport]) -> Callable[[int | None], Transport]:
    def transport(sms: int | None) -> Transport:
        made = make(sms)
        if isinstance(made, SlotTransport):
            made.limit_spins(SPIN_LIMIT)
        return made

    return transport
