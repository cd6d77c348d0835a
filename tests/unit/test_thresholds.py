"""Tables of thresholds: reading, writing, errors, and which layer counts."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tw_compile.gating import (
    ANY,
    BACKENDS,
    Entry,
    Gate,
    Node,
    Settings,
    Source,
    Table,
    read_table,
    table_text,
    tables_of,
    threshold_layers,
)
from tw_compile.gating.layers import shipped_tables
from tw_compile.gating.table import DEVICE_CLASSES
from tw_compile.kernels.collective.transports import AUTO, names_for

WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(str.strip)
NAMES = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def sources(draw: st.DrawFn) -> Source:
    name, kind = draw(NAMES), draw(st.sampled_from(["measured", "public", "default"]))
    if kind == "measured":
        return Source(name, kind, (draw(WORDS), draw(WORDS), draw(st.dates()).isoformat(), draw(WORDS)))
    return Source(name, kind, (draw(WORDS),))


@st.composite
def tables(draw: st.DrawFn, device_class: str | None = None) -> Table:
    known = draw(st.lists(sources(), min_size=1, max_size=3, unique_by=lambda source: source.name))
    world_sizes = st.one_of(st.integers(2, 16), st.just(ANY))
    keys = st.tuples(world_sizes, st.sampled_from([*BACKENDS, ANY]))
    entries = []
    for world_size, backend in draw(st.lists(keys, max_size=4, unique=True)):
        inner = draw(st.lists(st.integers(1, 2**40), max_size=4, unique=True))
        bounds: list[int | None] = [0, *sorted(inner), None]
        for begin, end in itertools.pairwise(bounds):
            assert begin is not None
            transport = draw(st.sampled_from([None, AUTO, *names_for("cuda")]))
            decision = "left" if transport is None else "fused"
            source = draw(st.sampled_from(known))
            entries.append(Entry(world_size, backend, begin, end, decision, transport, source))  # type: ignore[arg-type]
    chosen = device_class or draw(st.sampled_from(DEVICE_CLASSES))
    return Table("t", chosen, tuple(entries))


def gate(*more: Table, capability: tuple[int, int] | None = (9, 0), backend: str = "auto") -> Gate:
    return Gate(Node(capability, False), Settings(backend=backend), (*more, shipped_tables()["generic"]))


@settings(max_examples=60, deadline=None)
@given(tables(), WORDS)
def test_a_table_reads_back_as_it_was_written(table: Table, comment: str) -> None:
    assert read_table(table_text(table), "t") == table


def test_a_comment_is_not_part_of_the_table() -> None:
    table = shipped_tables()["sm90"]
    assert read_table(table_text(table, "written\n\nby hand"), "sm90.toml") == table


@settings(max_examples=60, deadline=None)
@given(tables("sm90"), st.integers(2, 16), st.sampled_from(BACKENDS), st.lists(st.integers(0, 2**41), min_size=2))
def test_lookup_is_total_and_monotone(table: Table, world_size: int, backend: str, sizes: list[int]) -> None:
    one = gate(table, backend=backend)
    begins = []
    for nbytes in sorted(sizes):
        verdict = one.decide(nbytes, world_size=world_size, dtype="bfloat16")
        found, ranges = one.ranges_for(world_size, backend)
        (entry,) = (e for e in ranges if f"{found.file}: {e}" == verdict.entry)
        assert entry.from_bytes <= nbytes and (entry.to_bytes is None or nbytes < entry.to_bytes)
        assert verdict.fused == (entry.decision == "fused") and verdict.transport == entry.transport
        begins.append(entry.from_bytes)
    assert begins == sorted(begins)


@settings(max_examples=60, deadline=None)
@given(tables("sm90"))
def test_boundaries_are_exact_on_both_sides(table: Table) -> None:
    for entry in table.entries:
        if entry.from_bytes and entry.world_size != ANY and entry.backend != ANY:
            one = gate(table, backend=entry.backend)
            at, below = (
                one.decide(nbytes, world_size=int(entry.world_size), dtype="bfloat16").entry
                for nbytes in (entry.from_bytes, entry.from_bytes - 1)
            )
            (before,) = (other for other in table.ranges(entry.key) if other.to_bytes == entry.from_bytes)
            assert (at, below) == (f"t: {entry}", f"t: {before}")


def test_the_most_exact_range_of_a_table_counts() -> None:
    source = Source("s", "default", ("why",))
    keys = [(ANY, ANY), (ANY, "nccl"), (4, ANY), (4, "nccl")]
    entries = [Entry(world_size, backend, 0, None, "left", None, source) for world_size, backend in keys]
    for count in range(1, 5):
        one = gate(Table("t", "sm90", tuple(entries[:count])))
        assert one.decide(1, world_size=4, dtype="bfloat16").entry == f"t: {entries[count - 1]}"
    assert one.decide(1, world_size=2, dtype="bfloat16").entry == f"t: {entries[1]}"


def test_a_gate_has_an_answer_for_everything() -> None:
    with pytest.raises(ValueError, match="tables: expected ranges for world_size 'any' and backend 'any'"):
        Gate(Node((9, 0), False), Settings(), (shipped_tables()["sm90"],))


@pytest.mark.parametrize("device_class", DEVICE_CLASSES)
def test_shipped_tables_are_valid_and_name_their_sources(device_class: str) -> None:
    table = shipped_tables()[device_class]
    assert table.device_class == device_class and table.entries
    for entry in table.entries:
        assert str(entry.source)
        if entry.decision == "left":
            assert entry.source.kind != "default"


GOOD = """
schema_version = 1
device_class = "sm90"
[sources.here]
kind = "measured"
machine = "m"
versions = "v"
date = "2026-11-21"
command = "c"
[[entries]]
world_size = 8
backend = "multimem"
from_bytes = 0
to_bytes = 100
decision = "fused"
transport = "p2p"
source = "here"
[[entries]]
world_size = 8
backend = "multimem"
from_bytes = 100
decision = "left"
source = "here"
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema_version = 1", "schema_version = ", "t: expected TOML, got "),
        ("schema_version = 1", "schema_version = 2", "t: schema_version: expected 1, got 2"),
        ("schema_version = 1", "version = 1", "t: expected the keys schema_version, device_class, sources, entries, wires, "),
        ("schema_version = 1", "", "t: expected the keys schema_version, device_class, got no 'schema_version'"),
        ('"sm90"', '"sm80"', "t: device_class: expected one of generic, sm90, "),
        ('"sm90"', "90", "t: device_class: expected one of generic, sm90, "),
        ('"measured"', '"guessed"', "t: sources.here.kind: expected one of measured, public, default, got 'guessed'"),
        ('machine = "m"\n', "", "t: sources.here: expected the keys kind, machine, versions, date, command, got no 'machine'"),
        ('machine = "m"', 'machine = " "', "t: sources.here.machine: expected some words, got ' '"),
        ('machine = "m"', "machine = 3", "t: sources.here.machine: expected str, got 3"),
        ("2026-11-21", "yesterday", "t: sources.here.date: expected a date like '2026-11-21', got 'yesterday'"),
        ("[sources.here]", "[sources.there]", "entries[0].source: expected one of there, got 'here'"),
        ("world_size = 8", "world_size = 1", "entries[0].world_size: expected a number of at least 2, or 'any', got 1"),
        ("world_size = 8", "world_size = true", "entries[0].world_size: expected a number of at least 2"),
        ("world_size = 8\n", "", "entries[0]: expected the keys world_size, backend, "),
        ('"multimem"', '"mpi"', "entries[0].backend: expected one of custom, "),
        ("from_bytes = 0", "from_kib = 0", "entries[0]: expected the keys world_size, backend, from_bytes, "),
        ("from_bytes = 0", "from_bytes = -1", "entries[0].from_bytes: expected a number of bytes, got -1"),
        ("from_bytes = 0", "from_bytes = 1.5", "entries[0].from_bytes: expected a number of bytes, got 1.5"),
        ("from_bytes = 0", "from_bytes = 9", "entries[0].from_bytes: expected 0, where the range before ends, got 9: a gap"),
        ("from_bytes = 100\n", "from_bytes = 99\n", "entries[1].from_bytes: expected 100, where the range before ends, got 99"),
        ("from_bytes = 100\n", "from_bytes = 101\n", "expected 100, where the range before ends, got 101"),
        ("to_bytes = 100\n", "to_bytes = 0\n", "entries[0].to_bytes: expected more than from_bytes (0), got 0"),
        ("to_bytes = 100\n", "", "entries[1].from_bytes: expected nothing after the range without to_bytes, got 100"),
        ("from_bytes = 100\n", "from_bytes = 100\nto_bytes = 200\n", "entries[1].to_bytes: expected none in the last"),
        ('decision = "left"', 'decision = "maybe"', "entries[1].decision: expected one of fused, left, got 'maybe'"),
        ('decision = "left"', 'decision = "left"\ntransport = "p2p"', "entries[1].transport: expected none where"),
        ('transport = "p2p"\n', "", "entries[0].transport: expected one of auto, host, multimem, nccl, p2p, got None"),
        ('transport = "p2p"', 'transport = "ucx"', "entries[0].transport: expected one of auto, host, multimem, "),
        ("[sources.here]", "sources = 3\n[other]", "t: expected the keys "),
    ],
)  # fmt: skip
def test_a_malformed_table_is_one_error_that_names_file_and_key(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ValueError) as error:
        read_table(GOOD.replace(old, new, 1), "t")
    assert str(error.value).startswith("t: ") and message in str(error.value)


