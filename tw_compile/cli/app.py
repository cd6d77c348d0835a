"""The verbs of ``tw-compile``, put together."""

from __future__ import annotations

import typer

from tw_compile.cli import bench, bench_layer, bench_vllm, doctor, explain, inspect, plan, run, tune

app = typer.Typer(
    name="tw-compile",
    help="torch.compile passes that fuse all_reduce + residual + RMSNorm in tensor-parallel inference. Every command ends with "
    "exit code 130 after Ctrl-C and 143 after SIGTERM; a benchmark writes what it has measured by then.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("inspect")(inspect.inspect)
app.command("plan")(plan.plan)
app.command("explain")(explain.explain)
app.command("doctor")(doctor.doctor)
app.command("tune")(tune.tune)
bench.app.command("layer")(bench_layer.layer)
bench.app.command("model")(bench_layer.model)
bench.app.command("vllm")(bench_vllm.vllm)
app.add_typer(bench.app, name="bench")
