"""Lines of grouped_mm.cu that must be as they are: with another in its place, ``grouped.check`` fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.broken import Changes, broken_copy, check_caught
from emulator.grouped import SOURCE, check

SEEDS = range(12)
RETURNED = "if (read >= 0 && lane < 2) mbarrier_arrive_at(&shared.empty[read], lane);"
LAST_RETURNED = "    wgmma_wait<0>();\n    if (lane < 2) mbarrier_arrive_at(&shared.empty[read], lane);"
FULL, EMPTY = "wait(&shared.full[ring.stage], ring.parity);", "wait(&shared.empty[ring.stage], ring.parity ^ 1);"
TO_BOTH_B = (
    "load_tile_to(BOTH, b + rank * HALF_B, params.weights, k, weights_row + (int32_t)rank * (TILE_COLUMNS / 2), full);"
)
TO_BOTH_A = "load_tile_to(BOTH, a + rank * HALF_A, params.a, k, tile.row + (int32_t)rank * (TILE_ROWS / 2), full);"
BARRIERS = "mbarrier_init(&shared.empty[stage], 2 * 4 * CONSUMERS);"
LAST_SYNC = "  cluster_sync();  // CTAs end together: a CTA that has ended takes in no copies and no arrivals\n"
FIRST_SYNC = "  cluster_sync();\n  Tiles tiles"

RING: dict[str, Changes] = {
    "waits for the other parity of full stages": ((FULL, FULL.replace("parity", "parity ^ 1")),),
    "waits for the other parity of empty stages": ((EMPTY, EMPTY.replace(" ^ 1", "")),),
    "reads stages that have not arrived": ((FULL, ""),),
    "fills stages that are being read": ((EMPTY, ""),),
    "a stage is returned while matmuls read it": (("wgmma_wait<1>", "wgmma_wait<2>"),),
    "a stage is returned before its matmuls": (
        (RETURNED, RETURNED.replace("read >= 0 && ", "").replace("read]", "ring.stage]")),
        (LAST_RETURNED, "wgmma_wait<0>();"),
    ),
    "the last stage of a pair is not returned": ((LAST_RETURNED, "    wgmma_wait<0>();"),),
    "a stage is returned to its own CTA alone": (
        ("lane < 2) mbarrier_arrive_at", "lane == rank) mbarrier_arrive_at"),
        (BARRIERS, BARRIERS.replace("2 * ", "")),
    ),
    "a stage is returned to its own CTA twice": (
        ("mbarrier_arrive_at(&shared.empty[read], lane)", "mbarrier_arrive_at(&shared.empty[read], rank)"),
    ),
    "arrivals at the own CTA alone": (("lane < 2) mbarrier_arrive_at", "lane == rank) mbarrier_arrive_at"),),
    "waits for one CTA's readers": ((BARRIERS, BARRIERS.replace("2 * ", "")),),
    "waits for one warpgroup's readers": ((BARRIERS, BARRIERS.replace(" * CONSUMERS", "")),),
    "expects too few bytes": (("expect(full, STAGE_BYTES)", "expect(full, STAGE_BYTES / 2)"),),
    "expects too many bytes": (("expect(full, STAGE_BYTES)", "expect(full, STAGE_BYTES + 16)"),),
    "expects its own copies alone": (("expect(full, STAGE_BYTES)", "expect(full, STAGE_BYTES - HALF_B)"),),
    "mbarriers not visible to copies": (("    mbarrier_init_fence();\n", ""),),
    "copies to a CTA that has not begun": (
        (FIRST_SYNC, FIRST_SYNC.replace("cluster_sync()", "barrier_sync(0, THREADS)")),
    ),
    "ends while the other CTA arrives": ((LAST_SYNC, ""),),
    "ends while the other CTA arrives, after its own threads": ((LAST_SYNC, "  barrier_sync(0, THREADS);\n"),),
}

OPERANDS: dict[str, Changes] = {
    "shares columns with nobody": ((TO_BOTH_B, TO_BOTH_B.replace("BOTH", "1 << rank")),),
    "shares rows with nobody": ((TO_BOTH_A, TO_BOTH_A.replace("BOTH", "1 << rank")),),
    "shares columns with the other alone": ((TO_BOTH_B, TO_BOTH_B.replace("BOTH", "2 >> rank")),),
    "both load the same columns": (
        (TO_BOTH_B, TO_BOTH_B.replace("weights_row + (int32_t)rank * (TILE_COLUMNS / 2)", "weights_row")),
    ),
    "both load the same rows": (
        (TO_BOTH_A, TO_BOTH_A.replace("tile.row + (int32_t)rank * (TILE_ROWS / 2)", "tile.row")),
    ),
    "both load to the same half": ((TO_BOTH_A, TO_BOTH_A.replace("a + rank * HALF_A", "a")),),
    "second rows are the first": (("tile.row + TILE_ROWS / 2, full", "tile.row, full"),),
    "weights of the first group": (("tile.group * params.columns + ", ""),),
    "multiplies every other 16 columns": (("k + step);", "k + step);\n        step += 16;"),),
    "sums go on from the pair before": (("b + columns_on(step), k + step)", "b + columns_on(step), 1)"),),
    "sums begin again with each stage": (("b + columns_on(step), k + step)", "b + columns_on(step), step)"),),
    "multiplies the same columns four times": (("b + columns_on(step)", "b"),),
    "warpgroups multiply the same rows": (("stage + warp / 4 * HALF_A", "stage"),),
    "no fence before matmuls": (("      wgmma_fence();\n", ""),),
    "matmuls are not committed": (("      wgmma_commit();\n", ""),),
    "stores sums that are not there": (("    wgmma_wait<0>();\n", ""),),
}

TILES: dict[str, Changes] = {
    "stores beyond a group's end": (("tile.end - row", "tile.end - row + 1"),),
    "stores beyond the last row": (("tile.end - row", "TILE_ROWS"),),
    "a group's last row is left out": (("tile.end - row", "tile.end - row - 1"),),
    "a warp's columns begin where the first tile's do": (
        ("params.columns + tile.column;\n    auto", "params.columns;\n    auto"),
    ),
    "warps store the same rows": (("tile.row + warp * 16", "tile.row"),),
    "half of the tiles of columns": (("(wide + 1) / 2", "wide / 2"),),
    "no pairs beside each other": (("high % 2 * (", "0 * ("),),
    "a group begins where the first does": (("      begin = end;\n", ""),),
    "pairs of earlier groups count again": (("      first += pairs;\n", ""),),
    "groups are not rounded up": (("(end - begin + TILE_ROWS - 1) / TILE_ROWS", "(end - begin) / TILE_ROWS"),),
    "both CTAs take the same rows": (
        ("* 2 + (int32_t)rank;\n          column = number / ", "* 2;\n          column = number / "),
    ),
    "one tile of columns twice, and the last one not": (
        ("(number - over) * 2 + (int32_t)rank", "(number - over) * 2"),
    ),
    "a cluster computes its first pair alone": (("pair += gridDim.x / 2", "pair += gridDim.x * 1000"),),
    "clusters compute the pairs of others": (("pair += gridDim.x / 2", "pair += gridDim.x"),),
    "stores all columns to the first ones": (("Place{out + column,", "Place{out,"),),
    "knows the groups of its threads' number alone": (("group += THREADS", "group += 1 << 20"),),
}

TILES_HEADER: dict[str, Changes] = {
    "parity stays when the ring wraps": (("      parity ^= 1;\n", ""),),
    "parts of a block in another order": (("pick(w, quad_lane ^ step)", "pick(w, step)"),),
    "rows of a warp in another order": (("row = below * 8", "row = (1 - below) * 8"),),
    "stores eight columns too far": (("place(own * 8)", "place(own * 8 + 8)"),),
}

WGMMA_HEADER: dict[str, Changes] = {
    "rows of an operand too near": (("(1024ull >> 4) << 32", "(512ull >> 4) << 32"),),
    "operands not swizzled": (("1ull << 62", "0ull << 62"),),
    "steps of twice the columns": (("k * 2 >> 4", "k * 4 >> 4"),),
}

BROKEN = {
    f"{file}: {name}": (file, changes)
    for file, kind in (
        ("grouped_mm.cu", RING | OPERANDS | TILES),
        ("tiles.cuh", TILES_HEADER),
        ("wgmma.cuh", WGMMA_HEADER),
    )
    for name, changes in kind.items()
}


def run(source: Path, seed: int) -> None:
    """Both kinds of pairs, an odd number of tiles of columns, more pairs than clusters, the ring more than once around."""
    check([130, 0, 257, 70], 768, 192, seed, sms=2 + 2 * (seed % 3), resident=2 + 2 * (seed % 2), source=source)


def run_many_groups(source: Path, seed: int) -> None:
    check([0] * 450 + [1], 256, 64, seed, source=source)


@pytest.mark.full
@pytest.mark.parametrize("name", BROKEN)
def test_broken_grouped_kernels_are_caught(tmp_path: Path, name: str) -> None:
    source = broken_copy(tmp_path, SOURCE, *BROKEN[name])
    check_caught(run_many_groups if "threads' number" in name else run, source, SEEDS)


def test_the_grouped_kernel_as_it_is_passes() -> None:
    """What catches the broken ones lets it pass."""
    for seed in SEEDS:
        run(SOURCE, seed)
    run_many_groups(SOURCE, 0)
