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
from typing import Any, NamedTuple

from tw_compile import environment
from tw_compile.config import Config
from tw_compile.gating.gate import Gate
from tw_compile.hosts.vllm import plan
from tw_compile.hosts.vllm.flashinfer import OPTIONS, Peers, Share, flashinfer_share
from tw_compile.hosts.vllm.measuring import measure_behind_load_model
from tw_compile.hosts.vllm.options import asked_options, switched_off, vllm_config
from tw_compile.hosts.vllm.peers import links_for_kernels, peers_of
from tw_compile.hosts.vllm.reasons import HostRefusal
from tw_compile.hosts.vllm.ways import measure_behind_warm_up
from tw_compile.kernels.collective.wires import EXACT

logger = logging.getLogger("vllm.tw_compile")
_MIB = 2**20
_QUANTISES_TO_NVFP4 = (10, 0)
"""The first compute capability at which FlashInfer's fusion quantises to NVFP4."""


class Asked(NamedTuple):
    """What the user has said, which vLLM's configuration does not tell from defaults once it is complete.

    ``flashinfer``: whether one of :data:`OPTIONS` is set. ``norm_quant``: whether ``fuse_norm_quant`` is. ``range_ends``:
    ``compile_ranges_endpoints``.
    """

    flashinfer: bool
    norm_quant: bool
    range_ends: list[int] | None


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
        limits = self.compilation_config.pass_config
        asked = Asked(
            any(getattr(limits, name) is not None for name in OPTIONS),
            limits.fuse_norm_quant is not None,
            self.compilation_config.compile_ranges_endpoints,
        )
        original(self)
        if _install(self, config, asked) and not asked.norm_quant:
            try:
                _keep_norms_apart(self, config)
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

    if not _blocks(engine):
        return
    facts = engine_of(engine)
    choices = plan.gates(config, _capability(), *links_for_kernels(facts.tensor_parallel_size))
    if plan.fuses_all(facts, config, choices):
        engine.compilation_config.pass_config.fuse_norm_quant = False


def _blocks(engine: Any) -> bool:
    """Whether float8 weights have scales of blocks."""
    quantisation = engine.quant_config
    return getattr(quantisation, "weight_block_size", None) is not None or (
        hasattr(quantisation, "has_blocked_weights") and quantisation.has_blocked_weights()
    )


def _nvfp4(engine: Any) -> bool:
    """Whether some weights are in NVFP4, of a checkpoint by ModelOpt or compressed-tensors."""
    quantisation = engine.quant_config
    if quantisation is None:
        return False
    formats = [getattr(quantisation, name, None) for name in ("quant_format", "quantized_layers")]
    return quantisation.get_name() == "modelopt_fp4" or "nvfp4" in str(formats).lower()


def _only_flashinfer_fuses(
    engine: Any, config: Config, facts: plan.Engine, choices: tuple[Gate, ...], asked: Asked
) -> str | None:
    """Which norms FlashInfer fuses and ours can't, in words; None if there are none. See :func:`_keep_norms_apart`."""
    merges = engine.compilation_config.pass_config.fuse_norm_quant and _blocks(engine)
    if merges and (asked.norm_quant or not plan.fuses_all(facts, config, choices)):
        return "norms merged with quantisations by blocks can't be fused by tw_compile"
    if _nvfp4(engine) and (_capability() or (0, 0)) >= _QUANTISES_TO_NVFP4:
        return "FlashInfer fuses quantisations to NVFP4, too, and tw_compile does not"
    return None


def _wrap_backend() -> None:
    """Give the pass the graph before vLLM splits it into pieces, and after, so that it can add another way to run it."""
    from vllm.compilation.backends import VllmBackend

    original = VllmBackend.__call__

    @functools.wraps(original)
    def call(self: Any, graph: Any, example_inputs: Any) -> Any:
        from vllm.platforms import current_platform

        compilation = self.vllm_config.compilation_config
        inside = compilation.inductor_compile_config.get(current_platform.pass_key)
        try:
            if hasattr(inside, "before_split"):
                inside.before_split(self, graph)
        except Exception as error:
            _failed(error, "vLLM's graph", inside.config.strict)
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

    from tw_compile.current import own_profile
    from tw_compile.passes import manager

    config = vllm_config(options, __version__, engine.parallel_config.disable_custom_all_reduce)
    plan.gates(config, None)
    manager.check_names(config.disable_passes)
    if config.device_profile != "auto":
        own_profile(config)
    return config


