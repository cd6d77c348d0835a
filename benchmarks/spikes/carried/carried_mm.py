"""A spike: what it costs a row-parallel GEMM to store the rows that a peer owns into the peer's memory.

    python benchmarks/spikes/carried/carried_mm.py --json OUT.json [--timeout 65]

There are two ranks, each with one GPU, that reach each other's memory. The GEMMs are those in front of an all_reduce: o_proj
and down_proj of Llama-3.1-8B and Llama-3.3-70B at TP2. Each rank owns half of the tokens. Times are microseconds of one call in
a CUDA graph of several calls, on the slowest rank, while both ranks run: medians over replays. ``carried_mm.cu`` is our GEMM
with other stores, in tiles of 256 columns. So it is never a wave shorter than the product's GEMM, which chooses the width:

    mm            torch.mm
    joint         kernels/gemm/joint_mm.cu with one matrix
    own order     carried_mm.cu, which stores to local memory; tiles in the order of joint_mm.cu
    peer first    as own order, but tiles of the peer's rows come before the own ones. Percentages are beyond this
    regs          as peer first, but tiles of the peer's rows go to the peer's memory from registers
    regs signal   as regs; each warp also adds to a counter in the peer's memory after each of its tiles
    regs spread   as regs, but tiles of the peer's rows are spread evenly over all waves except the last
    bulk          as peer first, but tiles of the peer's rows go through extra shared memory and bulk copies. The sending warp
                  waits for each copy before it adds to a counter in the peer's memory
    bulk local    as bulk, but to local memory: shows what the lost stage and the way through shared memory cost
    held          as bulk, but without losing a stage: a stage of the ring is held until the rows in it have been sent
    held local    as held, but to local memory
    held spread   as held, in the order of regs spread

Before a size is timed, all results of all contenders are checked: joint must be within a rounding of torch.mm, and the others
equal joint to the bit. Nothing else may be written, and counters must add up. The exit code is 0 if all was right and measured,
1 if something was wrong, 3 if time was up before all sizes were measured. The file is written after each size.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

# Multicast stays off in these processes, also where the caller's environment doesn't say so.
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NCCL_NVLS_ENABLE"] = "0"

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.child import Child, end
from tw_compile.harness.measure import HEAD_START_CYCLES, capture, gpu_us
from tw_compile.kernels.gemm.joint_mm import JointMmParams, joint_mm_program, params_of, shared_bytes
from tw_compile.kernels.runtime.launch import prepare
from tw_compile.kernels.runtime.program import Program, arch_of
from tw_compile.kernels.runtime.wgmma import CAPABILITY, TensorMap, tensor_map
from tw_compile.planning.joint_tiles import PAIR_ROWS, Tiling, of_width, tiling

WORLD = 2
WIDTH, TILE_ROWS, TILE_DEPTH, THREADS = 256, 128, 64, 384
LINK_BYTES_PER_US = 330e3
ROUNDS, WARM_UP = 25, 3
GRAPH_US = 1200
"""About how many microseconds a graph takes."""
L2_BYTES = 50 * 2**20
COUNTER_BYTES = 64 * 1024
"""The counters lie in front of the inbox in the memory that the peer reaches. Each part of the inbox has a part of them."""
INBOX_BYTES = 160 * 2**20
GUARD_BYTES = 1 << 20
BLOCKS = 64
"""How many counters a part has."""
TOLERANCE = 2**-7, 1e-2
"""For a rounding to bfloat16, relative to the value; and for sums in another order, relative to the root mean square."""


class CarriedMmParams(ctypes.Structure):
    """``CarriedMmParams`` of carried_mm.cu."""

    _fields_ = [
        ("a", TensorMap),
        ("matrix", TensorMap),
        *((name, ctypes.c_void_p) for name in ("out", "remote", "counters")),
        *((name, ctypes.c_int32) for name in ("columns", "rows", "depth", "whole", "first", "peers", "spread")),
        ("unused", ctypes.c_int32 * 3),
    ]


@dataclass(frozen=True)
class Shape:
    site: str
    tokens: int
    depth: int
    hidden: int

    @property
    def half(self) -> int:
        return self.tokens // WORLD

    @property
    def moved_bytes(self) -> int:
        """How many bytes a rank sends."""
        return self.half * self.hidden * 2


SITES = {
    "8B down": (7168, 4096),
    "8B o_proj": (2048, 4096),
    "70B o_proj": (4096, 8192),
    "70B down": (14336, 8192),
}
SHAPES = [
    Shape(site, tokens, *SITES[site])
    for sites, sizes in (
        (("8B down", "8B o_proj"), (1024, 4096)),
        (("70B o_proj", "70B down"), (1024, 4096)),
        (tuple(SITES), (2048, 512)),
    )
    for tokens in sizes
    for site in sites
]


@dataclass(frozen=True)
class Contender:
    """``send``, ``signal``: as in carried_mm.cu. ``order``: own, first or spread. ``local``: this rank is its own peer."""

    label: str
    send: int
    order: str = "first"
    signal: bool = False
    local: bool = False

    @property
    def counts(self) -> bool:
        return self.send >= 2 or self.signal

    @property
    def sends(self) -> bool:
        """Whether the peer's rows go to the peer."""
        return self.send > 0 and not self.local


