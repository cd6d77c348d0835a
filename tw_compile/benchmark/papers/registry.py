"""The papers, by the name that the command takes. Imports no torch, and a paper's module only when it is asked for."""

from __future__ import annotations

from importlib import import_module

from tw_compile.benchmark.papers.exhibit import Exhibit
from tw_compile.harness.requests import UsageError

PAPERS = {
    "tokenweave": "tw_compile.benchmark.papers.tokenweave",
    "flash-communication": "tw_compile.benchmark.papers.flash_communication",
    "commfuse": "tw_compile.benchmark.papers.commfuse",
    "distfuse": "tw_compile.benchmark.papers.distfuse",
    "vllm-44079": "tw_compile.benchmark.papers.vllm_44079",
}
"""Each module has ``EXHIBITS``; its published numbers are ``configs/papers/NAME.toml``."""


def exhibits(name: str, figures: str | None = None) -> tuple[Exhibit, ...]:
    """The exhibits of the paper ``name``, in its order; only those of ``figures`` (ids with commas), if it is given.

    Raises:
        UsageError: There is no such paper, or it has no such exhibit.
    """
    if name not in PAPERS:
        raise UsageError(f"NAME: expected one of {', '.join(PAPERS)}, got {name!r}")
    known: tuple[Exhibit, ...] = import_module(PAPERS[name]).EXHIBITS
    if figures is None:
        return known
    wanted = [part.strip() for part in figures.split(",")]
    ids = [exhibit.id for exhibit in known]
    for figure in wanted:
        if figure not in ids:
            raise UsageError(f"--figures: expected some of {', '.join(ids)} for {name}, got {figure!r}")
    return tuple(exhibit for exhibit in known if exhibit.id in wanted)
