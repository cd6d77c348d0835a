"""Time kernels over host memory with one GPU: two ranks of one process share the GPU, and its one link to the host.

    python -m tw_compile.benchmark.host_memory [--hidden 4096,8192] [--tokens 1,16,256,4096] [--wire exact,int8] [--csv FILE]

Each rank has streams and an outbox of its own, so both ranks send and read as two GPUs would. But all rows cross one link. So
a call moves twice the bytes that a link carries where each rank has its own GPU. The bound is the time that the copy engines
take for bare copies of as many bytes, both ways at once. It is the bound of exact rows, whatever the wire. Calls are captured
in a CUDA graph, ``CALLS`` of each rank. Results are compared with float64.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tw_compile.harness.versions import machine, versions
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.algorithms.row_kernel import RowKernel
from tw_compile.kernels.collective.codes import round_trip
from tw_compile.kernels.collective.host_memory import HostMemory
from tw_compile.kernels.collective.reference import add_rms_norm
from tw_compile.kernels.collective.slot import Slot, SymmetricBuffer, state_words
from tw_compile.kernels.collective.spec import NormSpec, Request, row_range
from tw_compile.kernels.collective.wires import EXACT, WIRES, Wire
from tw_compile.kernels.runtime.barrier import REPORT_ROWS

RANKS = 2
CALLS = 10
REPLAYS = 9
SPIN_LIMIT = 2_000_000
SMS = (2, 4, 8, 16)
_BF16 = torch.bfloat16


def slots_for(needs: dict[str, int], device: torch.device) -> list[Slot]:
    """Make a slot for each rank. ``needs``: the bytes of each buffer, by name."""
    memory = HostMemory()
    made = [{name: memory.capacity_for(nbytes) for name, nbytes in needs.items()} for _ in range(RANKS)]
    parts = [memory.allocate(sizes, device) for sizes in made]
    for tensors in parts:
        memory.settle(tensors)
    addresses = {name: [memory.address(tensors[name]) for tensors in parts] for name in needs}
    slots = []
    for tensors in parts:
        buffers = {
            name: SymmetricBuffer(
                tensor,
                parts,
                torch.tensor([*addresses[name], 0], dtype=torch.int64, device=device),
                tensor.numel(),
                torch.zeros(state_words(name), dtype=torch.int32, device=device),
            )
            for name, tensor in tensors.items()
        }
        status = torch.zeros((REPORT_ROWS, 8), dtype=torch.int32, device=device)
        slots.append(Slot(buffers[next(iter(buffers))], status, status, buffers))
    return slots


def replayed_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds a call in a CUDA graph that runs all of ``calls`` at once, each ``CALLS`` times on a stream of its own."""
    main, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    streams = [torch.cuda.Stream(priority=-1) for _ in calls]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=main):
        for stream, call in zip(streams, calls, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                for _ in range(CALLS):
                    call()
        for stream in streams:
            main.wait_stream(stream)
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        with torch.cuda.stream(main):
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def copied_us(nbytes: int, device: torch.device) -> float:
    """The bound: microseconds of bare copies of ``nbytes`` to the host and ``nbytes`` from the host, at once."""
    there, back = (torch.empty(nbytes, dtype=torch.uint8).pin_memory() for _ in range(2))
    out, into = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return replayed_us([lambda: there.copy_(out, non_blocking=True), lambda: into.copy_(back, non_blocking=True)])


def with_wire(xs: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, wire: Wire) -> torch.Tensor:
    """The normalised rows that ranks get by this wire, computed in torch and returned in float64."""
    h = torch.empty_like(residual, dtype=torch.float32)
    for owner in range(len(xs)):
        own = slice(*row_range(len(residual), len(xs), owner))
        parts = [x[own] if rank == owner else round_trip(x[own], wire.sums) for rank, x in enumerate(xs)]
        h[own] = torch.stack([part.float() for part in parts]).sum(0)
    hidden, _ = add_rms_norm(h, residual, None, weight, NormSpec(1e-5, 0.0, None, _BF16, _BF16))
    return round_trip(hidden, wire.results).to(_BF16).double()


def times_of(
    algorithm: RowKernel, whole: bool, tokens: int, hidden: int, device: torch.device, wire: str = EXACT
) -> dict[str, Any]:
    """Time a call of both ranks and check its results; ``whole``: each rank has all rows of the residual.

    With a wire, the error against float64 may be at most 1.1 times the error of torch with the same wire.
    """
    generator = torch.Generator(device=device).manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=_BF16)

    norm, weight, residual = NormSpec(1e-5, 0.0, None, _BF16, _BF16), random(hidden), random(tokens, hidden)
    xs = [random(tokens, hidden) for _ in range(RANKS)]
    requests = []
    for rank, x in enumerate(xs):
        own = residual if whole else residual[slice(*row_range(tokens, RANKS, rank))].contiguous()
        requests.append(Request(x, own, None, weight, norm, not whole, "replicated" if whole else "sharded", "", 0))
    requests = [replace(request, wire=wire) for request in requests]
    slots = slots_for(algorithm.needs(requests[0], RANKS), device)
    states: list[Any] = [SimpleNamespace(world_size=RANKS, rank=rank, device=device) for rank in range(RANKS)]
    calls = [lambda r=rank: algorithm.launch(requests[r], states[r], slots[r], SPIN_LIMIT) for rank in range(RANKS)]
    streams = [torch.cuda.Stream() for _ in calls]
    results = []
    for stream, call in zip(streams, calls, strict=True):
        with torch.cuda.stream(stream):
            results.append(call())
    torch.cuda.synchronize()
    exact = NormSpec(1e-5, 0.0, None, torch.float64, torch.float64)
    want, _ = add_rms_norm(torch.stack(xs).double().sum(0), residual.double(), None, weight.double(), exact)
    if wire == EXACT:
        near = all(torch.allclose(result.hidden.double(), want, rtol=2**-7, atol=2**-9) for result in results)
    else:
        budget = 1.1**2 * (with_wire(xs, residual, weight, WIRES[wire]) - want).square().mean()
        near = all(bool((result.hidden.double() - want).square().mean() <= budget) for result in results)
    equal = torch.equal(results[0].hidden, results[1].hidden)
    us = replayed_us(calls)
    gave_up = any(bool(slot.status.any()) for slot in slots)
    return {"us": us if near and equal and not gave_up else None, "right": near and equal and not gave_up}


