"""The interface that each kernel over memory that the ranks share implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transport import Started

if TYPE_CHECKING:
    from tw_compile.kernels.collective.slot import GroupState, Slot
    from tw_compile.kernels.runtime.program import Program


class Algorithm(ABC):
    """One way to run the fused operator over peer memory or host memory.

    All ranks must get the same answers from the methods. So answers may depend only on what all ranks share, such as shapes,
    dtypes and the world size. ``name`` is the name in tables of ``configs/kernels``.
    """

    name: str

    @abstractmethod
    def obstacle(self, request: Request, state: GroupState) -> str | None:
        """Why the algorithm cannot serve the request; None when it can."""

    @abstractmethod
    def sms(self, tokens: int, world_size: int) -> int:
        """The number of SMs that a launch for a message ``[tokens, *]`` can occupy."""

    @abstractmethod
    def needs(self, request: Request, world_size: int) -> dict[str, int]:
        """The symmetric buffers that a slot must have for the request, as name -> bytes.

        The buffer "x" is special: peers read the partial sums there, and the matmul before the call may write them to it.
        """

    @abstractmethod
    def prepare(self, request: Request, state: GroupState, spin_limit: int) -> None:
        """Compile and load the kernels for the request, and for all messages that differ from it in tokens or memory of ``x``.

        This launches nothing and needs no slot. It does nothing if the algorithm can serve no such message. The caller has made
        the device current, and does not call this while a CUDA graph is captured.
        """

    def programs(self, request: Request, state: GroupState, spin_limit: int) -> list[Program]:
        """The CUDA C++ programs that :meth:`prepare` loads, so that those of several algorithms are compiled at the same time.

        They may be fewer: :meth:`prepare` compiles what is not here, one after the other.
        """
        return []

    def outputs(self, request: Request, state: GroupState, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a launch leaves its results: ``(hidden, residual_out)``."""
        return request.allocate(state.world_size)

    @abstractmethod
    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        """Enqueue the call on the current stream.

        The device is current, and ``slot`` has the buffers that :meth:`needs` asked for. With ``spin_limit`` above 0 a barrier
        gives up after that many polls.
        """
