"""``tw-compile tune``: measure this node, and write tables and a device profile of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tw_compile.cli import bench_common, common
from tw_compile.cli.common import JsonOption, WireSitesOption
from tw_compile.cli.tune_halves import HalvesTuning, tune_halves
from tw_compile.cli.tune_wires import WireTuning, finish_wires, measure_checkpoint, wires_of
from tw_compile.cli.wire_cost import TEXT_TOKENS
from tw_compile.environment import PEER_ACCESS, peer_access
from tw_compile.harness.requests import UsageError
from tw_compile.tuning.halves_spec import SHARDS
from tw_compile.tuning.halves_spec import TOKENS as HALVES_TOKENS

if TYPE_CHECKING:
    from tw_compile.calibration import Calibration

WORLD_SIZES = "2,4"
RESULTS = {"cuda": "tune.json", "cpu": "tune-cpu.json"}
LINK_RESULTS = "tune-{transport}.json"


@common.one_line_errors
def tune(
    tp: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Ranks. With --halves: those among which weights are divided.",
            show_default=f"those of {WORLD_SIZES} that fit, 2 on CPU; with --halves {','.join(map(str, SHARDS))}",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="cuda|cpu", help="cpu is a smoke test on gloo ranks; it writes no table.")
    ] = "cuda",
    transport: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Time this transport (nccl, host) alone, without peer access, and write host-memory.toml.",
            show_default="everything else",
        ),
    ] = None,
    wire: Annotated[
        str | None,
        typer.Option(
            metavar="int8|int6[,...]",
            help="Time only these wires, and add them to thresholds.toml. With --checkpoint: show what they cost a model.",
            show_default="everything else",
        ),
    ] = None,
    wire_sites: WireSitesOption = "all",
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|FILE.gguf|PACKAGE",
            help="With --wire and --text: keep what the wires cost this model. Needs no GPU.",
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --checkpoint: the text; ranks are simulated on the CPU.")
    ] = None,
    text_tokens: Annotated[
        int, typer.Option(metavar="N", help="With --text: the most tokens of it to use.")
    ] = TEXT_TOKENS,
    halves: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL[,MODEL...]",
            help="Time only halves of these models' FFNs, on one GPU, and add the fastest ones to device.toml.",
            show_default="everything else",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="With --halves: tokens of both halves.",
            show_default=",".join(map(str, HALVES_TOKENS)),
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be measured, and do nothing.")] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Calibrate this node in seconds, as its ranks would do by themselves before their first compile.",
        ),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Continue where an interrupted tuning stopped, or start over.")
    ] = True,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where the files go.", show_default="the user's config folder")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Give up a stage after this time.")] = 600.0,
    plot_file: Annotated[
        str | None, typer.Option("--plot", metavar="FILE.png|svg", help="Draw fused by unfused time, and crossovers.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Time every unfused all_reduce and every kernel of tw_compile on this machine, and write tables from the times.

    It times them alone and beside GEMMs. It writes thresholds.toml, kernels.toml, device.toml, and tune.json with all times.
    With --transport it writes host-memory.toml and tune-NAME.json, with --wire thresholds.toml and tune-wires.json, and with
    --checkpoint one file for each checkpoint. With --halves it adds the fastest halves of each FFN to device.toml, and writes
    tune-halves.json.

    Exit code: 0 done; 1 a kernel of tw_compile or a rank failed, or a wire costs the checkpoint more than 0.01 nats a token;
    2 bad input or a busy GPU.
    """
    common.one_of("--device", device, tuple(RESULTS))
    common.seconds("--timeout", timeout)
    common.writable("--plot", plot_file)
    if plot_file is not None:
        from tw_compile.harness.plot import require

        if device == "cpu":
            raise UsageError(
                f"--plot: expected --device cuda with it, as a smoke test has no crossovers, got {plot_file!r}"
            )
        require(plot_file)
    if halves is not None:
        quickly = "--quick" if quick else None
        sites = None if wire_sites == "all" else wire_sites
        common.none_with(
            "--halves",
            {
                "--transport": transport,
                "--wire": wire,
                "--wire-sites": sites,
                "--checkpoint": checkpoint,
                "--text": text,
                "--plot": plot_file,
                "--quick": quickly,
            },
        )
        raise typer.Exit(
            tune_halves(HalvesTuning(halves, device, tp, tokens, timeout, dry_run), _folder(out), json_file)
        )
    if tokens is not None:
        raise UsageError(f"--tokens: expected --halves with it, got {tokens!r} alone")
    wires = () if wire is None else wires_of(wire)
    if wires:
        common.none_with(
            "--wire", {"--transport": transport, "--plot": plot_file, "--quick": "--quick" if quick else None}
        )
    for option, value in (("--checkpoint", checkpoint), ("--text", text)):
        if value is not None and not wires:
            raise UsageError(f"{option}: expected --wire with it, got {value!r} alone")
    if checkpoint is not None or text is not None:
        counts = common.numbers("--tp", tp) if tp is not None else None
        tuning = WireTuning(wires, wire_sites, checkpoint, text, text_tokens, counts, dry_run)
        raise typer.Exit(measure_checkpoint(tuning, _folder(out), json_file))
    if wire_sites != "all":
        raise UsageError(f"--wire-sites: expected all without --checkpoint, got {wire_sites!r}")
    if wires and device != "cuda":
        raise UsageError(f"--device: expected cuda with --wire, as times of gloo ranks are no table, got {device!r}")
    if quick:
        _check_quick(device, {"--transport": transport, "--plot": plot_file, "--out": out})
        _quick(
            world_sizes_of(common.numbers("--tp", tp) if tp is not None else None, device, dry_run),
            timeout,
            dry_run,
            json_file,
        )
        return
    folder = _folder(out)
    if out is None and device == "cuda" and not (dry_run or peer_access()):
        raise UsageError(
            f"--out: expected a folder with {PEER_ACCESS}=0, as its tables are not for this machine's daily use, got none"
        )
    asked = common.numbers("--tp", tp) if tp is not None else None
    world_sizes = world_sizes_of(asked, device, dry_run)
    labels = () if transport is None else _link_labels(transport, device, plot_file, dry_run)
    from tw_compile.tuning.show import print_grid
    from tw_compile.tuning.spec import TuneSpec
    from tw_compile.tuning.wires import labels_of

    console = common.make_console(json_file)
    over = _transports(world_sizes, device, dry_run)
    spec = TuneSpec(world_sizes, device, timeout, labels, wires, labels_of(wires) if wires else (), over)
    if dry_run:
        print_grid(console, spec)
        console.print(f"would write to {folder}", markup=False, soft_wrap=True)
        common.write_json(
            {"schema_version": 1, "command": "tune", "dry_run": True, "stages": spec.options()}, json_file
        )
        return
    report, derived = _measure(spec, folder, resume, json_file)
    if transport is not None:
        _finish_link(report, transport, folder, json_file)
        return
    if wires:
        finish_wires(report, wires, folder, json_file)
        return
    failed = _finish(report, derived, folder, plot_file, json_file)
    raise typer.Exit(common.EXIT_FAILED if failed else 0)


