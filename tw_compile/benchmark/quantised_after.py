"""Float8 with scales made of the results by kernels of their own, behind a call with results in the message's dtype.

This is what a model has where the call does not make the codes itself. ``tw-push-two-shot-fp8-token`` and ``-fp8-group`` make
them, so their time beside these says what that gains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tw_compile.benchmark.contender import Contender, ContenderCall, form
from tw_compile.benchmark.labels import QUANTISED_AFTER
from tw_compile.benchmark.ours import Operator
from tw_compile.benchmark.spec import MessageSize
from tw_compile.benchmark.variants import OURS
from tw_compile.harness.problems import EPS, Problem
from tw_compile.harness.ranks import Ranks
from tw_compile.kernels.collective.spec import FP8_MAX, empty_hidden, scales_of


def rms_norm(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The norm (Hugging Face Llama's) of ``h [tokens, hidden]``."""
    y = h.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * y.to(h.dtype)


def quantise_(y: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, columns: int, least: float) -> None:
    """Write ``y [tokens, hidden]`` as float8 to ``codes``, and the scale of each row and ``columns`` columns to ``scales``.

    ``least``: the smallest scale.
    """
    values = y.float().unflatten(-1, (-1, columns))
    by = (values.abs().amax(-1) / FP8_MAX).clamp_min(least)
    codes.copy_((values / by.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).flatten(-2))
    scales.copy_(by)


def norm_quantise_(
    h: torch.Tensor,
    weight: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    columns: int,
    least: float,
) -> None:
    """:func:`quantise_` of :func:`rms_norm`, to be one kernel."""
    quantise_(rms_norm(h, weight), codes, scales, columns, least)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, compiled by Inductor to one kernel for each shape."""
    return torch.compile(function, dynamic=False, fullgraph=True)


class QuantisedAfter(Contender):
    """A call of ours, and float8 codes made behind it as ``QUANTISED_AFTER`` says.

    ``quantise``: two-shot gives normalised rows, and a kernel quantises them. ``norm-quantise``: one-shot gives ``h`` to all
    ranks, and a kernel makes norm and codes. ``norm+quantise``: these are two kernels. One-shot needs no further message
    for ``h``. It also makes normalised rows, which nobody uses then. These kernels are Inductor's, which may add up in
    another order on each rank. So ranks may have different bits.
    """

    def __init__(self, label: str) -> None:
        self._way, self.scales = QUANTISED_AFTER[label]
        self.label = label
        call = "tw-push-two-shot" if self._way == "quantise" else "tw-push-one-shot"
        self._call = Operator(next(variant for variant in OURS if variant.label == call))
        self.residual_sharded = self._call.residual_sharded

    def obstacle(self, size: MessageSize, world_size: int) -> str | None:
        return self._call.obstacle(size, world_size)

    def num_sms(self, size: MessageSize, world_size: int) -> int | None:
        return self._call.num_sms(size, world_size)

    def deviation(self, ranks: Ranks) -> str | None:
        return self._call.deviation(ranks)

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        first = self._call.prepare(ranks, problem)
        x, weight = problem.x, problem.weight
        norm = form(self, x.dtype).norm(x.shape[1])
        hidden = empty_hidden(x.shape[0], x.shape[1], norm, x.device)
        # AOTAutograd refuses views of one storage with two dtypes. So the scales get a storage of their own at their address.
        scales = torch.from_dlpack(scales_of(hidden, norm.scale_columns))
        to = (hidden, scales, norm.scale_columns, norm.min_scale)
        compiled = _compiled if x.is_cuda else _as_it_is

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            rows, h = first()
            if self._way == "norm-quantise":
                compiled(norm_quantise_)(h, weight, *to)
            elif self._way == "norm+quantise":
                compiled(quantise_)(compiled(rms_norm)(h, weight), *to)
            else:
                compiled(quantise_)(rows, *to)
            return hidden, h

        return call


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
