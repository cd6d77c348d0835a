"""Barriers between equal CTAs of several GPUs, inside a running Triton kernel.

A *slot* owns, on every rank, a pad ``uint32 [MAX_CTAS, MAX_WORLD_SIZE]`` in symmetric memory and, in private memory,
epochs ``uint32 [MAX_CTAS]``. Both start as zeros (stored as int32: only differences and bit patterns matter). CTA
``b`` of rank ``r`` announces barrier number ``e`` by writing ``e`` to ``pad[b, r]`` of every peer, and passes it when
``pad[b, p]`` of its own pad has reached ``e`` for every peer ``p``. CTAs with different indices never meet, so the
ranks' kernels need no co-residency beyond their own CTAs'.

Why this is correct
-------------------
**Before the release.** All threads of a CTA write its row data, a few threads write the flags.
``tl.debug_barrier()`` (``bar.sync``) orders every thread's writes before those few threads' ``atom.release.sys``.
Release is cumulative. So the writes of the whole CTA, to local or to peer memory, are visible at system scope to whoever
acquires the flag. The writes of the stream's earlier kernels are visible, too, because they come before everything that the CTA
does. So a GEMM may write the staging buffer itself.

**After the acquire.** The flags are read with ``atom.acquire.sys`` by a few threads. The ``bar.sync`` that follows
orders the reads of all other threads after it. Without it another warp could read a row before the flag was seen.

**No stale L1 lines.** L1 is not coherent. A row address may have been read in an earlier launch of the slot, or by
another CTA of the same SM, before a peer rewrote it. An acquire at system scope invalidates the SM's L1 (SASS:
``CCTL.IVALL`` after the atomic), and everything read afterwards is fetched again. L2 of the memory's home GPU is the
point of coherence, and peer addresses are not kept in the reader's L2 beyond it. Flags themselves are only accessed
by atomics, which bypass L1.

**Epochs only grow**, so a flag never has to be reset. A fast peer that has already announced ``e + 1`` satisfies ``e``.
Epochs are compared by the sign of their 32-bit difference. This is correct across wrap-around while ranks are less than 2**31
barriers apart, and they are never more than one apart.

**Epochs agree between ranks.** The counter of CTA ``b`` advances by the number of barriers of a launch whenever a
launch has more than ``b`` CTAs. Grids depend on rank-invariant values only, so after equal sequences of launches all
ranks hold equal counters. Grids of different sizes may follow each other on one slot, because each CTA index counts
for itself.

**One staging buffer is enough.** Let launch L+1 follow L on the same slot and stream of rank ``r``, with any two
grids. L+1 starts when all CTAs of L on ``r`` have ended (kernel boundary). So they have passed their last barrier,
and every peer's CTA of the same index has finished the reads it does before that barrier. All CTAs of L together make all the
reads of ``r``'s staging buffer. So nobody reads it any more when L+1, or a GEMM before L+1 on that stream, overwrites
it. Buffers that *peers* write (published rows) are written in L+1 only after the first barrier of L+1. Rank
``r`` announces that barrier only when its own L has ended, including L's reads of that buffer. Both arguments need launches of
one slot to be ordered on one stream (or by events). Neither needs equal grids.

**CUDA graphs.** No part of this state lives on the host: a replay reads the epoch that the previous launch left in memory,
eager or replayed. Required: all ranks replay and launch in the same order.

Progress
--------
A CTA waits only for CTAs of its own index, of the same call, on other ranks. Kernels without peers always end. GPUs hand out
CTAs in order of their index. So a call ends if on every rank at least one of its CTAs at a time can be resident: on every rank
the lowest CTA that has not ended is resident. Of calls that run at the same time, one may be as large as it likes, if all CTAs
of the others are resident beside it and leave it room for one CTA. That call ends, and then the others go on. Hence all calls
beside other work that are in flight together may hold at most half of the SMs, and each CTA counts for one SM
(``ops.check_room``). The other half is for the one call of the current stream, and for what that stream computes. If several
current streams have calls at once, these must be that small, too.

Calls beside other work may come in clusters of two CTAs, which need two free SMs of one group (GPC) at once. Of S SMs in
G groups, calls hold at most S/2 - 2 while such a cluster waits to be placed. Suppose that no group had two SMs that no call
holds. Then calls would hold at least S - G, which is more than S/2 - 2 for S > 2 G. So some group has two SMs that no call
holds, and other kernels that run there end.

All ranks start their calls in the same order. In a CUDA graph, calls beside each other are branches, which may share a
stream of the graph's own. Then one call follows the other, in the same order on all ranks, because equal graphs are laid out
equally.

Bounded spins
-------------
With ``SPIN_LIMIT > 0`` a CTA polls at most that many times. Then it writes the barrier's
number within the launch (1, 2, ...) to ``status[b, p]`` for each silent peer ``p`` and goes on. So a lost peer causes
an error on the host (``raise_if_peer_missing``) and not a hang. The results of such a launch, and the slot, are
not usable afterwards. With 0 a CTA waits for ever. Beside other work a peer's CTA may wait for an SM as long as a GEMM's CTA
runs. The limit must be longer than that, and longer than the ranks' skew.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tw_compile.environment import SPIN_LIMIT as SPIN_LIMIT_VARIABLE

MAX_CTAS = 32
"""The most CTAs of one launch. Few, because the CTAs of all concurrent launches must be resident at once to make progress."""

REPORT_ROWS = 256
"""How many CTAs can report a silent peer: CTAs that meet in barriers, and CTAs of kernels that wait for data instead."""

MAX_WORLD_SIZE = 8
"""Row length of a pad; also the number of lanes that signal and poll."""


@triton.jit
def load_pointer(table, index, like):
    """``table[index]`` (``int64 [world]``, addresses) as a pointer of ``like``'s type; 16-byte aligned."""
    return tl.multiple_of(tl.load(table + index).to(like.dtype), 16)


