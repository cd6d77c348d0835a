"""The contenders of a benchmark of the operator.

A contender turns a :class:`Problem` into a function that enqueues one call and returns ``(hidden, residual)``. The function is
captured in a CUDA graph and replayed thousands of times. So it must not wait on the host, and its inputs must stay finite.
Contenders that reduce in place let the norm write ``hidden`` over their input, so the next call adds up normalised rows. Sums
of sums would be infinite after some dozens of calls. Inference engines do the same, and any other place for ``hidden`` would
move as many bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch

from tw_compile.benchmark.spec import ContenderKind, MessageSize
from tw_compile.harness.problems import Form, Problem, Scales
from tw_compile.harness.ranks import Ranks
from tw_compile.kernels.collective.fields import RMS_NORM
from tw_compile.kernels.collective.wires import EXACT

ContenderCall = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class Contender(ABC):
    """One way to do the work.

    Attributes:
        kind: See ``ContenderKind``.
        residual_sharded: Whether the residual in and out has this rank's rows only. If not, it has all rows.
        residual_narrow: Whether a sharded residual has the message's dtype, as in calls beside other work; else float32.
        hidden_scale: The scale of float8 results, if one is given.
        scales: What has a float8 scale of its own that the call makes from its results; empty where it makes none.
        reduces: False for a bound that leaves the communication out, so that its results are wrong.
        wire: How its rows travel, a name of ``wires.WIRES``.
        norm: The norm behind the sum, a name of ``epilogues.EPILOGUES``. A LayerNorm has a bias of its own.
        gemm_columns: Columns of the weights of a matmul that follows the call, and is part of the time. The weights of each
            call are not in the L2 cache. 0: no matmul follows.
        prefetch_bytes: How many bytes of these weights the call brings into the L2 cache.
        tokens: The numbers of tokens at which a calibration times it, because others say nothing new; None: all.
        algorithm: The name of its kernel in tables of ``configs/kernels``; None if a table can't name the kernel.
        max_sms: The SMs that this kernel may have.
        several: Whether calls of different ``lane`` may be on their way at the same time.
        lane: Of the calls that are prepared from now on.
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
    several: bool = False
    lane: int = 0

    def obstacle(self, size: MessageSize, world_size: int) -> str | None:
        """Why the contender does not serve this size; None when it does. Called before anything is prepared."""
        return None

    def num_sms(self, size: MessageSize, world_size: int) -> int | None:
        """Number of SMs that its communication occupies; None when the contender does not say."""
        return None

    @abstractmethod
    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        """Make everything that one call needs, and return the call. On all ranks at once; nothing is in flight on return."""

    def deviation(self, ranks: Ranks) -> str | None:
        """What ran instead of what the label says; None when nothing else ran. Called after the first call."""
        return None

    def choice(self) -> str | None:
        """What the contender chose to run at this size, and why; None where it has no choice. Called after the first call."""
        return None


def form(contender: Contender, dtype: torch.dtype) -> Form:
    """The operator's form between two fused sites: the residual in and out has the same layout. See :func:`form_of_norm`."""
    of_norm = form_of_norm(dtype, contender.norm)
    of_norm = replace(of_norm, hidden_scale=contender.hidden_scale, scales=contender.scales)
    if not contender.residual_sharded:
        return of_norm
    kept = dtype if contender.residual_narrow else torch.float32
    return replace(of_norm, residual="sharded", out="sharded", residual_dtype=kept)


def form_of_norm(dtype: torch.dtype, norm: str) -> Form:
    """The form with Hugging Face Llama's RMSNorm, or with torch's LayerNorm, which has weight and bias."""
    return Form(dtype) if norm == RMS_NORM else Form(dtype, weight="plain", epilogue=norm, norm_bias=True)