def _give_flashinfer(engine: Any, share: Share, asked: Asked) -> None:
    """Have FlashInfer fuse what ``share`` leaves it, and vLLM's ranges end where that ends."""
    limits = engine.compilation_config.pass_config
    if share.limit is None:
        limits.fuse_allreduce_rms = False
    else:
        limits.fi_allreduce_fusion_max_size_mb = share.limit / _MIB
    engine.compilation_config.compile_ranges_endpoints = asked.range_ends
    engine._set_compile_ranges()


def _flashinfer_share(
    engine: Any, config: Config, facts: plan.Engine, choices: tuple[Gate, ...], asked: Asked, again: bool
) -> Share:
    """What FlashInfer is left in ``engine``. ``again``: whether this configuration was here before, and is to stay."""
    limits, ranks, parallel = engine.compilation_config.pass_config, facts.tensor_parallel_size, engine.parallel_config
    fuses = limits.fuse_allreduce_rms and _capability() is not None
    one_node = ranks <= getattr(parallel, "local_world_size", ranks)
    peers = peers_of(ranks) if fuses and one_node else Peers(None, False)
    of_vllm = limits.flashinfer_max_size(ranks) if fuses else None
    alone = _only_flashinfer_fuses(engine, config, facts, choices, asked)
    return flashinfer_share(facts, config, choices, of_vllm, peers, asked.flashinfer or again, alone)


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


def _install(engine: Any, config: Config, asked: Asked) -> bool:
    """Put the pass into its slot, and add the ends of its ranges to vLLM's. Returns whether the passes are on.

    After an exception everything is as it was, except that a pass of ours that the user has named is taken out.
    """
    compilation = engine.compilation_config
    slot, limits = compilation.inductor_compile_config, compilation.pass_config
    ends = compilation.compile_ranges_endpoints
    had, had_limits = dict(slot), {name: getattr(limits, name) for name in OPTIONS}
    try:
        is_on, lines = _put(engine, config, asked)
    except Exception as error:
        slot.clear()
        slot.update(had)
        _take_out_named(slot)
        compilation.compile_ranges_endpoints = ends
        for name, value in had_limits.items():
            setattr(limits, name, value)
        _failed(error)
        return False
    for line in lines:
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


def _put(engine: Any, config: Config, asked: Asked) -> tuple[bool, tuple[str, ...]]:
    """Change ``engine`` as :func:`_install` says.

    Returns whether the passes are on, and a line: what was done, or why nothing was. A second one is about FlashInfer.
    """
    from vllm.compilation.passes.inductor_pass import InductorPass
    from vllm.platforms import current_platform

    from tw_compile.hosts.vllm.engine import engine_of, known_of, layer_of
    from tw_compile.hosts.vllm.inductor_pass import VllmPass

    if engine.model_config is None:
        return False, ("off, there is no model",)
    facts = engine_of(engine)
    refused = facts.refusal()
    if refused is not None:
        _take_out_named(engine.compilation_config.inductor_compile_config)
        return False, (f"off, {refused[0]}: {refused[1]}",)
    compilation = engine.compilation_config
    slot = compilation.inductor_compile_config
    users = slot.get(current_platform.pass_key)
    if users is not None and not isinstance(users, InductorPass):
        holds = f"{current_platform.pass_key} holds {type(users).__name__}, which is no InductorPass"
        return False, (f"off, {HostRefusal.SLOT_TAKEN}: {holds}",)
    again = False
    if isinstance(users, VllmPass):  # the user named it in inductor_passes, or this configuration was here before
        again, users = users.engine is not None, users.before
    choices = plan.gates(config, _capability(), *links_for_kernels(facts.tensor_parallel_size))
    share = _flashinfer_share(engine, config, facts, choices, asked, again)
    if share.changes:
        _give_flashinfer(engine, share, asked)
    flashinfer = share.limit
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
    return True, (line,) if again or not share.line else (line, share.line)


def _capability() -> tuple[int, int] | None:
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return None if found is None else (found.major, found.minor)


def _failed(error: Exception, what: str = "vLLM's configuration", strict: bool = False) -> None:
    if strict or environment.strict():
        raise error
    logger.warning("tw_compile left %s as it was: %s: %s", what, type(error).__name__, error)
