"""What takes part in a benchmark of the operator.

A contender turns a :class:`Problem` into a function that enqueues one call and returns ``(hidden, residual)``. The function is
captured in a CUDA graph and replayed thousands of times, so it must not wait on the host and its inputs must stay sane:
contenders that reduce in place let the norm write ``hidden`` over their input. That is what inference engines do, it moves no
byte more than any other place for ``hidden``, and the next call adds up normalised rows. Sums of sums would be infinite
after some dozens of calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal

import torch

from tw_compile.benchmark.spec import MessageSize
from tw_compile.harness.problems import Form, Problem, Scales
from tw_compile.harness.ranks import Ranks
from tw_compile.kernels.collective.fields import RMS_NORM
from tw_compile.kernels.collective.wires import EXACT

ContenderCall = Callable[[], tuple[torch.Tensor, torch.Tensor]]
ContenderKind = Literal["ours", "peer", "bound"]


class Contender(ABC):
    """One way to do the work.

    Attributes:
        kind: "ours", "peer", or "bound". A bound is a limit on the time, not a way to do the work.
        residual_sharded: Residual in and out are this rank's rows; else all rows.
        residual_narrow: A sharded residual is in the message's dtype, as calls beside other work keep it, not in float32.
        hidden_scale: The scale of float8 results, if one is given.
        scales: What has a scale of its own, made of float8 results; empty where none is made.
        reduces: False for a bound that leaves the communication out, so that its results are wrong.
        wire: How its rows travel, a name of ``wires.WIRES``.
        norm: The norm behind the sum, a name of ``epilogues.EPILOGUES``. A LayerNorm has a bias of its own.
        gemm_columns: A matmul by weights of so many columns follows the call, and is part of the time; 0: none does. Each
            call has weights that are not in the L2 cache.
        prefetch_bytes: How much of them the call brings there.
        tokens: The sizes at which a calibration times it, because others say nothing new; None: all.
        algorithm: What a table of ``configs/kernels`` calls its kernel, and the SMs that it may have; None if it can't.
    """

    label: str
    kind: ClassVar[ContenderKind] = "peer"
    residual_sharded: bool = False
    residual_narrow: bool = False
    hidden_scale: float | None = None
    scales: Scales = ""
    reduces: ClassVar[bool] = True
    wire: str = EXACT
    norm: str = RMS_NORM
    gemm_columns: int = 0
    prefetch_bytes: int = 0
    tokens: tuple[int, ...] | None = None
    algorithm: str | None = None
    max_sms: int | None = None

    def obstacle(self, size: MessageSize, world_size: int) -> str | None:
        """Why it does not serve this size; None when it does. Asked before anything is prepared."""
        return None

    def num_sms(self, size: MessageSize, world_size: int) -> int | None:
        """SMs that its communication occupies; None when it does not say."""
        return None

    @abstractmethod
    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        """Everything that one call needs, made beforehand. On all ranks at once; nothing may be in flight on return."""

    def deviation(self, ranks: Ranks) -> str | None:
        """What ran instead of what the label says; None when nothing did. Asked after the first call."""
        return None

    def choice(self) -> str | None:
        """What it chose to run at this size, and why; None where it has no choice. Asked after the first call."""
        return None


def form(contender: Contender, dtype: torch.dtype) -> Form:
    """The operator's form between two fused sites, residual in and out laid out alike, see :func:`form_of_norm`."""
    of_norm = form_of_norm(dtype, contender.norm)
    of_norm = replace(of_norm, hidden_scale=contender.hidden_scale, scales=contender.scales)
    if not contender.residual_sharded:
        return of_norm
    kept = dtype if contender.residual_narrow else torch.float32
    return replace(of_norm, residual="sharded", out="sharded", residual_dtype=kept)


def form_of_norm(dtype: torch.dtype, norm: str) -> Form:
    """RMSNorm is Hugging Face Llama's. A LayerNorm is torch's, with weight and bias."""
    return Form(dtype) if norm == RMS_NORM else Form(dtype, weight="plain", epilogue=norm, norm_bias=True)
