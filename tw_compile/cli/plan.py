"""``tw-compile plan``: how the tokens of a layer would be split, and what that is predicted to give."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from tw_compile.calibration import all_stored, default_folder
from tw_compile.cli import common
from tw_compile.cli.common import MEASURED_WIRES, JsonOption, ModelOption
from tw_compile.cli.plan_published import beside_published, print_published
from tw_compile.config import whole_number
from tw_compile.harness.requests import UsageError
from tw_compile.harness.table import plain_table, widen
from tw_compile.kernels.collective.planned_wires import planned_wires
from tw_compile.kernels.collective.wires import EXACT, WIRES
from tw_compile.planning import (
    DeviceProfile,
    LayerShape,
    Link,
    Mode,
    Plan,
    evidence,
    layer_shape,
    load_profile,
    plan_layer,
)
from tw_compile.planning.ffn import measured_halves, merged
from tw_compile.planning.links import link_of_node
from tw_compile.planning.presets import preset_layer
from tw_compile.planning.windows import PlannedWindow

SCHEMA_VERSION = 1
ATTENTION = ("auto", "split", "join")
FASTER_THAN_SILENT = (
    "A split layer can be faster than no comm.: without communication every rank normalises all tokens, and in a fused "
    "layer each rank normalises only its share."
)
FFN_ALONE = "an FFN alone, gate and up as one GEMM; the halves above are the model's"
_WIDTH = 120
_WIDE = 110
"""From this many terminal columns on, a window's GEMMs stand in the window's row, and not in a table of their own."""


@common.one_line_errors
def plan(
    model: ModelOption = "llama-3.3-70b",
    tp: Annotated[int, typer.Option(metavar="N", help="Ranks.")] = 8,
    tokens: Annotated[
        str, typer.Option(metavar="FIRST:LAST|N[,N...]", help="Token counts. In a range each is twice the one before.")
    ] = "512:65536",
    device_profile: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE.toml",
            help="A profile of configs/devices, a file of that form, or a device that ranks have calibrated, by its name.",
        ),
    ] = "H200",
    kernel: Annotated[
        str | None, typer.Option(metavar="NAME", help="A fused kernel of the profile.", show_default="the profile's")
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Plan for GPUs without peer access, whose sums go through host memory by nccl or host.",
            show_default="peer memory",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences that share the tokens.")] = 1,
    attention: Annotated[
        str,
        typer.Option(metavar="|".join(ATTENTION), help="How the halves attend: join computes attention once for both."),
    ] = "auto",
    wire: Annotated[
        str,
        typer.Option(
            metavar="|".join(MEASURED_WIRES), help="How rows of fused sums travel, in messages of every size."
        ),
    ] = EXACT,
    plot_file: Annotated[
        str | None, typer.Option("--plot", metavar="FILE.png|svg", help="Draw speed-ups and one layer's timeline.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Predict how splitting a layer's tokens hides communication: sizes, windows, CTAs, waves, times. Needs no GPU."""
    common.ranks("--tp", tp)
    common.positive("--batch", batch)
    common.one_of("--attention", attention, ATTENTION)
    common.measured_wire(wire)
    counts = token_counts(tokens)
    if batch > min(counts):
        raise UsageError(f"--batch: expected at most {min(counts)}, the fewest tokens, got {batch}")
    common.writable("--plot", plot_file)
    console = common.make_console(json_file)
    if plot_file is not None:
        from tw_compile.harness.plot import require

        require(plot_file)
    profile = named_profile(device_profile)
    link = None if transport is None else link_of_transport(transport)
    if link is not None and kernel is not None:
        raise UsageError(f"--kernel: expected none with --transport, which uses no peer memory, got {kernel!r}")
    try:
        profile.fused_kernel(kernel)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    layer, layers = layer_of_model(model, tp)
    served_by = kernel if link is None else transport
    _check_wire(wire, profile, kernel, link, layer)
    wires = planned_wires(layer.hidden_size, wire, wire)
    plans = [
        plan_layer(
            profile,
            layer,
            count,
            kernel=served_by,
            sequences=sequences(count, batch),
            attention=attention,
            link=link,
            wires=wires,
        )
        for count in counts
    ]
    measured = (
        [entry for count in counts if (entry := measured_halves(profile, merged(layer), count))]
        if layer.has_dense_mlp
        else []
    )
    known = evidence(profile, served_by, link, wires)
    published = None if link is not None else beside_published(model, tp, layer.hidden_size, profile, kernel, plans)
    report = {
        "schema_version": SCHEMA_VERSION,
        "command": "plan",
        "model": model,
        "world_size": tp,
        "layers": layers,
        "device_profile": profile.name,
        "kernel": profile.kernel if served_by is None else served_by,
        "link": "" if link is None else link.name,
        "wire": wire,
        "batch": batch,
        "layer": dataclasses.asdict(layer),
        "evidence": {
            "layers": len(known.counted),
            "of_groups": any(error.layer.group for error in known.counted),
            "margin": known.margin,
            "mean_error": known.mean,
            "worst_error": known.worst,
            "text": str(known),
        },
        "plans": [
            dataclasses.asdict(layer_plan) | {"us": layer_plan.us, "gain": layer_plan.gain} for layer_plan in plans
        ],
        "ffn_halves": [dataclasses.asdict(entry) for entry in measured],
        "published": published,
    }
    _print(console, report, plans)
    for entry in measured:
        console.print(f"{FFN_ALONE}: {entry}", style="dim", markup=False, soft_wrap=True)
    common.write_json(report, json_file)
    if plot_file is not None:
        from tw_compile.cli.plan_plot import plot

        plot(plans, f"{model}, {tp} x {profile.name}, {report['kernel']}", plot_file)