def _check_quick(device: str, others: dict[str, str | None]) -> None:
    if device != "cuda":
        raise UsageError(f"--quick: expected --device cuda with it, got {device!r}")
    for option, value in others.items():
        if value is not None:
            raise UsageError(f"{option}: expected none with --quick, got {value!r}")


def _quick(world_sizes: tuple[int, ...], timeout: float, dry_run: bool, json_file: str | None) -> None:
    """Measure, show and write one calibration for each number of ranks."""
    from tw_compile.calibration import calibration_of, default_folder
    from tw_compile.harness.launch import spawn_ranks
    from tw_compile.harness.variables import for_runs
    from tw_compile.tuning import calibrate, short

    console = common.make_console(json_file)
    folder = default_folder()
    calibrations = []
    for ranks in () if dry_run else world_sizes:
        spec = replace(short.short_spec(ranks), timeout=timeout)
        with common.stages(console, 2) as progress, for_runs():
            text = spawn_ranks(spec, progress, calibrate.rank_process)["calibration"]
        if text is not None:
            found = calibration_of(text, "what the ranks measured")
            calibrations.append(json.loads(text))
            for line in short.lines(found):
                console.print(line, markup=False, soft_wrap=True)
    if dry_run:
        tokens = ", ".join(map(str, sorted(short.TOKENS)))
        console.print(
            f"would time {tokens} tokens x {short.HIDDEN} and write to {folder}", markup=False, soft_wrap=True
        )
    common.write_json(
        {"schema_version": 1, "command": "tune", "dry_run": dry_run, "calibrations": calibrations}, json_file
    )
    if not dry_run and len(calibrations) < len(world_sizes):
        raise typer.Exit(common.EXIT_FAILED)


