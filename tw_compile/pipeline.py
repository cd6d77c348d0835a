"""The passes as one object that any host can put into Inductor's post-grad slot."""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable
from enum import StrEnum

import torch.fx as fx

from tw_compile import compat, environment, report
from tw_compile.config import Config
from tw_compile.current import current_gate, current_link, current_profile, own_prefetch_bytes
from tw_compile.gating.gate import Gate
from tw_compile.kernels.collective.transport import group_facts
from tw_compile.kernels.runtime import operator
from tw_compile.passes import fusion, manager, split
from tw_compile.passes.contract import Context, HostGraph, InductorNeed
from tw_compile.passes.reasons import Refusal, SplitRefusal, refusals
from tw_compile.sources import source_digest

logger = logging.getLogger("tw_compile")


class TWCompilePass(compat.CustomGraphPass):
    """All passes, in order. Use it as Inductor's ``post_grad_custom_post_pass``.

    Args:
        config: What the passes may do.
        before: A post-grad pass of the user's own; it runs first and sees the graph without the fused operators.

    If a pass fails, its changes and those of its transaction are undone, with one warning. Earlier transactions stay: where the
    split fails, the graph is fused. With ``config.strict`` the error is raised instead. With ``TW_COMPILE=0`` in the
    environment the pass leaves graphs as they are.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``config.disable_passes`` has a name that no pass has.
    """

    def __init__(self, config: Config | None = None, *, before: Callable[[fx.Graph], object] | None = None) -> None:
        self.config = Config() if config is None else config
        self.before = before
        if not isinstance(self.config, Config):
            raise TypeError(f"config: expected a tw_compile.Config, got {config!r}")
        if before is not None and not callable(before):
            raise TypeError(f"before: expected a pass, which is called with a graph, got {before!r}")
        manager.check_names(self.config.disable_passes)

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        if environment.enabled() is False:
            say_off()
            return
        self.rewrite(graph, current_gate(self.config))  # raises if a user's file is wrong, so that the user sees it

    def rewrite(self, graph: fx.Graph, gate: Gate, host: HostGraph | None = None) -> report.GraphReport:
        """Rewrite ``graph`` by ``gate`` and publish the report.

        Args:
            host: What the graph's host says of it; None for torch.compile.
        """
        begin = time.perf_counter()
        profile = current_profile(self.config)
        link, prefetch_bytes = current_link(profile, self.config), own_prefetch_bytes(self.config)
        context = Context(self.config, gate, profile, host, link, prefetch_bytes)
        if fusion.FUSE.name in self.config.disable_passes:
            detail = f"tw_compile.disable_passes names {fusion.FUSE.name}"
            context.keep(fusion.FusionDecisions(tuple(fusion.gated_sites(graph, detail))))
        run = manager.run(graph, context)
        result = report.GraphReport(
            _sites(graph, context, run),
            split_report(graph, context, run),
            warning=run.warning,
            tokens=context.tokens,
            passes=run.reports,
        )
        log_report(result)
        for need in sorted(run.inductor):
            _TELL_INDUCTOR[need]()
        compat.lower_as_calls(operator.defined())
        result.seconds = time.perf_counter() - begin
        report.publish(result)
        return result

    def refuse(self, graph: fx.Graph, reason: StrEnum, detail: str) -> report.GraphReport:
        """Leave ``graph`` as it is, and report every site as refused for ``reason``.

        Raises:
            ValueError: The reason is none of :func:`tw_compile.passes.reasons.refusals`.
        """
        if reason not in refusals():
            raise ValueError(f"reason: expected one of {', '.join(refusals())}, got {reason!r}")
        result = report.GraphReport(fusion.refused_sites(graph, reason, detail))
        report.publish(result)
        return result

    def uuid(self) -> bytes | None:
        """A digest of all that the result depends on: sources, options, tables, profile, link, groups, users' passes and rules.

        None, which switches Inductor's caches off, when the user's pass can't be identified.
        """
        parts = ["off" if environment.enabled() is False else self.identity(current_gate(self.config))]
        if self.before is not None:
            before = self.before.uuid() if isinstance(self.before, compat.CustomGraphPass) else None
            if before is None:
                return None
            parts.append(repr(before))
        return hashlib.sha256("\n".join(parts).encode()).digest()

    def identity(self, gate: Gate) -> str:
        """Everything that goes into :meth:`uuid` except the user's pass, as text."""
        profile = current_profile(self.config)
        planned_for = repr((profile, current_link(profile, self.config), own_prefetch_bytes(self.config)))
        groups = [(*facts, group_facts(facts[0], "cuda").peer_access) for facts in compat.process_group_facts()]
        own = [source_digest(), self.config.digest(), gate.digest(), planned_for, repr(groups)]
        return "\n".join([*own, manager.identity(), split.rules_identity()])


@functools.cache
def say_off() -> None:
    """Warn that the passes are off; only once, as a model may have many graphs. ``say_off.cache_clear()`` allows a repeat."""
    logger.warning("tw_compile: off, as %s=0 in the environment: compiling with Inductor alone", environment.ENABLE)


_TELL_INDUCTOR: dict[InductorNeed, Callable[[], None]] = {
    InductorNeed.NO_COMBO_KERNELS: compat.leave_out_combo_kernels,
    InductorNeed.TUNE_FOR_EXAMPLES: compat.tune_for_examples,
}


def _sites(graph: fx.Graph, context: Context, run: manager.Run) -> list[report.Site]:
    decided = context.kept(fusion.FusionDecisions)
    return fusion.failed_sites(graph, run.warning) if decided is None else list(decided.sites)


def split_report(graph: fx.Graph, context: Context, run: manager.Run) -> report.Split | None:
    """What became of the tokens; None where no split was wanted. If a split is refused or fails, the fused graph stays."""
    if not split.is_wanted(graph, context):
        return None
    first = run.report_of(split.SPLIT[0].name)
    assert first is not None
    if run.failed is not None and run.failed.transaction == split.TRANSACTION:
        return _not_split(context, SplitRefusal.SPLIT_FAILED, run.warning)
    if first.outcome == "not_run":
        by_fusion = run.failed is fusion.FUSE
        reason = SplitRefusal.FUSION_FAILED if by_fusion else SplitRefusal.EARLIER_PASS_FAILED
        return _not_split(context, reason, run.warning)
    if first.outcome == "off":
        return _not_split(context, SplitRefusal.SWITCHED_OFF, first.detail)
    return split.summarise(context)


def _not_split(context: Context, reason: SplitRefusal, detail: str) -> report.Split:
    return report.Split(str(context.config.split), "off", reason, detail)


@functools.cache
def say_training() -> None:
    """Warn that nothing is fused in training; only once, as ``say_off``. The user may have forgotten to switch it off."""
    logger.warning(
        "tw_compile: a graph records gradients, so none of its all_reduces is fused; call the model under torch.no_grad() or "
        "torch.inference_mode()"
    )


def log_report(result: report.GraphReport) -> None:
    """Log a line for the all_reduces, and a line for the tokens where the graph has a split report."""
    if Refusal.TRAINING_GRAPH in result.refusals:
        say_training()
    level = logging.INFO if result.counts["fused"] else logging.DEBUG
    logger.log(level, "tw_compile: %s", result.summary)
    done = result.split
    if done is None:
        return
    if done.mode == "off":
        logger.info("tw_compile: tokens not split, %s: %s", done.reason, done.detail)
    else:
        logger.info("tw_compile: %ss split %s + %s, joins %s", done.unit, *done.sizes, done.joins or "none")