def test_a_table_of_splits_is_refused_by_name_with_what_does_it_now() -> None:
    splits = '[[splits]]\nworld_size = 8\nbackend = "any"\nfrom_bytes = 1000\nsource = "here"\n'
    with pytest.raises(ValueError) as error:
        read_table(GOOD + splits, "/home/me/thresholds.toml")
    assert str(error.value) == (
        "/home/me/thresholds.toml: expected the keys schema_version, device_class, sources, entries, wires, got 'splits' "
        "(splits are planned now, see tw-compile plan)"
    )


def test_ranges_out_of_order_and_repeated_keys_are_errors() -> None:
    head, first, second = GOOD.split("[[entries]]")
    for entries, message in (
        ([second, first], "entries[0].from_bytes: expected 0, where the range before ends, got 100: a gap"),
        ([first, second, first.replace("multimem", "nccl"), first], "entries[2].to_bytes: expected none in the last"),
        ([first, second, first, second], "entries[2].from_bytes: expected nothing after the range"),
    ):
        with pytest.raises(ValueError) as error:
            read_table("[[entries]]".join([head, *entries]), "t")
        assert message in str(error.value)
    apart = [first, second, second.replace("multimem", "nccl").replace("100", "0"), second.replace("100", "0")]
    with pytest.raises(ValueError, match=r"entries\[3\].from_bytes: expected the ranges of .* to follow each other"):
        read_table("[[entries]]".join([head, *apart]), "t")


