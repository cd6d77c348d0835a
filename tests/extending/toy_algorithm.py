"""An algorithm of the P2P transport in a file of its own; its kernel is Python that notes what it was asked for."""

from __future__ import annotations

from tw_compile.kernels.algorithms.entry import AlgorithmEntry, Checked
from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.slot import GroupState, Slot
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transport import Started
from tw_compile.kernels.registry import Benchmarked

MOST_TOKENS = 8
MOST_SMS = 4


class ToyAlgorithm(Algorithm):
    name = "toy_algorithm"

    def __init__(self, max_sms: int = 2) -> None:
        if not 1 <= max_sms <= MOST_SMS:
            raise ValueError(f"max_sms: expected 1 to {MOST_SMS}, got {max_sms}")
        self._max_sms = max_sms
        self.launched: list[tuple[int, int]] = []

    def obstacle(self, request: Request, state: GroupState) -> str | None:
        tokens = request.x.shape[0]
        return f"{tokens} tokens are more than {MOST_TOKENS}" if tokens > MOST_TOKENS else None

    def sms(self, tokens: int, world_size: int) -> int:
        return min(tokens, self._max_sms)

    def needs(self, request: Request, world_size: int) -> dict[str, int]:
        return {"x": request.x.nbytes}

    def prepare(self, request: Request, state: GroupState, spin_limit: int) -> None:
        pass

    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        tokens = request.x.shape[0]
        self.launched.append((tokens, self.sms(tokens, state.world_size)))
        return Started(*request.allocate(state.world_size))


ENTRY = AlgorithmEntry(
    "toy_algorithm",
    "toy_algorithm:ToyAlgorithm",
    sms=2,
    most_sms=MOST_SMS,
    instead="push_two_shot",
    profile="toy",
    benchmarked=(Benchmarked("tw-toy-algorithm", sharded=True),),
    checked=(Checked("toy_algorithm"),),
)
