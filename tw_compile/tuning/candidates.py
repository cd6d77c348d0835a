"""Who takes part in a calibration: the unfused way, and every kernel of the registries that the node's transports have.

They are contenders of ``tw-compile bench kernel``, except that nothing of them can wait for ever, and that Inductor has no part
in them: a calibration runs inside of its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from tw_compile.benchmark.contender import Contender, ContenderCall
from tw_compile.benchmark.ours import Operator
from tw_compile.benchmark.variants import Variant, variants
from tw_compile.harness.problems import Problem
from tw_compile.harness.ranks import Ranks, one_line
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.collective.reference import add_rms_norm
from tw_compile.kernels.collective.transport import Transport
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.epilogues import EPILOGUES
from tw_compile.kernels.registry import load
from tw_compile.kernels.transports.slot_transport import SlotTransport

SPIN_LIMIT = 500_000
"""Polls of about 1 us. Ranks meet before each call, so one that waits longer for a peer waits for ever."""


class Unfused(Contender):
    """The process group's all_reduce in place, then one norm kernel, as Inductor makes it of an unfused graph.

    The kernel is that of the ``nccl`` transport: compiling one would take longer than all the rest.
    """

    label = "nccl+norm"

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        x = problem.x.clone()
        request = problem.request(ranks.ctx)
        residual = torch.empty_like(problem.residual)
        operands = (x, request.residual, request.bias, request.weight, request.norm)
        kernel = EPILOGUES[request.norm.epilogue].local_kernel

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            dist.all_reduce(x)
            if x.is_cuda and kernel is not None:
                load(kernel)(*operands, x, residual, None)
                return x, residual
            hidden, h = add_rms_norm(*operands)
            return x.copy_(hidden), h

        return call


class Bounded(Operator):
    """An operator whose kernels give up where a peer does not come, and are loaded on all ranks before one launches."""

    _loaded = False

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        call = super().prepare(ranks, problem)
        if isinstance(self.transport, SlotTransport) and self._request is not None and not self._loaded:
            self.transport.load(self._request)
            self._loaded = True  # for messages of other sizes, too
        return call

    def deviation(self, ranks: Ranks) -> str | None:
        """See :class:`Contender`. Also that a wait gave up."""
        if isinstance(self.transport, SlotTransport):
            try:
                self.transport.check()
            except RuntimeError as error:
                return one_line(error)
        return super().deviation(ranks)


def candidates(transports: Sequence[str]) -> list[Contender]:
    """All that can serve messages over ``transports``, by their names in the registry."""
    ours = [variant for name in transports for variant in _over(name)]
    return [Unfused(), *(Bounded(replace(variant, transport=_bounded(variant.transport))) for variant in ours)]


def _over(transport: str) -> list[Variant]:
    """What tables of kernels can name, and what serves the rest, which they need not name."""
    listed = [variant for variant in variants("cuda") if variant.over == transport]
    named = [variant for variant in listed if variant.algorithm is not None]
    last = next((entry for entry in ALGORITHMS if entry.serves_all and entry.transport == transport), None)
    whole = next((variant for variant in listed if variant.algorithm is None), None)
    if last is None or last.benchmarked or whole is None:
        return named
    return [replace(whole, transport=lambda sms: TRANSPORTS[transport].make(last.make())), *named]


def _bounded(make: Callable[[int | None], Transport]) -> Callable[[int | None], Transport]:
    def transport(sms: int | None) -> Transport:
        made = make(sms)
        if isinstance(made, SlotTransport):
            made.limit_spins(SPIN_LIMIT)
        return made

    return transport