def _measure(spec: Any, folder: Path, resume: bool, json_file: str | None) -> tuple[dict[str, Any], Any]:
    from tw_compile.tuning.run import PARTIAL, earlier_stages, key_of, steps, tune
    from tw_compile.tuning.tables import derive

    console = common.make_console(json_file)
    devices = _ready(spec, folder)
    calibrations = _calibrations(spec, devices)
    key = key_of(spec, devices)
    if not resume:
        (folder / PARTIAL).unlink(missing_ok=True)
    stages = earlier_stages(folder, key)
    for calibration in calibrations:
        here = calibration.measured_on
        console.print(f"goes on from what {here.world_size} ranks have measured: {here.file_name}", markup=False)
    if stages:
        console.print(f"resumed, done before: {', '.join(stages)}", markup=False, soft_wrap=True)
    total = sum(steps(stage) for stage in spec.stages() if stage.name not in stages)
    with common.stages(console, total) as progress:
        report = tune(spec, key, stages, folder, progress, calibrations)
    return report, derive(report) if spec.device == "cuda" and not (spec.link_labels or spec.wires) else None


def _transports(world_sizes: tuple[int, ...], device: str, dry_run: bool) -> tuple[str, ...]:
    """The transports whose kernels are timed.

    They are those of a calibration of this node. On a CPU and in a dry run the node need not be here. Then the transports are
    those of a node whose GPUs reach each other, or ``host`` where peer access is switched off.
    """
    if device == "cpu" or dry_run:
        return ("p2p",) if peer_access() else ("host",)
    from tw_compile.current import current_node
    from tw_compile.harness.variables import for_measurements
    from tw_compile.kernels.collective.transport import node_facts
    from tw_compile.tuning.calibrate import transports_of

    with for_measurements():
        node = current_node()  # it initialises CUDA, without which nothing is known of peers
        return tuple(transports_of(node_facts("cuda", max(world_sizes)), node))


def _calibrations(spec: Any, devices: list[str]) -> list[Calibration]:
    """The calibrations that ranks have stored of this node before, with multicast as it is set for the measurements now."""
    from tw_compile.calibration import default_folder, stored
    from tw_compile.current import current_node, measured_on
    from tw_compile.harness.variables import for_measurements
    from tw_compile.kernels.collective.transport import node_facts

    if not devices or spec.link_labels or spec.wires:
        return []
    with for_measurements():
        node = current_node()
        of_sizes = [
            measured_on(devices[0], ranks, node, node_facts("cuda", ranks).peer_access) for ranks in spec.world_sizes
        ]
    return [found for here in of_sizes if (found := stored(default_folder(), here)) is not None]


def _finish(report: dict[str, Any], derived: Any, folder: Path, plot_file: str | None, json_file: str | None) -> bool:
    """Show and write everything. Returns whether one of our kernels failed. No table is written where its numerics failed."""
    from tw_compile.benchmark.results import rows_of
    from tw_compile.files import write_whole
    from tw_compile.harness.rows import failures
    from tw_compile.tuning.run import PARTIAL
    from tw_compile.tuning.show import plot, print_report
    from tw_compile.tuning.tables import command_of, write

    console = common.make_console(json_file)
    print_report(console, report, derived)
    failed = [row for stage in report["stages"].values() for row in failures(rows_of(stage))]
    wrong = any(row.outcome == "numerics failed" for row in failed)
    results = folder / RESULTS[report["device"]]
    write_whole(results, json.dumps(report, indent=1) + "\n")
    written = [results]
    if derived is not None and not wrong:
        versions = report["versions"]
        comment = (
            f"Written by {command_of(report)} on {versions['date']}: {derived.device_name}, {report['machine']}, torch "
            f"{versions['torch']}, NCCL {versions['nccl']}, FlashInfer {versions['flashinfer'] or '-'}, "
            f"tw_compile {versions['commit']}"
        )
        written += write(folder, derived, comment)
        if derived.profile is None:
            console.print(
                f"no device profile: none is shipped for {derived.device_name}; the next program that compiles measures one",
                markup=False,
                soft_wrap=True,
            )
        _say_if_not_used(console, derived.table.device_class)
    elif wrong:
        console.print("no table is written, as numerics of ours failed", style="red")
    (folder / PARTIAL).unlink(missing_ok=True)
    for file in written:
        console.print(f"wrote {file}", markup=False, soft_wrap=True)
    if plot_file is not None:
        plot(derived, plot_file)
    common.write_json(report, json_file)
    return bool(failed)


