"""Time the joint GEMM in every tiling that the planner chooses from, by force, beside the one that it chooses.

    python benchmarks/spikes/joint_tilings.py --csv OUT.csv [--only MODEL] [--replays 11]

It needs one GPU that the kernel runs on. The GEMMs are queries, keys and values (plain), and gate and up (gated), of one rank.
A CUDA graph has several calls, which take copies of the weights in turn, so that these come from memory as in a model. Each
call runs behind a kernel that writes its input, as in a layer. All tilings of a size are replayed in turn, and a row has the
median of the replays, in microseconds of one call; the kernel that writes the input is timed alone and subtracted. Before a
tiling is timed, its results must be within a rounding of torch's matmuls, and equal to the bit in all tilings.

The exit code is 1 if results differ.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from tw_compile.kernels.gemm import joint_mm as kernel
from tw_compile.planning.joint_tiles import WIDTHS, of_width, tiling

PLAIN: dict[str, tuple[int, tuple[int, ...]]] = {  # depth, columns of queries, keys and values
    "llama-3.1-8b tp2": (4096, (2048, 512, 512)),
    "llama-3.1-8b tp4": (4096, (1024, 256, 256)),
    "llama-3.3-70b tp2": (8192, (4096, 512, 512)),
    "llama-3.3-70b tp4": (8192, (2048, 256, 256)),
}
GATED = {"llama-3.1-8b tp2": (4096, 7168), "llama-3.3-70b tp2": (8192, 14336)}
PLAIN_TOKENS = (64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096)
GATED_TOKENS = (128, 256, 512, 768, 1024, 2048, 4096)
TILING = ["width", "multiple", "whole", "narrow", "low"]
FIELDS = ["gpu", "form", "model", "tokens", *TILING, "predicted_share", "us", "us_again", "chosen"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--only", choices=sorted({*PLAIN, *GATED}), help="one model")
    parser.add_argument("--replays", type=int, default=11)
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    right = True
    with arguments.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        shapes = [("plain", model, depth, columns) for model, (depth, columns) in PLAIN.items()]
        shapes += [("gated", model, depth, (one, one)) for model, (depth, one) in GATED.items()]
        for form, model, depth, columns in shapes:
            if arguments.only not in (None, model):
                continue
            copies = max(2, min(8, int(1e8 / (2 * depth * sum(columns))) + 1))
            weights = [[_random(one, depth, device) * depth**-0.5 for one in columns] for _ in range(copies)]
            matrices = [[one.t() for one in copy] for copy in weights]
            for tokens in PLAIN_TOKENS if form == "plain" else GATED_TOKENS:
                right &= _size(writer, arguments.replays, form, model, _random(tokens, depth, device), matrices)
                file.flush()
    return 0 if right else 1


def _random(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)


def _size(
    writer: csv.DictWriter[str],
    replays: int,
    form: str,
    model: str,
    source: torch.Tensor,
    matrices: list[list[torch.Tensor]],
) -> bool:
    """Time all tilings of one size; returns whether their results are right."""
    tokens, depth = source.shape
    columns = [one.shape[1] for one in matrices[0]]
    beside = (sum(columns),) if form == "gated" else tuple(columns)
    clusters = kernel.sms_of(source.device) // 2
    chosen = tiling(tokens, beside, clusters)
    candidates = [one for width in WIDTHS for one in of_width(tokens, beside, clusters, width)]
    calls = 8 if 2.0 * tokens * depth * sum(columns) > 2e11 else 24
    a = source.clone()

    def product(call: int) -> list[torch.Tensor]:
        these = matrices[call % len(matrices)]
        return [kernel.gated_mm(a, these[0], these[1], 0)] if form == "gated" else kernel.joint_mm(a, these, (), 0)

    def write(call: int) -> None:
        torch.mul(source, 1.0, out=a)

    def behind(call: int) -> None:
        write(call)
        product(call)

    want = [a @ one for one in matrices[0]]
    if form == "gated":
        want = [torch.nn.functional.silu(want[0]) * want[1]]
    graphs, first, right = {}, None, True
    for one in candidates:
        with mock.patch.object(kernel, "tiling", lambda *_, forced=one: forced):
            got = product(0)
            first = first or got
            near = all(torch.allclose(x, y, rtol=0.02, atol=0.02) for x, y in zip(got, want, strict=True))
            if not near or not all(torch.equal(x, y) for x, y in zip(got, first, strict=True)):
                print(f"{form} {model} {tokens}: results of {one} are wrong", flush=True)
                right = False
            graphs[one] = _graph(behind, calls)
    empty = _graph(write, calls)
    times: dict[object, list[float]] = {key: [] for key in (*graphs, None)}
    again: dict[object, list[float]] = {key: [] for key in times}
    for kept in (times, again):
        for _ in range(replays):
            for key, graph in (*graphs.items(), (None, empty)):
                kept[key].append(_replay(graph) / calls)
    us, us_again = ({key: statistics.median(all_of) for key, all_of in kept.items()} for kept in (times, again))
    for one in candidates:
        row = {name: getattr(one, name) for name in TILING}
        row |= dict(form=form, model=model, tokens=tokens, gpu=torch.cuda.get_device_name(), chosen=int(one == chosen))
        row |= dict(
            predicted_share=f"{one.time / chosen.time:.3f}",
            us=f"{us[one] - us[None]:.2f}",
            us_again=f"{us_again[one] - us_again[None]:.2f}",
        )
        writer.writerow(row)
    least = min(us[one] - us[None] for one in candidates)
    mine = us[chosen] - us[None]
    print(f"{form} {model} {tokens}: {mine:.1f} us as chosen, {least:.1f} at best, {mine / least:.3f}", flush=True)
    return right


def _graph(call: Callable[[int], None], calls: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(calls):
                call(index)
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


if __name__ == "__main__":
    sys.exit(main())
