"""``tw-compile tune --halves``: which halves of a model's FFN are the fastest on this GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tw_compile.benchmark.layer.ffn_spec import FfnSpec
from tw_compile.cli import bench_common, common
from tw_compile.files import write_whole
from tw_compile.harness.launch import Progress
from tw_compile.harness.requests import INTERRUPTED, RankError, UsageError
from tw_compile.harness.table import plain_table
from tw_compile.planning import DeviceProfile, load_profile
from tw_compile.tuning.halves_spec import SHARDS, TOKENS, HalvesSpec, HalvesTrial, check_tokens, seconds, trials_of

SCHEMA_VERSION = 1
RESULTS = "tune-halves.json"
DRY_RUN_PROFILE = "H100"
"""A dry run plans for it, as it needs no GPU."""


@dataclass(frozen=True)
class HalvesTuning:
    """The options of ``tw-compile tune`` that ``--halves`` uses, as they were given. ``tp``, ``tokens``: None was not given."""

    models: str
    device: str
    tp: str | None
    tokens: str | None
    timeout: float
    dry_run: bool


def tune_halves(asked: HalvesTuning, folder: Path, json_file: str | None) -> int:
    """Time halves of the models' FFNs, and put the fastest ones into ``device.toml`` of ``folder``. Returns the exit code.

    Raises:
        UsageError: An option has a value that makes no sense, there is no GPU or a busy one, or the file there is wrong.
    """
    if asked.device != "cuda":
        raise UsageError(
            f"--device: expected cuda with --halves, as times of a CPU are no profile, got {asked.device!r}"
        )
    shards = SHARDS if asked.tp is None else common.numbers("--tp", asked.tp)
    for ranks in shards:
        common.ranks("--tp", ranks, least=2)
    tokens = TOKENS if asked.tokens is None else common.numbers("--tokens", asked.tokens)
    check_tokens(tokens, shards)
    models = tuple(asked.models.split(","))
    if len(set(models)) < len(models):
        raise UsageError(f"--halves: expected different models, got {asked.models!r}")
    for model in models:
        _check_model(model, max(shards))
    from tw_compile.tuning.halves_profile import base_profile, check_halves_fit

    console = common.make_console(json_file)
    name = "" if asked.dry_run else _idle_gpu()
    profile = load_profile(DRY_RUN_PROFILE) if asked.dry_run else base_profile(folder, name)
    if not asked.dry_run:
        check_halves_fit(folder, name)
    spec = spec_of(profile, models, shards, tokens, asked.timeout)
    if asked.dry_run:
        _print_trials(console, spec)
        console.print(f"would write to {folder}", markup=False, soft_wrap=True)
        report = {"schema_version": SCHEMA_VERSION, "command": "tune", "dry_run": True, **asdict(spec)}
        common.write_json(report, json_file)
        return 0
    from tw_compile.tuning.halves import run

    with common.stages(console, 2 + len(spec.trials)) as progress:
        report = run(spec, progress)
    return _finish(console, report, folder, name, json_file)


def tune_for(wanted: Iterable[FfnSpec], minutes: float, progress: Progress) -> str | None:
    """Time the halves of these FFNs that the user's profile lacks, for ``minutes`` at most, and add them to it.

    Returns why some are still missing; None where none is.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM came. What was done before is written.
    """
    import torch

    from tw_compile.files import user_folder
    from tw_compile.tuning.halves import run
    from tw_compile.tuning.halves_profile import base_profile, check_halves_fit, measured_rows, write_halves

    folder = user_folder()
    if folder is None:
        return "this user has no home for a device.toml"
    try:
        name = torch.cuda.get_device_name(0)
        missing = _missing(base_profile(folder, name), wanted)
        if not missing:
            return None
        _idle_gpu()
        check_halves_fit(folder, name)
        report = run(HalvesSpec(missing, timeout=60.0 * minutes), lambda what: progress(f"tune --halves: {what}"))
        progress(f"wrote {write_halves(folder, name, measured_rows(report), _comment(report, name))}")
    except (RankError, UsageError) as error:
        return str(error).splitlines()[0].removeprefix("--out: ").removeprefix("--halves: ")
    if report["incomplete"] == INTERRUPTED:
        raise KeyboardInterrupt  # no benchmark begins after it
    return None if report["incomplete"] is None else str(report["incomplete"]).splitlines()[0]


def _missing(profile: DeviceProfile, wanted: Iterable[FfnSpec]) -> tuple[HalvesTrial, ...]:
    """Trials of the halves of these FFNs that ``profile`` has no times of."""
    have = {entry.key for entry in profile.halves}
    missing: dict[tuple[int, int, str, int], HalvesTrial] = {}
    for ffn in wanted:
        for trial in spec_of(profile, (ffn.model,), (ffn.shards,), ffn.tokens, ffn.timeout).trials:
            key = (trial.hidden_size, trial.intermediate_size, ffn.dtype, trial.tokens)
            if key not in have:
                missing[key] = trial
    return tuple(missing.values())


def _comment(report: dict[str, Any], device_name: str) -> str:
    versions = report["versions"]
    return (
        f"Written by tw-compile tune --halves on {versions['date']}: {device_name}, {report['machine']}, torch "
        f"{versions['torch']}, tw_compile {versions['commit']}"
    )


def spec_of(
    profile: DeviceProfile, models: tuple[str, ...], shards: tuple[int, ...], tokens: tuple[int, ...], timeout: float
) -> HalvesSpec:
    """What to time for all models and numbers of ranks. FFNs of the same shapes are timed once.

    Raises:
        UsageError: A model has experts, or its sizes don't divide by the ranks.
    """
    from tw_compile.cli.plan import layer_of_model

    trials: dict[tuple[int, int, int], HalvesTrial] = {}
    for model in models:
        for ranks in shards:
            try:
                layer, _ = layer_of_model(model, ranks)
            except UsageError as error:
                raise _of_halves(error) from None
            for trial in trials_of(profile, model, layer, tokens):
                trials.setdefault((trial.hidden_size, trial.intermediate_size, trial.tokens), trial)
    return HalvesSpec(tuple(trials.values()), timeout=timeout)


def _check_model(model: str, ranks: int) -> None:
    """Refuse what is no model, by the option that names it, before torch is imported."""
    try:
        common.model_file(model, ranks)
    except UsageError as error:
        raise _of_halves(error) from None


def _of_halves(error: UsageError) -> UsageError:
    """The error with the name of the option that names models here."""
    return UsageError(str(error).replace("--model ", "--halves ", 1))


def _idle_gpu() -> str:
    """The name of the first GPU. Refuses a machine without one, a GPU with other work, and a launcher's rank."""
    bench_common.refuse_launcher("tune")
    if common.gpus() < 1:
        raise UsageError(
            "--halves: expected a GPU, as halves are timed on one, got a machine on which torch finds none"
        )
    import torch

    from tw_compile.tuning.busy import obstacles, usages

    busy = obstacles(usages(1))
    if busy:
        raise UsageError(f"tune: expected an idle GPU, got {'; '.join(busy)}")
    return torch.cuda.get_device_name(0)


