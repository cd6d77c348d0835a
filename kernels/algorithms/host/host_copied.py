"""Two-shot through host memory by the GPUs' copy engines: no SM moves rows between ranks, and none waits for a rank.

SMs that load from host memory get less of the bus while anything is stored there. Copy engines don't
(``benchmarks/host-memory-notes.md``, "Two calls at a time"). So rows travel in pieces that copy engines move. A rank has two
streams for a slot, one for each direction. *Out* copies the partial sums of a peer's rows to host memory. *In* copies what the
peers have put there for this rank. The stream of the call adds up and normalises a piece when all its partial sums have come.
Then *out* copies the results to host memory, and *in* copies those of the peers to ``hidden``.

**Rings.** A rank writes to its own part of host memory: a ring of places for the results, which all peers read, and one for the
partial sums of each peer. Each place has a word for each reader, FREE or FULL. Who writes waits for FREE and writes FULL behind
the rows. Who reads waits for FULL and writes FREE behind its copy. Streams do this by themselves (``stream_words.py``). Places
are as large in all calls, so calls of different sizes may follow each other on a slot. Nothing counts calls. So a CUDA graph
can be replayed.

**Progress.** A stream that waits for a peer holds no SM. But streams, or branches of a CUDA graph, may be put behind each other
on the way to the GPU. Then a wait holds up what is behind it, also on the peer. Suppose that ranks waited for each other in a
circle for ever. Each one's wait would be before what the next one waits for. But each rank waits for a peer's step only behind
the same step of its own: it takes piece ``i`` behind having put its own piece ``i``, and puts piece ``i + ring`` behind having
taken piece ``i``. Events between the streams say so. If all ranks have the same order, the step that a rank waits for would be
earlier in the order than its wait, for each rank of the circle, which can't be. Ranks enqueue the same waits and writes, also
for pieces without rows, but no copies of these. That they are laid out in equal orders is assumed, as for all calls beside
each other (``kernels/runtime/barrier.py``). No GPU has shown it yet.

**Debug mode.** A stream's wait never gives up. With a spin limit a kernel waits instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tw_compile import compat
from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.cuda_variant import LOADS_AND_STORES, aligned, row_obstacle
from tw_compile.kernels.collective.slot import PIECES, GroupState, Slot
from tw_compile.kernels.collective.spec import Request, row_range, rows_per_rank, scales_of
from tw_compile.kernels.collective.transport import Started
from tw_compile.kernels.epilogues import EPILOGUES
from tw_compile.kernels.registry import load
from tw_compile.kernels.runtime import bindings, stream_words
from tw_compile.kernels.runtime.await_word import await_word
from tw_compile.kernels.runtime.barrier import MAX_WORLD_SIZE

PIECE_BYTES = 2**20
"""The most bytes of a piece. Longer copies keep the bus no busier, and the first rows arrive later."""
_LEAST_PIECE_BYTES = 2**17
"""Shorter copies take longer to begin than to move their bytes."""
_PIECES_OF_A_LEG = 4
"""A short message has this many pieces, so that a piece is on its way while the one before is read."""
RING = 4
_FREE, _FULL = 0, 1
_SUMS, _RESULTS = 0, 1
"""The two legs of a call."""
_WORD_BYTES = 128
"""A word has a line of its own."""
_WHERE = "copies through host memory"


@dataclass(frozen=True)
class Cuts:
    """How every owner's rows are cut into ``count`` pieces of at most ``rows`` rows. The same on all ranks."""

    tokens: int
    world_size: int
    rows: int

    @property
    def count(self) -> int:
        return -(-rows_per_rank(self.tokens, self.world_size) // self.rows)

    def piece(self, owner: int, index: int) -> range:
        """The token rows of a piece; the last ranks may own fewer rows, or none."""
        begin, end = row_range(self.tokens, self.world_size, owner)
        return range(min(begin + index * self.rows, end), min(begin + (index + 1) * self.rows, end))


def cuts_for(tokens: int, world_size: int, row_bytes: int, piece_bytes: int = PIECE_BYTES) -> Cuts:
    """The cuts for rows that are at most ``row_bytes`` long when they travel."""
    part = rows_per_rank(tokens, world_size) * row_bytes
    wanted = min(max(part // _PIECES_OF_A_LEG, _LEAST_PIECE_BYTES), piece_bytes)
    return Cuts(tokens, world_size, max(wanted // row_bytes, 1))


@dataclass(frozen=True)
class Part:
    """Rows that travel together with those of other parts: ``[rows, columns]``. Token ``first`` has the first row."""

    rows: torch.Tensor
    first: int = 0

    def of(self, piece: range) -> tuple[int, int]:
        """Where a piece of it begins, and how many bytes that is."""
        row_bytes = self.rows.shape[1] * self.rows.element_size()
        return self.rows.data_ptr() + (piece.start - self.first) * row_bytes, len(piece) * row_bytes


@dataclass(frozen=True)
class Places:
    """The places in the host memory of all ranks, and their words. ``addresses`` are those of the ranks' parts."""

    addresses: Sequence[int]
    ring: int
    piece_bytes: int

    @staticmethod
    def nbytes(world_size: int, ring: int, piece_bytes: int) -> int:
        """Bytes of a rank's part: the words, a ring for the results, and one for the sums of each peer."""
        return 2 * MAX_WORLD_SIZE * ring * _WORD_BYTES + world_size * ring * piece_bytes

    def word(self, owner: int, leg: int, reader: int, index: int) -> int:
        """The word that says to ``reader`` whether the place of piece ``index`` is full."""
        number = (leg * MAX_WORLD_SIZE + reader) * self.ring + index % self.ring
        return self.addresses[owner] + _WORD_BYTES * number

    def place(self, owner: int, leg: int, reader: int, index: int) -> int:
        """Where ``owner`` puts a piece. All readers read the same results, but each has sums of its own."""
        ring = 0 if leg == _RESULTS else 1 + reader - (reader > owner)
        begin = 2 * MAX_WORLD_SIZE * self.ring * _WORD_BYTES
        return self.addresses[owner] + begin + (ring * self.ring + index % self.ring) * self.piece_bytes


@dataclass(frozen=True)
class Lane:
    """A stream that copies rows, and waits for words of other ranks. ``report`` is for waits that give up in debug mode."""

    stream: torch.cuda.Stream
    report: torch.Tensor
    spin_limit: int

    def wait(self, words: Sequence[int], value: int, owners: Sequence[int]) -> None:
        """Go on when all words have the value. ``owners`` are the ranks that write it."""
        if not self.spin_limit:
            self._enqueue([stream_words.wait(word, value) for word in words])
            return
        with torch.cuda.stream(self.stream):
            for word, owner in zip(words, owners, strict=True):
                # A report must not be 0, and FREE is.
                number = value + 1
                await_word[(1,)](word, value, self.report[owner:], number, SPIN_LIMIT=self.spin_limit, num_warps=1)

    def write(self, words: Sequence[int], value: int) -> None:
        self._enqueue([stream_words.write(word, value) for word in words])

    def copy(self, target: int, source: int, nbytes: int) -> None:
        copy = bindings.load("driver").cuMemcpyAsync
        bindings.call(copy, target, source, nbytes, self.stream.cuda_stream, where=_WHERE)

    def _enqueue(self, operations: Sequence[Any]) -> None:
        stream_words.enqueue(operations, self.stream.cuda_stream, _WHERE)


@cache
def lane_streams(device: torch.device, slot: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams *out* and *in* of a slot. Streams of this priority are never the one that a graph is captured on."""
    return torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)


@cache
def streams_await_words(device: torch.device) -> bool:
    """Whether the driver lets streams write words and wait for them. All drivers for Linux of CUDA 12 and later do."""
    driver = bindings.load("driver")
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    handle = bindings.call(driver.cuDeviceGet, device.index, where=_WHERE)
    return bool(bindings.call(driver.cuDeviceGetAttribute, attribute, handle, where=_WHERE))


class HostCopied(Algorithm):
    """Copies in pieces of at most ``piece_bytes``, by rings of ``ring`` places. The norm takes any SM, and takes it shortly."""

    name = "host_copied"
    in_turn = False

    def __init__(self, piece_bytes: int = PIECE_BYTES, ring: int = RING) -> None:
        self._piece_bytes, self._ring = piece_bytes, ring

    def obstacle(self, request: Request, state: GroupState) -> str | None:
        """See :class:`Algorithm`."""
        if (obstacle := row_obstacle(request, LOADS_AND_STORES, scales=True)) is not None:
            return obstacle
        if EPILOGUES[request.norm.epilogue].local_kernel is None:
            return f"epilogue {request.norm.epilogue} has no kernel for rows of one rank"
        if _result_row_bytes(request) > self._piece_bytes:
            return f"a row of results is longer than a piece of {self._piece_bytes} bytes"
        return None if streams_await_words(state.device) else "the driver lets no stream wait for words in memory"

    def sms(self, tokens: int, world_size: int) -> int:
        """See :class:`Algorithm`. The norm has a CTA for each row of a piece."""
        return rows_per_rank(tokens, world_size)

    def needs(self, request: Request, world_size: int) -> dict[str, int]:
        """See :class:`Algorithm`. Longer messages need no more."""
        return {PIECES: Places.nbytes(world_size, self._ring, self._piece_bytes)}

    def prepare(self, request: Request, state: GroupState, spin_limit: int) -> None:
        """See :class:`Algorithm`. Triton loads its kernels in the first call."""

    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        """See :class:`Algorithm`."""
        request = aligned(request)
        results = request.allocate(state.world_size)
        call = _Call(request, state, slot, spin_limit, results, self._ring, self._piece_bytes)
        call.enqueue()
        return Started(*results)


class _Call:
    """One call on its way to the GPU."""

    def __init__(
        self,
        request: Request,
        state: GroupState,
        slot: Slot,
        spin_limit: int,
        results: tuple[torch.Tensor, torch.Tensor],
        ring: int,
        piece_bytes: int,
    ) -> None:
        self._request, self._results = request, results
        self._rank, self._world_size = state.rank, state.world_size
        self._current = compat.current_stream(state.device)
        self._out, self._in = (
            Lane(stream, slot.status[0], spin_limit) for stream in lane_streams(state.device, request.slot)
        )
        self._places = Places(slot.buffers[PIECES].addresses, ring, piece_bytes)
        tokens = request.x.shape[0]
        self._cuts = cuts_for(
            tokens, state.world_size, max(_row_bytes(request.x), _result_row_bytes(request)), piece_bytes
        )
        self._own = row_range(tokens, state.world_size, state.rank)
        # Every rank begins with another peer, so that no part of host memory has all the readers.
        self._peers = [(state.rank + step) % state.world_size for step in range(1, state.world_size)]
        own_rows = self._own[1] - self._own[0]
        self._arrived = request.x.new_empty((state.world_size - 1, own_rows, request.x.shape[1]))

    def enqueue(self) -> None:
        """Enqueue everything, between a fork and a join of the current stream."""
        for lane in (self._out, self._in):
            lane.stream.wait_stream(self._current)
        made = []
        for index, arrived in enumerate(self._leg(_SUMS, [])):
            self._current.wait_event(arrived)
            self._normalise(self._cuts.piece(self._rank, index))
            made.append(self._current.record_event())
        for _ in self._leg(_RESULTS, made):
            pass
        for lane in (self._out, self._in):
            self._current.wait_stream(lane.stream)

    def _leg(self, leg: int, made: Sequence[torch.cuda.Event]) -> Iterator[torch.cuda.Event]:
        """Put and take the pieces of a leg. ``made``: when they can be put; empty: now. Yields when each has been taken."""
        taken: list[torch.cuda.Event] = []
        for index in range(self._cuts.count):
            if made:
                self._out.stream.wait_event(made[index])
            if index >= self._places.ring:
                self._out.stream.wait_event(taken[index - self._places.ring])
            self._put(leg, index)
            self._in.stream.wait_event(self._out.stream.record_event())
            for peer in self._peers:
                self._take(leg, index, peer)
            taken.append(self._in.stream.record_event())
            yield taken[-1]

    def _put(self, leg: int, index: int) -> None:
        if leg == _SUMS:
            for peer in self._peers:
                self._put_for([peer], leg, index, self._cuts.piece(peer, index), [Part(self._request.x)])
        else:
            self._put_for(self._peers, leg, index, self._cuts.piece(self._rank, index), self._travelling())

    def _put_for(self, readers: Sequence[int], leg: int, index: int, piece: range, parts: Sequence[Part]) -> None:
        words = [self._places.word(self._rank, leg, reader, index) for reader in readers]
        self._out.wait(words, _FREE, readers)
        target = self._places.place(self._rank, leg, readers[0], index)
        for part in parts if piece else ():
            source, nbytes = part.of(piece)
            self._out.copy(target, source, nbytes)
            target += nbytes
        self._out.write(words, _FULL)

    def _take(self, leg: int, index: int, peer: int) -> None:
        piece = self._cuts.piece(self._rank if leg == _SUMS else peer, index)
        words = [self._places.word(peer, leg, self._rank, index)]
        self._in.wait(words, _FULL, [peer])
        source = self._places.place(peer, leg, self._rank, index)
        place = peer - (peer > self._rank)
        parts = [Part(self._arrived[place], self._own[0])] if leg == _SUMS else self._travelling()
        for part in parts if piece else ():
            target, nbytes = part.of(piece)
            self._in.copy(target, source, nbytes)
            source += nbytes
        self._in.write(words, _FREE)

    def _travelling(self) -> list[Part]:
        """What all ranks get of every row: the results, the scales that were made of them, and the residual if all want it."""
        hidden, residual = self._results
        columns = self._request.norm.scale_columns
        parts = [Part(hidden)]
        if columns:
            parts.append(Part(scales_of(hidden, columns)))
        if self._request.residual_out == "replicated":
            parts.append(Part(residual))
        return parts

    def _normalise(self, piece: range) -> None:
        """Add up and normalise the own rows of a piece."""
        if not piece:
            return
        request, first = self._request, self._own[0]
        hidden, residual_out = self._results
        whole, local = slice(piece.start, piece.stop), slice(piece.start - first, piece.stop - first)
        residual = request.residual
        if residual is not None:
            residual = residual[local if request.residual_sharded else whole]
        kept = None
        if request.residual_out != "none":
            kept = residual_out[local if request.residual_out == "sharded" else whole]
        columns = request.norm.scale_columns
        kernel = EPILOGUES[request.norm.epilogue].local_kernel
        assert kernel is not None, "refused by obstacle"
        load(kernel)(
            request.x[whole],
            residual,
            request.bias,
            request.weight,
            request.norm,
            hidden[whole],
            kept,
            request.hidden_scale,
            request.norm_bias,
            scales_of(hidden, columns)[whole] if columns else None,
            self._arrived[:, local],
            self._rank,
        )


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.element_size()


def _result_row_bytes(request: Request) -> int:
    """Bytes of a row of what all ranks get."""
    hidden_size, norm = request.x.shape[1], request.norm
    scales = 4 * (hidden_size // norm.scale_columns) if norm.scale_columns else 0
    residual = hidden_size * norm.residual_dtype.itemsize if request.residual_out == "replicated" else 0
    return hidden_size * norm.hidden_dtype.itemsize + scales + residual
