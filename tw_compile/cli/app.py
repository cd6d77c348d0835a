"""The verbs of ``tw-compile``, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from tw_compile import __version__
from tw_compile.cli import (
    bench,
    bench_beside,
    bench_layer,
    bench_paper,
    bench_vllm,
    doctor,
    explain,
    inspect,
    plan,
    run,
    tune,
)

app = typer.Typer(
    name="tw-compile",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
_SEE, _RUN, _MEASURE = "See what would be done", "Run and check", "Measure"


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tw-compile {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """torch.compile passes that fuse all_reduce + residual + RMSNorm in tensor-parallel inference.

    Every command ends with exit code 130 after Ctrl-C and 143 after SIGTERM. A benchmark writes what it has measured by then.
    """


app.command("run", rich_help_panel=_RUN)(run.run)
app.command("inspect", rich_help_panel=_SEE)(inspect.inspect)
app.command("plan", rich_help_panel=_SEE)(plan.plan)
app.command("explain", rich_help_panel=_SEE)(explain.explain)
app.command("doctor", rich_help_panel=_SEE)(doctor.doctor)
app.command("tune", rich_help_panel=_MEASURE)(tune.tune)
bench.app.command("beside")(bench_beside.beside)
bench.app.command("layer")(bench_layer.layer)
bench.app.command("gemm-site")(bench_layer.gemm_site)
bench.app.command("model")(bench_layer.model)
bench.app.command("vllm")(bench_vllm.vllm)
bench.app.command("paper")(bench_paper.paper)
app.add_typer(bench.app, name="bench", rich_help_panel=_MEASURE)
