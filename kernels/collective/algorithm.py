"""What a kernel of the P2P transport is to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transport import Started

if TYPE_CHECKING:
    from tw_compile.kernels.collective.slot import GroupState, Slot


class Algorithm(ABC):
    """One way to do the operator over peer memory. All answers depend on what all ranks share.

    ``name``: what tables of ``configs/kernels`` call it.
    """

    name: str

    @abstractmethod
    def obstacle(self, request: Request, state: GroupState) -> str | None:
        """Why it cannot serve the request; None when it can."""

    @abstractmethod
    def sms(self, tokens: int, world_size: int) -> int:
        """SMs that a launch for ``[tokens, *]`` can occupy."""

    @abstractmethod
    def needs(self, request: Request, world_size: int) -> dict[str, int]:
        """Symmetric buffers of the slot: name -> bytes. "x", if there is one, is where peers read the partial sums."""

    @abstractmethod
    def prepare(self, request: Request, state: GroupState, spin_limit: int) -> None:
        """Compile and load the kernels of all messages like the request, whatever their tokens and wherever ``x`` lies.

        Launches nothing and needs no slot. Nothing to do where it can serve no such message. The device is current; not in
        CUDA-graph capture.
        """

    def outputs(self, request: Request, state: GroupState, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a launch leaves its results: ``(hidden, residual_out)``."""
        return request.allocate(state.world_size)

    @abstractmethod
    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        """Enqueue the call on the current stream; the device is current. The slot has what :meth:`needs` asked for."""
