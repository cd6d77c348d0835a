"""From a report of ``tw-compile tune`` to the files in the user's config folder, and what these files change."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tw_compile.benchmark.results import Row, rows_of
from tw_compile.calibration import LAYER, Calibration, calibration_of
from tw_compile.files import read_if_there, write_whole
from tw_compile.gating.facts import Backend, Node, Settings
from tw_compile.gating.gate import Gate
from tw_compile.gating.layers import shipped_tables
from tw_compile.gating.table import Entry, Source, Table, read_table, table_text
from tw_compile.harness.requests import UsageError
from tw_compile.harness.table import mebibytes
from tw_compile.kernels.transports import selection
from tw_compile.kernels.transports.selection import Step, shipped_steps, steps_of, usual_steps
from tw_compile.planning.device import USER_FILE as PROFILE_FILE
from tw_compile.planning.device import DeviceProfile, parse_profile, shipped_profile
from tw_compile.tuning.decide import Band, Chooser, entries_from
from tw_compile.tuning.halves_profile import halves_text, kept_halves
from tw_compile.tuning.measured import LEFT, UNFUSED, KernelRun, measured_steps, run_of_report, timings
from tw_compile.tuning.pairs import PairCost, contentions, pair_costs
from tw_compile.tuning.profile import fitted, profile_text
from tw_compile.tuning.spec import TuneSpec

THRESHOLDS_FILE = "thresholds.toml"
KERNELS_FILE = selection.USER_FILE

AnyTable = TypeVar("AnyTable")


@dataclass(frozen=True)
class Derived:
    """What follows from a report.

    Attributes:
        table: Thresholds of the world sizes and backends that were measured.
        steps: Which kernel serves which message.
        profile: None where there is no base profile, neither a shipped one nor a calibration's. A tuning needs one, because it
            does not measure the times of compute.
        measured: The dotted names of the values of ``profile`` that are measured.
        bands: Fused against left alone, by world size and backend.
    """

    device_name: str
    table: Table
    steps: tuple[Step, ...]
    profile: DeviceProfile | None
    measured: frozenset[str]
    pairs: tuple[PairCost, ...]
    bands: dict[tuple[int, Backend], Band]


def command_of(report: dict[str, Any]) -> str:
    return f"tw-compile tune --tp {','.join(map(str, report['world_sizes']))}"


def derive(report: dict[str, Any]) -> Derived:
    """What follows from ``report``, which must be of GPUs. A pure function."""
    assert report["device"] == "cuda", "times of gloo ranks are no table"
    stages = list(report["stages"].values())
    device_name, device_class = stages[0]["device_name"], stages[0]["device_class"]
    shipped = shipped_gate(device_class)
    entries: list[Entry] = []
    steps: list[Step] = []
    bands: dict[tuple[int, Backend], Band] = {}
    kernel_runs = [kernel_run(report, stage) for stage in stages if stage["kind"] == "kernel"]
    beside_runs = [kernel_run(report, stage) for stage in stages if stage["kind"] == "beside"]
    first = calibrations_of(report)
    for run in sorted(kernel_runs, key=lambda run: run.world_size):
        decided = decide([*rows_before(first, run), run], shipped)
        steps += decided.steps
        entries += decided.entries
        bands |= decided.bands
    benches = {stage.name: stage.bench for stage in TuneSpec(tuple(report["world_sizes"])).stages()}
    pairs = [
        cost
        for name, stage in report["stages"].items()
        if stage["kind"] == "beside"
        for cost in pair_costs(rows_of(stage), benches[name])
    ]
    estimates = (calibration.profile for calibration in first if calibration.profile is not None)
    base = shipped_profile(device_name) or next(estimates, None)
    profile, measured = None, frozenset[str]()
    if base is not None:
        profile, measured = fitted(base, kernel_runs, beside_runs, contentions(pairs))
    table = Table(THRESHOLDS_FILE, device_class, tuple(entries))
    return Derived(device_name, table, tuple(steps), profile, measured, tuple(pairs), bands)


def calibrations_of(report: dict[str, Any]) -> list[Calibration]:
    """The calibrations in the report: what ranks measured on this node before the tuning."""
    return [calibration_of(json.dumps(values), LAYER) for values in report.get("calibrations", ())]


def rows_before(calibrations: Iterable[Calibration], run: KernelRun) -> list[KernelRun]:
    """The rows of calibrations with the same number of ranks, at sizes that ``run`` lacks.

    At all other sizes only ``run`` counts, because it measured longer.
    """
    sizes = {(row.nbytes, row.hidden) for row in run.rows}
    before = []
    for calibration in calibrations:
        if calibration.measured_on.world_size == run.world_size:
            rows = [Row(**values) for values in calibration.rows]
            kept = tuple(row for row in rows if (row.nbytes, row.hidden) not in sizes)
            before.append(replace(run, rows=kept))
    return before


@dataclass(frozen=True)
class Decided:
    """What follows from one run of the operator's benchmark. The attributes are as in :class:`Derived`."""

    entries: tuple[Entry, ...]
    steps: tuple[Step, ...]
    bands: dict[tuple[int, Backend], Band]


