"""Calls beside other work: the kernel runs on a side stream, so the current stream goes on until ``wait_``.

    current:  ... x is made | fork | other work ...                  | join | readers of the results ...
    side:                          \\-> wait | kernel (few SMs) | done --/

Fork and join are events, which CUDA-graph capture turns into the edges of a graph. Both are in the same capture, or in none.

**Order.** The side stream does nothing of a call before the current stream has reached the fork. The current stream does
nothing behind the join before the side stream has reached it. So everything before ``start`` and everything after ``finish``
sees a call beside other work as if it were on the current stream. Hence the arguments of ``kernels/runtime/barrier.py`` hold
for slots whose calls are of both kinds. A slot's next call, or the GEMM that writes its message, comes after the ``finish`` of
the call before it: ``ops.complete_earlier`` ensures that if ``wait_`` has not run.

**Memory.** Outputs are allocated on the current stream, before the fork. Earlier users of that memory were enqueued on the
current stream earlier, so the kernel runs after them. Inputs and outputs belong to the current stream's pool and may be freed
only after the join. Until then ``finish`` holds them, and also contiguous copies of inputs, to which nothing else refers. Work
that the current stream does after the join reuses the freed memory. So no ``record_stream`` is needed, which delays reuse and
which CUDA graphs do not replay. Memory that a launch allocates for itself while the side stream is current comes from the side
stream's pool. Only the side stream reads it, and it is reused in that stream's order.

**First on the SMs.** Both streams have work for the GPU when ``x`` is ready. If a GEMM takes all SMs first, the kernel begins
only when CTAs of the GEMM have ended. Therefore the current stream goes on only when the side stream has passed the fork, by an
event (``passed``) between the fork and the kernel. A captured graph has no streams, and there such an event would only be one
more edge.

**In turn.** Where messages share one slow link, the long calls of all slots use one side stream
(``SlotTransport.in_turn_from``). Two calls at the same time would each get half of the link, and the first call would end as
late as the second. In turn, the second call ends no later, and the work that waits for the first call goes on earlier: its own
message is ready when the link is free again. The current stream must not wait for the call before. So ``passed`` is still
recorded on the slot's own side stream.

**Programmatic launch** is not used here. A fork lies between two kernels of a side stream, so there is nothing to gain, and no
CTA holds an SM while it waits for other kernels. ``kernels/runtime/barrier.py`` argues that all kernels make progress.

**Clusters.** GEMMs on Hopper use clusters of two, four or eight SMs of one group (GPC). CTAs without clusters are dealt out to
all groups in turn. Each would break up a pair of SMs that a GEMM needs. In clusters of two CTAs take pairs. Larger clusters
would leave more groups whole. But many calls begin while a GEMM runs, and what such a GEMM leaves is pairs of SMs in different
groups: a larger cluster would have no place before the GEMM ends. Nothing else about the kernels is different. ``HostRows``
says where that wait is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch

from tw_compile import compat
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transport import Started

_PAIR = 2
"""CTAs of a cluster of a call beside other work, if its kernel does not ask for more."""
_CLUSTER_MIN_SMS = 100
_IN_TURN = -1
"""Used in place of a slot index for the one side stream of all calls that go in turn, whatever their slots."""


@cache
def side_stream(device: torch.device, slot: int) -> torch.cuda.Stream:
    """A stream of high priority. Its kernel gets the GPU's next free SM before a GEMM that has thousands of CTAs to go.

    All process groups share the stream. Their calls follow each other in the order of the program, as on the current stream.
    """
    return torch.cuda.Stream(device, priority=-1)


Events = tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]
"""Three events: the fork, that the side stream has passed the fork, and the join."""


def _new_events() -> Events:
    return torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()


@cache
def events_of(device: torch.device, group_name: str, slot: int) -> Events:
    """The events of calls that are not captured.

    All calls of a slot share them. This is safe: a call forks after the join of the call before it, and a stream that waits for
    an event waits for the latest record of it so far.
    """
    return _new_events()


def cluster_size(ctas: int, device: torch.device, most: int = _PAIR) -> int:
    """The number of CTAs in a cluster, for a call with ``ctas`` CTAs and one CTA on each SM.

    It divides ``ctas``, and is at most ``most``, a power of two up to 8, which every GPU allows. On small GPUs it is 1:
    clusters have not been measured there. ``kernels/runtime/barrier.py`` says why a place for a whole cluster always becomes
    free.
    """
    if torch.cuda.get_device_properties(device).multi_processor_count < _CLUSTER_MIN_SMS:
        return 1
    return math.gcd(ctas, most)


def start_beside(request: Request, launch: Callable[[Request], Started], in_turn: bool = False) -> Started:
    """Run ``launch(request)`` on a side stream. ``finish`` makes the stream that is current at that time wait for it.

    The request has its ``outputs``; the device is current. ``in_turn``: see :func:`fork_and_join`.
    """

    def launch_there(side: torch.cuda.Stream) -> Started:
        with torch.cuda.stream(side):
            return launch(request)

    slot, overlap_sms = request.slot, request.overlap_sms
    return fork_and_join(request.x.device, request.group_name, slot, overlap_sms, request, launch_there, in_turn)


def fork_and_join(
    device: torch.device,
    group_name: str,
    slot: int,
    overlap_sms: int,
    kept: object,
    launch: Callable[[torch.cuda.Stream], Started],
    in_turn: bool = False,
) -> Started:
    """Let ``launch`` enqueue its work on the side stream between a fork and a join; ``finish`` of the result is the join.

    ``launch`` gets the side stream as its argument. ``kept`` keeps inputs and outputs alive until the join. ``device``,
    ``slot`` and ``overlap_sms`` are those of the request, and the device is current. ``in_turn``: the call begins when all
    earlier calls with ``in_turn`` have ended, whatever their slots.
    """
    current, side = compat.current_stream(device), side_stream(device, _IN_TURN if in_turn else slot)
    captured = torch.cuda.is_current_stream_capturing()
    fork, passed, join = _new_events() if captured else events_of(device, group_name, slot)
    fork.record(current)
    if not captured:
        free = side_stream(device, slot)
        free.wait_event(fork)
        passed.record(free)
        current.wait_event(passed)
    if captured or in_turn:
        side.wait_event(fork)
    try:
        started = launch(side)
    except BaseException:
        # Part of the launch may already run, and its memory goes back to the current stream's pool now.
        join.record(side)
        current.wait_event(join)
        raise
    join.record(side)

    def finish(kept: object = kept) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        if captured and not capturing:
            return  # the capture ended without the join: it made no graph, and the kernel will never run
        if capturing and not captured:
            raise RuntimeError(
                f"all_reduce_rms_norm: a call on group {group_name!r}, slot {slot} was started before "
                "CUDA-graph capture and not waited for: a graph can't wait for what is not in it"
            )
        compat.current_stream(device).wait_event(join)

    return Started(started.hidden, started.residual, finish, overlap_sms, started.call)
