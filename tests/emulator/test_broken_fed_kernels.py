"""Lines of fed.cuh, and of what is FED elsewhere, that must be as they are: with another in its place, calls fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.broken import Changes, check_caught
from emulator.fed import sources
from emulator.test_fed_kernels import LONG, WRAPS, check

SEEDS = range(8)
POLL = "while ((int32_t)(load_acquire_sys(flag) - call) < 0) {"
ADDED = "if ((int32_t)fetch_add_gpu(done, count) + count != wanted) return;"

FED: dict[str, Changes] = {
    "reads rows that have not arrived": ((POLL, "while (false) {"),),
    "compares numbers, not their difference": ((POLL, "while (load_acquire_sys(flag) < call) {"),),
    "does not fence before it loads": (("    }\n  }\n  fence_proxy_async();\n}", "    }\n  }\n}"),),
    "waits for another block": (("fed_flag(fed, fed.rank, owner, row)", "fed_flag(fed, fed.rank, owner, 0)"),),
    "waits for the first owner alone": (("owner * share < end; owner++", "owner == row / share; owner++"),),
    "counts rows that have been read, and are on their way": (("    bulk_wait<LAG>();\n", ""),),
    "counts rows a turn too early": (("turns[(turn - AHEAD - LAG) %", "turns[(turn - AHEAD - LAG + 1) %"),),
    "sends rows that have not been loaded": (("      wait(&arrived[out.stage], out.parity);\n", ""),),
    "counts rows of the call before": (("  *done = 0;  // for the next call\n", ""),),
    "wants rows of other ranks in a block": (("(block < chunks.begin ? chunks.begin : block)", "block"),),
    "sends with rows of other ranks": (
        ("return chunk ? (first + chunk) * rows : begin;", "return (first + chunk) * rows;"),
    ),
}
LONG_ROWS: dict[str, Changes] = {
    "announces a block with its first rows": ((ADDED, "fetch_add_gpu(done, count);"),),
    "loads into places that are still read": (("    bulk_wait_read<FED_PIECES - AHEAD - 1>();\n", ""),),
    "sends the first piece alone": (("      if (left == 0) {", "      left = 0;\n      if (left == 0) {"),),
    "sends bytes beyond the chunk's end": (("least_of(left, FED_PIECE)", "FED_PIECE"),),
}
THREE_RANKS: dict[str, Changes] = {
    "takes one pair of each peer alone": ((" + at / peers;", ";"),),
    "has no room for what does not divide by the peers": ((" + (peer < more ? peer : more)", ""),),
}
PUSH: dict[str, Changes] = {
    "calls have one number": (("add_relaxed_gpu(&p.fed->call, 1);", "p.fed->call = 1;"),),
    "chunks stay claimed": (("      p.fed->chunks = 0;\n", ""),),
    "pairs stay claimed": (("      p.fed->pairs = 0;\n", ""),),
}
GEMM: dict[str, Changes] = {
    "pairs of other ranks are its own again": (("own + by_arrival(", "by_arrival("),),
    "pairs beyond the last are not the first": (("    if (place >= high) place -= high;\n", ""),),
    "loads before it has waited": (("    await_rows(params.fed, call,", "    if (0) await_rows(params.fed, call,"),),
    "fills stages through which rows are sent": (
        ("    cluster_sync();  // both CTAs' shared memory", "    // both CTAs'"),
    ),
    "leaves out a pair": (
        ("if (k == claims) next = claim_pair(params.fed);", "if (k == claims) next = claim_pair(params.fed) + 1;"),
    ),
}
PAIRS_OF_ALL_STAGES: dict[str, Changes] = {
    "forgets a pair that has not been read": (
        ("    wait(&shared.empty[ring.stage], ring.parity ^ 1);\n    shared.fed.pairs", "    shared.fed.pairs"),
    ),
}
BROKEN = [
    (file, name) for file, found in (("fed.cuh", FED), ("push.cu", PUSH), ("joint_mm.cu", GEMM)) for name in found
]


def run(source: Path, seed: int) -> None:
    check(source, seed, [390, 300, 390], numbered=WRAPS, sms=4 + 8 * (seed % 2), resident=16 + 16 * (seed % 2))


def run_long(source: Path, seed: int) -> None:
    check(source, seed, [17], hidden_size=LONG)


def run_all_stages(source: Path, seed: int) -> None:
    """Each pair begins in the first of five stages."""
    check(source, seed, [513, 390], hidden_size=320)


def run_three(source: Path, seed: int) -> None:
    check(source, seed, [900], world_size=3)


@pytest.mark.full
@pytest.mark.parametrize(("file", "name"), BROKEN, ids=[name for _, name in BROKEN])
def test_a_broken_copy_is_caught(file: str, name: str, tmp_path: Path) -> None:
    changes = {**FED, **PUSH, **GEMM}[name]
    check_caught(run, sources(tmp_path, file, changes), SEEDS)


@pytest.mark.full
@pytest.mark.parametrize("name", LONG_ROWS)
def test_a_broken_copy_of_long_rows_is_caught(name: str, tmp_path: Path) -> None:
    check_caught(run_long, sources(tmp_path, "fed.cuh", LONG_ROWS[name]), SEEDS)


@pytest.mark.full
@pytest.mark.parametrize("name", PAIRS_OF_ALL_STAGES)
def test_a_broken_copy_whose_pairs_have_all_stages_is_caught(name: str, tmp_path: Path) -> None:
    check_caught(run_all_stages, sources(tmp_path, "joint_mm.cu", PAIRS_OF_ALL_STAGES[name]), SEEDS)


@pytest.mark.full
@pytest.mark.parametrize("name", THREE_RANKS)
def test_a_broken_copy_with_three_ranks_is_caught(name: str, tmp_path: Path) -> None:
    check_caught(run_three, sources(tmp_path, "fed.cuh", THREE_RANKS[name]), SEEDS)


@pytest.mark.full
def test_the_copies_are_right_but_for_their_changes(tmp_path: Path) -> None:
    for seed in SEEDS:
        run(sources(tmp_path), seed)
        run_long(sources(tmp_path), seed)
        run_all_stages(sources(tmp_path), seed)
    run_three(sources(tmp_path), 0)