def _link_labels(transport: str, device: str, plot_file: str | None, dry_run: bool) -> tuple[str, ...]:
    """The contenders of a transport. Refuses options and machines with which the run would not measure the link."""
    from tw_compile.cli.plan import node_link
    from tw_compile.tuning.link import check_link_is_used, labels_of

    if device != "cuda":
        raise UsageError(f"--transport: expected --device cuda with it, got {transport!r}")
    if plot_file is not None:
        raise UsageError(f"--plot: expected none with --transport, which has no crossovers, got {plot_file!r}")
    link = node_link()
    labels = labels_of(link, transport)
    if not dry_run:
        from tw_compile.kernels.collective.peer_access import pair_obstacle

        check_link_is_used(link, transport, peer_access() and pair_obstacle(0, 1) is None)
    return labels


def _finish_link(report: dict[str, Any], transport: str, folder: Path, json_file: str | None) -> None:
    """Show and write what was measured of a link."""
    from tw_compile.cli.plan import node_link
    from tw_compile.files import write_whole
    from tw_compile.tuning.link import fitted_link, link_lines, write_link
    from tw_compile.tuning.run import PARTIAL
    from tw_compile.tuning.tables import kernel_run

    console = common.make_console(json_file)
    runs = [kernel_run(report, stage) for stage in report["stages"].values()]
    found = fitted_link(node_link(), transport, runs)
    for line in link_lines(found, transport, [row for run in runs for row in run.rows]):
        console.print(line, markup=False, soft_wrap=True)
    versions = report["versions"]
    comment = (
        f"Written by tw-compile tune --transport {transport} on {versions['date']}: {report['machine']}, torch "
        f"{versions['torch']}, NCCL {versions['nccl']}, tw_compile {versions['commit']}"
    )
    results = folder / LINK_RESULTS.format(transport=transport)
    write_whole(results, json.dumps(report, indent=1) + "\n")
    written = [results]
    if found.measured:
        written.append(write_link(folder, found, comment))
    else:
        console.print("no latency and rate fit the times, so no link is written", style="red")
    (folder / PARTIAL).unlink(missing_ok=True)
    for file in written:
        console.print(f"wrote {file}", markup=False, soft_wrap=True)
    common.write_json(report, json_file)
    if not found.measured:
        raise typer.Exit(common.EXIT_FAILED)


def _folder(out: str | None) -> Path:
    if out is not None:
        return common.folder("--out", out)
    from tw_compile.files import user_folder

    folder = user_folder()
    if folder is None:
        raise UsageError("--out: expected a folder, as this user has no home, got none")
    return folder


def world_sizes_of(asked: tuple[int, ...] | None, device: str, dry_run: bool) -> tuple[int, ...]:
    """The world sizes that ``--tp`` names, or else those of ``WORLD_SIZES`` that the GPUs here suffice for (2 on a CPU)."""
    bench_common.refuse_launcher("tune")
    for ranks in asked or ():
        common.ranks("--tp", ranks, least=2)
    if device == "cpu":
        common.cpu_ranks("--tp", max(asked or (2,)))
        return asked or (2,)
    gpus = common.gpus()
    usual = common.numbers("--tp", WORLD_SIZES)
    if dry_run and gpus < 2:
        return asked or usual
    bench_common.check_gpus(None if asked is None else max(asked), gpus)
    return asked or tuple(ranks for ranks in usual if ranks <= gpus)


def _ready(spec: Any, folder: Path) -> list[str]:
    """The names of the GPUs. Refuses GPUs that have other work or differ, and a folder whose files are about another device."""
    if spec.device == "cpu":
        return []
    import torch

    from tw_compile.current import current_node
    from tw_compile.harness.variables import for_measurements
    from tw_compile.tuning.busy import obstacles, usages
    from tw_compile.tuning.tables import check_folder

    count = max(spec.world_sizes)
    busy = obstacles(usages(count))
    if busy:
        raise UsageError(f"tune: expected idle GPUs, got {'; '.join(busy)}")
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    if len(set(names)) > 1:
        raise UsageError(f"--tp: expected GPUs of one kind, got {', '.join(sorted(set(names)))}")
    with for_measurements():
        check_folder(folder, current_node().device_class, names[0])
    return names


def _say_if_not_used(console: Any, device_class: str) -> None:
    from tw_compile.current import current_node

    own = current_node().device_class
    if own != device_class:
        console.print(
            f"measured with NVLink multicast off, so the thresholds are about {device_class}: this device is {own} unless "
            "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 is set, and does not use them",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
