"""What the benchmarks that time something have in common: options, what is refused, and how a report is made and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from tw_compile.cli import common
from tw_compile.cli.common import MEASURED_WIRES
from tw_compile.config import WHY_NOT_INT4, whole_number
from tw_compile.harness.requests import UsageError
from tw_compile.kernels.collective.wires import EXACT, WIRES
from tw_compile.model_file import read_model_file, text_part
from tw_compile.runner.spec import DTYPES

CUDA_RANKS = (8, 4, 2)
MIN_REPEATS = 20

RanksOption = Annotated[
    int | None, typer.Option("--tp", metavar="N", help="Ranks.", show_default="the GPUs that are there, 2 on CPU")
]
DeviceOption = Annotated[str, typer.Option("--device", metavar="cuda|cpu", help="cpu is a smoke test on gloo ranks.")]
DtypeOption = Annotated[str, typer.Option("--dtype", metavar="|".join(DTYPES))]
OnlyOption = Annotated[
    str | None,
    typer.Option(
        "--only", metavar="LABEL[,...]", help="Time only the implementations with these labels. Default: all."
    ),
]
RepeatsOption = Annotated[int, typer.Option("--repeats", metavar="N", help=f"Timed runs, at least {MIN_REPEATS}.")]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of all random numbers.")]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", help="Give up after this time, and report the sizes that are done."),
]
WiresOption = Annotated[
    str,
    typer.Option(
        "--wire",
        metavar="|".join(MEASURED_WIRES) + "[,...]",
        help="How rows travel: variants with these wires take part beside the exact ones.",
    ),
]
PrefetchOption = Annotated[
    str | None,
    typer.Option(
        "--prefetch",
        metavar="off|BYTES[,...]",
        help="Variants that prefetch so many bytes of the next weights take part beside the others (option prefetch).",
    ),
]
CsvOption = Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write the rows as CSV.")]
PlotOption = Annotated[str | None, typer.Option("--plot", metavar="FILE.png|svg", help="Draw the report as a picture.")]


def labels(only: str | None) -> tuple[str, ...]:
    return tuple(only.split(",")) if only is not None else ()


def wires(text: str, model: str, dtype: str) -> tuple[str, ...]:
    """The wires that ``--wire`` names beside exact rows.

    Raises:
        UsageError: There is no such wire, or the rows of the model can't have it.
    """
    names = tuple(text.split(","))
    if "int4" in names:
        raise UsageError(f"--wire: {WHY_NOT_INT4}")
    if len(set(names)) < len(names) or not set(names) <= set(MEASURED_WIRES):
        raise UsageError(f"--wire: expected different ones of {', '.join(MEASURED_WIRES)}, got {text!r}")
    coded = tuple(name for name in names if name != EXACT)
    if coded and dtype == "float32":
        raise UsageError(f"--wire: expected exact with --dtype float32, as who keeps 32 bits wants them, got {text!r}")
    common.model_file(model)
    hidden_size = text_part(read_model_file(model)[0]).get("hidden_size")
    for name in coded:
        if isinstance(hidden_size, int) and hidden_size % WIRES[name].group:
            group = WIRES[name].group
            raise UsageError(
                f"--wire: expected exact, as the hidden size of {model}, {hidden_size}, is no multiple of {group}, got {name!r}"
            )
    return coded


def prefetch(text: str | None) -> tuple[str, ...]:
    """The values of option ``prefetch`` that ``--prefetch`` names.

    Raises:
        UsageError: One of them is neither ``off`` nor a number of bytes.
    """
    values = tuple(text.split(",")) if text is not None else ()
    if len(set(values)) < len(values) or not all(value == "off" or whole_number(value) for value in values):
        raise UsageError(f"--prefetch: expected off and numbers of bytes, all different, got {text!r}")
    return values


def check(spec: Any, tp: int | None, files: Mapping[str, str | None]) -> None:
    """Refuse values that no benchmark can have. ``files`` holds the output files by option.

    Raises:
        UsageError: An option has a value that makes no sense.
    """
    common.one_of("--device", spec.device, ("cuda", "cpu"))
    common.ranks("--tp", tp)
    if not MIN_REPEATS <= spec.repeats <= common.MOST:
        raise UsageError(f"--repeats: expected {MIN_REPEATS} to {common.MOST}, got {spec.repeats}")
    check_run(spec, files)


def check_run(spec: Any, files: Mapping[str, str | None]) -> None:
    """Check what every benchmark has: dtype, seed, time limit, and output ``files`` by option.

    Raises:
        UsageError: An option has a value that makes no sense.
    """
    common.one_of("--dtype", spec.dtype, DTYPES)
    common.not_negative("--seed", spec.seed)
    common.seconds("--timeout", spec.timeout)
    options: dict[str, str] = {}
    for option, file in files.items():
        common.writable(option, file)
        if file is not None and options.setdefault(file, option) != option:
            raise UsageError(f"{option}: expected another file than that of {options[file]}, got {file!r}")
    plot_file = files.get("--plot")
    if plot_file is not None:
        from tw_compile.harness.plot import require

        require(plot_file)


def ranks_here(command: str, tp: int | None, device: str) -> int:
    """The number of ranks: ``--tp``, or else as many as this machine has GPUs for (2 on a CPU).

    Raises:
        UsageError: This machine can't run that many ranks, ``--tp`` is 1, or a launcher has started this process as a rank.
    """
    refuse_launcher(command)
    if tp == 1:
        raise UsageError("--tp: expected at least 2 ranks, got 1")
    if device == "cpu":
        common.cpu_ranks("--tp", tp)
        return tp or 2
    gpus = common.gpus()
    check_gpus(tp, gpus)
    return tp or next(ranks for ranks in CUDA_RANKS if ranks <= gpus)


def refuse_launcher(command: str) -> None:
    """Raise UsageError where a launcher has started this process as a rank."""
    from tw_compile.harness.launch import torchrun_world_size

    if torchrun_world_size() is not None:
        raise UsageError(
            f"{command}: expected to start the ranks itself, got RANK of a launcher; run it without torchrun"
        )


def check_gpus(tp: int | None, gpus: int) -> None:
    """Raise UsageError where this machine has fewer than 2 GPUs, or fewer than ``tp``."""
    if gpus < 2:
        raise UsageError(f"--device: expected cpu, as torch finds {gpus} GPUs here and cuda needs 2, got 'cuda'")
    common.ranks_of_gpus(tp, gpus)


def check_depth(model: str, layers: int | None) -> None:
    common.model_file(model)
    from tw_compile.runner.model import model_config

    model_config(model, layers)


def measure(
    run: Callable[..., dict[str, Any]],
    steps: int,
    print_report: Callable[[Console, dict[str, Any]], None],
    spec: Any,
    json_file: str | None,
) -> dict[str, Any]:
    """Call ``run``, show its report and write it where ``--json`` says. ``run`` calls its progress ``steps`` times."""
    console = common.make_console(json_file)
    with common.stages(console, steps) as progress:
        report = run(spec, progress)
    print_report(console, report)
    common.write_json(report, json_file)
    return report


def finish(
    report: dict[str, Any],
    failed: Sequence[Any],
    as_csv: Callable[[dict[str, Any]], str],
    csv_file: str | None,
    plot: Callable[[dict[str, Any], str], None],
    plot_file: str | None,
) -> None:
    """Write the CSV file and the plot that were asked for. Then exit with 1 when something ``failed`` or is missing."""
    if csv_file is not None:
        common.write_file("--csv", csv_file, as_csv(report))
    if plot_file is not None:
        plot(report, plot_file)
    if report["incomplete"] is not None or failed:
        raise typer.Exit(common.EXIT_FAILED)
