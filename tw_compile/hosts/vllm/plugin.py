"""The entry point of ``vllm.general_plugins``: puts the pass and its compile ranges into every engine configuration.

vLLM has no hook for that, so the plugin wraps ``VllmConfig.__post_init__``. Where nobody asked for the passes, the wrapper only
tells the engine to a pass that the user has named. The wrapper changes only fields that users may set themselves, and that are
part of vLLM's cache keys. The plugin also wraps ``VllmBackend.__call__``, to see graphs before they are cut. It measures a node
that nobody measured when its workers have loaded the model, and whether the host is fast enough for the split when they have
warmed up.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from tw_compile import environment
from tw_compile.config import Config
from tw_compile.hosts.vllm import plan
from tw_compile.hosts.vllm.measuring import measure_behind_load_model
from tw_compile.hosts.vllm.options import asked_options, switched_off, vllm_config
from tw_compile.hosts.vllm.peers import gpus_reach_each_other
from tw_compile.hosts.vllm.reasons import HostRefusal
from tw_compile.hosts.vllm.ways import measure_behind_warm_up
from tw_compile.kernels.collective.wires import EXACT

logger = logging.getLogger("vllm.tw_compile")
_MIB = 2**20


def register() -> None:
    """Wrap vLLM's configuration, backend and workers. vLLM calls this once in every process."""
    if switched_off(os.environ):
        return
    from vllm.config import VllmConfig

    original = VllmConfig.__post_init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        options = asked_options(self.additional_config, os.environ)
        if options is None:
            original(self)
            try:
                _tell(self)
            except Exception as error:
                _failed(error)
            return
        config = _config_of(self, options)
        compilation = self.compilation_config
        limits = compilation.pass_config
        before, ends = limits.fi_allreduce_fusion_max_size_mb, compilation.compile_ranges_endpoints
        try:
            _limit_flashinfer(self, config)
        except Exception as error:
            limits.fi_allreduce_fusion_max_size_mb = before
            _failed(error)
        user_said = limits.fuse_norm_quant is not None
        original(self)
        installed = _install(self, config)
        if installed and not user_said:
            try:
                _keep_norms_apart(self, config)
            except Exception as error:
                _failed(error)
        if not installed and limits.fi_allreduce_fusion_max_size_mb != before:
            limits.fi_allreduce_fusion_max_size_mb, compilation.compile_ranges_endpoints = before, ends
            try:
                self._set_compile_ranges()  # without the lower limit
            except Exception as error:
                _failed(error)

    VllmConfig.__post_init__ = post_init
    _wrap_backend()
    measure_behind_load_model()
    measure_behind_warm_up()


def _keep_norms_apart(engine: Any, config: Config) -> None:
    """Leave norms and quantisations apart where float8 weights have scales of blocks.

    vLLM lays out the scales of activations by columns then, and the fused operator does so by rows. If vLLM merges a norm with
    such a quantisation, the sum before it can't be fused. If the two stay apart, sum and norm are fused, and the quantisation
    is a kernel of its own. Where some sums are left as they are, their norms would lose vLLM's merged kernel, so nothing is
    changed.
    """
    from tw_compile.hosts.vllm.engine import engine_of

    quantisation = engine.quant_config
    blocks = getattr(quantisation, "weight_block_size", None) is not None or (
        hasattr(quantisation, "has_blocked_weights") and quantisation.has_blocked_weights()
    )
    if not blocks:
        return
    facts = engine_of(engine)
    choices = plan.gates(config, _capability(), gpus_reach_each_other(facts.tensor_parallel_size))
    if plan.fuses_all(facts, config, choices):
        engine.compilation_config.pass_config.fuse_norm_quant = False


