"""Our kernels beside a GEMM, as contenders. ``pairs.py`` says which pairs are timed, and what follows from their times."""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from tw_compile.benchmark.contender import Contender, ContenderCall
from tw_compile.benchmark.ours import Operator
from tw_compile.benchmark.product import product_deviation
from tw_compile.benchmark.spec import BenchSpec
from tw_compile.benchmark.variants import Variant
from tw_compile.benchmark.worker import run_rank
from tw_compile.harness.problems import Problem
from tw_compile.harness.ranks import Ranks, work_as_rank
from tw_compile.kernels.gemm.mm_leaving_sms import mm_leaving_sms
from tw_compile.tuning.pairs import LayerMatmul, Trial, trials


@functools.lru_cache(maxsize=4)
def _operands(
    device: torch.device, dtype: torch.dtype, tokens: int, inner: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype)
        for shape in ((tokens, inner), (inner, columns))
    )
    return a, b


def operands(gemm: LayerMatmul, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands of ``gemm`` beside messages like ``x [tokens, hidden]``. All contenders share the same tensors."""
    tokens, hidden = x.shape
    return _operands(x.device, x.dtype, tokens, int(gemm.inner * hidden), int(gemm.columns * hidden))


class GemmAlone(Contender):
    """The GEMM by itself, planned for all but ``reserved`` SMs."""

    kind = "bound"
    reduces = False

    def __init__(self, gemm: LayerMatmul, reserved: int) -> None:
        self.label = gemm.name + (f" leaving {reserved}" if reserved else "")
        self._gemm, self._reserved = gemm, reserved

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        a, b = operands(self._gemm, problem.x)

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            product = mm_leaving_sms(a, b, self._reserved)
            return product, product

        return call


class Beside(Operator):
    """A kernel on ``sms`` SMs and a stream of its own, while a GEMM that leaves ``reserved`` SMs runs on the current stream."""

    def __init__(self, variant: Variant, sms: int, gemm: LayerMatmul, reserved: int) -> None:
        super().__init__(variant, sms if variant.sms is not None else None)
        self.label = f"{variant.label} on {sms}, {gemm.name}" + (f" leaving {reserved}" if reserved else "")
        self.residual_narrow = True
        self.algorithm = None  # this time is of no use to a table for messages that travel alone
        self._overlap_sms, self._gemm, self._reserved = sms, gemm, reserved
        self._product: torch.Tensor | None = None

    def meanwhile(self, problem: Problem) -> Callable[[], None]:
        a, b = operands(self._gemm, problem.x)

        def multiply() -> None:
            self._product = mm_leaving_sms(a, b, self._reserved)

        self._expected = functools.partial(torch.mm, a, b)
        return multiply

    def deviation(self, ranks: Ranks) -> str | None:
        assert self._product is not None
        return product_deviation(self._product, self._expected()) or super().deviation(ranks)


def beside_contenders(spec: BenchSpec) -> list[Contender]:
    """A contender for each of :func:`~tw_compile.tuning.pairs.trials`."""
    return [_contender(trial) for trial in trials(spec)]


def _contender(trial: Trial) -> Contender:
    if trial.gemm is None:
        assert trial.kernel is not None, "a trial has a kernel, a GEMM or both"
        return Operator(trial.kernel, trial.sms)
    if trial.kernel is None:
        return GemmAlone(trial.gemm, trial.reserved)
    assert trial.sms is not None, "a kernel beside a GEMM gets a number of SMs"
    return Beside(trial.kernel, trial.sms, trial.gemm, trial.reserved)


def rank_process(spec: BenchSpec, rank: int, scratch: str, messages: Connection) -> None:
    """Entry point of a spawned rank."""
    work_as_rank(spec, rank, scratch, messages, functools.partial(run_rank, spec, beside_contenders))
