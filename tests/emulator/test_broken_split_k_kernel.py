"""Lines of split_k_mm.cu that must be as they are: with another in its place, ``split_k.check`` fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.broken import Changes, broken_copy, check_caught
from emulator.split_k import SOURCE, check

SEEDS = range(12)
RETURNED = "if (read >= 0 && threadIdx.x % 32 == 0) mbarrier_arrive(&shared.empty[read]);"
FULL, EMPTY = "wait(&shared.full[ring.stage], ring.parity);", "wait(&shared.empty[ring.stage], ring.parity ^ 1);"
BYTES = "tile.halves * HALF_A + COLUMNS * ROW_BYTES"
STEPS = "rows + columns_on(step), columns + columns_on(step), 1);"
SUMS_THERE = "  cluster_sync();  // all sums are there\n"
LAST_SYNC = "  cluster_sync();  // a CTA that has ended has no sums\n"
ALL_READ = "  barrier_sync(1, 128 * tile.halves);  // all have read the stages\n"
SLOT, SUMS = "(block * CONSUMERS + threadIdx.x) * 16", "((column / 8 + block) * CONSUMERS + threadIdx.x) * 16"
COLUMN = "tile.column + box * box_columns"

BROKEN: dict[str, Changes] = {
    # the ring
    "waits for the other parity of full stages": ((FULL, FULL.replace("parity", "parity ^ 1")),),
    "waits for the other parity of empty stages": ((EMPTY, EMPTY.replace(" ^ 1", "")),),
    "reads stages that have not arrived": ((FULL, ""),),
    "fills stages that are being read": ((EMPTY, ""),),
    "a stage is returned while matmuls read it": (("wgmma_wait<1>", "wgmma_wait<2>"),),
    "a stage is returned before its matmuls": (
        (RETURNED, RETURNED.replace("read >= 0 && ", "").replace("read]", "ring.stage]")),
    ),
    "waits for one warpgroup's readers": (("4 * tile.halves", "4"),),
    "waits for two warpgroups' readers": (("4 * tile.halves", "8"),),
    "all lanes return a stage": ((RETURNED, RETURNED.replace(" && threadIdx.x % 32 == 0", "")),),
    "expects too few bytes": ((BYTES, BYTES + " - 16"),),
    "expects too many bytes": ((BYTES, BYTES + " + 16"),),
    "expects all rows of the last ones": ((BYTES, BYTES.replace("tile.halves", "2")),),
    "mbarriers not visible to copies": (("    mbarrier_init_fence();\n", ""),),
    "copies before there are mbarriers": (("  barrier_sync(0, THREADS);\n", ""),),
    # operands
    "loads the second columns over the first": (("box * box_columns * ROW_BYTES", "0"),),
    "second columns are the first": ((COLUMN, "tile.column"),),
    "loads boxes that are not there": (("      if (box == params.boxes) break;\n", ""),),
    "loads the first box alone": (("box == params.boxes", "box > 0"),),
    "loads the second rows over the first": (("a + half * HALF_A", "a"),),
    "second rows are the first": (("tile.row + half * (TILE_ROWS / 2), full", "tile.row, full"),),
    "loads half of the rows": (("half < tile.halves; half++", "half < 1; half++"),),
    "loads rows that are not there": (("half < tile.halves; half++", "half < 2; half++"),),
    "loads from the first matrix": ((COLUMN + ", matrix = matrix_of(params, column)", COLUMN + ", matrix = 0"),),
    "loads columns that lie in the matrices before": (("column - params.begins[matrix]", "column"),),
    "warpgroups multiply the same rows": (("stage + half * HALF_A", "stage"),),
    "columns are read where rows lie": (("tile_descriptor(stage + 2 * HALF_A)", "tile_descriptor(stage + HALF_A)"),),
    "multiplies the same depth of columns four times": (
        (STEPS, STEPS.replace("columns + columns_on(step)", "columns")),
    ),
    "multiplies the same depth of rows four times": ((STEPS, STEPS.replace("rows + columns_on(step)", "rows")),),
    "sums begin again with each stage": ((STEPS, STEPS.replace("1);", "step);")),),
    "no fence before matmuls": (("    wgmma_fence();\n", ""),),
    "matmuls are not committed": (("    wgmma_commit();\n", ""),),
    "adds up sums that are not there": (("  wgmma_wait<0>();\n", ""),),
    # parts
    "all parts begin with the first": (("tile.begin = part * stages", "tile.begin = 0 * stages"),),
    "a part ends where it begins": (("(part + 1) * stages", "part * stages"),),
    "parts have as many stages": (("part * stages / params.parts *", "part * (stages / params.parts) *"),),
    "sums lie over each other": ((SLOT, "threadIdx.x * 16"),),
    "warpgroups' sums lie over each other": ((SLOT, "(block * CONSUMERS + threadIdx.x % 128) * 16"),),
    "sums lie where the other warpgroup reads": ((ALL_READ, ""),),
    "sums are read before they are there": ((SUMS_THERE, "  barrier_sync(2, THREADS);\n"),),
    "ends while others read its sums": ((LAST_SYNC, ""),),
    "adds the first columns' sums": ((SUMS, "(block * CONSUMERS + threadIdx.x) * 16"),),
    "adds the first block's sums": ((SUMS, "(column / 8 * CONSUMERS + threadIdx.x) * 16"),),
    "adds its own sums alone": (("load_from_cta(w[part], part,", "load_from_cta(w[part], cluster_rank(),"),),
    "leaves the last part out": (("part = 1; part < PARTS;", "part = 1; part < PARTS - 1;"),),
    "two of four parts": (("finish<4>", "finish<2>"),),
    "the first row's sums alone": (("i < 4; i++) {\n      float sum", "i < 2; i++) {\n      float sum"),),
    "each CTA stores one group of columns": (("first += PARTS * GROUP", "first += 1000 * GROUP"),),
    "all CTAs store the first columns": (("first = (int32_t)cluster_rank() * GROUP", "first = 0"),),
    # tiles
    "all tiles have the first rows": (("tile.row = number % params.high * TILE_ROWS", "tile.row = 0"),),
    "all tiles have the first columns": (("number / params.high * COLUMNS", "0"),),
    "a cluster's CTAs have tiles of their own": (("(int32_t)blockIdx.x / params.parts", "(int32_t)blockIdx.x"),),
    "64 rows alone": (("tile.row + TILE_ROWS / 2 < params.rows", "false"),),
    # stores
    "stores beyond the last row": (("params.rows - row,", "params.rows - row + 1,"),),
    "the last row is left out": (("params.rows - row,", "params.rows - row - 1,"),),
    "warps of the second warpgroup store further down": (("threadIdx.x / 32 % 4 * 16", "threadIdx.x / 32 * 16"),),
    "warpgroups store the same rows": (("tile.row + half * (TILE_ROWS / 2) + (int32_t)", "tile.row + (int32_t)"),),
    "stores beyond the last column": (("row_elements, in + further < row_elements}", "row_elements, true}"),),
    "stores to the first matrix's result": (("params.out[matrix]", "params.out[0]"),),
    "stores as many columns as the first matrix has": (
        ("row_elements = params.columns[matrix]", "row_elements = params.columns[0]"),
    ),
    "stores each block to the group's first columns": (("Place{out + further,", "Place{out,"),),
    "stores to the first columns": (("row * row_elements + in", "row * row_elements"),),
    "adds no bias": (("if constexpr (BIASED)", "if constexpr (false)"),),
    "adds the biases of the tile's first columns": (
        ("add_bias<GROUP>(params, sums, column)", "add_bias<GROUP>(params, sums, tile.column)"),
    ),
}


def run(source: Path, seed: int) -> None:
    """Two and four parts, of three matrices and partial tiles, the ring more than once around."""
    width, rows, parts = (128, 64, 192)[seed % 3], (200, 70, 129, 64, 320)[seed % 5], (4, 2)[seed // 2 % 2]
    columns = (width + 40, width - 8, 2 * width)
    depth = 64 * (11, 43, 9)[seed % 3]
    check(
        rows,
        columns,
        depth,
        seed,
        biased=seed % 2 == 1,
        width=width,
        parts=parts,
        resident=4 + 4 * (seed % 2),
        source=source,
    )


@pytest.mark.full
@pytest.mark.parametrize("name", BROKEN)
def test_broken_split_k_kernels_are_caught(tmp_path: Path, name: str) -> None:
    check_caught(run, broken_copy(tmp_path, SOURCE, "split_k_mm.cu", BROKEN[name]), SEEDS)


@pytest.mark.full
def test_the_split_k_kernel_as_it_is_passes() -> None:
    """What catches the broken ones lets it pass."""
    for seed in SEEDS:
        run(SOURCE, seed)
