"""Push, with a row on the SMs of a whole cluster where a call has few rows."""

from __future__ import annotations

from tw_compile.kernels.algorithms.push.entries import CLUSTER
from tw_compile.kernels.algorithms.push.push import Push
from tw_compile.kernels.collective.slot import GroupState, Slot
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transport import Started

LEAST_HIDDEN = 1024
"""The shortest row of which each warp of such CTAs has a part."""


class SharingPush(Push):
    """:class:`Push`. Clusters of :data:`entries.CLUSTER` CTAs share rows as long as each CTA has an SM of its own.

    One SM limits how fast a long row goes in and out. A call with few rows leaves most SMs without work, so they can help. With
    more rows there is nothing to gain, and the exchange inside the clusters costs time (``benchmarks/kernel-notes.md``).
    """

    def __init__(self, one_shot: bool, max_sms: int = 128) -> None:
        super().__init__(one_shot, max_sms)
        self._sharing = Push(one_shot, max_sms, CLUSTER)

    def shares(self, request: Request, state: GroupState) -> bool:
        """Whether CTAs share rows of the request.

        They do not beside other work, which has the other SMs, nor where the other SMs prefetch weights.
        """
        few = self._few(request.x.shape[0], state.world_size)
        return few and _may_share(request) and self._sharing.obstacle(request, state) is None

    def _few(self, tokens: int, world_size: int) -> bool:
        return self.local_rows(tokens, world_size) * CLUSTER <= self._max_sms

    def sms(self, tokens: int, world_size: int) -> int:
        """See :class:`Algorithm`."""
        rows = self.local_rows(tokens, world_size)
        return rows * CLUSTER if self._few(tokens, world_size) else min(rows, self._max_sms)

    def prepare(self, request: Request, state: GroupState, spin_limit: int) -> None:
        """See :class:`Algorithm`."""
        super().prepare(request, state, spin_limit)
        if _may_share(request):
            self._sharing.prepare(request, state, spin_limit)

    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        """See :class:`Algorithm`."""
        if self.shares(request, state):
            return self._sharing.launch(request, state, slot, spin_limit)
        return super().launch(request, state, slot, spin_limit)


def _may_share(request: Request) -> bool:
    """Whether CTAs would share rows if the request had few."""
    return not request.overlap_sms and not request.prefetch and request.x.shape[1] >= LEAST_HIDDEN
