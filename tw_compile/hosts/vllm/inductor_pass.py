"""The pass for vLLM's compiler. It imports vLLM, and registers what compiled code needs: the operators, and vLLM's group names.

Processes that load compiled code, and compile nothing, import this module too: they unpickle the pass in the engine's
configuration.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from vllm import __version__ as vllm_version
from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context
from vllm.distributed import parallel_state
from vllm.forward_context import get_forward_context, is_forward_context_available

from tw_compile import compat, report
from tw_compile.config import Config
from tw_compile.current import current_gate, current_link, current_profile
from tw_compile.gating.facts import Settings
from tw_compile.gating.gate import Gate
from tw_compile.hosts.vllm import attention as halves
from tw_compile.hosts.vllm import plan
from tw_compile.hosts.vllm.buffers import write_no_buffers
from tw_compile.hosts.vllm.long_steps import Ranges, add_long_steps
from tw_compile.hosts.vllm.one_scale import scale_of_all_tokens
from tw_compile.hosts.vllm.operators import ATTENTION
from tw_compile.hosts.vllm.options import switched_off, vllm_config
from tw_compile.hosts.vllm.plan import Engine, observed
from tw_compile.hosts.vllm.reasons import GroupRefusal, WholeAttention
from tw_compile.hosts.vllm.residual_seams import leave_last, sew_residuals, without_seams
from tw_compile.hosts.vllm.state import called_operator, state_operator
from tw_compile.hosts.vllm.ways import Way, way_to_compile
from tw_compile.kernels.collective.transport import group_facts
from tw_compile.kernels.registry import load
from tw_compile.passes.fusion.forms import host_call
from tw_compile.passes.operators import AttentionOperator
from tw_compile.passes.reasons import HostAttention, SplitRefusal, SplitRefused
from tw_compile.passes.split import HostGraph
from tw_compile.pipeline import TWCompilePass
from tw_compile.planning import LayerShape

logger = logging.getLogger("vllm.tw_compile")  # a child of vLLM's logger, which alone has a handler

_USE_STORED = "tw_compile.tuning.calibrate:use_stored"


class VllmPass(InductorPass):
    """The passes in the slot ``post_grad_custom_post_pass`` of vLLM's ``inductor_compile_config``.

    vLLM compiles each distinct piece of the model once per range of token counts. The pass is a function of the piece, the
    range, the configuration and the gate, and of nothing else. Its state is plain data: it is copied, pickled and sent to
    workers.

    Args:
        config: What the passes may do.
        before: What the user had put into the slot. It runs first, for the ranges that it wants.
        engine: The engine that compiles, because vLLM doesn't tell it to passes. None, without the plugin: any engine that may
            have the passes.
        long_ranges: Ranges of token counts for which groups of layers are compiled, and not only pieces.
        tried: Those of them that are compiled split and whole, and of which the engine's start measures which is faster.
        layer: One of the model's layers, if the ranks cut these ranges further, by what they have measured of the node. None:
            the ranges are as they shall be.
    """

    def __init__(
        self,
        config: Config,
        before: InductorPass | None = None,
        engine: Engine | None = None,
        long_ranges: tuple[tuple[int, int], ...] = (),
        tried: tuple[tuple[int, int], ...] = (),
        layer: LayerShape | None = None,
    ) -> None:
        self.config = config
        self.before = before
        self.engine = engine
        self.long_ranges = long_ranges
        self.tried = tried
        self.layer = layer

    def __call__(self, graph: fx.Graph) -> None:
        compile_range = get_pass_context().compile_range
        if self.before is not None and self.before.is_applicable_for_range(compile_range):
            self.before(graph)
        if switched_off(os.environ):  # a pass that the user has named is in the slot all the same
            return
        compat.sort_nodes(graph)  # vLLM's fusions leave nodes before their operands, and sort only behind this slot
        leave_last(graph)
        counts = (compile_range.start, compile_range.end)
        captured = 0 if self.engine is None else self.engine.captured_tokens
        attention = self._attention(graph, compile_range.start)
        way = way_to_compile()
        host_us = 0.0 if way is Way.SPLIT else plan.SPLIT_HOST_US
        refusal = _split_refusal(graph, self.engine)
        host = HostGraph(counts, attention, host_us, captured, ATTENTION.kernel, refusal, measures=way is Way.SPLIT)
        pieces = host.attention is HostAttention.ELSEWHERE
        records_experts = self.engine is not None and self.engine.returns_experts
        whole = (pieces and self.long_ranges) or records_experts or way is Way.WHOLE
        passes = TWCompilePass(replace(self.config, split="off") if whole else self.config)
        refused = None if self.engine is None else self.engine.refusal()
        result = passes.refuse(graph, *refused) if refused else passes.rewrite(graph, self._gate(), host)
        result.tokens = host.counts
        result.fused_by_host = sum(_is_flashinfer_fusion(node) for node in graph.nodes)
        if not dist.is_initialized() or dist.get_rank() == 0:
            _log(result)

    def uuid(self) -> str:
        """A digest of what the result depends on, like that of :class:`TWCompilePass`, but as text, because vLLM hashes JSON.

        It is part of the engine's key and of vLLM's AOT keys.
        """
        parts = [
            TWCompilePass(self.config).identity(self._gate()),
            vllm_version,
            repr(self.engine),
            repr(self.long_ranges),
            repr(self.tried),
            repr(self.layer),
            way_to_compile(),
        ]
        if self.before is not None:
            parts.append(repr(self.before.uuid()))
        if switched_off(os.environ):
            parts.append("switched off")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _attention(self, graph: fx.Graph, least_tokens: int) -> HostAttention:
        """Where attention is. If it is in the graph and wanted in halves, but can't be, the reason is logged."""
        calls = [call for node in graph.nodes if (call := host_call(node, AttentionOperator)) is not None]
        if not calls:
            return HostAttention.ELSEWHERE
        if any(call.operator.half is None for call in calls):
            logger.info(
                "tw_compile: attention is not split, %s: no operator does half of it", WholeAttention.ATTENTION_BACKEND
            )
            return HostAttention.ONCE
        if not self.config.vllm_layer_groups or self.engine is None:
            return HostAttention.ONCE
        layers = get_forward_context().no_compile_layers.values() if is_forward_context_available() else ()
        refused = self.engine.whole_attention(least_tokens) or halves.whole_attention(layers)
        if refused is None:
            return HostAttention.HALVES
        logger.info("tw_compile: attention of %d tokens and more is not split, %s: %s", least_tokens, *refused)
        return HostAttention.ONCE

    def before_split(self, backend: Any, graph: fx.GraphModule) -> None:
        """Prepare the graph of a whole model, so that its pieces can be fused. What it computes stays the same to the bit."""
        off = self.engine is not None and self.engine.refusal() is not None
        if off or not self.config.fuse or switched_off(os.environ):
            return
        count = write_no_buffers(graph)
        if count:
            logger.info("tw_compile: %d sums go to their norms directly, where the model copies them to buffers", count)
        if self.engine is None:
            return
        compilation = backend.compilation_config
        refused = self.engine.refuses_seams(
            self.config, bool(compilation.pass_config.enable_sp), bool(backend.is_encoder)
        )
        if refused is not None:
            logger.info("tw_compile: pieces hand each other all rows of the residual, %s: %s", *refused)
            return
        from vllm.compilation.partition_rules import should_split  # not at the top: only this needs it

        operators = compilation.splitting_ops or []
        count = sew_residuals(graph, lambda node: should_split(node, operators))
        logger.info("tw_compile: pieces hand each other their own rows of %d residuals, where these are fused", count)

    def behind_split(self, backend: Any, graph: fx.GraphModule, example_inputs: Sequence[Any], function: Any) -> Any:
        """``function``, which vLLM made of ``graph``, with another way to run long steps, and with graphs of short ones."""
        short = None if self.engine is None else self.engine.short_steps(self.config, self.long_ranges)
        if backend.is_encoder or not (self.long_ranges or short):
            return function
        found = state_operator(graph.graph)
        if found:
            logger.info("tw_compile: no groups of layers, %s: the model calls %s", GroupRefusal.STATE_SPACE, found)
            return function
        captures = self.config.vllm_step_graphs == "auto"
        if captures and (scale := scale_of_all_tokens(graph.graph)):
            logger.info("tw_compile: no steps as CUDA graphs: %s makes one scale of all tokens", scale)
            captures, short = False, None
        layers, graph = self.config.vllm_layer_groups, without_seams(graph)
        ranges, tried = self._ranges() if self.long_ranges else ((), ())
        return add_long_steps(backend, graph, example_inputs, function, ranges, layers, tried, short, captures)

    def _ranges(self) -> tuple[Ranges, Ranges]:
        """The ranges of long steps, and those tried. If the ranks plan them, all do so by facts that they agree on."""
        if self.layer is None or self.engine is None:
            return self.long_ranges, self.tried
        gate, profile = self._gate(), current_profile(self.config)
        # A gate goes by what the GPUs can do, as vLLM does. Our kernels may leave peer access unused.
        peers = group_facts(parallel_state.get_tp_group().unique_name, "cuda").peer_access
        gate = replace(gate, node=replace(gate.node, peer_atomics=peers))
        split_for = plan.SplitFor(profile, self.layer, current_link(profile, self.config))
        first, ends = self.long_ranges[0][0], [high for _, high in self.long_ranges[:-1]]
        planned = plan.planned_ranges(
            self.engine, self.config, (gate,), first, ends, split_for, inside=True, groups=True
        )
        if not dist.is_initialized() or dist.get_rank() == 0:
            name = "no device profile" if profile is None else profile.name
            logger.info("tw_compile: planned for %s: %s", name, planned.text)
        return planned.ranges, planned.tried

    def _gate(self) -> Gate:
        # vLLM compiles while it profiles its memory, so nothing is measured here.
        if self.config.calibrate != "off" and torch.cuda.is_initialized() and dist.is_initialized():
            load(_USE_STORED)(self.config)
        return current_gate(self.config, _observed)

    def __repr__(self) -> str:
        return f"VllmPass({self.config}, before={self.before!r}, engine={self.engine!r})"