CARRIED = (
    Contender("own order", 0, "own"),
    Contender("peer first", 0),
    Contender("regs", 1),
    Contender("regs signal", 1, signal=True),
    Contender("regs spread", 1, "spread"),
    Contender("bulk", 2),
    Contender("bulk local", 2, local=True),
    Contender("held", 3),
    Contender("held local", 3, local=True),
    Contender("held spread", 3, "spread"),
)
LABELS = ("mm", "joint", *(contender.label for contender in CARRIED))
BASE = "peer first"


def carried_program(send: int, signal: bool = False) -> Program:
    defines = {"COLUMNS": WIDTH, "SEND": send, "SIGNAL": int(signal)}
    source = Path(__file__).with_name("carried_mm.cu")
    return Program(source, CarriedMmParams, arch_of(CAPABILITY), tuple(defines.items()))


def carried_shared_bytes(send: int) -> int:
    """The size of ``Shared`` in carried_mm.cu."""
    stage, half_out = (TILE_ROWS + WIDTH) * TILE_DEPTH * 2, TILE_ROWS // 2 * WIDTH * 2
    regions = {2: 2, 3: 1}.get(send, 0)
    stages = (226 * 1024 - regions * half_out) // stage
    return stages * (stage + 16) + regions * half_out + 4 * 8


def carried_tiling(shape: Shape, clusters: int) -> Tiling:
    return min(of_width(shape.tokens, (shape.hidden,), clusters, WIDTH), key=lambda each: each.pairs)


