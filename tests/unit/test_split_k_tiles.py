"""Where few rows have their depth split: tiles cover what there is, run at once, and are nearly the fastest of all."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tw_compile.planning.joint_tiles import BOX, MOST_JOINT, tiles_beside, tiling
from tw_compile.planning.split_k_tiles import (
    MOST_ROWS,
    MOST_SHARE,
    PARTS,
    TILE_ROWS,
    WIDTHS,
    SplitK,
    candidates,
    clusters,
    split_k,
    whole_us,
)

MEASURED = Path(__file__).parents[2] / "benchmarks/results/2026-11-29-h200-split-k-tilings.csv"
GEMMS = {
    "llama-3.1-8b tp2": (4096, (2048, 512, 512)),
    "llama-3.1-8b tp4": (4096, (1024, 256, 256)),
    "llama-3.3-70b tp2": (8192, (4096, 512, 512)),
    "llama-3.3-70b tp4": (8192, (2048, 256, 256)),
}
SMS = 132
SHAPES = {
    "rows": st.integers(1, 1000),
    "depth": st.integers(1, 256).map(lambda stages: 64 * stages),
    "columns": st.lists(st.integers(1, 600).map(lambda blocks: 8 * blocks), min_size=1, max_size=MOST_JOINT).map(tuple),
    "sms": st.integers(8, 160),
}


@settings(max_examples=300, deadline=None)
@given(**SHAPES)
def test_tiles_cover_all_rows_and_columns_and_run_at_once(
    rows: int, depth: int, columns: tuple[int, ...], sms: int
) -> None:
    found = list(candidates(rows, depth, columns, sms))
    assert len({(tiles.width, tiles.parts) for tiles in found}) == len(found)
    for tiles in found:
        assert tiles.width in WIDTHS and tiles.parts in PARTS and tiles.us > 0
        assert tiles.tiles == -(-rows // TILE_ROWS) * tiles_beside(columns, tiles.width, BOX)
        assert depth // 64 >= tiles.parts, "each SM has a stage"
        assert tiles.tiles <= clusters(tiles.parts, sms) and tiles.tiles * tiles.parts <= sms


@settings(max_examples=300, deadline=None)
@given(**SHAPES)
def test_the_chosen_tiles_are_predicted_to_be_the_fastest(
    rows: int, depth: int, columns: tuple[int, ...], sms: int
) -> None:
    chosen, whole = split_k(rows, depth, columns, sms), whole_us(rows, depth, columns, sms)
    times = [tiles.us for tiles in candidates(rows, depth, columns, sms)]
    assert (chosen is None) == (rows > MOST_ROWS or not times or min(times) >= MOST_SHARE * whole)
    assert chosen is None or chosen.us == min(times)


def test_a_gpu_has_room_for_so_many_clusters() -> None:
    """A driver said 66 and 30 of one H200 (``cuOccupancyMaxActiveClusters``). Others may have one of four less."""
    assert (clusters(2, SMS), clusters(4, SMS)) == (66, 29)


@pytest.mark.parametrize("rows", [1024, 4096])
def test_many_rows_keep_whole_depths(rows: int) -> None:
    assert all(split_k(rows, depth, columns, SMS) is None for depth, columns in GEMMS.values())


Measured = dict[tuple[str, int], dict[object, float]]


@pytest.fixture(scope="module")
def measured() -> Measured:
    """Microseconds by model and rows, and then by width and parts, or by the kernel's name."""
    found: Measured = {}
    with MEASURED.open() as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            key = (int(row["width"]), int(row["parts"])) if row["kernel"] == "split_k" else row["kernel"]
            found.setdefault((row["model"], int(row["tokens"])), {})[key] = float(row["us"])
    return found


def chosen_us(times: dict[object, float], tiles: SplitK | None) -> float:
    return times["whole"] if tiles is None else times[tiles.width, tiles.parts]


def test_what_is_chosen_is_nearly_the_fastest_of_those_measured(measured: Measured) -> None:
    shares = []
    for (model, rows), times in measured.items():
        chosen = split_k(rows, *GEMMS[model], SMS)
        shown = {(tiles.width, tiles.parts) for tiles in candidates(rows, *GEMMS[model], SMS)}
        least = min(us for key, us in times.items() if key in shown or key == "whole")
        shares.append(chosen_us(times, chosen) / least)
    assert len(shares) == 36 and max(shares) < 1.09 and mean(shares) < 1.01


def test_what_is_chosen_gains_and_what_is_not_would_not(measured: Measured) -> None:
    for (model, rows), times in measured.items():
        found = list(candidates(rows, *GEMMS[model], SMS))
        if split_k(rows, *GEMMS[model], SMS) is not None:
            assert chosen_us(times, split_k(rows, *GEMMS[model], SMS)) < 0.9 * times["whole"]
        elif found:
            fastest = min(found, key=lambda tiles: tiles.us)
            assert chosen_us(times, fastest) > 0.99 * times["whole"]


def test_up_to_256_rows_all_gain(measured: Measured) -> None:
    """Of the faster of the GEMM with whole depths and the library's."""
    gains = {
        key: min(times["whole"], times["library"]) / chosen_us(times, split_k(key[1], *GEMMS[key[0]], SMS))
        for key, times in measured.items()
        if key[1] <= 256
    }
    assert len(gains) == 24 and min(gains.values()) > 1.2 and max(gains.values()) > 2


def test_times_are_predicted(measured: Measured) -> None:
    split = [
        abs(tiles.us / times[tiles.width, tiles.parts] - 1)
        for (model, rows), times in measured.items()
        for tiles in candidates(rows, *GEMMS[model], SMS)
    ]
    whole = [abs(whole_us(rows, *GEMMS[model], SMS) / times["whole"] - 1) for (model, rows), times in measured.items()]
    assert mean(split) < 0.065 and max(split) < 0.2
    assert mean(whole) < 0.05 and max(whole) < 0.15


@pytest.mark.parametrize("sms", [114, 132])
@pytest.mark.parametrize("model", GEMMS)
def test_few_rows_split_their_depth_on_other_gpus_too(model: str, sms: int) -> None:
    assert all(split_k(rows, *GEMMS[model], sms) is not None for rows in (1, 16, 64, 128))


def test_tiles_of_whole_depths_take_longer_the_more_there_are() -> None:
    columns = (2048, 512, 512)
    times = [
        (tiling(rows, columns, SMS // 2).time, whole_us(rows, 4096, columns, SMS)) for rows in (64, 512, 1024, 4096)
    ]
    assert times == sorted(times)
