"""A spike: all_reduce + residual + RMSNorm of two ranks through host memory, whose rows are moved by the copy engines.

    python benchmarks/spikes/copied/copied.py --json OUT.json [--tokens 512,1024,2048,4096] [--chunks 2,4,8] [--timeout 150]

SMs that load from host memory lose while anything is stored there, and copy engines don't: ``benchmarks/host-memory-notes.md``,
"Two calls at a time". So this is two-shot in chunks of rows, by copies. Each rank has a stream for each direction. *Out*
copies the peer's rows of x to a ring in host memory, and later the results. *In* copies what the peer has put there. The
current stream adds up and normalises a chunk when it has come. A flag for each chunk is 0 (free) or 1 (full): who writes
waits for 0 and writes 1, who reads waits for 1 and writes 0. So a CUDA graph can be replayed, and nothing counts calls.

Flags are awaited and written by operations of streams (``memop``), or by kernels of one warp (``kernel``). Beside them the
kernels of the product run, one-shot and two-shot on 8 SMs. *alone*: ten calls one after the other. *of two*: five calls on each
of two streams, each with a slot of its own; the time of all by ten. Both are CUDA graphs, and times are microseconds a call on
the slowest rank, medians of seven replays. Results are held against float64 before anything is timed.

It says go if *of two* is at most 0.9 of the fastest kernel's at 8 and 16 MiB. The exit code is 0 if all was right and measured,
1 if something was wrong, 3 if time was up before. The file is written after each line. No GPU has run this yet.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Multicast and peer access stay off in these processes, also where the caller's environment doesn't say so.
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TW_COMPILE_PEER_ACCESS"] = "0"

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from tw_compile import compat
from tw_compile.child import Child, end
from tw_compile.harness.measure import HEAD_START_CYCLES, capture, gpu_us
from tw_compile.harness.problems import EPS, Context, Form, Problem, Results, expect_right, make_problem
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.collective.host_memory import HostMemory
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.runtime import bindings

RANKS, HIDDEN = 2, 4096
ROW_BYTES = HIDDEN * 2
FREE, FULL = 0, 1
SUMS, RESULTS = 0, 1
"""The legs of a call."""
RING = 8
"""The most chunks of a leg."""
_FLAG_BYTES, _FLAGS_BYTES = 128, 64 * 1024
_EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ."""
_REPLAYS, _WARM_UP = 9, 2
FORM = Form(out="sharded")
Lane = Callable[[], object]


@triton.jit
def add_and_normalise(x, peer, residual, kept, hidden, weight, eps, HIDDEN: tl.constexpr, RANK: tl.constexpr):
    """One row a program: the sum in rank order, the residual, RMSNorm as Hugging Face's Llama rounds it."""
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    columns = tl.arange(0, HIDDEN)
    own, other = tl.load(x + row + columns).to(tl.float32), tl.load(peer + row + columns).to(tl.float32)
    total = own + other if RANK == 0 else other + own
    h = total + tl.load(residual + row + columns).to(tl.float32)
    tl.store(kept + row + columns, h.to(kept.dtype.element_ty))
    y = (h * tl.rsqrt(tl.sum(h * h) / HIDDEN + eps)).to(hidden.dtype.element_ty).to(tl.float32)
    tl.store(hidden + row + columns, (y * tl.load(weight + columns).to(tl.float32)).to(hidden.dtype.element_ty))


