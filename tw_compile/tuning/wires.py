"""The size from which on rows in codes arrive earlier than exact rows: ``[[wires]]`` entries of the user's thresholds file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tw_compile.benchmark.results import Row
from tw_compile.files import write_whole
from tw_compile.gating.table import Source, Table, WireEntry, read_table, size, table_text
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.tuning.measured import KernelRun
from tw_compile.tuning.tables import THRESHOLDS_FILE, merged_table

LEAST_BYTES = {"p2p": 2**20}
"""By transport, the size below which no table has a wire. Over NVLink a step that generates tokens waits for latency, so its
messages stay exact."""
EXACT_LABELS = {
    "p2p": ("tw-p2p", "tw-push-one-shot", "tw-push-two-shot", "tw-stream"),
    "host": ("tw-host-words", "tw-host-one-shot", "tw-host-two-shot"),
}
"""By transport the contenders of ``bench kernel`` that rows in codes have to beat: all that may serve exact rows. Words and
one-shot also give all ranks the whole residual. But they serve short messages, so codes must be faster than they are."""
CODED_LABELS = {"p2p": "tw-push-two-shot", "host": "tw-host-two-shot"}


@dataclass(frozen=True)
class MeasuredWire:
    """What was measured for one wire.

    ``ratios``: bytes of the message, and the time with coded rows divided by that of the fastest exact rows. ``from_bytes``:
    from this size on, all sizes are faster by more than the noise; None: not even the largest size is.
    """

    wire: str
    world_size: int
    transport: str
    from_bytes: int | None
    ratios: tuple[tuple[int, float], ...]
    source: Source

    @property
    def below(self) -> str | None:
        """What was measured at the largest size below ``from_bytes``, in words; None where no size is below."""
        smaller = [pair for pair in self.ratios if self.from_bytes is not None and pair[0] < self.from_bytes]
        if not smaller:
            return None
        nbytes, ratio = max(smaller)
        return f"at {size(nbytes)} codes take {ratio:.2f} of the time of exact rows"

    @property
    def key(self) -> tuple[str, int | str, str]:
        return self.wire, self.world_size, self.transport

    def __str__(self) -> str:
        pays = "pays at no size" if self.from_bytes is None else f"pays from {size(self.from_bytes)} on"
        ratios = ", ".join(f"{size(nbytes)} {ratio:.2f}" for nbytes, ratio in self.ratios)
        return f"TP{self.world_size}, {self.transport}, {self.wire} {pays}; its time by that of exact rows: {ratios}"


def labels_of(wires: Iterable[str]) -> tuple[str, ...]:
    """The labels of the contenders that measure ``wires``."""
    exact = [label for labels in EXACT_LABELS.values() for label in labels]
    return (*exact, *(f"{label}-{wire}" for wire in wires for label in CODED_LABELS.values()))


def measured_wires(run: KernelRun, wires: Sequence[str], command: str) -> list[MeasuredWire]:
    """The result for each wire and each transport with times of both kinds of rows. ``command`` is what measured them."""
    source = replace(run.source, values=(*run.source.values[:-1], command))
    found = []
    for transport, exact_labels in EXACT_LABELS.items():
        for wire in wires:
            coded = [row for row in run.rows if (row.label, row.wire) == (f"{CODED_LABELS[transport]}-{wire}", wire)]
            exact = [row for row in run.rows if row.label in exact_labels and row.wire == EXACT]
            pairs = _pairs(coded, exact)
            if pairs:
                ratios = tuple((row.nbytes, _us(row) / _us(other)) for row, other in pairs)
                found.append(
                    MeasuredWire(
                        wire,
                        run.world_size,
                        transport,
                        _crossover(pairs, LEAST_BYTES.get(transport, 0)),
                        ratios,
                        source,
                    )
                )
    return found


def _pairs(coded: Iterable[Row], exact: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Each coded row with the fastest exact one of the same size; by bytes, then by columns."""
    pairs = []
    for row in coded:
        same = [
            other
            for other in exact
            if (other.tokens, other.hidden) == (row.tokens, row.hidden)
            and other.numerics == "ok"
            and other.p50_us is not None
        ]
        if row.numerics == "ok" and row.p50_us is not None and same:
            pairs.append((row, min(same, key=_us)))
    return sorted(pairs, key=lambda pair: (pair[0].nbytes, pair[0].hidden))


def _us(row: Row) -> float:
    assert row.p50_us is not None
    return row.p50_us


def _crossover(pairs: Sequence[tuple[Row, Row]], least: int) -> int | None:
    """The smallest size, of at least ``least`` bytes, from which on slow runs of coded rows beat fast runs of exact rows.

    A slow run is the 80th percentile, a fast run the 20th. None where there is no such size.
    """
    slower = max((coded.nbytes for coded, exact in pairs if not _is_faster(coded, exact)), default=0)
    return min((coded.nbytes for coded, _ in pairs if coded.nbytes > slower and coded.nbytes >= least), default=None)


def _is_faster(coded: Row, exact: Row) -> bool:
    assert coded.p80_us is not None and exact.p20_us is not None
    return coded.p80_us < exact.p20_us


def write_wires(folder: Path, device_class: str, found: Sequence[MeasuredWire], comment: str) -> Path:
    """Write what was found into the thresholds file of ``folder``. All else in the file stays.

    Raises:
        UsageError: The file there is wrong, or is about another device; nothing is written.
    """
    there = merged_table(folder / THRESHOLDS_FILE, Table(THRESHOLDS_FILE, device_class, ()))
    measured = {wire.key for wire in found}
    kept = [entry for entry in there.wires if (entry.wire, entry.world_size, entry.transport) not in measured]
    own = [
        WireEntry(wire.wire, wire.world_size, wire.transport, wire.from_bytes, _named(wire, there), wire.below)
        for wire in found
        if wire.from_bytes is not None
    ]
    text = table_text(replace(there, wires=(*own, *kept)), comment)
    read_table(text, THRESHOLDS_FILE)  # a wrong file would stop every compile
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / THRESHOLDS_FILE, text)
    return folder / THRESHOLDS_FILE


def _named(wire: MeasuredWire, there: Table) -> Source:
    """The wire's source, renamed so that no other source of the file has its name."""
    sources = [*(entry.source for entry in there.entries), *(entry.source for entry in there.wires)]
    taken = {source.name: source for source in sources}
    number, name = 1, f"wires_tp{wire.world_size}"
    while name in taken and taken[name].values != wire.source.values:
        number += 1
        name = f"wires_tp{wire.world_size}_{number}"
    return replace(wire.source, name=name)
