"""``torch.compile(model, backend="tw_compile")``: Inductor with the passes in its post-grad slot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx

from tw_compile import compat, environment, kept_reports
from tw_compile.config import Config
from tw_compile.kernels.registry import load
from tw_compile.pipeline import TWCompilePass, log_report, say_off
from tw_compile.report import GraphReport, collect_reports, publish

logger = logging.getLogger("tw_compile")

_CALIBRATE = "tw_compile.tuning.calibrate:before_compile"
"""The name of the function. Its module is not imported here, because it imports the modules of the benchmarks."""


def tw_compile_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend that torch.compile finds under the name ``tw_compile``.

    Args:
        mode: As torch.compile's: ``default``, ``reduce-overhead``, ``max-autotune``, ``max-autotune-no-cudagraphs``.
        options: ``tw_compile.*`` keys configure the passes (:class:`tw_compile.Config`), all others are Inductor's own.
            A ``post_grad_custom_post_pass`` among them, or set globally, runs before the passes.

    torch.compile takes either ``mode`` or ``options``, and refuses both together; :func:`make_backend` is for that case.

    ``TW_COMPILE=0`` in the environment leaves the passes out: what remains is Inductor with the same options.

    Raises:
        ValueError, TypeError: An option is unknown or has a bad value.
    """
    config, inductor_options = Config.split_options(options)
    return _compile(gm, example_inputs, config, mode, inductor_options)


def make_backend(config: Config) -> Callable[..., Any]:
    """A backend bound to ``config``, for use together with ``mode=``, which torch.compile doesn't take beside options.

    Raises:
        TypeError: ``config`` is no :class:`tw_compile.Config`.
        ValueError: ``config.disable_passes`` has a name that no pass has.
    """
    TWCompilePass(config)

    def backend(
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        _, inductor_options = Config.split_options(options)
        if len(inductor_options) < len(options or {}):
            raise ValueError("tw_compile.* options: expected none beside make_backend(config), which has them already")
        return _compile(gm, example_inputs, config, mode, inductor_options)

    return backend


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    mode: str | None,
    inductor_options: dict[str, Any],
) -> Callable[..., Any]:
    patches = compat.mode_options(mode)
    known = compat.inductor_option_names()
    for key, value in inductor_options.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ValueError(f"options: unknown key {key!r}; expected an Inductor option or a tw_compile.* option")
        patches[name] = value
    if environment.enabled() is False:
        say_off()
        return compat.compile_with_inductor(gm, list(example_inputs), patches)
    if config.calibrate != "off" and torch.cuda.is_initialized() and dist.is_available() and dist.is_initialized():
        load(_CALIBRATE)(config, gm)
    users = patches.pop(compat.POST_GRAD_HOOK, compat.global_post_grad_pass())
    passes = TWCompilePass(config, before=compat.chain_passes(users))
    file = kept_reports.file_of(gm, example_inputs, passes, patches)
    with collect_reports() as reports:
        compiled = compat.compile_with_inductor(gm, list(example_inputs), patches | {compat.POST_GRAD_HOOK: passes})
    if file is not None and reports:
        _keep(file, reports)
    elif file is not None:
        _publish_kept(file)
    return compiled


def _keep(file: Path, reports: Sequence[GraphReport]) -> None:
    """Keep ``reports`` for a later compile, which may take the graph from Inductor's cache."""
    try:
        kept_reports.keep(file, reports)
    except ValueError as error:
        logger.info("tw_compile: a graph's report is not kept: %s", error)


def _publish_kept(file: Path) -> None:
    """Publish the reports from when the graph was rewritten: it came out of Inductor's cache now, so no pass has run."""
    try:
        reports = kept_reports.read(file)
    except ValueError as error:
        logger.info(
            "tw_compile: a graph came out of Inductor's cache as the passes left it before; no report of it was kept: %s "
            "(TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles it anew)",
            error,
        )
        return
    for report in reports:
        log_report(report)
        publish(report)