def decide(runs: Sequence[KernelRun], shipped: Gate) -> Decided:
    """Thresholds and kernel table from measured times. A pure function.

    ``shipped``: see :func:`shipped_gate`. The last run names the source.
    """
    run = runs[-1]
    steps = measured_steps(runs, usual_steps(run.device_name, run.world_size))
    entries: list[Entry] = []
    bands: dict[tuple[int, Backend], Band] = {}
    for backend in UNFUSED:
        times = timings(runs, backend, steps)
        if not any(timing.way == LEFT for timing in times):
            continue
        default = shipped.entries(run.world_size, backend)
        entries += entries_from(run.world_size, backend, times, default, run.source)
        own = Chooser(backend, times, default).bands
        bands[run.world_size, backend] = own.get(("p2p", LEFT)) or own.get(("nccl", LEFT)) or Band((), (), (), ())
    return Decided(tuple(entries), tuple(steps), bands)


def shipped_gate(device_class: str) -> Gate:
    """A gate with the shipped tables alone."""
    shipped = shipped_tables()
    tables = [shipped[name] for name in dict.fromkeys((device_class, "generic"))]
    return Gate(Node(None, False), Settings(), tuple(tables))


def changes(derived: Derived) -> list[str]:
    """How the derived tables differ from the shipped ones, one line for each difference."""
    gate = shipped_gate(derived.table.device_class)
    lines = []
    for key in dict.fromkeys(entry.key for entry in derived.table.entries):
        differing = [
            (_decision(entry), _decision(shipped), begin, end)
            for entry in derived.table.ranges(key)
            for shipped, begin, end in _overlaps(entry, gate.entries(int(key[0]), key[1]))
        ]
        for (ours, theirs), group in itertools.groupby(differing, key=lambda change: change[:2]):
            _, _, begins, ends = zip(*group, strict=True)
            if ours != theirs:
                span = f"from {mebibytes(begins[0])}" + ("" if ends[-1] is None else f" to {mebibytes(ends[-1])}")
                lines.append(f"TP{key[0]}, {key[1]}, {span}: {ours}, shipped {theirs}")
    for world_size in sorted({step.world_size for step in derived.steps}):
        ours, theirs = (
            "; ".join(f"{step.algorithm} ({step.sms} SMs) to {mebibytes(step.up_to_bytes)}" for step in steps) or "none"
            for steps in (
                [step for step in derived.steps if step.world_size == world_size],
                shipped_steps(derived.device_name, world_size),
            )
        )
        if ours != theirs:
            lines.append(f"TP{world_size}, kernels: {ours}, shipped {theirs}")
    return lines


def _decision(entry: Entry) -> str:
    return "left" if entry.decision == "left" else f"fused by {'p2p' if entry.transport == 'auto' else entry.transport}"


def _overlaps(entry: Entry, others: Sequence[Entry]) -> Iterator[tuple[Entry, int, int | None]]:
    for other in others:
        begin = max(entry.from_bytes, other.from_bytes)
        end = min((to for to in (entry.to_bytes, other.to_bytes) if to is not None), default=None)
        if end is None or begin < end:
            yield other, begin, end