def default_pass() -> VllmPass:
    """The pass with default options; always the same object, so that copies and pickles of the named pass are this object."""
    global _default
    if _default is None:
        _default = VllmPass(vllm_config({}, vllm_version, disable_custom_all_reduce=False))
    return _default


_default: VllmPass | None = None


def _observed(settings: Settings) -> Settings:
    group = parallel_state._TP
    return settings if group is None else observed(settings, group.device_communicator)


def _split_refusal(graph: fx.Graph, engine: Engine | None) -> SplitRefused | None:
    """Why the graph is not split: its model has a state, says the engine where it is known, or one of the graph's operators.

    A state goes from each token to the next, so half 2 would have to begin with what half 1 has left. The operators are outside
    of pieces, but not of the one graph of ``use_inductor_graph_partition``.
    """
    found = state_operator(graph)
    if found:
        return SplitRefused(SplitRefusal.STATE_SPACE, f"{found} hands a state from each token to the next")
    if engine is not None and engine.state_space:
        return SplitRefused(
            SplitRefusal.STATE_SPACE, "the model has layers that hand a state from each token to the next"
        )
    return None


def _is_flashinfer_fusion(node: fx.Node) -> bool:
    return called_operator(node) == "vllm::flashinfer_trtllm_fused_allreduce_norm"


def _log(result: report.GraphReport) -> None:
    if not result.sites and not result.fused_by_host:
        return
    counts = result.counts
    tokens = "-".join(map(str, result.tokens or ()))
    taken = f", {result.fused_by_host} fused by FlashInfer" if result.fused_by_host else ""
    halves = f", {_halves(result.split)}" if result.split is not None else ""
    message = "tw_compile: a piece for %s tokens, %d of %d all_reduces fused%s%s %s"
    logger.info(message, tokens, counts["fused"], counts["all_reduce"], taken, halves, result.refusals or "")


def _halves(split: report.Split) -> str:
    return f"not split: {split.reason}" if split.mode == "off" else f"split {split.sizes[0]} + {split.sizes[1]} of s"


def _resolve_group(name: str) -> dist.ProcessGroup | None:
    """The device group of vLLM's coordinator ``name``, such as ``tp:0``. The group's number among torch's groups may change."""
    found = parallel_state._groups.get(name)
    coordinator = None if found is None else found()
    return None if coordinator is None else coordinator.device_group


compat.add_group_resolver(_resolve_group)
