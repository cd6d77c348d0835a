"""Calls beside other work: a kernel on a stream of its own, so that the current stream goes on until the call is waited for.

    current:  ... x is made | fork | other work ...                  | join | readers of the results ...
    side:                          \\-> wait | kernel (few SMs) | done --/

Fork and join are events, which CUDA-graph capture turns into the edges of a graph. Both are in the same capture, or in none.

**Order.** The side stream does nothing before a fork and the current stream nothing after a join that the other one has not
reached. So with respect to everything before ``start`` and everything after ``finish`` a call beside other work is where a call
on the current stream would be, and the arguments of ``kernels/runtime/barrier.py`` hold for slots whose calls are of both
kinds. A slot's next call, or the GEMM that writes its message, comes after the ``finish`` of the one before it:
``ops._complete_earlier`` sees to that where ``wait_`` has not run.

**Memory.** Outputs are allocated on the current stream, before the fork. What had their memory before was enqueued on that
stream before, so the kernel comes after it. Inputs and outputs belong to the current stream's pool and may be given back to it
only after the join; until then ``finish`` holds them, and contiguous copies of inputs, which nobody else knows. What is given
back is reused by work that the current stream does after the join. So no ``record_stream``, which delays reuse and which CUDA
graphs do not replay. What a launch allocates for itself while the side stream is current comes from the side stream's pool,
is read by that stream alone, and is reused in its order.

**First on the SMs.** Both streams have work for the GPU when ``x`` is made. A GEMM with CTAs on most SMs leaves some free,
but hardly in one group, where the kernel's clusters would find a place: it would begin when the GEMM has ended. The current
stream therefore goes on when the side stream has, by an event (``passed``) between the fork and the kernel. A captured graph
has no streams, and there such an event would only be one more edge.

**In turn.** Where messages share one slow link, long calls of all slots are on one side stream
(``SlotTransport.in_turn_from``). Two calls at a time would each have half of the link, and the first would end as late as the
second. In turn, the second ends no later, and what waits for the first goes on earlier: its own message is ready when the link
is free again. The current stream must not wait for the call before, so what it goes on behind is still the slot's own stream.

**Programmatic launch** is not used here: a fork lies between two kernels of a side stream, so there is nothing to gain, and no
CTA that waits for other kernels holds an SM. That all kernels make progress is argued in ``kernels/runtime/barrier.py``.

**Clusters.** GEMMs on Hopper are clusters of two, four or eight SMs of one group (GPC). CTAs without clusters are dealt out to
all groups in turn and would break one of those in each of them; in clusters they are together, and most groups stay whole.
Nothing else about the kernels is different.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from tw_compile import compat
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transport import Started

_CLUSTER_MIN_SMS = 100
_IN_TURN = -1
"""In the place of a slot: the side stream of calls that follow each other, whatever their slots."""


@cache
def side_stream(device: torch.device, slot: int) -> torch.cuda.Stream:
    """A stream of high priority: the kernel gets the GPU's next free SM before a GEMM does that has thousands of CTAs to go.

    All groups share it. Their calls follow each other in the order of the program, as on the current stream.
    """
    return torch.cuda.Stream(device, priority=-1)


Events = tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]
"""Three events: the fork, that the side stream has passed the fork, and the join."""


def _new_events() -> Events:
    return torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()


@cache
def events_of(device: torch.device, group_name: str, slot: int) -> Events:
    """The events of calls that are not captured.

    All calls of a slot share them. A call forks after the join of the call before it, and a stream that waits for an event
    waits for the last record before that.
    """
    return _new_events()


def cluster_size(ctas: int, device: torch.device) -> int:
    """The number of CTAs in a cluster, for a call with ``ctas`` CTAs and one CTA on each SM.

    It divides ``ctas`` and is at most 8, which every GPU allows. On small GPUs it is 1, because a place for a whole cluster
    must always become free, see ``kernels/runtime/barrier.py``. A call of four CTAs has pairs: in a captured graph a GEMM may
    come first, and if it leaves four SMs they are two pairs that hardly lie in one group.
    """
    if torch.cuda.get_device_properties(device).multi_processor_count < _CLUSTER_MIN_SMS:
        return 1
    return next(size for size in ((8, 4, 2, 1) if ctas > 4 else (2, 1)) if ctas % size == 0)


def start_beside(request: Request, launch: Callable[[Request], Started], in_turn: bool = False) -> Started:
    """``launch(request)`` on the side stream of the request's slot; ``finish`` makes the then current stream wait for it.

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

    ``launch`` is given the side stream. ``kept`` holds inputs and outputs alive until the join. ``device``, ``slot`` and
    ``overlap_sms`` are those of the request, and the device is current. ``in_turn``: the call begins when those before it with
    ``in_turn`` have ended, whatever their slots.
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
        # Some of it may run, and memory is given back to the current stream now.
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