def rows(
    hidden_sizes: Sequence[int], token_counts: Sequence[int], device: torch.device, wires: Sequence[str] = (EXACT,)
) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel, number of SMs, wire and message; ``us`` is None where the results were wrong."""
    for hidden in hidden_sizes:
        for tokens in token_counts:
            nbytes = tokens * hidden * _BF16.itemsize
            bound = copied_us(RANKS * nbytes, device)
            for entry, wire in product(ALGORITHMS, wires):
                if entry.transport != "host" or (wire != EXACT and not entry.wires):
                    continue
                for sms in SMS if entry.most_sms <= max(SMS) else (entry.most_sms,):
                    algorithm: Any = entry.make(sms)
                    measured = times_of(algorithm, entry.needs_whole_residual, tokens, hidden, device, wire)
                    yield {
                        "kernel": entry.name,
                        "wire": wire,
                        "sms": sms,
                        "hidden": hidden,
                        "tokens": tokens,
                        "message_bytes": nbytes,
                        "copies_us": round(bound, 2),
                        **{
                            key: round(value, 2) if isinstance(value, float) else value
                            for key, value in measured.items()
                        },
                    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows, and write them to ``--csv``. Returns 1 if a result is wrong, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tw_compile.benchmark.host_memory", description=__doc__)
    parser.add_argument("--hidden", default="4096,8192")
    parser.add_argument("--tokens", default="1,16,64,256,1024,4096")
    parser.add_argument("--wire", default=EXACT, help=f"how rows travel: {', '.join(WIRES)} (default: {EXACT})")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(arguments)
    wires = options.wire.split(",")
    unknown = [wire for wire in wires if wire not in WIRES]
    if unknown:
        parser.error(f"--wire: expected some of {', '.join(WIRES)}, got {unknown[0]!r}")
    if not torch.cuda.is_available():
        parser.error("expected a CUDA GPU, got none")
    device = torch.device("cuda", torch.cuda.current_device())
    about = {"device": torch.cuda.get_device_name(), "machine": machine(), **versions()}
    written = []
    hidden_sizes, token_counts = (
        [int(number) for number in text.split(",")] for text in (options.hidden, options.tokens)
    )
    for row in rows(hidden_sizes, token_counts, device, wires):
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        written.append(row | about)
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, written[0].keys())
            writer.writeheader()
            writer.writerows(written)
    return 0 if all(row["right"] for row in written) else 1


if __name__ == "__main__":
    sys.exit(main())
