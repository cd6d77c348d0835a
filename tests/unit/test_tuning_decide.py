"""From measured times to ranges of bytes: total, exact at both sides of a boundary, and never decided by noise."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_rows import runs_of_file

from tw_compile.gating import Entry, Source, Table, read_table, table_text
from tw_compile.gating.facts import Backend
from tw_compile.gating.layers import shipped_tables
from tw_compile.kernels.transports.selection import shipped_steps
from tw_compile.tuning.decide import MOST_APART, NOISE, Chooser, entries_from
from tw_compile.tuning.measured import AT_LEAST, LEFT, UNFUSED, Timing, measured_steps, timings
from tw_compile.tuning.tables import shipped_gate

DATA = Path(__file__).parents[1] / "data"
HERE = Source("here", "measured", ("2x GPU", "torch 2", "2026-11-21", "tune"))
BEFORE = Source("before", "default", ("somebody said so",))
WAYS = (LEFT, "p2p", "nccl")


def entry(begin: int, end: int | None, transport: str | None) -> Entry:
    decision = "left" if transport is None else "fused"
    return Entry("any", "any", begin, end, decision, transport, BEFORE)  # type: ignore[arg-type]


FUSED, ALONE = (entry(0, None, "p2p"),), (entry(0, None, None),)


def at(nbytes: int, way: str, us: float, spread: float = 1.0, hidden: int = 8192) -> Timing:
    return Timing(0, nbytes, hidden, way, us / spread, us, us * spread)


def decisions(found: list[Entry]) -> list[tuple[int, int | None, str, str | None, str]]:
    return [(one.from_bytes, one.to_bytes, one.decision, one.transport, one.source.kind) for one in found]


def derived(times: list[Timing], default: tuple[Entry, ...], backend: Backend = Backend.NCCL) -> list[Entry]:
    return entries_from(2, backend, times, default, HERE)


def test_without_peer_access_what_asks_for_peers_is_compared_as_it_runs_there() -> None:
    times = [at(2**20, "host", 100.0), at(2**20, LEFT, 50.0), at(2**21, "host", 50.0), at(2**21, LEFT, 100.0)]
    for default in (FUSED, (entry(0, None, "auto"),)):
        measured = [one for one in decisions(derived(times, default)) if one[-1] == "measured"]
        assert [(decision, transport) for _, _, decision, transport, _ in measured] == [
            ("left", None),
            ("fused", "host"),
        ]


@st.composite
def times(draw: st.DrawFn) -> list[Timing]:
    sizes = draw(st.lists(st.integers(1, 2**32), min_size=1, max_size=5, unique=True))
    microseconds, spreads = st.floats(1.0, 1000.0), st.floats(1.0, 1.3)
    return [
        at(nbytes, way, draw(microseconds), draw(spreads), hidden)
        for nbytes in sizes
        for way in draw(st.sets(st.sampled_from(WAYS)))
        for hidden in draw(st.sampled_from([(8192,), (4096, 8192)]))
    ]


@st.composite
def defaults(draw: st.DrawFn) -> tuple[Entry, ...]:
    bounds = [0, *sorted(draw(st.lists(st.integers(1, 2**32), max_size=3, unique=True)))]
    transports = [draw(st.sampled_from([None, "p2p", "auto", "nccl", "multimem"])) for _ in bounds]
    ends = [*bounds[1:], None]
    return tuple(entry(*one) for one in zip(bounds, ends, transports, strict=True))


def containing(found: list[Entry], nbytes: int) -> Entry:
    (one,) = (e for e in found if e.from_bytes <= nbytes and (e.to_bytes is None or nbytes < e.to_bytes))
    return one


@settings(max_examples=150, deadline=None)
@given(times(), defaults(), st.sampled_from(list(UNFUSED)), st.lists(st.integers(0, 2**33), max_size=20))
def test_ranges_cover_all_sizes_and_say_what_the_choice_is_on_both_sides_of_every_boundary(
    measured: list[Timing], default: tuple[Entry, ...], backend: Backend, more: list[int]
) -> None:
    found = derived(measured, default, backend)
    table = Table("t", "sm90", tuple(found))
    assert read_table(table_text(table), "t") == table  # which refuses gaps, overlaps and what does not begin at 0
    chooser = Chooser(backend, measured, default)
    sizes = {one.from_bytes for one in found} | {one.from_bytes - 1 for one in found[1:]} | set(more)
    for nbytes in sizes | {one.nbytes for one in measured}:
        one, chosen = containing(found, nbytes), chooser.choose(nbytes)
        assert (one.source == HERE) == chosen.sure
        if chosen.sure:
            assert one.decision == ("left" if chosen.way == LEFT else "fused")
        else:
            assert (one.decision, one.transport) == (chosen.default.decision, chosen.default.transport)


@settings(max_examples=100, deadline=None)
@given(times(), defaults(), st.floats(0.1, 1.0), st.lists(st.integers(0, 2**33), min_size=1, max_size=30))
def test_faster_fused_kernels_never_leave_more(
    measured: list[Timing], default: tuple[Entry, ...], factor: float, sizes: list[int]
) -> None:
    faster = [
        one
        if one.way == LEFT
        else replace(one, p20_us=one.p20_us * factor, p50_us=one.p50_us * factor, p80_us=one.p80_us * factor)
        for one in measured
    ]
    before, after = derived(measured, default), derived(faster, default)
    for nbytes in sizes:
        if containing(before, nbytes).decision == "fused":
            assert containing(after, nbytes).decision == "fused"


@settings(max_examples=100, deadline=None)
@given(
    defaults(),
    st.lists(st.integers(1, 2**32), min_size=1, max_size=5, unique=True),
    st.data(),
)
def test_a_difference_inside_the_noise_keeps_the_default(
    default: tuple[Entry, ...], sizes: list[int], data: st.DataObject
) -> None:
    little = st.floats(1.0, 1.0 + 0.99 * NOISE)
    measured = [at(nbytes, way, 10.0 * data.draw(little)) for nbytes in sizes for way in WAYS]
    found = derived(measured, default)
    assert {one.source.kind for one in found} == {"default"}
    for nbytes in [*sizes, *(one.from_bytes for one in default)]:
        one, usual = containing(found, nbytes), containing(list(default), nbytes)
        assert (one.decision, one.transport) == (usual.decision, usual.transport)


def test_repeats_that_scatter_are_noise_too() -> None:
    measured = [at(1000, LEFT, 10.0, 1.2), at(1000, "p2p", 8.0, 1.2)]
    assert {one.source.kind for one in derived(measured, ALONE)} == {"default"}
    steady = [replace(one, p20_us=one.p50_us, p80_us=one.p50_us) for one in measured]
    assert decisions(derived(steady, ALONE))[1] == (1000, 1001, "fused", "p2p", "measured")


def test_a_crossover_is_interpolated_in_the_logarithm_of_bytes_to_where_it_is_sure() -> None:
    measured = [
        at(2**20, LEFT, math.exp(0.5)),
        at(2**20, "p2p", 1.0),
        at(2**22, LEFT, 1.0),
        at(2**22, "p2p", math.exp(0.5)),
    ]
    noise = math.log1p(NOISE)
    sure_fused, sure_left = (2**20 * 4 ** (0.5 + sign * noise) for sign in (-1, 1))
    found = derived(measured, FUSED)
    assert [one[2:] for one in decisions(found)] == [
        ("fused", "p2p", "default"),
        ("fused", "p2p", "measured"),
        ("fused", "p2p", "default"),
        ("left", None, "measured"),
        ("fused", "p2p", "default"),
    ]
    begins = [one.from_bytes for one in found]
    assert begins == [0, 2**20, math.ceil(sure_fused), math.floor(sure_left) + 1, 2**22 + 1]
    # With the other default the sure parts are the same, and what lies between them is left.
    other = derived(measured, ALONE)
    assert [one.from_bytes for one in other] == begins and other[2].decision == "left"


def test_what_lies_beyond_the_grid_or_in_a_wide_gap_is_not_measured() -> None:
    far = 2**10 * MOST_APART * 2
    measured = [at(nbytes, way, us) for nbytes in (2**10, far) for way, us in ((LEFT, 1.0), ("p2p", 2.0))]
    assert [(one[0], one[2]) for one in decisions(derived(measured, FUSED))] == [
        (0, "fused"),
        (2**10, "left"),
        (2**10 + 1, "fused"),
        (far, "left"),
        (far + 1, "fused"),
    ]


def test_every_hidden_size_of_the_same_bytes_must_agree() -> None:
    measured = [
        at(1000, LEFT, 1.0),
        at(1000, "p2p", 2.0),
        at(1000, LEFT, 1.0, hidden=64),
        at(1000, "p2p", 0.5, hidden=64),
    ]
    assert {one.decision for one in derived(measured, FUSED)} == {"fused"}
    assert {one.decision for one in derived(measured, ALONE)} == {"left"}


def test_of_several_ways_to_fuse_the_fastest_is_taken() -> None:
    measured = [at(1000, LEFT, 4.0), at(1000, "p2p", 3.0), at(1000, "nccl", 2.0)]
    assert containing(derived(measured, ALONE), 1000).transport == "nccl"
    assert containing(derived(measured, FUSED), 1000).transport == "nccl"


def test_a_lower_bound_can_show_that_fusing_pays_and_not_that_it_does_not() -> None:
    (backend,) = AT_LEAST
    slower, faster = ([at(1000, LEFT, 2.0), at(1000, "p2p", us)] for us in (4.0, 1.0))
    kept = containing(derived(slower, FUSED, backend), 1000)
    assert (kept.decision, kept.source.kind) == ("fused", "default") and "lower bound" in str(kept.source)
    assert containing(derived(faster, ALONE, backend), 1000).source == HERE


@pytest.mark.parametrize(
    ("ranks", "files"),
    [
        (2, ["h200-kernel-tp2.csv"]),
        (4, ["h200-kernel-tp4.csv", "h200-kernel-tp4-gated.csv"]),
    ],
)
def test_shipped_ranges_of_h200_follow_from_the_committed_rows(ranks: int, files: list[str]) -> None:
    runs = [run for file in files for run in runs_of_file(str(DATA / file))]
    steps = measured_steps(runs, ())
    shipped = shipped_steps("NVIDIA H200", ranks)
    assert tuple(steps) == shipped == tuple(measured_steps(runs, shipped))
    default = shipped_gate("generic")
    for backend in UNFUSED:
        found = entries_from(ranks, backend, timings(runs, backend, steps), default.entries(ranks, backend), HERE)
        ranges = list(shipped_tables()["sm90"].ranges((ranks, backend)))
        assert decisions(found) == decisions(ranges), backend


def test_files_that_bench_kernel_did_not_write_are_named(tmp_path: Path) -> None:
    for name, text, problem in (
        ("a.csv", "label,kind\nx,ours\n", "no 'world_size'"),
        ("b.csv", "", "no rows"),
        ("c.json", "{", "Expecting"),
        ("d.json", json.dumps({"rows": []}), "no 'world_size'"),
    ):
        file = tmp_path / name
        file.write_text(text)
        with pytest.raises(ValueError) as error:
            runs_of_file(str(file))
        assert str(error.value).startswith(f"{file}: expected ") and problem in str(error.value)
    with pytest.raises(ValueError, match=r"nowhere\.csv: expected a file that can be read"):
        runs_of_file(str(tmp_path / "nowhere.csv"))
