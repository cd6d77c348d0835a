"""Push, with a row on the SMs of a whole cluster where a call has few rows."""

from __future__ import annotations

from tw_compile.kernels.algorithms.push.entries import CLUSTERS
from tw_compile.kernels.algorithms.push.push import Push
from tw_compile.kernels.collective.slot import GroupState, Slot
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transport import Started

LEAST_HIDDEN = 1024
"""The shortest row of which each warp of such CTAs has a part."""


class SharingPush(Push):
    """:class:`Push`. Clusters of CTAs (:data:`entries.CLUSTERS`) share rows as long as each CTA has an SM of its own.

    One SM limits how fast a long row goes in and out. A call with few rows leaves most SMs without work, so they can help. With
    more rows there is nothing to gain, and the exchange inside the clusters costs time (``benchmarks/kernel-notes.md``).
    """

    def __init__(self, one_shot: bool, max_sms: int = 128) -> None:
        super().__init__(one_shot, max_sms)
        self._sharing = {cluster: Push(one_shot, max_sms, cluster) for cluster in CLUSTERS}

    def shares(self, request: Request, state: GroupState) -> int:
        """How many CTAs share each row of the request; 1: none.

        They do not beside other work, which has the other SMs, nor where the other SMs prefetch weights.
        """
        cluster = self._cluster_for(request.x.shape[0], state.world_size)
        if cluster == 1 or not _may_share(request) or self._sharing[cluster].obstacle(request, state) is not None:
            return 1
        return cluster

    def _cluster_for(self, tokens: int, world_size: int) -> int:
        """The most CTAs of a row that each have an SM."""
        rows = self.local_rows(tokens, world_size)
        return next((cluster for cluster in CLUSTERS if rows * cluster <= self._max_sms), 1)

    def sms(self, tokens: int, world_size: int) -> int:
        """See :class:`Algorithm`."""
        return min(self.local_rows(tokens, world_size) * self._cluster_for(tokens, world_size), self._max_sms)

    def prepare(self, request: Request, state: GroupState, spin_limit: int) -> None:
        """See :class:`Algorithm`."""
        super().prepare(request, state, spin_limit)
        if _may_share(request):
            for sharing in self._sharing.values():
                sharing.prepare(request, state, spin_limit)

    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        """See :class:`Algorithm`."""
        cluster = self.shares(request, state)
        if cluster > 1:
            return self._sharing[cluster].launch(request, state, slot, spin_limit)
        return super().launch(request, state, slot, spin_limit)


def _may_share(request: Request) -> bool:
    """Whether CTAs would share rows if the request had few."""
    return not request.overlap_sms and not request.prefetch and request.x.shape[1] >= LEAST_HIDDEN
