"""The passes as one object that any host can put into Inductor's post-grad slot."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable

import torch.fx as fx

from tw_compile import compat, report
from tw_compile.config import Config
from tw_compile.gating.current import current_gate
from tw_compile.gating.gate import Gate
from tw_compile.kernels.runtime import operator
from tw_compile.passes import fusion, split
from tw_compile.passes.reasons import HostRefusal, SplitRefusal
from tw_compile.planning import DeviceProfile
from tw_compile.sources import source_digest

logger = logging.getLogger("tw_compile")


class TWCompilePass(compat.CustomGraphPass):
    """All passes, in order. Use it as Inductor's ``post_grad_custom_post_pass``.

    Args:
        config: What the passes may do.
        before: A post-grad pass of the user's own; it runs first and sees the graph without the fused operators.

    A graph on which a pass fails stays as it was, with one warning; ``config.strict`` raises instead.

    Raises:
        TypeError: An argument is something else.
    """

    def __init__(self, config: Config | None = None, *, before: Callable[[fx.Graph], object] | None = None) -> None:
        self.config = Config() if config is None else config
        self.before = before
        if not isinstance(self.config, Config):
            raise TypeError(f"config: expected a tw_compile.Config, got {config!r}")
        if before is not None and not callable(before):
            raise TypeError(f"before: expected a pass, which is called with a graph, got {before!r}")

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        self.rewrite(graph, current_gate(self.config))  # what is wrong with a user's file is the user's to know

    def rewrite(self, graph: fx.Graph, gate: Gate, host: split.HostGraph | None = None) -> report.GraphReport:
        """Rewrite ``graph`` by ``gate`` and publish the report.

        Args:
            host: For fusing its token counts, see :func:`fusion.fuse_all_reduce_rms_norm`; for splitting
                :func:`split.split_graph`.
        """
        tokens = None if host is None else host.counts
        result = report.GraphReport(tokens=tokens)
        begin = time.perf_counter()
        profile = split.current_profile(self.config)
        try:
            result.sites = fusion.fuse_all_reduce_rms_norm(graph, self.config, gate, tokens)
        except Exception as error:
            if self.config.strict:
                raise
            result.warning = f"{type(error).__name__}: {error}"
            result.sites = fusion.failed_sites(graph, result.warning)
            logger.warning("tw_compile left a graph as it was: %s", result.warning, exc_info=True)
        counts = result.counts
        level = logging.INFO if counts["fused"] else logging.DEBUG
        message = "tw_compile: %d of %d all_reduces fused %s"
        logger.log(level, message, counts["fused"], counts["all_reduce"], result.refusals or "")
        if self.config.split_tokens is not None or (self.config.split == "auto" and result.sites):
            result.split = self._split(graph, profile, result, host)
        compat.lower_as_calls(operator.defined())
        result.seconds = time.perf_counter() - begin
        report.publish(result)
        return result

    def refuse(self, graph: fx.Graph, reason: HostRefusal, detail: str) -> report.GraphReport:
        """Leave ``graph`` as it is, and report that."""
        result = report.GraphReport(fusion.refused_sites(graph, reason, detail))
        report.publish(result)
        return result

    def _split(
        self,
        graph: fx.Graph,
        profile: DeviceProfile | None,
        result: report.GraphReport,
        host: split.HostGraph | None,
    ) -> report.Split:
        """Split what fusing has left; the fused graph stays if that is refused or fails."""
        asked = self.config.split
        if result.warning:
            done = report.Split(asked, "off", SplitRefusal.FUSION_FAILED, result.warning)
        else:
            try:
                done = split.split_graph(graph, self.config, profile, host)
            except Exception as error:
                if self.config.strict:
                    raise
                result.warning = f"{type(error).__name__}: {error}"
                done = report.Split(asked, "off", SplitRefusal.SPLIT_FAILED, result.warning)
                logger.warning("tw_compile did not split a graph: %s", result.warning, exc_info=True)
        if done.mode == "off":
            logger.info("tw_compile: tokens not split, %s: %s", done.reason, done.detail)
        else:
            logger.info("tw_compile: %ss split %s + %s, joins %s", done.unit, *done.sizes, done.joins or "none")
        return done

    def uuid(self) -> bytes | None:
        """Identifies everything the result depends on: sources, configuration, thresholds, device profile, groups, user's pass.

        None, which switches Inductor's caches off, when the user's pass can't be identified.
        """
        parts = [self.identity(current_gate(self.config))]
        if self.before is not None:
            before = self.before.uuid() if isinstance(self.before, compat.CustomGraphPass) else None
            if before is None:
                return None
            parts.append(repr(before))
        return hashlib.sha256("\n".join(parts).encode()).digest()

    def identity(self, gate: Gate) -> str:
        """All that of :meth:`uuid` but the user's pass, as text."""
        profile = split.current_profile(self.config)
        groups = compat.process_group_facts()
        return "\n".join([source_digest(), self.config.digest(), gate.digest(), repr(profile), repr(groups)])