def _wrap_backend() -> None:
    """Give the pass the graph that vLLM has split into pieces, so that it can add another way to run it."""
    from vllm.compilation.backends import VllmBackend

    original = VllmBackend.__call__

    @functools.wraps(original)
    def call(self: Any, graph: Any, example_inputs: Any) -> Any:
        from vllm.platforms import current_platform

        compilation = self.vllm_config.compilation_config
        inside = compilation.inductor_compile_config.get(current_platform.pass_key)
        function = original(self, graph, example_inputs)
        try:
            if hasattr(inside, "behind_split"):
                return inside.behind_split(self, graph, example_inputs, function)
        except Exception as error:
            _failed(error, "vLLM's graph", inside.config.strict)
        return function

    VllmBackend.__call__ = call


def _config_of(engine: Any, options: dict[str, Any]) -> Config:
    """The passes' configuration in ``engine``.

    An error in the options, or in files that they name, is raised, so vLLM does not start: the user must know about it.
    """
    from vllm import __version__

    config = vllm_config(options, __version__, engine.parallel_config.disable_custom_all_reduce)
    plan.gates(config, None)
    return config


def _limit_flashinfer(engine: Any, config: Config) -> None:
    """Limit FlashInfer's fusion to the sizes at which it is faster, before vLLM computes its ranges from the limit."""
    limits = engine.compilation_config.pass_config
    if engine.model_config is None or limits.fi_allreduce_fusion_max_size_mb is not None:
        return
    world_size, capability = engine.parallel_config.tensor_parallel_size, _capability()
    settings = plan.settings_of(plan.gates(config, capability)[0])
    wanted = limits.fuse_allreduce_rms  # None: vLLM decides, and says yes where FlashInfer is installed
    if not (settings.flashinfer_installed if wanted is None else wanted):
        return
    known = limits.flashinfer_max_size(world_size)
    limit = plan.flashinfer_fusion_limit(capability, world_size, settings, known)
    if limit is not None and limit != known:
        limits.fi_allreduce_fusion_max_size_mb = limit / _MIB
        logger.info("tw_compile: FlashInfer's fusion up to %d bytes instead of %d (vLLM issue 44079)", limit, known)


def _tell(engine: Any) -> None:
    """Tell the engine to a pass that the plugin did not put into the slot. Its refusals depend on the engine."""
    from vllm.platforms import current_platform

    slot = engine.compilation_config.inductor_compile_config
    named = slot.get(current_platform.pass_key)
    if named is None or engine.model_config is None:
        return
    from tw_compile.hosts.vllm.engine import engine_of
    from tw_compile.hosts.vllm.inductor_pass import VllmPass

    if isinstance(named, VllmPass):
        slot[current_platform.pass_key] = VllmPass(named.config, named.before, engine_of(engine))


def _install(engine: Any, config: Config) -> bool:
    """Put the pass into its slot, and add the ends of its ranges to vLLM's. Returns whether the passes are on.

    After an exception everything is as it was, except that a pass of ours that the user has named is taken out.
    """
    compilation = engine.compilation_config
    slot, ends = compilation.inductor_compile_config, compilation.compile_ranges_endpoints
    had = dict(slot)
    try:
        is_on, line = _put(engine, config)
    except Exception as error:
        slot.clear()
        slot.update(had)
        _take_out_named(slot)
        compilation.compile_ranges_endpoints = ends
        _failed(error)
        return False
    logger.info("tw_compile: %s", line)
    return is_on


def _take_out_named(slot: dict[str, Any]) -> None:
    """Leave only the user's own pass where the slot holds one of ours: it does not know of what speaks against it."""
    from vllm.platforms import current_platform

    from tw_compile.hosts.vllm.inductor_pass import VllmPass

    named = slot.get(current_platform.pass_key)
    if isinstance(named, VllmPass):
        del slot[current_platform.pass_key]
        if named.before is not None:
            slot[current_platform.pass_key] = named.before


