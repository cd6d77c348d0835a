"""``tw-compile bench paper``: what a paper has claimed, exhibit by exhibit, beside what this package does here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tw_compile.benchmark.papers import accuracy
from tw_compile.benchmark.papers.exhibit import Exhibit
from tw_compile.benchmark.papers.measure import Measured, made_with, measure, through_host
from tw_compile.benchmark.papers.published import read_published
from tw_compile.benchmark.papers.registry import PAPERS, exhibits
from tw_compile.benchmark.papers.timed import given
from tw_compile.cli import bench_common, common
from tw_compile.cli.common import JsonOption
from tw_compile.cli.tune_halves import tune_for
from tw_compile.harness.launch import Progress
from tw_compile.harness.requests import UsageError

MOST_MINUTES = 24 * 60.0
DRY_RUN_RANKS = 2
TUNE_MINUTES = 2.0
"""With less time halves are not tuned before they are planned. It takes a GPU well under a minute."""


@common.one_line_errors
def paper(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(PAPERS)}.")],
    figures: Annotated[
        str | None,
        typer.Option(
            metavar="ID[,ID...]", help="Figures by their numbers, tables as t1.", show_default="all of the paper"
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(metavar="N", help="Ranks to measure with.", show_default="the GPUs that are there, 2 without"),
    ] = None,
    files: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="RESULTS",
            help="A benchmark's CSV, or a JSON report of run --wire, to draw from; may be given several times.",
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(metavar="M", help="Measure no longer; the same command goes on from there.")
    ] = 25.0,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Use what an earlier call has measured here, or measure it again.")
    ] = True,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Where measured rows are kept.", show_default="in the user's config folder"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Draw from committed results and the planner alone; needs no GPU.")
    ] = False,
    html_file: Annotated[
        str | None, typer.Option("--html", metavar="FILE.html", help="Write one self-contained page.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Show a paper's figures and tables beside what is measured here, was measured before, or is predicted.

    NAME is tokenweave, flash-communication, commfuse, distfuse or vllm-44079. Every value says how it was obtained, and claims
    are checked in words. The benchmarks do the measuring; what they found is kept as CSV. TokenWeave's figure 9 plans halves.
    So what tune --halves measures is measured first, if the user's device.toml lacks it, and added there. Exit code: 0 drawn,
    also where something could not be measured, 2 bad input.
    """
    begin = time.monotonic()
    shown = exhibits(name, figures)
    common.ranks("--tp", tp, least=2)
    if not 0.0 < minutes <= MOST_MINUTES:
        raise UsageError(f"--minutes: expected more than 0 and at most {MOST_MINUTES:g}, got {minutes:g}")
    common.writable("--html", html_file)
    published = read_published(name)
    reports = [file for file in files or () if file.endswith(".json")]
    costs = accuracy.given(reports)
    rows = given(file for file in files or () if file not in reports)
    folder = None if dry_run else _folder(out)
    console = common.make_console(json_file)
    measured, ranks = None, tp or DRY_RUN_RANKS
    if folder is not None:
        bench_common.refuse_launcher("bench paper")
        gpus = common.gpus()
        ranks = tp or next((count for count in bench_common.CUDA_RANKS if count <= gpus), DRY_RUN_RANKS)
        with common.stages(console) as progress:
            measured = _measured(shown, ranks, gpus, folder, minutes, resume, progress)
    from tw_compile.benchmark.papers.report import report_of
    from tw_compile.cli.paper_page import page, print_report

    report = report_of(name, published, shown, rows, measured, ranks, time.monotonic() - begin, costs)
    print_report(console, report)
    common.write_json(report, json_file)
    if html_file is not None:
        common.write_file("--html", html_file, page(report))


def _folder(out: str | None) -> Path:
    if out is not None:
        return common.folder("--out", out)
    from tw_compile.files import user_folder

    folder = user_folder()
    if folder is None:
        raise UsageError("--out: expected a folder, as this user has no home, got none")
    return folder / "papers"


def _measured(
    shown: tuple[Exhibit, ...], ranks: int, gpus: int, folder: Path, minutes: float, resume: bool, progress: Progress
) -> Measured:
    from tw_compile.benchmark.papers.report import requests_of

    begin = time.monotonic()
    requests = [request for asked in requests_of(shown, ranks).values() for request in asked]
    ffns = [request.spec for request in requests if request.bench == "bench ffn"]
    if gpus > 0 and ffns and minutes >= TUNE_MINUTES:
        # The halves that a request plans depend on what is measured here, so the requests are made anew.
        reason = tune_for(ffns, minutes, progress)
        if reason is not None:
            progress(f"halves that device.toml lacks are planned by the model: {reason}")
        requests = [request for asked in requests_of(shown, ranks).values() for request in asked]
    left = minutes - (time.monotonic() - begin) / 60.0
    return measure(requests, gpus, folder, left, made_with(), progress, resume, host=through_host())
