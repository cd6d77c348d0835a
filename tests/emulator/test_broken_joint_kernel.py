"""Lines of joint_mm.cu that must be as they are: with another in its place, ``joint.check`` or ``check_gated`` fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from emulator.broken import Changes, broken_copy, check_caught
from emulator.joint import SOURCE, check, check_gated, narrow_behind
from tw_compile.planning.joint_tiles import BOX, Tiling

SEEDS = range(12)
RETURNED = "if (read >= 0 && lane < 2) mbarrier_arrive_at(&shared.empty[read], lane);"
LAST_RETURNED = "  wgmma_wait<0>();\n  if (lane < 2) mbarrier_arrive_at(&shared.empty[read], lane);"
FULL, EMPTY = "wait(&shared.full[ring.stage], ring.parity);", "wait(&shared.empty[ring.stage], ring.parity ^ 1);"
BARRIERS = "mbarrier_init(&shared.empty[stage], 2 * 4 * CONSUMERS);"
BYTES_A, BYTES_B = "(tile.low ? 1 : 2) * HALF_A", "(tile.narrow ? 1 : 2) * HALF_B"
LAST_SYNC = "  cluster_sync();  // CTAs end together: a CTA that has ended takes in no copies and no arrivals\n"
FIRST_SYNC = "  cluster_sync();\n#if FED\n  if (rank == 0"
FIRST, OWN = "first = rank * ((boxes_b + 1) / 2)", "own = (rank ? boxes_b : boxes_b + 1) / 2"
STAGE_B, OFFSET_B = "first * box_columns * ROW_BYTES", "b + box * box_columns * ROW_BYTES"
COLUMN = "tile.column + (GATED ? box : first + box) * box_columns"
MATRIX = "matrix = GATED ? rank : matrix_of(params, column)"
PLACE = "at = column + further, matrix = GATED ? 0 : matrix_of(params, at), in = at - params.begins[matrix]"
BESIDE = "beside * HALF_B, row, column"
STEPS = "d[part], rows + columns_on(step), columns + part * (HALF_B >> 4) + columns_on(step), 1);"
BAND = "over - band * most < most ? over - band * most : most"

RING: dict[str, Changes] = {
    "waits for the other parity of full stages": ((FULL, FULL.replace("parity", "parity ^ 1")),),
    "waits for the other parity of empty stages": ((EMPTY, EMPTY.replace(" ^ 1", "")),),
    "reads stages that have not arrived": ((FULL, ""),),
    "fills stages that are being read": ((EMPTY, ""),),
    "a stage is returned while matmuls read it": (("wgmma_wait<1>", "wgmma_wait<2>"),),
    "a stage is returned before its matmuls": (
        (RETURNED, RETURNED.replace("read >= 0 && ", "").replace("read]", "ring.stage]")),
        (LAST_RETURNED, "  wgmma_wait<0>();"),
    ),
    "the last stage of a pair is not returned": ((LAST_RETURNED, "  wgmma_wait<0>();"),),
    "arrivals at the own CTA alone": (("lane < 2) mbarrier_arrive_at", "lane == cluster_rank()) mbarrier_arrive_at"),),
    "a stage is returned to its own CTA alone": (
        ("lane < 2) mbarrier_arrive_at", "lane == cluster_rank()) mbarrier_arrive_at"),
        (BARRIERS, BARRIERS.replace("2 * ", "")),
    ),
    "a stage is returned to its own CTA twice": (
        ("mbarrier_arrive_at(&shared.empty[read], lane)", "mbarrier_arrive_at(&shared.empty[read], cluster_rank())"),
    ),
    "waits for one CTA's readers": ((BARRIERS, BARRIERS.replace("2 * ", "")),),
    "waits for one warpgroup's readers": ((BARRIERS, BARRIERS.replace(" * CONSUMERS", "")),),
    "expects its own copies alone": ((BYTES_B, BYTES_B + " / 2"),),
    "expects too few bytes": ((BYTES_B, BYTES_B + " - 16"),),
    "expects too many bytes": ((BYTES_B, BYTES_B + " + 16"),),
    "expects all rows of low tiles": ((BYTES_A, "2 * HALF_A"),),
    "expects all columns of narrow tiles": ((BYTES_B, "2 * HALF_B"),),
    "mbarriers not visible to copies": (("    mbarrier_init_fence();\n", ""),),
    "copies to a CTA that has not begun": (
        (FIRST_SYNC, FIRST_SYNC.replace("cluster_sync()", "barrier_sync(0, THREADS)")),
    ),
    "ends while the other CTA arrives": ((LAST_SYNC, ""),),
    "ends while the other CTA arrives, after its own threads": ((LAST_SYNC, "  barrier_sync(0, THREADS);\n"),),
}

OPERANDS: dict[str, Changes] = {
    "shares columns with nobody": (("load_tile_to(BOTH", "load_tile_to(1 << rank"),),
    "shares columns with the other alone": (("load_tile_to(BOTH", "load_tile_to(2 >> rank"),),
    "both load all boxes": ((FIRST, "first = 0"), (OWN, "own = boxes_b")),
    "nobody loads the odd box": ((OWN, "own = boxes_b / 2"),),
    "both load the odd box": ((FIRST, "first = rank * (boxes_b / 2)"), (OWN, "own = (boxes_b + 1) / 2")),
    "both load the same columns": ((COLUMN, COLUMN.replace("GATED ? box : first + box", "box")),),
    "both load to the same columns": ((STAGE_B, "0"),),
    "loads the second columns over the first": ((OFFSET_B, "b"),),
    "second columns are the first": ((COLUMN, "tile.column"),),
    "loads half of the columns": (("params.boxes_b / (tile.narrow ? 2 : 1)", "params.boxes_b / 2"),),
    "loads all columns of narrow tiles": (("params.boxes_b / (tile.narrow ? 2 : 1)", "params.boxes_b"),),
    "loads half of the rows": (("tile.low ? 1 : params.boxes_a", "1"),),
    "loads all rows of low tiles": (("tile.low ? 1 : params.boxes_a", "params.boxes_a"),),
    "loads boxes that are not there": (("      if (box == own) break;\n", ""),),
    "loads the first box alone": (("if (box == own) break;", "if (box > 0) break;"),),
    "loads the second rows over the first": (("load_tile(a + HALF_A", "load_tile(a"),),
    "second rows are the first": (("tile.row + TILE_ROWS / 2, full", "tile.row, full"),),
    "loads from the first matrix": ((MATRIX, "matrix = GATED ? rank : 0"),),
    "loads from the matrix of the tile's first column": ((MATRIX, MATRIX.replace("column)", "tile.column)")),),
    "loads columns that lie in the matrices before": (("column - (GATED", "column - 0 * (GATED"),),
    "warpgroups multiply the same rows": (("a = below * HALF_A", "a = 0"),),
    "warpgroups of low tiles multiply different rows": (("a = below * HALF_A", "a = warpgroup * HALF_A"),),
    "warpgroups of low tiles multiply the same columns": ((BESIDE, "0, row, column"),),
    "the second warpgroup's columns begin too early": ((BESIDE, BESIDE.replace("HALF_B", "HALF_B / 2")),),
    "multiplies every other 16 columns": ((STEPS, STEPS + "\n        step += 16;"),),
    "multiplies the same depth of columns four times": ((STEPS, STEPS.replace(" + columns_on(step), 1", ", 1")),),
    "multiplies the same depth of rows four times": ((STEPS, STEPS.replace("rows + columns_on(step)", "rows")),),
    "sums begin again with each stage": ((STEPS, STEPS.replace("1);", "step);")),),
    "columns are read where rows lie": (("stage + 2 * HALF_A + b", "stage + HALF_A + b"),),
    "no fence before matmuls": (("    wgmma_fence();\n", ""),),
    "matmuls are not committed": (("    wgmma_commit();\n", ""),),
    "stores sums that are not there": (("  wgmma_wait<0>();\n", ""),),
}

TILES: dict[str, Changes] = {
    "low tiles are narrow": (("behind >= 0 && !tile.low", "behind >= 0"),),
    "both narrow tiles are the first": (("behind % 2 * (OUT_COLUMNS / 2)", "0"),),
    "a narrow pair for each whole one": (("params.whole + behind / 2", "params.whole + behind"),),
    "the first low tile is not": (("tile.low = pair >= pairs", "tile.low = pair > pairs"),),
    "any rows behind the last 256 are low": (("(params.rows + TILE_ROWS - 1) / (2", "params.rows / (2"),),
    "low tiles' rows are the first": (("row = high * 2 * TILE_ROWS", "row = 0"),),
    "narrow tiles count among low ones": (("column = behind - 2 * (pairs - params.whole)", "column = behind"),),
    "CTAs of low pairs have 128 rows each": (("(tile.low ? TILE_ROWS / 2 : TILE_ROWS)", "TILE_ROWS"),),
    "CTAs have 64 rows each": (("(tile.low ? TILE_ROWS / 2 : TILE_ROWS)", "(TILE_ROWS / 2)"),),
    "both CTAs compute the same rows": (("rank * (tile.low ? TILE_ROWS / 2 : TILE_ROWS)", "0"),),
    "a cluster computes its first pair alone": (("number += gridDim.x / 2", "number += gridDim.x * 1000"),),
    "clusters compute the pairs of others": (("number += gridDim.x / 2", "number += gridDim.x"),),
    "warpgroups of low tiles have different rows": (("tile.low ? 0 : warpgroup", "warpgroup"),),
    "low tiles are computed as whole ones": (("if (!tile.low && !tile.narrow)", "if (!tile.narrow)"),),
    "narrow tiles are computed as whole ones": (("if (!tile.low && !tile.narrow)", "if (!tile.low)"),),
    "warps of the second warpgroup store further down": (("warp % 4 * 16", "warp * 16"),),
    "warpgroups of low tiles store the same columns": (("beside * (OUT_COLUMNS / 2)", "0"),),
}

BANDS: dict[str, Changes] = {
    "bands are not of the pairs that are left": ((BAND, "most"),),
    "bands are of all pairs over each other": ((BAND, "high"),),
    "the first band alone": (("band = pair / (most * wide)", "band = 0"),),
    "the order in a band is that of a whole one": (("in_band % here", "in_band % BAND"),),
    "columns in a band are those of a whole one": (("in_band / here", "in_band / BAND"),),
}

STORES: dict[str, Changes] = {
    "stores beyond the last row": (("params.rows - row,", "params.rows - row + 1,"),),
    "the last row is left out": (("params.rows - row,", "params.rows - row - 1,"),),
    "stores beyond the last column": (("row_elements, in < row_elements}", "row_elements, true}"),),
    "the last columns are left out": (("row_elements, in < row_elements}", "row_elements, in + 8 < row_elements}"),),
    "stores to the first matrix's result": (("params.out[matrix]", "params.out[0]"),),
    "stores as many columns as the first matrix has": (
        ("row_elements = params.columns[matrix]", "row_elements = params.columns[0]"),
    ),
    "stores to the first columns": (("row * row_elements + in", "row * row_elements + further"),),
    "stores where all matrices have the column": (("row * row_elements + in", "row * row_elements + at"),),
    "stores to the matrix of the tile's first column": (
        (PLACE, PLACE.replace("matrix_of(params, at)", "matrix_of(params, column)")),
    ),
}

GATED: dict[str, Changes] = {
    "both CTAs load the first matrix": ((MATRIX, MATRIX.replace("rank", "0")),),
    "the first matrix is the second": ((MATRIX, MATRIX.replace("rank", "1 - rank")),),
    "the second CTA loads columns beside the first's": (
        (COLUMN, COLUMN.replace("GATED ? box : first + box", "first + box")),
    ),
    "the second matrix's columns are behind the first's": (
        ("column - (GATED ? 0 : params.begins[matrix])", "column - params.begins[matrix]"),
    ),
    "tiles store as many columns as they load": (("GATED ? COLUMNS / 2 : COLUMNS", "COLUMNS"),),
    "low tiles are of one matrix for each warpgroup": (("GATED && tile.low", "false"),),
    "narrow tiles are computed as low ones": (("GATED && tile.low", "GATED"),),
    "warpgroups of low tiles multiply the same columns": (("beside * HALF_B / 2", "0"),),
    "the second warpgroup's columns are the second matrix's": (("beside * HALF_B / 2", "beside * HALF_B"),),
    "the second matrix's columns begin too early": (("(HALF_B >> 4)", "(HALF_B / 2 >> 4)"),),
    "the first product is both factors": (("d[(N / 4 + i) / EACH][(N / 4 + i) % EACH]", "d[0][i]"),),
    "the factors are of the columns beside": (("(N / 4 + i) % EACH", "(N / 4 + i + 4) % EACH"),),
    "silu of the other factor": (
        ("silu(d[0][i]) * d[(N / 4 + i)", "d[0][i] * silu(d[(N / 4 + i)"),
        ("% EACH];", "% EACH]);"),
    ),
    "products without silu": (("silu(d[0][i])", "d[0][i]"),),
}

BIASED: dict[str, Changes] = {
    "adds no bias": (("if constexpr (BIASED) add_bias", "if constexpr (false) add_bias"),),
}

MATRICES_HEADER: dict[str, Changes] = {
    "does not reach the last matrix": (("next < MATRICES; next++", "next < MATRICES - 1; next++"),),
    "stays with the first matrix": (("matrix += column >= params.begins[next]", "matrix += 0"),),
    "a matrix begins one block later": (("column >= params.begins[next]", "column > params.begins[next]"),),
}

BIASES: dict[str, Changes] = {
    "adds the first matrix's": (("params.biases[matrix]", "params.biases[0]"),),
    "adds those of the first columns": (("params.biases[matrix] + in +", "params.biases[matrix] + block * 8 +"),),
    "adds those of the matrix of the first column": (
        ("matrix_of(params, column + block * 8)", "matrix_of(params, column)"),
    ),
    "a block's is the first block's": (("in = column + block * 8 - params", "in = column - params"),),
    "a thread's is the first thread's": (("threadIdx.x % 4 * 2", "0"),),
    "a thread's is that of another row": (("threadIdx.x % 4 * 2", "threadIdx.x / 4 % 4 * 2"),),
    "both columns have the first one's": (("i % 2 ? two[0] & 0xffff0000u : two[0] << 16", "two[0] << 16"),),
    "both columns have the second one's": (("i % 2 ? two[0] & 0xffff0000u : two[0] << 16", "two[0] & 0xffff0000u"),),
    "the first row alone": (("i < 4; i++) d[block", "i < 2; i++) d[block"),),
    "reads beyond the matrix's": (("if (in < params.columns[matrix]) load", "load"),),
    "the last columns have none": (("in < params.columns[matrix]", "in + 8 < params.columns[matrix]"),),
}

TILES_HEADER: dict[str, Changes] = {
    "parity stays when the ring wraps": (("      parity ^= 1;\n", ""),),
    "parts of a block in another order": (("pick(w, quad_lane ^ step)", "pick(w, step)"),),
    "rows of a warp in another order": (("row = below * 8", "row = (1 - below) * 8"),),
    "stores blocks beyond the tile": (("own < N / 8 && ", ""),),
    "stores blocks beyond the matrix": ((" && to.exists", ""),),
    "stores rows beyond the matrix": (("row < rows && ", ""),),
}

WGMMA_HEADER: dict[str, Changes] = {
    "rows of an operand too near": (("(1024ull >> 4) << 32", "(512ull >> 4) << 32"),),
    "steps of twice the columns": (("k * 2 >> 4", "k * 4 >> 4"),),
}


def some_tiles(seed: int, rows: int, columns: Sequence[int], width: int) -> Tiling:
    """With tiles of one matrix each, or of two and more."""
    multiple = BOX if seed // 2 % 2 else width
    can_be_narrow = multiple == width or width % (2 * BOX) == 0
    return narrow_behind(seed % 5 if can_be_narrow else 99, rows, columns, width, multiple)


def run(source: Path, seed: int) -> None:
    """All kinds of pairs, of three matrices and partial tiles, more than clusters, the ring more than once around."""
    width, rows = (192, 224)[seed % 2], (300, 400, 600, 130)[seed // 2 % 4]
    columns = (2 * width + 40, width - 8, 2 * width)
    tiles = some_tiles(seed, rows, columns, width)
    check(rows, columns, 192, seed, tiles=tiles, sms=2 + 2 * (seed % 3), resident=2 + 2 * (seed % 2), source=source)


def run_biased(source: Path, seed: int) -> None:
    """As :func:`run`."""
    width, rows = (192, 224)[seed % 2], (300, 400, 70)[seed % 3]
    columns = (2 * width + 40, width - 8, 24)
    tiles = some_tiles(seed, rows, columns, width)
    check(rows, columns, 64, seed, biased=True, tiles=tiles, sms=2 + 2 * (seed % 3), resident=2, source=source)


def run_bands(source: Path, seed: int) -> None:
    """More pairs over each other than in a band."""
    rows, columns = 10 * 256 + 1, (192, 200)
    check(rows, columns, 64, seed, tiles=narrow_behind(17, rows, columns, 192), sms=6, source=source)


def run_gated(source: Path, seed: int) -> None:
    """All kinds of pairs here, too."""
    width, rows = (192, 224)[seed % 2], (300, 400, 70)[seed % 3]
    tiles = narrow_behind(seed % 4, rows, (2 * width + 48,), width)
    check_gated(rows, width + 24, 128, seed, tiles=tiles, sms=2 + 2 * (seed % 3), resident=2, source=source)


BROKEN = {
    f"{kind}: {name}": (runs, file, change)
    for kind, runs, file, changes in (
        ("ring", run, "joint_mm.cu", RING),
        ("operands", run, "joint_mm.cu", OPERANDS),
        ("tiles", run, "joint_mm.cu", TILES),
        ("bands", run_bands, "joint_mm.cu", BANDS),
        ("stores", run, "joint_mm.cu", STORES),
        ("biased", run_biased, "joint_mm.cu", BIASED),
        ("biases", run_biased, "matrices.cuh", BIASES),
        ("matrices", run, "matrices.cuh", MATRICES_HEADER),
        ("gated", run_gated, "joint_mm.cu", GATED),
        ("tiles.cuh", run, "tiles.cuh", TILES_HEADER),
        ("wgmma.cuh", run, "wgmma.cuh", WGMMA_HEADER),
    )
    for name, change in changes.items()
}


@pytest.mark.full
@pytest.mark.parametrize("name", BROKEN)
def test_broken_joint_kernels_are_caught(tmp_path: Path, name: str) -> None:
    runs, file, changes = BROKEN[name]
    check_caught(runs, broken_copy(tmp_path, SOURCE, file, changes), SEEDS)


@pytest.mark.full
@pytest.mark.parametrize("runs", [run, run_bands, run_biased, run_gated])
def test_the_joint_kernel_as_it_is_passes(runs: Callable[[Path, int], None]) -> None:
    """What catches the broken ones lets it pass."""
    for seed in SEEDS:
        runs(SOURCE, seed)
