"""Lines of the kernels over host memory that must be as they are: with another in its place, a call goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from emulator.broken import broken_copy, check_caught
from emulator.kernels import ALGORITHMS, FP8, FP32, Form
from emulator.test_host_kernels import calls_of_one_name, random_calls, rows, words
from emulator.test_kernels import WHOLE

Run = Callable[[Path | None, int], None]
SEEDS = range(40)
_LIMITS: dict[str, Any] = {"stall_limit": 20_000}


def run_words(source: Path | None, seed: int, form: Form = WHOLE) -> None:
    options = _LIMITS | {"resident": 2 + seed % 5, "sources": None if source is None else source.parent}
    machine = words(3, 264, form, seed, **options)
    random_calls(machine, seed, 6)
    machine.run()


def run_named_again(source: Path | None, seed: int) -> None:
    calls_of_one_name(seed, sources=None if source is None else source.parent, **_LIMITS).run()


def run_rows(
    source: Path | None,
    seed: int,
    *,
    one_shot: bool,
    form: Form = WHOLE,
    hidden_size: int = 136,
    world_size: int = 3,
    **shape: int,
) -> None:
    options = _LIMITS | {"resident": 2 + seed % 5, "sources": None if source is None else source.parent}
    machine = rows(world_size, hidden_size, form, one_shot, seed, first_turn=-3, **(shape | options))
    random_calls(machine, seed, 5)
    machine.run()


SHARDED = Form(residual="sharded", residual_out="sharded", residual_dtype=FP32)
ONE_SHOT, TWO_SHOT = partial(run_rows, one_shot=True), partial(run_rows, one_shot=False)
NARROW = {"groups": 1, "ring": 2, "ahead": 1, "depth": 1}

BROKEN_WORDS: dict[str, tuple[Run, str, str]] = {
    "one part": (run_words, "(number & 1) * p.part_bytes", "0"),
    "half a line speaks for the other": (run_words, " || line[1] >> 48 != name", ""),
    "words do not name their call": (run_words, "(uint64_t)name << 48", "1ull << 48"),
    "words of a call with the same name stay": (run_named_again, "if (blockIdx.x == 0) call.erase();", ""),
    "erases the same lines in each call": (run_named_again, "(number >> 1) % shares", "0"),
    "erases what it has just sent": (run_named_again, "begin + i >= p.tokens * ROW_LINES && ", ""),
    "calls are not counted": (run_words, "if (thread == 0) add_relaxed_gpu", "if (false) add_relaxed_gpu"),
    "a CTA is not counted": (run_words, "if (thread == 0) add", "if (thread == 0 && blockIdx.x != 1) add"),
    "first CTA counts the call": (
        run_words,
        "one + (blockIdx.x == 0 ? (1ull << 32) - stride : 0)",
        "blockIdx.x == 0 ? 1ull << 32 : 0",
    ),
    "counts the call before other threads have read it": (
        run_words,
        "one = barrier_sync_with(0, THREADS, before)",
        "one = 1",
    ),
    "starts before the call before has ended": (run_words, "  grid_dependency_wait();\n", ""),
    "adds in another order on each rank": (
        partial(run_words, form=Form(FP32, residual_dtype=FP32)),
        "rank == p.rank ? own.vectors[v].words[i] : got[rank]",
        "rank == 0 ? own.vectors[v].words[i] : got[rank == p.rank ? 0 : rank]",
    ),
    "rows share partial sums": (run_words, "partials + parity * WARPS", "partials"),
}

BROKEN_ROWS: dict[str, tuple[Run, str, str]] = {
    "announces what is not in memory yet": (ONE_SHOT, "      fence_sys();\n", ""),
    "announces news that has come behind the fence": (
        TWO_SHOT,
        "      for (int i = 0; i < COUNTERS; ++i) done[i] = load_acquire_cta(&shared.done[i]);\n      fence_sys();\n",
        "      fence_sys();\n      for (int i = 0; i < COUNTERS; ++i) done[i] = load_acquire_cta(&shared.done[i]);\n",
    ),
    "announces before all threads have stored": (
        partial(run_rows, one_shot=True, hidden_size=264, threads=64),
        "      warp_sync();\n      barrier_sync(1, WORKERS);\n",
        "      warp_sync();\n",
    ),
    "writes a slot that is being read": (
        partial(run_rows, one_shot=True, groups=1, ring=3, ahead=2, depth=1),
        "if (turn >= RING) cta.await(READ, turn - RING + 1, known[READ]);",
        "",
    ),
    "writes a result that is being read": (
        partial(run_rows, one_shot=False, depth=0, behind=1, groups=1),
        "if (computing >= RESULT_RING) cta.await(TAKEN, computing - RESULT_RING + 1, known[TAKEN]);",
        ";",
    ),
    "reads rows that are not there yet": (ONE_SHOT, "cta.await(SENT, turn + 1, known[SENT]);", ""),
    "takes results that are not there yet": (TWO_SHOT, "cta.await(COMPUTED, taken + 1, known[COMPUTED]);", ""),
    "counts results before they are stored": (
        TWO_SHOT,
        "ONE_SHOT ? 0 : computing;",
        "ONE_SHOT ? 0 : computing + 1;",
    ),
    "adds up rows that are on their way": (
        partial(run_rows, one_shot=True, depth=2),
        "copies_wait<(DEPTH > 0 ? DEPTH - 1 : 0)>()",
        "copies_wait<(DEPTH > 0 ? DEPTH : 0)>()",
    ),
    "does not count turns that are none": (
        partial(run_rows, one_shot=True, depth=2),
        "      copies_commit();",
        "      if (turn < cta.turns) copies_commit();",
    ),
    "calls share a half": (ONE_SHOT, "(blockIdx.x * 2 + (calls & 1))", "(blockIdx.x * 2)"),
    "calls are not counted": (ONE_SHOT, "p.state[blockIdx.x * 2 + 1] = calls + 1;", ""),
    "turns are not counted": (ONE_SHOT, "p.state[blockIdx.x * 2] = base + turns;", ""),
    "count does not wrap": (
        ONE_SHOT,
        "(int32_t)(load_acquire_sys(address) - base)",
        "(int32_t)load_acquire_sys(address)",
    ),
    "does not know one peer": (ONE_SHOT, "peer >= WORLD_SIZE ||", "peer >= WORLD_SIZE - 1 ||"),
    "starts before the call before has ended": (ONE_SHOT, "  grid_dependency_wait();\n", ""),
    "adds in another order on each rank": (
        partial(run_rows, one_shot=True, form=Form(FP32, residual_dtype=FP32)),
        "place == i",
        "i == 1",
    ),
    "reads the section of another": (TWO_SHOT, "ONE_SHOT ? 0 : PEERS - 1 - step, turn", "ONE_SHOT ? 0 : step, turn"),
    "sends a row in the place of those that are loaded with it": (TWO_SHOT, "smaller(first + i, STEPS - 1)", "first"),
    "sends more rows than there are peers": (
        partial(run_rows, one_shot=False, world_size=4, hidden_size=264, behind=2, **NARROW),
        "if (first + i < STEPS) store_sent",
        "store_sent",
    ),
    "reads a sharded residual as a whole one": (
        partial(run_rows, one_shot=False, form=SHARDED),
        "(RESIDUAL_SHARDED ? local : row)",
        "row",
    ),
    "turns share partial sums": (
        partial(run_rows, one_shot=True, hidden_size=264, threads=64, groups=1),
        "cta.shared.partials[turn & 1]",
        "cta.shared.partials[0]",
    ),
    "residuals lie on the results": (
        partial(run_rows, one_shot=False, form=Form(hidden_dtype=FP8)),
        "(uint32_t)(HIDDEN_ROW + KEPT_ROW)",
        "(uint32_t)HIDDEN_ROW",
    ),
}
BROKEN = {
    f"{file}: {name}": (file, *change)
    for file, changes in (("host_words", BROKEN_WORDS), ("host_rows", BROKEN_ROWS))
    for name, change in changes.items()
}


@pytest.mark.full
@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_caught(tmp_path: Path, name: str) -> None:
    file, run, old, new = BROKEN[name]
    source = ALGORITHMS / "host" / f"{file}.cu"
    broken = broken_copy(tmp_path, source, source.name, ((old, new),))
    check_caught(run, broken, SEEDS)


@pytest.mark.parametrize(
    "run",
    [
        run_words,
        run_named_again,
        ONE_SHOT,
        TWO_SHOT,
        partial(run_rows, one_shot=True, **NARROW),
        partial(run_rows, one_shot=False, world_size=4, hidden_size=264, behind=2, **NARROW),
    ],
)
def test_kernels_as_they_are_pass(run: Run) -> None:
    """What catches the broken ones lets these pass."""
    for seed in SEEDS[:6]:
        run(None, seed)
