"""CTAs without rows that prefetch, in the emulator: what they ask for, and that nothing else is different."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from emulator import EmulationError
from emulator.broken import broken_copy, check_caught
from emulator.host_kernels import WordsMachine
from emulator.kernels import ALGORITHMS, PushMachine
from emulator.memory import bits
from emulator.test_host_kernels import words
from emulator.test_kernels import LLAMA, push, random_calls
from tw_compile.kernels.collective.prefetch import prefetched, shares

WEIGHT_BYTES = (1000, 16, 4096)
BUDGET = 3000
_MARGIN = 64


def make(kernel: str, world_size: int, hidden_size: int, seed: int, **options: Any) -> PushMachine | WordsMachine:
    if kernel == "words":
        return words(world_size, hidden_size, LLAMA, seed, **options)
    return push(world_size, hidden_size, LLAMA, kernel == "one_shot", seed, **options)


class Weights:
    """Weights of every rank, which launches of a machine are asked to prefetch on ``free`` more CTAs; bytes as given."""

    def __init__(self, machine: PushMachine | WordsMachine, free: int, budget: int = BUDGET) -> None:
        self.of_rank: list[list[torch.Tensor]] = []
        for rank in range(machine.world_size):
            memory = [torch.zeros(size + 2 * _MARGIN, dtype=torch.uint8) for size in WEIGHT_BYTES]
            tensors = [
                one[_MARGIN - one.data_ptr() % 16 :][:size] for one, size in zip(memory, WEIGHT_BYTES, strict=True)
            ]
            for tensor in tensors:
                machine.emulator.alloc(rank, tensor, name="weight")
            self.of_rank.append(tensors)
        launch = machine.emulator.launch
        self.grids: list[tuple[int, int]] = []

        def with_prefetch(rank: int, stream: int, grid: int, *rest: Any, **named: Any) -> int:
            params = rest[-1]
            cluster = named.get("cluster", 1)
            params.prefetch, grown = prefetched(self.of_rank[rank], budget, grid, free, cluster)
            params.prefetch.begin[:] = [*(one.data_ptr() for one in self.of_rank[rank]), 0]
            self.grids.append((grid, grown))
            return launch(rank, stream, grown, *rest, **named)

        machine.emulator.launch = with_prefetch  # type: ignore[method-assign]


def expect_each_line_once(machine: PushMachine | WordsMachine, weights: Weights) -> None:
    """By each call, up to the budget, and no line more; no weight has changed."""
    asked = machine.emulator.prefetches()
    for rank, tensors in enumerate(weights.of_rank):
        for tensor, share in zip(tensors, shares(WEIGHT_BYTES, BUDGET), strict=True):
            begin = tensor.data_ptr()
            times = torch.zeros(len(tensor), dtype=torch.int32)
            for of_rank, address, size in asked:
                if of_rank == rank and begin <= address < begin + len(tensor):
                    times[address - begin : address - begin + size] += 1
            assert (times[:share] == len(machine.calls)).all() and not times[share:].any()
            assert not bits(tensor).any()


@pytest.mark.parametrize("arch", [900, 800])
@pytest.mark.parametrize(
    "kernel", ["one_shot", *(pytest.param(name, marks=pytest.mark.full) for name in ("two_shot", "words"))]
)
def test_every_line_of_the_budget_is_asked_for_once_and_the_results_are_the_same_bits(kernel: str, arch: int) -> None:
    """Also with fewer CTAs that may run than there are, in launches that begin before those ahead of them have ended."""
    for seed, (world_size, free) in enumerate(((2, 1), (3, 3), (8, 9))):
        options = {"threads": 64, "data_seed": 5, "resident": 1 + 2 * seed, "arch": arch}
        plain = make(kernel, world_size, 136, seed, **options)
        machine = make(kernel, world_size, 136, seed, more_defines={"PREFETCH": 1}, **options)
        weights = Weights(machine, free)
        for each in (plain, machine):
            random_calls(each, seed, 4)  # type: ignore[arg-type]
            each.run()
        for one, other in zip(plain.calls, machine.calls, strict=True):
            assert all(map(torch.equal, one.outputs(), other.outputs()))
        assert {grown - grid for grid, grown in weights.grids} == {min(free, 3)}  # one piece of each weight
        expect_each_line_once(machine, weights)


@pytest.mark.parametrize("cluster", [2, 4])
@pytest.mark.parametrize("kernel", ["one_shot", pytest.param("two_shot", marks=pytest.mark.full)])
def test_clusters_prefetch_as_wholes(kernel: str, cluster: int) -> None:
    """Each line once, the same bits as without, and no cluster with rows that lacks a CTA."""
    for seed, (world_size, free) in enumerate(((2, cluster), (3, 2 * cluster - 1), (4, 9))):
        options = {"threads": 32, "cluster": cluster, "resident": cluster * (1 + seed), "data_seed": 5}
        plain = make(kernel, world_size, 264, seed, **options)
        machine = make(kernel, world_size, 264, seed, more_defines={"PREFETCH": 1}, **options)
        weights = Weights(machine, free)
        for each in (plain, machine):
            random_calls(each, seed, 4)  # type: ignore[arg-type]
            each.run()
        for one, other in zip(plain.calls, machine.calls, strict=True):
            assert all(map(torch.equal, one.outputs(), other.outputs()))
        grown = {(more - grid) for grid, more in weights.grids}
        assert grown == {min(free // cluster, -(-3 // cluster)) * cluster}
        expect_each_line_once(machine, weights)


def test_without_free_ctas_nothing_is_asked_for() -> None:
    machine = make("one_shot", 2, 136, 0, more_defines={"PREFETCH": 1})
    weights = Weights(machine, 0)
    random_calls(machine, 0, 3)  # type: ignore[arg-type]
    machine.run()
    assert all(grid == grown for grid, grown in weights.grids) and not machine.emulator.prefetches()


def test_what_lies_outside_of_a_weight_is_an_error() -> None:
    machine = make("one_shot", 2, 136, 0, more_defines={"PREFETCH": 1})
    weights = Weights(machine, 2)
    weights.of_rank[0][0] = torch.zeros(1000, dtype=torch.uint8)  # which the machine does not know
    machine.call(1, 1)
    with pytest.raises(EmulationError, match="prefetch_l2"):
        machine.run()


BROKEN = {
    "who prefetches is counted": ("push.cu", "to_next_part(part, ctas)", "to_next_part(part, gridDim.x)"),
    "rows are shared out to who prefetches": ("prefetch.cuh", "return prefetch.row_ctas;", "return gridDim.x;"),
    "who prefetches has rows, too": ("prefetch.cuh", "  return true;\n#else", "  return false;\n#else"),
    "all CTAs ask for the same": ("prefetch.cuh", "cta = blockIdx.x - prefetch.row_ctas", "cta = 0"),
    "warps ask for the same": ("prefetch.cuh", "warp = threadIdx.x / 32", "warp = 0"),
    "lanes ask for the same": ("prefetch.cuh", "lane * PREFETCH_BYTES; at", "0; at"),
    "the last piece is too long": (
        "prefetch.cuh",
        "bytes - at < PREFETCH_BYTES ? bytes - at : PREFETCH_BYTES",
        "PREFETCH_BYTES",
    ),
    "only one tensor": ("prefetch.cuh", "tensor < MOST_PREFETCHED", "tensor < 1"),
}


@pytest.mark.full
@pytest.mark.parametrize("what", BROKEN)
def test_broken_kernels_are_found(what: str, tmp_path: Path) -> None:
    file, *change = BROKEN[what]
    broken_copy(tmp_path, ALGORITHMS / "push" / "push.cu", file, ((change[0], change[1]),))

    def run(source: Path, seed: int) -> None:
        machine = make("one_shot", 2, 136, seed, more_defines={"PREFETCH": 1}, sources=source.parent)
        weights = Weights(machine, 2)
        random_calls(machine, seed, 3)  # type: ignore[arg-type]
        machine.run()
        expect_each_line_once(machine, weights)

    check_caught(run, tmp_path / "push.cu", range(3))