def _check_wire(wire: str, profile: DeviceProfile, kernel: str | None, link: Link | None, layer: LayerShape) -> None:
    """Raise UsageError where the rows of this layer's sums can't travel by ``wire``."""
    if wire == EXACT:
        return
    group = WIRES[wire].group
    if layer.hidden_size % group:
        raise UsageError(
            f"--wire: expected exact, as the hidden size {layer.hidden_size} is no multiple of {group}, got {wire!r}"
        )
    if link is None and profile.fused_kernel(kernel).multicast:
        raise UsageError(
            f"--wire: expected exact with --kernel {kernel}, whose switch adds rows as they are, got {wire!r}"
        )
    if link is None and profile.coded_kernel is None:
        raise UsageError(
            f"--wire: expected exact, as {profile.name}'s profile has no kernel whose rows travel in codes, got {wire!r}"
        )


def token_counts(text: str) -> tuple[int, ...]:
    """``"512:4096"`` -> ``(512, 1024, 2048, 4096)``; ``"1000,1024"`` -> ``(1000, 1024)``. No count exceeds a range's end."""
    if ":" not in text:
        return common.numbers("--tokens", text)
    first, last = map(whole_number, text.split(":", 1))
    if not first or not last or first > last:
        raise UsageError(f"--tokens: expected FIRST:LAST, positive and not descending, got {text!r}")
    counts = [first]
    while counts[-1] * 2 <= last:
        counts.append(counts[-1] * 2)
    return tuple(counts)


def sequences(tokens: int, batch: int) -> tuple[int, ...]:
    """The lengths of ``batch`` sequences that share ``tokens``. If there is a remainder, the first ones get one token more."""
    length, longer = divmod(tokens, batch)
    return (length + 1,) * longer + (length,) * (batch - longer)


def named_profile(name: str) -> DeviceProfile:
    """The profile that ``--device-profile`` names. A device's name also finds the profile that ranks have measured on it."""
    try:
        return load_profile(name)
    except ValueError as error:
        for calibration in all_stored(default_folder()):
            if calibration.measured_on.device_name == name and calibration.profile is not None:
                return calibration.profile
        raise UsageError(f"--device-profile: {error}") from error


def node_link() -> Link:
    """The link that messages travel over where GPUs have no peer access."""
    try:
        return link_of_node()
    except ValueError as error:  # the user's own file is wrong
        raise UsageError(str(error)) from error


def link_of_transport(transport: str) -> Link:
    """The node's link. Raises UsageError where the link does not have the ``transport``."""
    link = node_link()
    try:
        link.transport(transport)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    return link


def layer_of_model(model: str, tp: int) -> tuple[LayerShape, int]:
    """The model's layer on one of ``tp`` ranks, and how many layers there are."""
    common.model_file(model, tp)
    try:
        layer = preset_layer(model, tp)
        if layer is not None:
            return layer
        from tw_compile.models.config import load_config, tensor_parallel_plan

        config = load_config(model)
        return layer_shape(config, tensor_parallel_plan(config), tp), config.num_hidden_layers
    except ValueError as error:
        raise UsageError(f"--model {model} --tp {tp}: {error}") from error