def _print_trials(console: Console, spec: HalvesSpec) -> None:
    for trial in spec.trials:
        firsts = ", ".join(str(first) + "*" * (first == trial.modelled) for first in trial.firsts)
        console.print(f"{trial}: half 1 of {firsts} tokens", markup=False, soft_wrap=True)
    console.print(
        f"*: by the model, for {DRY_RUN_PROFILE}. CUDA graphs of {spec.calls} FFNs, {spec.repeats} turns, in all about "
        f"{seconds(spec):.0f} s (an estimate)",
        markup=False,
        soft_wrap=True,
    )


def _finish(console: Console, report: dict[str, Any], folder: Path, device_name: str, json_file: str | None) -> int:
    """Show and write what was found."""
    from tw_compile.tuning.halves_profile import measured_rows, write_halves

    _print_rows(console, report["rows"])
    results = folder / RESULTS
    write_whole(results, json.dumps(report, indent=1) + "\n")
    profile = write_halves(folder, device_name, measured_rows(report), _comment(report, device_name))
    for file in (results, profile):
        console.print(f"wrote {file}", markup=False, soft_wrap=True)
    common.write_json(report, json_file)
    if report["incomplete"] is not None:
        console.print(f"incomplete: {report['incomplete'].splitlines()[0]}", style="red", markup=False, soft_wrap=True)
        return common.EXIT_FAILED
    return 0


def _print_rows(console: Console, rows: list[dict[str, Any]]) -> None:
    columns = ("model", "tokens", "halves", "us", "by the model", "us", "equal halves, us")
    table = plain_table(columns, ("model",), "an FFN in halves, one behind the other on all SMs; medians", "bold")
    for row in rows:
        halves = [f"{first} + {row['tokens'] - first}" for first in (row["first"], row["modelled"])]
        same = row["first"] == row["modelled"]
        table.add_row(
            f"{row['model']}, TP{row['shards']}",
            str(row["tokens"]),
            halves[0],
            f"{row['us']:.1f}",
            "the same" if same else halves[1],
            f"{row['modelled_us']:.1f}",
            f"{row['equal_us']:.1f}",
        )
    console.print(table)
    console.print(
        "The model's halves stay where no others were faster in four of five turns. Only an FFN alone is planned by these; "
        "halves of layers are the model's.",
        style="dim",
        markup=False,
        soft_wrap=True,
    )