def carried_params(
    shape: Shape,
    tiles: Tiling,
    clusters: int,
    rank: int,
    order: str,
    a: int,
    matrix: int,
    out: int,
    inbox: int,
    counters: int,
) -> CarriedMmParams:
    """The parameters of one call on ``rank``.

    ``a``, ``matrix``, ``out``: addresses of [tokens, depth], [hidden, depth], [tokens, hidden]. ``inbox``: the address of the
    peer's rows, [half of the tokens, hidden], in the memory that these rows are to go to.
    """
    assert shape.tokens % (WORLD * PAIR_ROWS) == 0 and shape.depth % TILE_DEPTH == 0 and shape.hidden % 8 == 0
    high, wide = shape.tokens // PAIR_ROWS, -(-shape.hidden // WIDTH)
    peers = 0 if order == "own" else high // WORLD
    begin = (1 - rank) * shape.half
    last_wave = (high * wide - 1) // clusters * clusters  # where the last wave begins, in pairs
    spread = max(peers * wide, last_wave) if order == "spread" else peers * wide
    return CarriedMmParams(
        a=tensor_map(a, shape.tokens, shape.depth, TILE_ROWS // 2),
        matrix=tensor_map(matrix, shape.hidden, shape.depth, WIDTH // 4),
        out=out,
        remote=inbox - begin * shape.hidden * 2,
        counters=counters,
        columns=shape.hidden,
        rows=shape.tokens,
        depth=shape.depth,
        whole=tiles.whole,
        first=begin // PAIR_ROWS if peers else 0,
        peers=peers,
        spread=spread if peers else 0,
    )


def carried_grid(tiles: Tiling, clusters: int) -> int:
    return 2 * min(clusters, tiles.whole + tiles.narrow)


def weights_for(shape: Shape) -> int:
    """How many matrices the calls use in turn: more than L2 holds."""
    return min(max(-(-3 * L2_BYTES // (shape.hidden * shape.depth * 2)), 2), 8)


def calls_for(shape: Shape, weights: int) -> int:
    """How many calls a graph has: the same number with each matrix."""
    us = 2 * shape.tokens * shape.depth * shape.hidden / 650e6
    return weights * max(1, min(round(GRAPH_US / us / weights), 64 // weights))


class Rank:
    """One rank's memory, kernels and checks."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device = rank, torch.device("cuda", rank)
        self.failures: list[str] = []
        assert dist.group.WORLD is not None
        size = COUNTER_BYTES + INBOX_BYTES + GUARD_BYTES
        self.memory = compat.symm_mem_empty(size, self.device)
        self.memory.zero_()
        self.handle, self.addresses, multicast, _ = compat.symm_mem_rendezvous(
            self.memory, compat.group_name(dist.group.WORLD)
        )
        assert not multicast, "multicast must be off"
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.clusters = self.sms // 2
        widths = {tiling(shape.tokens, (shape.hidden,), self.clusters).width for shape in SHAPES}
        programs = [joint_mm_program(width, "plain") for width in sorted(widths)]
        programs += dict.fromkeys(carried_program(each.send, each.signal) for each in CARRIED)
        for program in programs[rank::WORLD]:
            program.cubin()
        dist.barrier()
        self.kernels = {program: prepare(program, rank) for program in programs}
        self.local_counters = torch.zeros(8 * BLOCKS, dtype=torch.int32, device=self.device)

    @property
    def counters(self) -> torch.Tensor:
        """The counters that the peer adds to, [parts, blocks]."""
        return self.memory[: 8 * BLOCKS * 4].view(torch.int32).view(8, BLOCKS)

    @property
    def inbox_memory(self) -> torch.Tensor:
        """The inbox and what lies behind it."""
        return self.memory[COUNTER_BYTES:]

    def expect(self, is_right: bool, message: str) -> None:
        if not is_right:
            self.failures.append(f"rank {self.rank}: {message}")

    def meet(self) -> None:
        """Wait until everything that any rank has launched is over."""
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()


class Site:
    """The contenders of one shape on one rank."""

    def __init__(self, own: Rank, shape: Shape) -> None:
        self.own, self.shape = own, shape
        self.parts = weights_for(shape)
        self.count = calls_for(shape, self.parts)
        generator = torch.Generator(own.device).manual_seed(1000 * SHAPES.index(shape) + own.rank)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=own.device, dtype=torch.bfloat16)

        self.a = random(shape.tokens, shape.depth)
        self.matrices = [random(shape.hidden, shape.depth) for _ in range(self.parts)]
        self.outs = torch.empty(self.parts, shape.tokens, shape.hidden, dtype=torch.bfloat16, device=own.device)
        assert self.parts * shape.moved_bytes <= INBOX_BYTES
        used = own.inbox_memory[: self.parts * shape.moved_bytes]
        self.inbox = used.view(torch.bfloat16).view(self.parts, shape.half, shape.hidden)
        begin = own.rank * shape.half
        self.mine, self.theirs = slice(begin, begin + shape.half), slice(shape.half - begin, shape.tokens - begin)
        self.tiles = carried_tiling(shape, own.clusters)
        self.one = torch.ones(1, device=own.device)
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        for label, calls in self._calls().items():
            for call in calls:
                call()
            own.meet()
            self.graphs[label] = capture(calls, self.count)

    def _calls(self) -> dict[str, list[Callable[[], object]]]:
        calls: dict[str, list[Callable[[], object]]] = {label: [] for label in LABELS}
        for part, matrix in enumerate(self.matrices):
            calls["mm"].append(lambda out=self.outs[part], matrix=matrix: torch.mm(self.a, matrix.t(), out=out))
            calls["joint"].append(self._joint(part))
            for contender in CARRIED:
                calls[contender.label].append(self._carried(contender, part))
        return calls

    def _joint(self, part: int) -> Callable[[], object]:
        shape, own = self.shape, self.own
        tiles = tiling(shape.tokens, (shape.hidden,), own.clusters)
        params = params_of(JointMmParams, "plain", self.a, [self.matrices[part].t()], [], [self.outs[part]], tiles)
        grid = 2 * min(own.clusters, tiles.whole + tiles.narrow + tiles.low)
        return self._launch(joint_mm_program(tiles.width, "plain"), params, grid, shared_bytes(tiles.width))

    def _carried(self, contender: Contender, part: int) -> Callable[[], object]:
        shape, own, out = self.shape, self.own, self.outs[part]
        if contender.local:
            inbox, counters = out[self.theirs].data_ptr(), own.local_counters.data_ptr()
        else:
            inbox = own.addresses[1 - own.rank] + COUNTER_BYTES + part * shape.moved_bytes
            counters = own.addresses[1 - own.rank]
        params = carried_params(
            shape,
            self.tiles,
            own.clusters,
            own.rank,
            contender.order,
            self.a.data_ptr(),
            self.matrices[part].data_ptr(),
            out.data_ptr(),
            inbox,
            counters + part * BLOCKS * 4,
        )
        program = carried_program(contender.send, contender.signal)
        return self._launch(
            program, params, carried_grid(self.tiles, own.clusters), carried_shared_bytes(contender.send)
        )

    def _launch(self, program: Program, params: ctypes.Structure, grid: int, shared: int) -> Callable[[], object]:
        kernel, device = self.own.kernels[program], self.own.device

        def launch() -> None:
            stream = compat.current_stream(device).cuda_stream
            kernel.launch(params, stream=stream, grid=grid, block=THREADS, shared_bytes=shared, cluster=2)

        return launch

    def check(self) -> dict[str, Any]:
        """Check all results of one replay of each contender."""
        own, shape, found = self.own, self.shape, {}
        self._replay("mm")
        library = self.outs.clone()
        self._replay("joint")
        ours = self.outs.clone()
        found["bits that are not torch.mm's"] = self._near(ours, library)
        gathered = torch.empty(WORLD * self.parts, shape.half, shape.hidden, dtype=torch.bfloat16, device=own.device)
        sent = ours[:, self.theirs].contiguous()
        dist.all_gather_into_tensor(gathered, sent)
        self.expected = gathered.view(WORLD, self.parts, shape.half, shape.hidden)[1 - own.rank].clone()
        # The rows that come to this rank are the peer's, not its own. The ranks' inputs differ, so these rows must differ.
        own.expect(not torch.equal(self.expected, sent), f"{shape}: the ranks have the same results")
        for contender in CARRIED:
            self._replay(contender.label)
            where = f"{shape.site} {shape.tokens}, {contender.label}"
            whole = not contender.sends
            rows = slice(0, shape.tokens) if whole else self.mine
            self._same(self.outs[:, rows], ours[:, rows], f"{where}: rows that stay here")
            if whole:
                own.expect(self._is_poison(own.inbox_memory), f"{where}: the inbox was written")
            else:
                own.expect(
                    self._is_poison(self.outs[:, self.theirs]), f"{where}: the peer's rows were stored here, too"
                )
                self._same(self.inbox, self.expected, f"{where}: rows that came")
                behind = own.inbox_memory[self.parts * shape.moved_bytes :]
                own.expect(self._is_poison(behind), f"{where}: memory behind the rows was written")
            if contender.send != 0:
                self._check_counters(contender, where, self.count // self.parts)
            else:
                own.expect(not own.counters.any() and not own.local_counters.any(), f"{where}: counters have changed")
        return found

    def check_again(self) -> None:
        """Check the inbox and the counters after the timing."""
        self.own.meet()
        where = f"{self.shape.site} {self.shape.tokens}, after the timing"
        self._same(self.inbox, self.expected, f"{where}: rows that came")
        counting = [contender for contender in CARRIED if contender.sends and contender.counts]
        calls = (WARM_UP + ROUNDS) * self.count // self.parts * len(counting)
        want, found = self._counters_of(self.mine, calls), self.own.counters
        self.own.expect(torch.equal(found, want), f"{where}: counters are {_few(found)}, not {_few(want)}")

    def _replay(self, label: str) -> None:
        """Fill the memory for results with poison, then replay a contender once on all ranks."""
        self._poison()
        self.own.meet()
        self.graphs[label].replay()
        self.own.meet()

    def _poison(self) -> None:
        own = self.own
        for tensor in (self.outs, own.inbox_memory):
            tensor.view(torch.uint8).fill_(0xFF)  # a NaN; no result has these bits
        own.memory[:COUNTER_BYTES].zero_()
        own.local_counters.zero_()

    def _check_counters(self, contender: Contender, where: str, calls: int) -> None:
        """Check the counters in this rank's memory: of its own rows, or of the peer's rows if the rank is its own peer."""
        own = self.own
        want = self._counters_of(self.theirs if contender.local else self.mine, calls if contender.counts else 0)
        peers, local = own.counters, own.local_counters.view(8, BLOCKS)
        counters, others = (local, peers) if contender.local else (peers, local)
        own.expect(torch.equal(counters, want), f"{where}: counters are {_few(counters)}, not {_few(want)}")
        own.expect(not others.any(), f"{where}: counters elsewhere have changed")

    def _counters_of(self, rows: slice, calls: int) -> torch.Tensor:
        """The values of the counters after each part of ``rows`` has come ``calls`` times."""
        want = torch.zeros(8, BLOCKS, dtype=torch.int32, device=self.own.device)
        want[: self.parts, rows.start // TILE_ROWS : rows.stop // TILE_ROWS] = calls * 8 * self.shape.hidden
        return want

    def _is_poison(self, tensor: torch.Tensor) -> bool:
        return bool((tensor.view(torch.int16) == -1).all())

    def _same(self, found: torch.Tensor, want: torch.Tensor, where: str) -> None:
        wrong = found.view(torch.int16) != want.view(torch.int16)
        count = int(wrong.sum())
        first = wrong.nonzero()[0].tolist() if count else []
        self.own.expect(not count, f"{where}: {count} of {wrong.numel()} are wrong, first [part, row, column] {first}")

    def _near(self, found: torch.Tensor, want: torch.Tensor) -> int:
        """How many values have other bits than ``want``. All must be within a rounding of ``want``."""
        different = 0
        for one, other in zip(found, want, strict=True):
            exact = other.float()
            allowed = TOLERANCE[0] * exact.abs() + TOLERANCE[1] * exact.square().mean().sqrt()
            far = ~((one.float() - exact).abs() <= allowed)  # a NaN is far
            count = int(far.sum())
            self.own.expect(not count, f"{self.shape}: {count} of ours are not near torch.mm's")
            different += int((one.view(torch.int16) != other.view(torch.int16)).sum())
        return different

    def measure(self) -> dict[str, list[float]]:
        """For each contender, the microseconds of a call on the slowest rank, in each round."""
        times: dict[str, list[float]] = {label: [] for label in LABELS}
        self._poison()
        self.own.meet()
        for number in range(WARM_UP + ROUNDS):
            begin = number % len(LABELS)
            for label in (*LABELS[begin:], *LABELS[:begin]):  # a drift of the clocks hits all alike
                # Everything is queued before the GPUs meet in the all_reduce, so no clock runs while a rank still launches.
                compat.delay_stream(HEAD_START_CYCLES)
                dist.all_reduce(self.one, op=dist.ReduceOp.MAX)
                us = gpu_us(self.graphs[label].replay) / self.count
                if number >= WARM_UP:
                    times[label].append(us)
        table = torch.tensor([times[label] for label in LABELS], dtype=torch.float64, device=self.own.device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        return dict(zip(LABELS, table.tolist(), strict=True))


def _few(counters: torch.Tensor) -> str:
    """How often each value occurs, for at most six values."""
    values, counts = counters.unique(return_counts=True)
    found = dict(zip(values.tolist(), counts.tolist(), strict=True))
    return str(dict(list(found.items())[:6]))


def run_rank(rank: int, folder: str, json_path: str, begin: float, timeout: float) -> None:
    """Run one rank. ``begin`` is when the parent began, by ``time.monotonic``."""
    faulthandler.dump_traceback_later(max(begin + timeout - 3 - time.monotonic(), 1))  # says where it hangs
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", WORLD)
    options = {"timeout": timedelta(seconds=max(timeout, 10)), "device_id": torch.device("cuda", rank)}
    dist.init_process_group("nccl", store=store, rank=rank, world_size=WORLD, **options)
    own = Rank(rank)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(rank),
        "torch": torch.__version__,
        "sms": own.sms,
        "rounds": ROUNDS,
        "link_bytes_per_us": LINK_BYTES_PER_US,
        "complete": False,
        "failures": [],
        "shapes": [],
    }
    _say(rank, f"{report['device']}, {own.sms} SMs; ready after {time.monotonic() - begin:.1f} s\n\n{_header()}")
    longest = 0.0
    for index, shape in enumerate(SHAPES):
        started = time.monotonic()
        time_is_up = torch.tensor([float(started - begin + 1.3 * longest > timeout - 3)], device=own.device)
        dist.all_reduce(time_is_up, op=dist.ReduceOp.MAX)
        if time_is_up.item():
            break
        site = Site(own, shape)
        found = site.check()
        us = site.measure()
        site.check_again()
        failures: list[Any] = [None] * WORLD
        dist.all_gather_object(failures, own.failures)
        report["failures"] = [failure for each in failures for failure in each]
        waves = -(-shape.tokens // PAIR_ROWS) * -(-shape.hidden // WIDTH) / own.clusters
        report["shapes"].append(
            asdict(shape)
            | found
            | {
                "waves": waves,
                "weights": site.parts,
                "calls": site.count,
                "link_us": shape.moved_bytes / LINK_BYTES_PER_US,
                "us": {label: statistics.median(times) for label, times in us.items()},
                "rounds_us": us,
            }
        )
        report["complete"] = index == len(SHAPES) - 1
        if rank == 0:
            _write(Path(json_path), report)
        _say(rank, _row(report["shapes"][-1]))
        del site
        longest = max(longest, time.monotonic() - started)
    _say(rank, _summary(report, time.monotonic() - begin))
    own.meet()
    sys.stdout.flush()
    os._exit(1 if report["failures"] else 0 if report["complete"] else 3)


def _say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def _write(path: Path, report: dict[str, Any]) -> None:
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(report))
    unfinished.replace(path)


def _header() -> str:
    columns = ("site", "tokens", "waves", "link us", *LABELS)
    return f"us of a call, and beyond {BASE!r}\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def _row(found: dict[str, Any]) -> str:
    us = found["us"]
    cells = [f"{us[label]:.1f} {100 * (us[label] / us[BASE] - 1):+.1f}%" for label in LABELS]
    first = (found["site"], str(found["tokens"]), f"{found['waves']:.2f}", f"{found['link_us']:.1f}")
    return f"| {' | '.join((*first, *cells))} |"


def _summary(report: dict[str, Any], seconds: float) -> str:
    lines = ["", f"{len(report['shapes'])} of {len(SHAPES)} sizes in {seconds:.1f} s"]
    lines += [f"WRONG: {failure[:2000]}" for failure in report["failures"]] or ["all results were right"]
    return "\n".join(lines)


def main() -> int:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the results")
    parser.add_argument("--timeout", type=float, default=65, help="seconds until the ranks are killed")
    arguments = parser.parse_args()
    path = arguments.json.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = begin + arguments.timeout
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            Child(run_rank, rank, folder, str(path), begin, arguments.timeout, scratch=folder) for rank in range(WORLD)
        ]
        try:
            while not all([rank.join(0) for rank in ranks]) and time.monotonic() < deadline:
                if any(rank.exitcode not in (None, 0) for rank in ranks):
                    deadline = min(deadline, time.monotonic() + 5)
                time.sleep(0.05)
        finally:
            codes = [rank.exitcode for rank in ranks]
            end(ranks, 3)
    if all(code == 0 for code in codes):
        return 0
    if all(code in (0, 3) for code in codes):
        return 3
    print(f"exit codes of the ranks: {codes} (None: killed after {time.monotonic() - begin:.0f} s)", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