@triton.jit
def _signal_peers(pads, epoch, cta, rank, WORLD_SIZE: tl.constexpr, PAD_WIDTH: tl.constexpr):
    """Announce ``epoch`` to all peers. Release, system scope: a peer that acquires it sees all earlier writes of this CTA."""
    tl.debug_barrier()
    peers = tl.arange(0, PAD_WIDTH)
    is_peer = (peers < WORLD_SIZE) & (peers != rank)
    bases = tl.load(pads + peers, mask=is_peer, other=0).to(tl.pointer_type(tl.int32))
    value = tl.zeros([PAD_WIDTH], tl.int32) + epoch
    tl.atomic_xchg(bases + cta * PAD_WIDTH + rank, value, mask=is_peer, sem="release", scope="sys")


@triton.jit
def _silent_peers(flags, epoch, is_peer, PAD_WIDTH: tl.constexpr):
    """Which peers have not announced ``epoch`` yet. Acquire, system scope, on those that have."""
    seen = tl.atomic_add(flags, tl.zeros([PAD_WIDTH], tl.int32), mask=is_peer, sem="acquire", scope="sys")
    return is_peer & (seen - epoch < 0)


@triton.jit
def _await_peers(
    pads,
    status,
    epoch,
    cta,
    rank,
    WORLD_SIZE: tl.constexpr,
    PHASE: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
    PAD_WIDTH: tl.constexpr,
):
    """Wait until every peer has announced ``epoch``; what they wrote before is then visible to the whole CTA."""
    peers = tl.arange(0, PAD_WIDTH)
    is_peer = (peers < WORLD_SIZE) & (peers != rank)
    flags = tl.load(pads + rank).to(tl.pointer_type(tl.int32)) + cta * PAD_WIDTH + peers
    # The loops carry a scalar: Triton 3.6 fails on a tensor carried by `while` (remove-layout-conversions pass).
    waiting = tl.sum(_silent_peers(flags, epoch, is_peer, PAD_WIDTH).to(tl.int32))
    if SPIN_LIMIT == 0:
        while waiting > 0:
            waiting = tl.sum(_silent_peers(flags, epoch, is_peer, PAD_WIDTH).to(tl.int32))
    else:
        polls = 1
        while (waiting > 0) & (polls < SPIN_LIMIT):
            waiting = tl.sum(_silent_peers(flags, epoch, is_peer, PAD_WIDTH).to(tl.int32))
            polls += 1
        if waiting > 0:
            silent = _silent_peers(flags, epoch, is_peer, PAD_WIDTH)
            report = status + cta * PAD_WIDTH + peers
            first = silent & (tl.load(report, mask=silent, other=0) == 0)
            tl.store(report, tl.zeros([PAD_WIDTH], tl.int32) + PHASE, mask=first)
    tl.debug_barrier()


@triton.jit
def barrier(
    pads,
    status,
    epoch,
    cta,
    rank,
    WORLD_SIZE: tl.constexpr,
    PHASE: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
    PAD_WIDTH: tl.constexpr,
):
    """Barrier ``epoch`` between CTA ``cta`` of all ranks: releases all writes before, acquires for all reads after.

    ``pads``: ``int64 [world]``, the addresses of the ranks' pads; ``status``: this rank's report. ``PAD_WIDTH`` is
    :data:`MAX_WORLD_SIZE`, ``PHASE`` the number of the barrier within the launch, for the report.
    """
    _signal_peers(pads, epoch, cta, rank, WORLD_SIZE, PAD_WIDTH)
    _await_peers(pads, status, epoch, cta, rank, WORLD_SIZE, PHASE, SPIN_LIMIT, PAD_WIDTH)


def raise_if_peer_missing(status: torch.Tensor, rank: int, where: str) -> None:
    """RuntimeError when a barrier gave up; reads ``status [REPORT_ROWS, MAX_WORLD_SIZE]``, which waits for the device."""
    report = status.cpu()
    missing = report.nonzero().tolist()
    if not missing:
        return
    peers = sorted({peer for _, peer in missing})
    cta, peer = missing[0]
    raise RuntimeError(
        f"{where}: rank {rank}, CTA {cta} gave up waiting for rank {peer} at barrier {int(report[cta, peer])} of a "
        f"launch after {SPIN_LIMIT_VARIABLE} polls ({len(missing)} (CTA, peer) pairs in all; silent ranks: "
        f"{', '.join(map(str, peers))}). That rank did not launch the same call, or stopped. Results are not valid"
    )
