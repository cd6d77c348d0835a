"""From which size on the shipped table has codes over peer memory: what the benchmarks' files say."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import pytest

from tw_compile.config import Config
from tw_compile.gating import Node
from tw_compile.gating.table import WireEntry
from tw_compile.own_gate import own_gate
from tw_compile.planning.evidence import measured_layers
from tw_compile.tuning.wires import EXACT_LABELS

MEBI = 2**20
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = {
    2: (
        "2026-11-24-2xh100-kernel-wires-tp2",
        "2026-11-26-2xh100-kernel-wires-tp2",
        "2026-11-26-2xh200-kernel-wires-tp2",
    ),
    4: ("2026-11-26-4xh100-kernel-wires-tp4", "2026-11-27-4xh100-kernel-wires-tp4"),
}
LAYER = "2026-11-26-2xh100-layer-int8-llama-3.1-8b-tp2"

Times = dict[str, tuple[float, float, float]]
"""By label, microseconds at the 20th, 50th and 80th percentile."""


@cache
def times(name: str) -> dict[int, Times]:
    """By bytes of the message, what was timed and right."""
    found: dict[int, Times] = {}
    with (RESULTS / f"{name}.csv").open() as file:
        for row in csv.DictReader(file):
            if row["outcome"] == "timed" and row["numerics"] == "ok":
                of_size = found.setdefault(int(row["nbytes"]), {})
                of_size[row["label"]] = (float(row["p20_us"]), float(row["p50_us"]), float(row["p80_us"]))
    return found


def pairs(world_size: int, wire: str) -> list[tuple[int, float, bool]]:
    """Bytes, the share of the fastest exact row's time, and whether a slow run in codes beats a fast one of exact rows."""
    compared = []
    for name in FILES[world_size]:
        for nbytes, of_size in times(name).items():
            coded = of_size.get(f"tw-push-two-shot-{wire}")
            if coded is not None:
                exact = min(
                    (of_size[label] for label in EXACT_LABELS["p2p"] if label in of_size), key=lambda one: one[1]
                )
                compared.append((nbytes, coded[1] / exact[1], coded[2] < exact[0]))
    return sorted(compared)


def shipped(world_size: int, wire: str) -> WireEntry:
    found = own_gate(Config(), Node((9, 0), False)).wire_entry(wire, world_size=world_size, transport="p2p")
    assert found is not None
    return found[1]


@pytest.mark.parametrize("wire", ["int8", "int6"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_codes_are_taken_from_where_all_measured_sizes_are_faster(world_size: int, wire: str) -> None:
    entry, compared = shipped(world_size, wire), pairs(world_size, wire)
    from_there = [(share, faster) for nbytes, share, faster in compared if nbytes >= entry.from_bytes]
    assert len(from_there) >= 4 and all(faster for _, faster in from_there)
    assert max(share for share, _ in from_there) < 0.79
    ((nbytes, share, faster),) = [pair for pair in compared if pair[0] < entry.from_bytes]
    assert nbytes == MEBI and not faster
    assert entry.below is not None and f"at 1 MiB codes take {share:.2f} of" in entry.below
    smallest = min(nbytes for nbytes, _, faster in compared if faster)
    assert entry.from_bytes == (2 * MEBI if (world_size, wire) == (2, "int8") else smallest == 4 * MEBI and smallest)


def test_between_two_ranks_a_layer_was_faster_with_int8_at_two_mebibytes() -> None:
    assert sorted(times(LAYER)) == [2 * MEBI, 4 * MEBI]
    for of_size in times(LAYER).values():
        assert of_size["fused-int8"][2] < of_size["fused"][0] < 1.04 * of_size["fused-int8"][1]


def test_halves_with_exact_rows_are_faster_by_the_figures_that_are_named() -> None:
    """The layers' and the calls' times are of different runs. What codes save of a layer is taken to be what its calls save."""
    (layer,) = (
        one
        for one in measured_layers("NVIDIA H100 80GB HBM3", "stream")
        if one.group and (one.world_size, one.tokens) == (4, 1024)
    )
    of_size = times(FILES[4][0])[16 * MEBI]
    saved = of_size["tw-push-two-shot"][1] - of_size["tw-push-two-shot-int8"][1]
    assert (layer.split_us, layer.fused_us, round(saved)) == (744.0, 824.3, 26)
    assert layer.fused_us is not None and layer.fused_us - 2 * saved == pytest.approx(772.5, abs=0.5)


def test_at_8_mebibytes_halves_were_slower_than_whole_layers() -> None:
    found = [
        one.ratio
        for one in measured_layers("NVIDIA H100 80GB HBM3", "stream")
        if one.group and one.shape.message_bytes(one.tokens) == 8 * MEBI and one.joined
    ]
    assert len(found) == 2 and min(found) > 1.0