def _put(engine: Any, config: Config) -> tuple[bool, str]:
    """Change ``engine`` as :func:`_install` says.

    Returns whether the passes are on, and one line: what was done, or why nothing was.
    """
    from vllm.compilation.passes.inductor_pass import InductorPass
    from vllm.platforms import current_platform

    from tw_compile.hosts.vllm.engine import engine_of, known_of, layer_of
    from tw_compile.hosts.vllm.inductor_pass import VllmPass

    if engine.model_config is None:
        return False, "off, there is no model"
    facts = engine_of(engine)
    refused = facts.refusal()
    if refused is not None:
        _take_out_named(engine.compilation_config.inductor_compile_config)
        return False, f"off, {refused[0]}: {refused[1]}"
    compilation = engine.compilation_config
    slot = compilation.inductor_compile_config
    users = slot.get(current_platform.pass_key)
    if users is not None and not isinstance(users, InductorPass):
        holds = f"{current_platform.pass_key} holds {type(users).__name__}, which is no InductorPass"
        return False, f"off, {HostRefusal.SLOT_TAKEN}: {holds}"
    if isinstance(users, VllmPass):  # the user named it in inductor_passes, or this configuration was here before
        users = users.before
    choices = plan.gates(config, _capability(), gpus_reach_each_other(facts.tensor_parallel_size))
    limits = compilation.pass_config
    flashinfer = limits.flashinfer_max_size(facts.tensor_parallel_size) if limits.fuse_allreduce_rms else None
    long_from = facts.long_from(config, flashinfer)
    inside = isinstance(long_from, int) or (facts.one_graph and config.vllm_layer_groups > 0)  # attention, in halves
    split_for = plan.SplitFor()
    if config.split == "auto":
        known = known_of(config, engine, choices)
        split_for = plan.SplitFor(known.profile, layer_of(engine), known.link, known.by_ranks)
    ends = plan.range_endpoints(facts, config, choices)
    long_ranges: tuple[tuple[int, int], ...] = ()
    tried: tuple[tuple[int, int], ...] = ()
    by_ranks = False
    if isinstance(long_from, int):
        long_ranges, split, tried, by_ranks = plan.planned_ranges(
            facts, config, choices, long_from, ends, split_for, inside, groups=True
        )
        ends = [end for end in ends if end < long_from - 1]
        last = ", ".join(str(end) for _, end in long_ranges)
        groups = f"from {long_from} tokens on by groups of layers in ranges that end at {last}"
    else:
        first = 1 + (flashinfer or 0) // plan.row_bytes_of(facts)
        theirs = [end for end in compilation.compile_ranges_endpoints or () if end < facts.max_tokens]
        short_ranges, split, *_ = plan.planned_ranges(
            facts, config, choices, first, sorted({*ends, *theirs}), split_for, inside
        )
        ends = sorted({*ends, *(end for _, end in short_ranges)})
        groups = "no groups of layers, {}: {}".format(*long_from)
    slot[current_platform.pass_key] = VllmPass(
        config, users, facts, long_ranges, tried, split_for.layer if by_ranks else None
    )
    compilation.compile_ranges_endpoints = sorted({*(compilation.compile_ranges_endpoints or ()), *ends})
    chained = f", after {type(users).__name__}" if users is not None else ""
    tables = " or ".join(dict.fromkeys(gate.node.device_class for gate in choices))
    ranges = ", ".join(map(str, compilation.compile_ranges_endpoints))
    sites = "" if config.wire_sites == "all" else f" of {config.wire_sites}"
    wire = "" if config.wire == EXACT else f"; wire {config.wire}{sites}"
    line = (
        f"on{chained}, {facts.tensor_parallel_size} ranks, {config.host}; fusing all_reduce + RMSNorm, "
        f"thresholds for {tables}{wire}; token ranges end at {ranges}; {groups}; {split}"
    )
    return True, line


def _capability() -> tuple[int, int] | None:
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return None if found is None else (found.major, found.minor)


def _failed(error: Exception, what: str = "vLLM's configuration", strict: bool = False) -> None:
    if strict or environment.strict():
        raise error
    logger.warning("tw_compile left %s as it was: %s: %s", what, type(error).__name__, error)
