"""Measure the link between the first two GPUs, each way and direction by itself: for ``tw-compile doctor --measure``.

PCIe may be fast for stores and slow for loads, or its loads may never end. No attribute of a device tells this. So processes
that are ended after ``LinksSpec.timeout`` try it. They try the loads last, and keep what they have measured before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from tw_compile.benchmark.copy_engines import Signals
from tw_compile.harness.launch import Progress, spawn_ranks
from tw_compile.harness.measure import GraphTimer
from tw_compile.harness.ranks import Keep, Ranks, UnavailableError, symmetric_memory, work_as_rank
from tw_compile.harness.requests import RankError
from tw_compile.harness.variables import for_measurements
from tw_compile.kernels.collective.peer_access import copy_obstacle

GPUS = 2
SIGNAL = "signal"
_CALLS, _SIGNALS, _REPEATS = 4, 40, 5
_KINDS_OF_SIGNAL = 2
"""The kinds take turns: a word is free again when the peer's next signal, of the other kind, has arrived."""


@dataclass(frozen=True)
class LinksSpec:
    """Each call moves ``nbytes``. The measurement is given up after ``timeout`` seconds."""

    world_size: int = GPUS
    device: str = "cuda"
    nbytes: int = 64 * 2**20
    timeout: float = 90.0


@dataclass
class LinkRow:
    """One way to move bytes, as ``gpu`` does it while the other is idle. A signal goes both ways at once, and has no GPU.

    Attributes:
        gb_per_s: 10^9 bytes a second; None for a signal.
        us: Microseconds one way; for a signal only.
        reason: Why there is no figure.
    """

    way: str
    gpu: int | None
    gb_per_s: float | None = None
    us: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Memory:
    """Buffers of one size: this GPU's, a pinned one of the host, and the other GPU's as mapped on this GPU."""

    own: torch.Tensor
    host: torch.Tensor
    peers: torch.Tensor


Way = tuple[str, Callable[[Memory], object]]

THROUGH_HOST: tuple[Way, ...] = (
    ("to host", lambda memory: memory.host.copy_(memory.own, non_blocking=True)),
    ("from host", lambda memory: memory.own.copy_(memory.host, non_blocking=True)),
)
"""By the GPU's copy engines."""
OVER_LINK: tuple[Way, ...] = (
    ("push", lambda memory: torch.add(memory.own, 1, out=memory.peers)),
    ("pull", lambda memory: torch.add(memory.peers, 1, out=memory.own)),
)
"""By a kernel's stores, and by a kernel's loads."""


def steps() -> int:
    """How often :func:`run` calls ``progress``."""
    return 2 + GPUS * (len(THROUGH_HOST) + len(OVER_LINK)) + 1


def run(progress: Progress, spec: LinksSpec | None = None) -> dict[str, Any]:
    """Measure all ways. Returns ``rows``, and as ``incomplete`` why some rows are missing; None where none is missing.

    Raises:
        UsageError: The ranks found the request to be impossible.
    """
    spec = spec or LinksSpec()
    progress(f"starting {spec.world_size} ranks")
    with for_measurements():
        try:
            found, incomplete = spawn_ranks(spec, progress, rank_process), None
        except RankError as error:
            found, incomplete = error.so_far or {"rows": []}, str(error).splitlines()[0]
    return {"rows": found["rows"], "incomplete": incomplete}


def rank_process(spec: LinksSpec, rank: int, scratch: str, messages: Connection) -> None:
    """Entry point of a spawned rank."""
    work_as_rank(spec, rank, scratch, messages, partial(run_rank, spec))


def run_rank(spec: LinksSpec, ranks: Ranks, progress: Progress, keep: Keep) -> dict[str, Any]:
    """Do everything that one rank does. The rows are the same on both ranks, and are kept one by one.

    Calls ``progress`` two times less than ``steps`` says.
    """
    rows: list[dict[str, Any]] = []

    def tell(row: LinkRow) -> None:
        rows.append(asdict(row))
        keep({"rows": rows})

    memory = _memory(spec, ranks.ctx.device)
    for way in THROUGH_HOST:
        for gpu in range(GPUS):
            progress(f"{way[0]}, GPU {gpu}")
            tell(_way(ranks, way, gpu, memory))
    obstacle = ranks.agree(copy_obstacle(range(GPUS)))
    progress(f"{SIGNAL} between the GPUs")
    tell(LinkRow(SIGNAL, None, reason=obstacle) if obstacle else _signal(ranks))
    if obstacle is None:
        try:
            memory = ranks.together(lambda: _with_peer(ranks, memory))
        except UnavailableError as error:
            obstacle = str(error)
    for way in OVER_LINK:
        for gpu in range(GPUS):
            progress(f"{way[0]}, GPU {gpu}")
            tell(LinkRow(way[0], gpu, reason=obstacle) if obstacle else _way(ranks, way, gpu, memory))
    return {"rows": rows}


def _memory(spec: LinksSpec, device: torch.device) -> Memory:
    own = torch.zeros(spec.nbytes // torch.float32.itemsize, device=device)
    return Memory(own, torch.zeros(own.shape, pin_memory=own.is_cuda), own)


def _with_peer(ranks: Ranks, memory: Memory) -> Memory:
    own, peers = _shared(ranks, memory.own.numel(), memory.own.dtype)
    return Memory(own.zero_(), memory.host, peers)


def _shared(ranks: Ranks, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Symmetric memory for ``count`` elements: first this GPU's, then the other GPU's."""
    _, handle = symmetric_memory(ranks, count * dtype.itemsize, ranks.ctx.device)
    rank = ranks.ctx.rank
    return [handle.get_buffer(owner, (count,), dtype) for owner in (rank, 1 - rank)]


def _way(ranks: Ranks, way: Way, gpu: int, memory: Memory) -> LinkRow:
    """Time one way to move bytes, done by ``gpu`` while the other GPU is idle."""
    label, move = way
    row = LinkRow(label, gpu)
    idle = torch.zeros(1, device=ranks.ctx.device)

    def call() -> object:
        return move(memory) if ranks.ctx.rank == gpu else idle.add_(1)

    try:
        us = ranks.gather(ranks.together(lambda: _median_us([call], _CALLS)))[gpu]
        row.gb_per_s = memory.own.nbytes / us / 1e3
    except UnavailableError as error:
        row.reason = str(error)
    return row


def _signal(ranks: Ranks) -> LinkRow:
    """Time a signal: the streams of both GPUs write a word to each other and wait for it, without a kernel."""
    row = LinkRow(SIGNAL, None)
    rank = ranks.ctx.rank
    try:
        own, peers = ranks.together(lambda: _shared(ranks, _KINDS_OF_SIGNAL * GPUS, torch.int32))
        own.zero_()
        torch.cuda.synchronize()
        ranks.barrier()
        addresses = [words.data_ptr() for words in ((own, peers) if rank == 0 else (peers, own))]
        signals = Signals(addresses, rank, [1 - rank])
        calls = [partial(signals.exchange, kind) for kind in range(_KINDS_OF_SIGNAL)]
        row.us = max(ranks.gather(ranks.together(lambda: _median_us(calls, _SIGNALS))))
    except UnavailableError as error:
        row.reason = str(error)
    return row


def _median_us(calls: Sequence[Callable[[], object]], count: int) -> float:
    """Microseconds a call, in a CUDA graph of ``count`` calls. Each call runs once before, and the first replay warms up."""
    for call in calls:
        call()
    timer = GraphTimer(calls, count)
    return statistics.median([timer.run() for _ in range(1 + _REPEATS)][1:])
