"""``tw-compile tune --wire``: from which size on a wire pays here, or what it costs a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from tw_compile.cli import common
from tw_compile.cli.common import MEASURED_WIRES
from tw_compile.cli.wire_cost import WORLD_SIZES, text_of
from tw_compile.config import WHY_NOT_INT4, WIRE_SITES
from tw_compile.files import read_if_there, write_whole
from tw_compile.gating.wire_accuracy import (
    BUDGET_NATS,
    AccuracyCost,
    CheckpointAccuracy,
    accuracy_text,
    read_accuracy,
)
from tw_compile.harness.requests import UsageError
from tw_compile.kernels.collective.wires import EXACT

SCHEMA_VERSION = 1
RESULTS = "tune-wires.json"


@dataclass(frozen=True)
class WireTuning:
    """The options of ``tw-compile tune`` that ``--checkpoint`` uses. An option is None where it was not given."""

    wires: tuple[str, ...]
    sites: str
    checkpoint: str | None
    text: str | None
    text_tokens: int
    tp: tuple[int, ...] | None
    dry_run: bool


def wires_of(text: str) -> tuple[str, ...]:
    """The wires that ``--wire`` names. Raises UsageError for names that are no wires."""
    names = tuple(text.split(","))
    coded = [name for name in MEASURED_WIRES if name != EXACT]
    if "int4" in names:
        raise UsageError(f"--wire: {WHY_NOT_INT4}")
    if len(set(names)) < len(names) or not set(names) <= set(coded):
        raise UsageError(f"--wire: expected different ones of {', '.join(coded)}, got {text!r}")
    return names


def measure_checkpoint(asked: WireTuning, folder: Path, json_file: str | None) -> int:
    """Measure what each wire costs the checkpoint, and keep the costs in a file of ``folder``. Returns the exit code.

    Raises:
        UsageError: An option has a value that makes no sense, or a file that was kept before is wrong.
    """
    if asked.checkpoint is None or asked.text is None:
        raise UsageError("--text: expected it and --checkpoint together, got one of them")
    common.positive("--text-tokens", asked.text_tokens)
    common.one_of("--wire-sites", asked.sites, WIRE_SITES)
    text = text_of(asked.text)
    world_sizes = asked.tp or WORLD_SIZES
    for ranks in world_sizes:
        common.ranks("--tp", ranks, least=2)
    console = common.make_console(json_file)
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "command": "tune",
        "dry_run": asked.dry_run,
        "wires": list(asked.wires),
        "checkpoint": asked.checkpoint,
        "text": asked.text,
        "budget_nats": BUDGET_NATS,
    }
    if asked.dry_run:
        simulated = ", ".join(map(str, world_sizes))
        console.print(
            f"would read {asked.checkpoint} and simulate {simulated} ranks with {', '.join(asked.wires)} on up to "
            f"{asked.text_tokens} tokens of {asked.text}, and write to {folder}",
            markup=False,
            soft_wrap=True,
        )
        common.write_json(report, json_file)
        return 0
    with common.stages(console) as progress:
        progress("importing torch and transformers")
        from tw_compile.harness.versions import versions
        from tw_compile.runner.accuracy import cost_of_wire, digest_of_weights, load_checkpoint, pieces_of

        progress(f"reading {asked.checkpoint}")
        model, tokenizer = load_checkpoint(asked.checkpoint)
        accuracy = CheckpointAccuracy(asked.checkpoint, digest_of_weights(model), ())
        file = folder / accuracy.file_name
        accuracy = _with_kept(file, accuracy)
        pieces = pieces_of(text, tokenizer, asked.text_tokens)
        date = versions()["date"]
        costs = []
        for wire in asked.wires:
            for ranks in world_sizes:
                cost = cost_of_wire(model, pieces, ranks, wire, asked.sites, progress=progress)
                named = (Path(asked.text).name, date)
                costs.append(
                    AccuracyCost(wire, ranks, asked.sites, cost.added_nats, cost.standard_error, cost.tokens, *named)
                )
    for measured in costs:
        verdict = "within" if measured.within_budget else "BEYOND"
        console.print(f"{measured}: {verdict} {BUDGET_NATS}", markup=False, soft_wrap=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(file, accuracy_text(accuracy.with_costs(costs)))
    console.print(f"wrote {file}; name it as tw_compile.wire_accuracy", markup=False, soft_wrap=True)
    digest = {"digest": accuracy.digest, "file": str(file)}
    common.write_json(report | digest | {"costs": [asdict(cost) for cost in costs]}, json_file)
    return 0 if all(cost.within_budget for cost in costs) else common.EXIT_FAILED


def _with_kept(file: Path, accuracy: CheckpointAccuracy) -> CheckpointAccuracy:
    """``accuracy`` with the costs that ``file`` holds from before. Refuses a file that is about other weights."""
    try:
        text = read_if_there(file, "--out")
        kept = None if text is None else read_accuracy(text, str(file))
    except ValueError as error:
        raise UsageError(f"--out: expected a file that can be read, got {error}") from error
    if kept is None:
        return accuracy
    if kept.digest != accuracy.digest:
        raise UsageError(f"--out: expected {file} to be about {accuracy.digest}, got {kept.digest}")
    return accuracy.with_costs(kept.costs)


def finish_wires(report: dict[str, Any], wires: tuple[str, ...], folder: Path, json_file: str | None) -> None:
    """Show and write from which sizes on the wires pay. Where one of our kernels failed, write no table and exit with 1."""
    from tw_compile.benchmark.results import rows_of
    from tw_compile.harness.rows import failures
    from tw_compile.harness.table import failed_lines, print_verdict
    from tw_compile.tuning.run import PARTIAL
    from tw_compile.tuning.tables import command_of, kernel_run
    from tw_compile.tuning.wires import measured_wires, write_wires

    console = common.make_console(json_file)
    stages = list(report["stages"].values())
    command = f"{command_of(report)} --wire {','.join(wires)}"
    found = [wire for stage in stages for wire in measured_wires(kernel_run(report, stage), wires, command)]
    for wire in found:
        console.print(str(wire), markup=False, soft_wrap=True)
    failed = [row for stage in stages for row in failures(rows_of(stage))]
    versions = report["versions"]
    comment = (
        f"Written by {command} on {versions['date']}: {stages[0]['device_name']}, {report['machine']}, torch "
        f"{versions['torch']}, tw_compile {versions['commit']}"
    )
    results = folder / RESULTS
    write_whole(results, json.dumps(report, indent=1) + "\n")
    written = [results]
    if failed:
        console.print("no table is written, as ours failed", style="red")
    elif found:
        written.append(write_wires(folder, stages[0]["device_class"], found, comment))
    else:
        console.print("no transport here has times of both kinds of rows, so no table is written", style="yellow")
    (folder / PARTIAL).unlink(missing_ok=True)
    for file in written:
        console.print(f"wrote {file}", markup=False, soft_wrap=True)
    print_verdict(console, failed_lines(failed, lambda row: f"[{row.tokens}, {row.hidden}]"))
    found_as_data = [asdict(wire) for wire in found]
    common.write_json(report | {"wires": found_as_data}, json_file)
    if failed:
        raise typer.Exit(common.EXIT_FAILED)