def write(folder: Path, derived: Derived, comment: str) -> list[Path]:
    """Write the files into ``folder``. Entries that are there for other world sizes and backends stay, and measured halves.

    Raises:
        UsageError: A file there is wrong, or is about another device; nothing is written.
    """
    texts = {
        THRESHOLDS_FILE: table_text(merged_table(folder / THRESHOLDS_FILE, derived.table), comment),
        KERNELS_FILE: selection.table_text(
            derived.device_name, _merged_steps(folder / KERNELS_FILE, derived.device_name, derived.steps), comment
        ),
    }
    if not derived.steps:
        del texts[KERNELS_FILE]
    if derived.profile is not None:
        texts[PROFILE_FILE] = profile_text(derived.profile, derived.measured, comment) + halves_text(
            kept_halves(folder, derived.device_name)
        )
    for name, text in texts.items():
        _read_back(name, text)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


def check_folder(folder: Path, device_class: str | None = None, device_name: str | None = None) -> None:
    """Raise UsageError where files of ``folder`` are wrong or about another device. Called before anything is measured."""
    if device_class is not None:
        merged_table(folder / THRESHOLDS_FILE, Table("", device_class, ()))
    if device_name is not None:
        _merged_steps(folder / KERNELS_FILE, device_name, ())
        kept_halves(folder, device_name)


def _read_back(name: str, text: str) -> None:
    """Check, before the text is written, that it can be read: a wrong file would stop every compile."""
    if name == THRESHOLDS_FILE:
        read_table(text, name)
    elif name == KERNELS_FILE:
        steps_of(text, name)
    else:
        parse_profile(text, name)


def _read(file: Path, what: str, parse: Callable[[str, str], AnyTable]) -> AnyTable | None:
    """The table in ``file``; None where there is no such file."""
    try:
        text = read_if_there(file, what)
        return None if text is None else parse(text, str(file))
    except ValueError as error:
        raise UsageError(f"--out: expected a table that can be read, got {error}") from error


def merged_table(file: Path, own: Table) -> Table:
    """``own``, with the file's wires and its entries for other world sizes and backends; UsageError where the file is wrong."""
    there = _read(file, "thresholds", read_table)
    if there is None:
        return own
    if there.device_class != own.device_class:
        raise UsageError(
            f"--out: expected a folder whose tables are about {own.device_class}, got {file} about {there.device_class}"
        )
    keys = {entry.key for entry in own.entries}
    entries = [*own.entries, *(entry for entry in there.entries if entry.key not in keys)]
    taken = {wire.source.name: wire.source for wire in there.wires}
    return Table(own.file, own.device_class, tuple(_distinct_sources(entries, taken)), there.wires)


def _distinct_sources(entries: Iterable[Entry], taken: Mapping[str, Source]) -> list[Entry]:
    """``entries``, in which different sources with the same name, as from two tunings, get different names.

    ``taken``: the sources of the table's wires, which keep their names.
    """
    names = dict(taken)
    distinct: list[Entry] = []
    for entry in entries:
        name, number = entry.source.name, 1
        while name in names and (names[name].kind, names[name].values) != (entry.source.kind, entry.source.values):
            number += 1
            name = f"{entry.source.name}_{number}"
        names[name] = replace(entry.source, name=name)
        distinct.append(replace(entry, source=names[name]))
    return distinct


def _merged_steps(file: Path, device_name: str, own: Sequence[Step]) -> list[Step]:
    table = _read(file, "kernels", steps_of)
    if table is None:
        return list(own)
    device, there = table
    if device != device_name:
        raise UsageError(f"--out: expected a folder whose tables are about {device_name}, got {file} about {device}")
    world_sizes = {step.world_size for step in own}
    merged = [*own, *(step for step in there if step.world_size not in world_sizes)]
    return sorted(merged, key=lambda step: (step.world_size, step.up_to_bytes))


def kernel_run(report: dict[str, Any], stage: dict[str, Any]) -> KernelRun:
    names = ("world_size", "device_name", "rows")
    run = run_of_report({name: stage[name] for name in names} | {"versions": report["versions"]}, command_of(report))
    machine = run.source.values[0] + f", {', '.join(f'{name}={value}' for name, value in stage['environment'].items())}"
    return replace(run, source=replace(run.source, values=(machine, *run.source.values[1:])))
