"""Push, with a row on the SMs of a whole cluster where a call has few rows."""

from __future__ import annotations

from tw_compile.kernels.algorithms.push.entries import CLUSTERS
from tw_compile.kernels.algorithms.push.push import Push, ctas_per_sm, threads_for
from tw_compile.kernels.collective.slot import GroupState, Slot
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transport import Started
from tw_compile.kernels.runtime.program import Program

LEAST_HIDDEN = 1024
"""The shortest row of which each warp of such CTAs has a part."""
_SHORT_BYTES = 16 * 1024
"""In one-shot, a CTA alone is as fast if it receives less than this of each row, except where there are very few rows."""
_SMALL_CTA = 128
"""Threads of CTAs of which an SM could hold more than two."""


class SharingPush(Push):
    """:class:`Push`. Clusters of CTAs (:data:`entries.CLUSTERS`) share rows as long as all of them run at once.

    One SM limits how fast a long row goes in and out. A call with few rows leaves most SMs without work, so they can help. With
    more rows there is nothing to gain, and the exchange inside the clusters costs time (``benchmarks/kernel-notes.md``).
    """

    def __init__(self, one_shot: bool, max_sms: int = 128) -> None:
        super().__init__(one_shot, max_sms)
        self._sharing = {cluster: Push(one_shot, max_sms, cluster) for cluster in CLUSTERS}

    def shares(self, request: Request, state: GroupState) -> int:
        """How many CTAs share each row of the request; 1: none.

        They do not beside other work, which has the other SMs.
        """
        if not _may_share(request):
            return 1
        rows = self.local_rows(request.x.shape[0], state.world_size)
        for cluster, sharing in self._sharing.items():
            if rows <= self._most_rows(cluster, request, state.world_size):
                return cluster if sharing.obstacle(request, state) is None else 1
        return 1

    def _most_rows(self, cluster: int, request: Request, world_size: int) -> int:
        """The most rows that clusters of this size share."""
        hidden_size = request.x.shape[1]
        if self._one_shot and (world_size - 1) * hidden_size * request.x.element_size() < _SHORT_BYTES:
            return self._max_sms // 8 if cluster == max(CLUSTERS) else 0
        threads = threads_for(hidden_size, world_size, cluster)
        ctas = self._max_sms * ctas_per_sm(threads, world_size)
        if cluster == 2:
            return ctas // 2
        if not self._one_shot and threads <= _SMALL_CTA:
            # A cluster of four may have two rows then, and is still faster than two pairs. With scales it is slower, as on two
            # H200 (2026-11-28-2xh200-kernel-fp8-pairs-tp2.csv).
            return ctas // (4 if request.norm.scale_columns else 2)
        # A GPU's groups of SMs are no multiples of large clusters: with 64 clusters of four some had to wait, with 56 none.
        return ctas * 7 // 8 // cluster

    def sms(self, tokens: int, world_size: int) -> int:
        """See :class:`Algorithm`. This is the most, as if the largest clusters shared all rows, with an SM for each CTA."""
        return min(self.local_rows(tokens, world_size) * max(CLUSTERS), self._max_sms)

    def prepare(self, request: Request, state: GroupState, spin_limit: int) -> None:
        """See :class:`Algorithm`."""
        super().prepare(request, state, spin_limit)
        if _may_share(request):
            for sharing in self._sharing.values():
                sharing.prepare(request, state, spin_limit)

    def programs(self, request: Request, state: GroupState, spin_limit: int) -> list[Program]:
        """See :class:`Algorithm`."""
        shared = self._sharing.values() if _may_share(request) else ()
        of_clusters = (program for sharing in shared for program in sharing.programs(request, state, spin_limit))
        return [*super().programs(request, state, spin_limit), *of_clusters]

    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        """See :class:`Algorithm`."""
        cluster = self.shares(request, state)
        if cluster > 1:
            return self._sharing[cluster].launch(request, state, slot, spin_limit)
        return super().launch(request, state, slot, spin_limit)


def _may_share(request: Request) -> bool:
    """Whether CTAs would share rows if the request had few."""
    return not request.overlap_sms and request.x.shape[1] >= LEAST_HIDDEN