def _left_below(nbytes: int, name: str, device_class: str = "sm90") -> str:
    """A table of one key, whose boundary tells it apart."""
    source = Source(name, "public", ("somebody's",))
    entries = (
        Entry(8, "nccl", 0, nbytes, "left", None, source),
        Entry(8, "nccl", nbytes, None, "fused", "p2p", source),
    )
    return table_text(Table(name, device_class, entries))


def test_later_layers_win(tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    node = Node((9, 0), False)

    def first_fused(chosen: str) -> int:
        tables = tables_of(threshold_layers(chosen, node.device_class, environment), node.device_class)
        crossovers = Gate(node, Settings(), tables).crossovers(1, world_size=8, dtype="bfloat16")
        return next(one.nbytes for one in crossovers if one.fused)

    assert first_fused("auto") == 1
    (tmp_path / "tw_compile").mkdir()
    (tmp_path / "tw_compile" / "thresholds.toml").write_text(_left_below(1000, "user"))
    assert first_fused("auto") == 1000
    for name, nbytes in (("environment", 2000), ("option", 3000)):
        (tmp_path / f"{name}.toml").write_text(_left_below(nbytes, name))
    environment["TW_COMPILE_THRESHOLDS"] = str(tmp_path / "environment.toml")
    assert first_fused("auto") == 2000
    assert first_fused(str(tmp_path / "option.toml")) == 3000
    assert first_fused("off") == 1
    environment["TW_COMPILE_THRESHOLDS"] = "off"
    assert first_fused("auto") == 1
    assert first_fused(str(tmp_path / "option.toml")) == 3000


def test_a_layer_replaces_what_it_speaks_of_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(_left_below(1000, "mine"))
    node = Node((9, 0), False)
    layers = threshold_layers(str(file), node.device_class, {"XDG_CONFIG_HOME": str(tmp_path)})
    one = Gate(node, Settings(), tables_of(layers, node.device_class))
    assert one.decide(10, world_size=8, dtype="bfloat16").entry.startswith(f"{file}: ")
    assert one.decide(10, world_size=2, dtype="bfloat16").entry.startswith("sm90.toml: ")


def test_a_table_for_other_devices_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(_left_below(1000, "mine", "sm100"))
    layers = threshold_layers(str(file), "sm90", {"XDG_CONFIG_HOME": str(tmp_path)})
    assert layers[-1].table is not None and layers[-1].table not in tables_of(layers, "sm90")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"thresholds: expected a file that can be read, got '.*nowhere\.toml'"):
        threshold_layers(str(tmp_path / "nowhere.toml"), "sm90", {})