def _print(console: Console, report: dict[str, Any], plans: Sequence[Plan]) -> None:
    widen(console, _WIDTH)
    console.print(
        f"{report['model']}, one of {report['layers']} layers on {report['world_size']} x {report['device_profile']}, "
        f"{'transport' if report['link'] else 'kernel'} {report['kernel']}",
        style="bold",
        markup=False,
    )
    if report["wire"] != EXACT:
        bytes_only = (
            f"rows of fused sums in {report['wire']}: their bytes are counted, and what it takes to encode them is not"
        )
        console.print(bytes_only, style="dim", markup=False)
    if plans[0].rates:
        console.print(plans[0].rates, style="dim", markup=False)
    console.print("predicted microseconds a layer; waves: of all GEMMs, whole -> half 1 + half 2", style="dim")
    console.print(str(report["evidence"]["text"]), style="dim", markup=False)
    _print_summary(console, plans)
    split = [plan for plan in plans if plan.mode is not Mode.OFF]
    console.print("gain: the unfused time by that of the plan, which is split or fused", style="dim", markup=False)
    if any(plan.cuts_sequence for plan in split):
        console.print("*: half 2 begins within a sequence", style="dim", markup=False)
    if any(plan.us < plan.predicted.no_communication_us for plan in split):
        console.print(FASTER_THAN_SILENT, style="dim", markup=False)
    if split:
        console.print()
        _print_windows(console, split)
    if report["published"] is not None:
        print_published(console, report["published"])
    for plan in plans:
        if plan.off is not None:
            console.print(f"{plan.tokens} tokens: off, {plan.off}: {plan.reason}", style="yellow", markup=False)


def _print_summary(console: Console, plans: Sequence[Plan]) -> None:
    wide = console.width >= _WIDE
    columns = ("tokens", "mode", "halves", "waves", "unfused", "no comm.", "fused", "split", "gain")
    table = plain_table([name for name in columns if wide or name != "waves"], ("mode",), no_wrap=True)
    for plan in plans:
        predicted = plan.predicted
        whole, first, second = (
            sum(getattr(gemm, name) for gemm in plan.waves) for name in ("whole", "first", "second")
        )
        table.add_row(
            str(plan.tokens),
            plan.mode.value + ("*" if plan.cuts_sequence else ""),
            " + ".join(map(str, plan.sizes)) if plan.mode is not Mode.OFF else "-",
            *([f"{whole} -> {first} + {second}" if plan.waves else "-"] if wide else []),
            *(f"{us:.0f}" for us in (predicted.unfused_us, predicted.no_communication_us, predicted.fused_us)),
            "-" if predicted.split_us is None else f"{predicted.split_us:.0f}",
            f"{plan.gain:.2f}x",
        )
    console.print(table)


_WINDOW_COLUMNS = ("window", "GEMMs: waves on SMs", "compute", "beside a sum of", "on SMs", "sum", "both")


def _print_windows(console: Console, plans: Sequence[Plan]) -> None:
    """Print the windows as one table where the terminal is wide enough. Elsewhere the GEMMs follow in a second table."""
    gemms = _WINDOW_COLUMNS.index("GEMMs: waves on SMs")
    everything = range(len(_WINDOW_COLUMNS))
    parts: list[Sequence[int]] = [everything]
    if console.width < _WIDE:
        parts = [[column for column in everything if column != gemms], [0, gemms]]
    for number, part in enumerate(parts):
        columns = ("tokens", *(_WINDOW_COLUMNS[column] for column in part))
        table = plain_table(columns, ("window", "GEMMs: waves on SMs", "beside a sum of"), no_wrap=True)
        if gemms in part:
            table.columns[1 + list(part).index(gemms)].no_wrap = False
        for plan in plans:
            for index, window in enumerate(plan.windows):
                cells = _window_cells(window)
                table.add_row("" if index else str(plan.tokens), *(escape(cells[column]) for column in part))
        if number:
            console.print()
        console.print(table)


def _window_cells(window: PlannedWindow) -> tuple[str, ...]:
    gemms = ", ".join(
        f"{name} {'+'.join(str(gemm.waves) for gemm in same)} on {sms}"
        for (name, sms), same in itertools.groupby(window.gemms, key=lambda gemm: (gemm.name, gemm.sms))
    )
    travels = ("-", "-", "-")
    if window.travels is not None:
        travels = (
            f"{window.message_bytes / 2**20:.1f} MiB of half {window.travels}",
            str(window.ctas),
            f"{window.communication_us:.0f}",
        )
    return (f"{window.computes} {window.half}", gemms, f"{window.compute_us:.0f}", *travels, f"{window.us:.0f}")
