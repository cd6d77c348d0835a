"""``tw-compile inspect``: what would be fused on a machine you don't have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from tw_compile.cli import common
from tw_compile.cli.common import (
    DeviceProfileOption,
    JsonOption,
    LayersOption,
    ModelOption,
    SplitOption,
    TransportOption,
    WireOption,
    WireSitesOption,
)
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.runner.spec import DTYPES, RunSpec

if TYPE_CHECKING:
    from tw_compile.graph.text import DiffLine
    from tw_compile.runner.fake import Inspection

STYLES = {"same": "", "removed": "red", "added": "green", "folded": "dim"}


@common.one_line_errors
def inspect(
    model: ModelOption = "llama-3.3-70b",
    tp: Annotated[int, typer.Option(metavar="N", help="Ranks to play.")] = 8,
    tokens: Annotated[int, typer.Option(metavar="N", help="Prompt length.")] = 4096,
    layers: LayersOption = None,
    transport: TransportOption = "auto",
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES))] = "bfloat16",
    split: SplitOption = "auto",
    device_profile: DeviceProfileOption = "auto",
    wire: WireOption = EXACT,
    wire_sites: WireSitesOption = "all",
    wire_min_bytes: Annotated[
        int | None,
        typer.Option(metavar="N", help="As the option tw_compile.wire_min_bytes.", show_default="the tables decide"),
    ] = None,
    all_layers: Annotated[
        bool, typer.Option("--all-layers", help="Trace every layer instead of only those that differ.")
    ] = False,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write the report as one HTML page.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Show what the passes do to a model on GPUs that need not exist: one process, no weights, nothing is run."""
    common.one_of("--dtype", dtype, DTYPES)
    common.one_of("--transport", transport, common.TRANSPORTS)
    common.ranks("--tp", tp)
    for option, value in (("--tokens", tokens), ("--layers", layers)):
        common.positive(option, value)
    common.splitting(split, device_profile)
    common.wires(wire, wire_sites, wire_min_bytes)
    common.thresholds()
    common.writable("--html", html)
    common.model_file(model, tp, layers)
    spec = RunSpec(
        model,
        tp,
        "cuda",
        (tokens,),
        dtype,
        layers,
        transport,
        split=split,
        device_profile=device_profile,
        wire=wire,
        wire_sites=wire_sites,
        wire_min_bytes=wire_min_bytes,
    )
    console = common.make_console(json_file)
    with common.stages(console) as progress:
        progress("importing torch and transformers")
        from tw_compile.runner.fake import as_report, inspect_model

        progress(f"compiling {model} for one of {tp} fake ranks, up to the passes")
        inspection = inspect_model(spec, all_layers=all_layers)
    report = as_report(spec, inspection)

    from tw_compile.cli.render import print_header, print_sites
    from tw_compile.cli.render_split import print_splits

    print_header(console, report)
    print_sites(console, report)
    print_splits(console, report["splits"], report["layers_traced"])
    layer = shown_layer(report)
    if layer is not None:
        _print_layer(console, layer, layer_diff(inspection, layer))
    common.write_json(report, json_file)
    if html is not None:
        from tw_compile.cli.html import page

        common.write_file("--html", html, page(report, inspection.before, inspection.after, layer))
        console.print(f"wrote {html}", markup=False)


def shown_layer(report: dict[str, object]) -> int | None:
    """A layer in the middle of the model, as the first and the last ones are special."""
    layers = sorted({site["layer"] for site in report["sites"] if site["layer"] is not None})  # type: ignore[attr-defined]
    return layers[len(layers) // 2] if layers else None


def layer_diff(inspection: Inspection, layer: int) -> list[DiffLine]:
    from tw_compile.graph import text

    return text.diff(text.layer_lines(inspection.before, layer), text.layer_lines(inspection.after, layer))


def _print_layer(console: Console, layer: int, diff: list[DiffLine]) -> None:
    from tw_compile.graph.text import aligned

    console.print()
    console.print(
        f"layer {layer}, from its first matmul to the next layer's; - before, + after the passes", style="bold"
    )
    for change, line in aligned(diff):
        console.print(Text(line, style=STYLES[change]), soft_wrap=True)