@triton.jit
def await_flag(flag, value):
    address = flag.to(tl.int64)
    seen = value + 1
    while seen != value:
        seen = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def write_flag(flag, value):
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; st.relaxed.sys.global.u32 [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [flag.to(tl.int64), value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


class Pointer:
    """What a Triton kernel takes for a pointer to int32 at a device address."""

    dtype = torch.int32

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class Flags:
    """Waits for flags, and writes them, on the current stream: by ``memop`` or by ``kernel``."""

    def __init__(self, by: str) -> None:
        self._by, self._driver = by, bindings.load("driver")

    def wait(self, address: int, value: int) -> None:
        if self._by == "kernel":
            await_flag[(1,)](Pointer(address), value, num_warps=1)
            return
        stream = torch.cuda.current_stream().cuda_stream
        bindings.call(self._driver.cuStreamWaitValue32, stream, address, value, _EQUAL, where="copied")

    def write(self, address: int, value: int) -> None:
        if self._by == "kernel":
            write_flag[(1,)](Pointer(address), value, num_warps=1)
            return
        stream = torch.cuda.current_stream().cuda_stream
        bindings.call(self._driver.cuStreamWriteValue32, stream, address, value, 0, where="copied")


class Slot:
    """Host memory of both ranks for one call at a time, its streams, and where the peer's sums arrive. Collective."""

    def __init__(self, ctx: Context, chunk_bytes: int) -> None:
        memory, self._chunk_bytes = HostMemory(), chunk_bytes
        nbytes = memory.capacity_for(_FLAGS_BYTES + 2 * RING * chunk_bytes)
        own = memory.allocate({"part": nbytes}, ctx.device)  # zeros, so all flags are FREE
        assert dist.group.WORLD is not None
        shared = memory.share_in(own, dist.group.WORLD, ctx.rank)["part"]
        dist.barrier()
        memory.settle(own)
        self._parts: list[torch.Tensor] = shared.handle
        self._addresses = shared.addresses
        self.out, self.into = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)
        self.arrived = torch.empty(RING * chunk_bytes, dtype=torch.uint8, device=ctx.device)

    def flag(self, owner: int, leg: int, chunk: int) -> int:
        """The device address of the flag of what ``owner`` writes."""
        return self._addresses[owner] + _FLAG_BYTES * (leg * RING + chunk)

    def ring(self, owner: int, leg: int, chunk: int, nbytes: int) -> torch.Tensor:
        begin = _FLAGS_BYTES + (leg * RING + chunk) * self._chunk_bytes
        return self._parts[owner][begin : begin + nbytes]

    def sums(self, chunk: int, rows: int) -> torch.Tensor:
        """``[rows, HIDDEN]``: where a chunk of the peer's partial sums arrives on the device."""
        begin = chunk * self._chunk_bytes
        return self.arrived[begin : begin + rows * ROW_BYTES].view(torch.bfloat16).view(rows, HIDDEN)


def chunks_of(rows: int, count: int) -> list[tuple[int, int, int]]:
    """``(chunk, first row, rows)`` of each of at most ``count`` chunks."""
    each = -(-rows // count)
    return [(index, begin, min(each, rows - begin)) for index, begin in enumerate(range(0, rows, each))]


def copied(ctx: Context, slot: Slot, flags: Flags, problem: Problem, count: int) -> Results:
    """``(hidden [tokens, HIDDEN], residual [tokens / 2, HIDDEN])``: all rows, and the new residual of the own rows."""
    x, rank, peer = problem.x, ctx.rank, 1 - ctx.rank
    half = len(x) // 2
    hidden, kept = torch.empty_like(x), torch.empty_like(problem.residual[:half])
    own = slice(rank * half, rank * half + half)
    of_peer = slice(peer * half, peer * half + half)
    cuts = chunks_of(half, count)
    current = torch.cuda.current_stream()
    slot.out.wait_stream(current)
    slot.into.wait_stream(current)

    def send(leg: int, rows: torch.Tensor, made: Sequence[torch.cuda.Event]) -> None:
        with torch.cuda.stream(slot.out):
            for chunk, begin, size in cuts:
                if made:
                    slot.out.wait_event(made[chunk])
                flags.wait(slot.flag(rank, leg, chunk), FREE)
                source = rows[begin : begin + size].reshape(-1).view(torch.uint8)
                slot.ring(rank, leg, chunk, size * ROW_BYTES).copy_(source, non_blocking=True)
                flags.write(slot.flag(rank, leg, chunk), FULL)

    def take(leg: int, into: Callable[[int, int, int], torch.Tensor]) -> list[torch.cuda.Event]:
        arrived = []
        with torch.cuda.stream(slot.into):
            for chunk, begin, size in cuts:
                flags.wait(slot.flag(peer, leg, chunk), FULL)
                target = into(chunk, begin, size).reshape(-1).view(torch.uint8)
                target.copy_(slot.ring(peer, leg, chunk, size * ROW_BYTES), non_blocking=True)
                flags.write(slot.flag(peer, leg, chunk), FREE)
                arrived.append(slot.into.record_event())
        return arrived

    send(SUMS, x[of_peer], ())
    arrived = take(SUMS, lambda chunk, begin, size: slot.sums(chunk, size))
    made = []
    for chunk, begin, size in cuts:
        current.wait_event(arrived[chunk])
        operands = (
            x[own][begin:],
            slot.sums(chunk, size),
            problem.residual[own][begin:],
            kept[begin:],
            hidden[own][begin:],
        )
        add_and_normalise[(size,)](*operands, problem.weight, EPS, HIDDEN, rank, num_warps=8)
        made.append(current.record_event())
    send(RESULTS, hidden[own], made)
    take(RESULTS, lambda chunk, begin, size: hidden[of_peer][begin : begin + size])
    current.wait_stream(slot.out)
    current.wait_stream(slot.into)
    return hidden, kept


def timed(lanes: Sequence[Lane], count: int) -> float:
    """Microseconds of one of ``count`` calls on each lane, which have a stream each."""
    for lane in lanes:
        lane()  # what is made once is made now
    torch.cuda.synchronize()
    dist.barrier()
    graph = capture(lanes, count * len(lanes), at_once=len(lanes))
    times = []
    for _ in range(_REPLAYS):
        torch.cuda.synchronize()
        dist.barrier()
        compat.delay_stream(HEAD_START_CYCLES)
        slowest = torch.tensor(gpu_us(graph.replay) / count / len(lanes))
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(float(slowest))
    return round(statistics.median(times[_WARM_UP:]), 1)


def run_rank(
    rank: int, folder: str, tokens: Sequence[int], counts: Sequence[int], by: Sequence[str], deadline: float
) -> None:
    """One rank: all sizes, each with the product's kernels first. Rank 0 writes what was found to ``folder``."""
    faulthandler.dump_traceback_later(max(deadline - time.monotonic() - 5.0, 1.0))
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    assert dist.group.WORLD is not None
    ctx = Context(rank, RANKS, torch.device("cuda", rank), compat.group_name(dist.group.WORLD))
    found: list[dict[str, Any]] = []

    def measure(what: str, problem: Problem, lanes: Sequence[Callable[[], Results]]) -> None:
        ctx.failures.clear()
        results = lanes[0]()
        torch.cuda.synchronize()
        expect_right(ctx, problem, results, what)
        times = {"alone_us": timed(lanes[:1], 10), "of_two_us": timed(lanes, 5)}
        found.append({"what": what, "mib": problem.x.nbytes / 2**20, **times, "wrong": list(ctx.failures)})
        if rank == 0:
            print(found[-1], flush=True)
            Path(folder, "found.json").write_text(json.dumps(found, indent=1))

    for size in tokens:
        problem = make_problem(ctx, size, HIDDEN, FORM)
        for name in ("host_one_shot", "host_two_shot"):
            transport = TRANSPORTS["host"].make(ALGORITHMS[name].make())

            def kernel(slot: int, transport: Any = transport, problem: Problem = problem) -> Results:
                started = transport.start(problem.request(ctx, slot=slot))
                if started.finish is not None:
                    started.finish()
                return started.hidden, started.residual

            measure(name, problem, [lambda: kernel(0), lambda: kernel(1)])
        for way in by:
            flags = Flags(way)
            for count in counts:
                chunk_bytes = chunks_of(size // 2, count)[0][2] * ROW_BYTES
                slots = [Slot(ctx, chunk_bytes) for _ in range(2)]

                def copies(slot: Slot, flags: Flags = flags, problem: Problem = problem, count: int = count) -> Results:
                    return copied(ctx, slot, flags, problem, count)

                lanes = [lambda slot=slot: copies(slot) for slot in slots]
                measure(f"copied by {way}, {count} chunks", problem, lanes)
    Path(folder, f"done{rank}").touch()
    os._exit(0)  # graphs and streams of this process are not taken down in order


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True, help="where to write what was measured")
    parser.add_argument("--tokens", default="512,1024,2048,4096", help="even numbers of rows")
    parser.add_argument("--chunks", default="2,4,8", help=f"chunks of a leg, at most {RING}")
    parser.add_argument("--by", default="memop,kernel", help="how flags are awaited")
    parser.add_argument("--timeout", type=float, default=150, help="seconds until the ranks are ended")
    arguments = parser.parse_args()
    tokens, counts = ([int(part) for part in text.split(",")] for text in (arguments.tokens, arguments.chunks))
    by = arguments.by.split(",")
    if any(size < 2 or size % 2 for size in tokens):
        parser.error(f"--tokens: expected even numbers, got {arguments.tokens!r}")
    if not all(1 <= count <= RING for count in counts):
        parser.error(f"--chunks: expected 1 to {RING}, got {arguments.chunks!r}")
    if not set(by) <= {"memop", "kernel"}:
        parser.error(f"--by: expected memop or kernel, got {arguments.by!r}")
    deadline = time.monotonic() + arguments.timeout
    with tempfile.TemporaryDirectory() as folder:
        ranks = [Child(run_rank, rank, folder, tokens, counts, by, deadline, scratch=folder) for rank in range(RANKS)]
        try:
            while not all([rank.join(0) for rank in ranks]) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            end(ranks, 5.0)
        found = json.loads(path.read_text()) if (path := Path(folder, "found.json")).exists() else []
        whole = all(Path(folder, f"done{rank}").exists() for rank in range(RANKS))
    arguments.json.write_text(json.dumps(found, indent=1))
    if any(line["wrong"] for line in found):
        return 1
    return 0 if whole else 3


if __name__ == "__main__":
    sys.exit(main())
