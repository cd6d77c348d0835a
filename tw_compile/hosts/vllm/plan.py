"""What the passes will do in a vLLM engine, as far as its configuration says: refusals, compile ranges, splits.

This is evaluated where the engine is configured, before any process has a GPU. So it is not known yet whether there is NVLink
multicast. The workers know, and decide for each range by their own gate.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tw_compile.config import Config
from tw_compile.gating.facts import DTYPE_BYTES, Node, Settings
from tw_compile.gating.gate import Gate
from tw_compile.hosts.vllm.operators import ATTENTION
from tw_compile.hosts.vllm.reasons import GroupRefusal, HostRefusal, WholeAttention, WholeResidual
from tw_compile.hosts.vllm.settings import VllmSettings
from tw_compile.kernels.collective.planned_wires import planned_wires
from tw_compile.kernels.collective.transports import AUTO
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.own_gate import own_gate
from tw_compile.passes.fusion import FUSE
from tw_compile.passes.fusion.wire import exact_halves, message_refusal, name_of_wire, wire_threshold
from tw_compile.passes.reasons import SplitRefusal, WireRefused
from tw_compile.planning import ALL_EXACT, DeviceProfile, LayerShape, Link, Mode, Off, Plan, Wires, plan_layer
from tw_compile.planning.links import link_of_node
from tw_compile.planning.ranges import Part, Ranges

SPLIT_HOST_US = 1800.0
"""Host time to launch one split layer in groups of layers, on the slower rank of a slow machine: 57 ms for a step of 32 layers.

Elsewhere it is less, down to half; ``benchmarks/results/2026-11-22-2xh200-vllm-power-and-host-llama-3.1-8b-tp2.txt``, 507d97b.
"""

MOST_SHORT_TOKENS = 512
"""Steps of at most this many tokens are run by pieces: their messages are for one-shot kernels, or nearly so."""


FEWEST_GRAPH_TOKENS = 33
"""Shorter steps are left to vLLM. Most of them are of requests of one token each, which vLLM captures with attention."""


@dataclass(frozen=True)
class Engine:
    """What matters of a vLLM configuration.

    ``max_tokens`` is ``max_num_batched_tokens``. ``dtype`` is that of the model, such as ``bfloat16``. Steps of up to
    ``captured_tokens`` tokens may have CUDA graphs. ``quantised``: the weights are quantised. ``experts``: some layers have
    experts. ``lora``: there may be adapters. ``returns_experts``: a step's choices of experts are recorded, by the numbers of
    its tokens. ``state_space``: some layers hand a state from each token to the next, as Mamba and linear attention do.
    ``times_steps``: the start can time steps of ranges that are compiled both ways, as no ranks are outside the tensor-parallel
    group. ``pooling``: it serves a pooling model. ``captures_attention``: vLLM's graphs have attention in them for all kinds of
    steps. ``captures_prompts``: vLLM captures steps with prompts in them, too, with attention or by pieces.
    """

    tensor_parallel_size: int
    hidden_size: int
    dtype: str
    max_tokens: int
    compiled: bool = True
    batch_invariant: bool = False
    lora: bool = False
    dual_batch_overlap: bool = False
    state_space: bool = False
    context_parallel: bool = False
    kv_transfer: bool = False
    prefix_lm: bool = False
    speculative: bool = False
    captured_tokens: int = 0
    one_graph: bool = False
    quantised: bool = False
    experts: bool = False
    returns_experts: bool = False
    times_steps: bool = True
    pooling: bool = False
    captures_attention: bool = False
    captures_prompts: bool = False

    @property
    def kernels_without_times(self) -> str | None:
        """Which kernels of the model the planner has no times of, in words; None if it can plan."""
        if self.quantised:
            return "quantised matmuls"
        return "kernels of experts" if self.experts else None

    def refusal(self) -> tuple[HostRefusal, str] | None:
        """Why nothing is done in this engine, by name and in words."""
        reasons = (
            (self.tensor_parallel_size == 1, HostRefusal.TENSOR_PARALLEL_SIZE_1, "there is nothing to communicate"),
            (
                not self.compiled,
                HostRefusal.NOT_COMPILED,
                "no compilation by Inductor: mode, backend, or eager execution",
            ),
            (self.batch_invariant, HostRefusal.BATCH_INVARIANT, "VLLM_BATCH_INVARIANT fixes the order of sums"),
            (self.dual_batch_overlap, HostRefusal.DUAL_BATCH_OVERLAP, "two threads would share one slot of a kernel"),
        )
        return next(((reason, detail) for applies, reason, detail in reasons if applies), None)

    def long_from(self, config: Config, flashinfer_bytes: int | None) -> int | tuple[GroupRefusal, str]:
        """From how many tokens on steps run by groups of layers; or why none do, by name and in words.

        Smaller steps use the one-shot form, which computes all rows anyway, or have CUDA graphs. Messages of up to
        ``flashinfer_bytes`` bytes are fused by vLLM itself.
        """
        at_most = max(self.captured_tokens, (flashinfer_bytes or 0) // row_bytes_of(self), MOST_SHORT_TOKENS)
        asked = config.fuse and config.vllm_layer_groups > 0
        none_longer = f"steps have at most {self.max_tokens} tokens, those of up to {at_most} are run otherwise"
        reasons = (
            (not asked, GroupRefusal.NOT_ASKED_FOR, "vllm_layer_groups is 0, or nothing is fused"),
            (self.one_graph, GroupRefusal.ONE_GRAPH, "use_inductor_graph_partition is on"),
            (self.speculative, GroupRefusal.SPECULATIVE, "a draft's model is compiled beside the model"),
            (self.state_space, GroupRefusal.STATE_SPACE, "layers with a state run by pieces, as vLLM runs them"),
            (at_most + 1 >= self.max_tokens, GroupRefusal.NO_LONG_STEPS, none_longer),
        )
        refused = next(((reason, detail) for applies, reason, detail in reasons if applies), None)
        return refused or at_most + 1

    def whole_attention(self, least_tokens: int | None = None) -> tuple[WholeAttention, str] | None:
        """Why attention is not split in steps of ``least_tokens`` tokens or more, by name and in words.

        ``least_tokens`` None: whatever the number of tokens. The result is None where nothing speaks against it.
        """
        graphs = least_tokens is not None and least_tokens <= self.captured_tokens
        reasons = (
            (self.context_parallel, WholeAttention.CONTEXT_PARALLEL, "each rank has a part of the keys"),
            (self.kv_transfer, WholeAttention.KV_TRANSFER, "a connector waits for whole layers"),
            (self.prefix_lm, WholeAttention.PREFIX_LM, "tokens of images see later ones"),
            (self.speculative, WholeAttention.SPECULATIVE, "a draft's steps have metadata of their own making"),
            (graphs, WholeAttention.CUDA_GRAPHS, f"graphs are captured for up to {self.captured_tokens} tokens"),
        )
        return next(((reason, detail) for applies, reason, detail in reasons if applies), None)

    def short_steps(self, config: Config, long_ranges: tuple[tuple[int, int], ...]) -> tuple[int, int] | None:
        """The fewest and the most tokens of steps that run by vLLM's pieces and may be captured as one CUDA graph each.

        ``long_ranges`` are the ranges of steps that run by groups of layers. None where no steps may be captured.
        """
        most = long_ranges[0][0] - 1 if long_ranges else self.max_tokens
        cannot = self.one_graph or self.speculative or self.state_space or self.captures_attention
        cannot = cannot or self.graphs_obstacle() is not None
        if config.vllm_step_graphs != "auto" or cannot or most <= FEWEST_GRAPH_TOKENS:
            return None
        return FEWEST_GRAPH_TOKENS, most

    def refuses_seams(self, config: Config, sequence_parallel: bool, encoder: bool) -> tuple[WholeResidual, str] | None:
        """Why pieces hand each other all rows of the residual, by name and in words; None if each rank may keep its own."""
        not_captured = (
            "vLLM captures no steps with prompts, so the host would have two more operators a layer to launch"
        )
        reasons = (
            (config.vllm_sharded_residual == "off", WholeResidual.NOT_ASKED_FOR, "vllm_sharded_residual is off"),
            (not self.captures_prompts, WholeResidual.NOT_CAPTURED, not_captured),
            (self.one_graph, WholeResidual.ONE_GRAPH, "use_inductor_graph_partition is on"),
            (sequence_parallel, WholeResidual.SEQUENCE_PARALLEL, "vLLM's sequence parallelism shares the residual out"),
            (encoder, WholeResidual.ENCODER, "the graph is that of an encoder"),
        )
        return next(((reason, detail) for applies, reason, detail in reasons if applies), None)

    def graphs_obstacle(self) -> str | None:
        """Why steps are not captured as CUDA graphs, in words; None if nothing in the configuration speaks against it."""
        reasons = (
            (not self.captured_tokens, "vLLM captures none"),
            (self.lora, "a step's adapters decide what is launched"),
            (self.kv_transfer, "a connector waits for layers"),
            (self.context_parallel, "each rank has a part of the keys"),
            (self.returns_experts, "choices of experts are recorded by the numbers of a step's tokens"),
            (self.pooling, "pooling keeps results of several steps, and a graph writes all to one place"),
        )
        return next((detail for applies, detail in reasons if applies), None)


def gates(
    config: Config,
    capability: tuple[int, int] | None,
    peer_access: bool = True,
    peer_atomics: bool = True,
    peers_used: bool = True,
) -> tuple[Gate, ...]:
    """The gates for the kinds of node that the workers may find: with NVLink multicast, and without.

    Where there is known to be no peer access, or a link without atomics, there is no multicast either, so there is one gate.
    ``peers_used``: whether our kernels may use what there is; vLLM does in any case.

    Raises:
        ValueError: A thresholds file, or an environment variable, is wrong.
    """
    if capability is None:
        return (own_gate(config, Node(None, False)),)
    if not (peer_access and peer_atomics):
        return (own_gate(config, Node(capability, False, peer_access, peer_atomics)),)
    nodes = [Node(capability, multicast, peer_atomics=peers_used) for multicast in (True, False)]
    return tuple(own_gate(config, node) for node in nodes)


def settings_of(gate: Gate) -> VllmSettings:
    """The settings of a gate for vLLM; configurations of :func:`tw_compile.hosts.vllm.options.vllm_config` have such gates."""
    assert isinstance(gate.settings, VllmSettings), gate.settings
    return gate.settings


def split_planner(
    profile: DeviceProfile,
    layer: LayerShape,
    engine: Engine,
    config: Config,
    choices: tuple[Gate, ...],
    inside: bool,
    split_host_us: float,
    link: Link | None = None,
) -> Ranges:
    """Plans for ranges of token counts, as the passes make them when they compile a range.

    ``inside``: whether attention is in the graphs, and not between them. A graph may be split if something in it is fused; it
    counts as fused if any gate of ``choices`` fuses it. Where no gate has peer kernels, messages go through host memory.
    ``split_host_us``: what the host takes to launch a split layer of a step that is not captured. ``link``: the rates of host
    memory; None: those of the user's file, or the shipped ones.
    """
    layer = replace(layer, attention=replace(layer.attention, kernel=ATTENTION.kernel))
    peers = any(gate.node.peer_kernels for gate in choices)
    kernel, link = (None, None) if peers else ("host", link or link_of_node())
    codes_unknown = peers and profile.coded_kernel is None

    @functools.cache
    def planned(tokens: int, first: int | None, attention: str, wires: Wires) -> Plan:
        host_us = 0.0 if tokens <= engine.captured_tokens else split_host_us
        leave = config.split_gemm_sms == "auto"
        return plan_layer(
            profile,
            layer,
            tokens,
            kernel=kernel,
            link=link,
            first=first,
            attention=attention,
            gemms_leave_sms=leave,
            joins_gemms=config.joins_gemms,
            host_us=host_us,
            wires=wires,
        )

    def plan(tokens: int, first: int | None, least: int) -> Plan:
        whole = not inside or engine.whole_attention(least) is not None
        return planned(tokens, first, Mode.JOIN if whole else "auto", planned_wires(least))

    def planned_wires(least: int) -> Wires:
        wires = _wires_of_range(engine, config, choices[-1], least)
        return ALL_EXACT if codes_unknown else wires

    def may_split(low: int, high: int) -> bool:
        if codes_unknown and _wires_of_range(engine, config, choices[-1], low) != ALL_EXACT:
            return False
        return any(is_fused(engine, config, gate, low, high) for gate in choices)

    return Ranges(plan, layer.world_size, may_split=may_split)


def _wires_of_range(engine: Engine, config: Config, gate: Gate, low: int) -> Wires:
    """The wires of a graph for ``low`` tokens and more, where its all_reduces are fused."""
    if config.wire == EXACT:
        return ALL_EXACT
    dtype = getattr(torch, engine.dtype)
    ranks, hidden_size, rows = engine.tensor_parallel_size, engine.hidden_size, (low, low)
    refused = message_refusal(config, gate, ranks, _transport(config, gate), hidden_size, dtype, rows)
    if isinstance(refused, WireRefused):
        return ALL_EXACT
    attention, mlp = (
        name_of_wire(config) if config.wire_sites in ("all", part) else EXACT for part in ("attention", "mlp")
    )
    return planned_wires(hidden_size, attention, mlp)


def _transport(config: Config, gate: Gate) -> str:
    if config.transport == AUTO:
        return "p2p" if gate.node.peer_kernels else "host"
    return config.transport


def is_fused(engine: Engine, config: Config, gate: Gate, low: int, high: int) -> bool:
    """Whether all_reduces of the graph for ``low`` to ``high`` tokens are fused."""
    row_bytes, world_size = row_bytes_of(engine), engine.tensor_parallel_size
    if not config.fuse or high * row_bytes < config.fuse_min_bytes:
        return False
    if config.fuse_max_bytes is not None and low * row_bytes > config.fuse_max_bytes:
        return False
    if config.transport != "auto":
        return True
    return gate.decide_range((low, high), row_bytes, world_size=world_size, dtype=engine.dtype).fused


class SplitFor(NamedTuple):
    """What the split is planned for: the device's profile, the model's layer, and the link; None for what is not known.

    ``by_ranks``: the ranks go by what they measure of the node, or have measured (``known.py``).
    """

    profile: DeviceProfile | None = None
    layer: LayerShape | None = None
    link: Link | None = None
    by_ranks: bool = False


class PlannedRanges(NamedTuple):
    """Ranges of steps, a text that says which are split, and which ranges are compiled both ways (``ways.py``).

    ``by_ranks``: the ranks must call :func:`planned_ranges` again, with what they know, and compile the ranges of that.
    """

    ranges: tuple[tuple[int, int], ...]
    text: str
    tried: tuple[tuple[int, int], ...] = ()
    by_ranks: bool = False


def planned_ranges(
    engine: Engine,
    config: Config,
    choices: tuple[Gate, ...],
    first: int,
    ends: list[int],
    split_for: SplitFor,
    inside: bool,
    groups: bool = False,
) -> PlannedRanges:
    """Ranges of steps of ``first`` tokens and more, and a text that says which of these steps are split, or why none is.

    The ranges end at ``ends`` and, for the split, at up to two more token counts. ``groups``: whether the ranks compile groups
    of layers for these ranges. If the start can also time steps, a range may be compiled split and whole: there is up to one
    more count, and a range where it depends on the host which way is faster. If the profile is an estimate, this is done for
    all ranges that shall be split. It is also done, without a plan, where sums go through host memory beside kernels of which
    no times are known: there much of a step is communication. The ranks can also cut the ranges themselves, by what they alone
    know.
    """
    timed = groups and engine.times_steps
    ranges = ranges_from(first, ends, engine.max_tokens) if first < engine.max_tokens else ()
    text = _not_planned(engine, config, first, split_for, groups)
    if text is not None:
        return PlannedRanges(ranges, text)
    if (kernels := engine.kernels_without_times) is not None:
        if not timed or any(gate.node.peer_kernels for gate in choices):
            alone = f"{kernels} leave no SMs to a sum beside them"
            what = "none" if engine.quantised else "no layer with experts"
            return PlannedRanges(ranges, f"split auto: {what}, {SplitRefusal.LAYER_NOT_RECOGNISED}: {alone}")
        steps = f"steps of {first} to {engine.max_tokens} tokens where the start measures that this is faster"
        return PlannedRanges(ranges, f"split auto: {steps}, as nobody knows the times of {kernels}", ranges)
    profile, layer = split_for.profile, split_for.layer
    if layer is None:
        further = [end for end in (1024, engine.max_tokens // 2) if not {end - 1, end + 1} & {*ends}]
        ranges = ranges_from(first, sorted({*ends, *further}), engine.max_tokens)
        return PlannedRanges(ranges, "split auto: by each range's plan, the model's layers are read off its graph")
    if split_for.by_ranks and groups:
        return PlannedRanges(
            ranges, "split auto: planned by the ranks, by what they measure of this node", by_ranks=True
        )
    assert profile is not None
    measured = (
        timed and profile.estimated
    )  # of an estimate little was measured, so the start measures what a split gains
    host_us = 0.0 if measured else SPLIT_HOST_US
    planner = split_planner(profile, layer, engine, config, choices, inside, host_us, split_for.link)
    parts = planner.cut(first, engine.max_tokens, (high for _, high in ranges))
    tried: tuple[tuple[int, int], ...] = ()
    steps = _split_steps(planner, parts)
    if measured:
        tried = tuple((part.low, part.high) for part in parts if part.split is not None)
        steps += " where the start measures that this is faster" if tried else ""
    elif timed:
        of_device = split_planner(profile, layer, engine, config, choices, inside, 0.0, split_for.link)
        cut, found = _cut_for_the_host(parts, of_device)
        if found is not None:
            text = f"steps of {found.low} to {found.high} tokens where the start measures that the host launches them in time"
            steps = text if all(part.split is None for part in parts) else f"{steps}, and {text}"
            parts, tried = cut, ((found.low, found.high),)
    split = [part for part in parts if part.split is not None]
    surely = all(is_fused(engine, config, gate, part.low, part.high) for part in split for gate in choices)
    steps += "" if surely else ", where they are fused"
    return PlannedRanges(tuple((part.low, part.high) for part in parts), f"split auto: {steps}", tried)


def _not_planned(engine: Engine, config: Config, first: int, split_for: SplitFor, groups: bool) -> str | None:
    """What is said of the split where no plan decides about it; None where one does. Graphs are refused by the same names."""
    if engine.returns_experts:
        return f"split {config.split}: none, a step's choices of experts are recorded by its tokens' numbers"
    if engine.lora:
        return f"split {config.split}: none, adapters' kernels sort the tokens of a whole step by their adapter"
    if engine.state_space:
        return f"split {config.split}: none, a state goes from each token to the next"
    if config.split != "auto":
        return f"split {config.split}"
    if first >= engine.max_tokens:
        return f"split auto: none, vLLM fuses steps of up to {first - 1} tokens by FlashInfer"
    if engine.kernels_without_times is not None:
        return None
    if split_for.profile is None and not (split_for.by_ranks and groups):
        later = "; once the ranks have measured this node, a start plans by that" if split_for.by_ranks else ""
        return f"split auto: none, {SplitRefusal.NO_DEVICE_PROFILE}: none says how long a layer takes{later}"
    return None


def _cut_for_the_host(parts: tuple[Part, ...], of_device: Ranges) -> tuple[tuple[Part, ...], Part | None]:
    """``parts``, of which the whole one that the GPU would gain most from splitting is cut where the GPU begins to gain.

    Returns also the part of it that the GPU would run faster split; None if there is none. ``of_device`` plans as if the host
    took no time.
    """
    most_saved, result, found = 0.0, parts, None
    for number, part in enumerate(parts):
        if part.split is not None or part.low == part.high:
            continue
        cut = of_device.cut(part.low, part.high, most=1)
        for piece in cut:
            if piece.split is not None and piece.split.saved > most_saved and piece.low < piece.high:
                most_saved, found = piece.split.saved, piece
                result = (*parts[:number], *cut, *parts[number + 1 :])
    return result, found


def _split_steps(planner: Ranges, parts: tuple[Part, ...]) -> str:
    split: list[tuple[int, int]] = []
    for part in parts:
        if part.split is not None:
            follows = bool(split) and split[-1][1] + 1 == part.low
            low = split.pop()[0] if follows else part.low
            split.append((low, part.high))
    if split:
        return f"steps of {' and '.join(f'{low} to {high}' for low, high in split)} tokens"
    longest = parts[-1].high
    plan = planner.at(longest)
    slower = f", at {longest} {plan.reason}" if plan.off is Off.HOST_SLOWER else ""
    return f"none of up to {longest} tokens pays{slower}"


def range_endpoints(engine: Engine, config: Config, choices: tuple[Gate, ...]) -> list[int]:
    """The last token count of every stretch of sizes that are fused alike, below ``max_tokens``.

    If an option gives the size of half 1, a range begins where half 2 is half as long. For what is split otherwise see
    :func:`planned_ranges`.
    """
    row_bytes = row_bytes_of(engine)
    ends: set[int] = set()
    if config.transport == "auto":
        for gate in choices:
            stretches = gate.crossovers(row_bytes, world_size=engine.tensor_parallel_size, dtype=engine.dtype)
            for before, after in itertools.pairwise(stretches):
                if before.fused != after.fused:
                    ends.add(after.nbytes // row_bytes - 1)
    if config.wire != EXACT:
        ends |= {end for gate in choices for end in _ends_of_wire(engine, config, gate)}
    if config.fuse_min_bytes:
        ends.add((config.fuse_min_bytes - 1) // row_bytes)
    if config.fuse_max_bytes is not None:
        ends.add(config.fuse_max_bytes // row_bytes)
    if config.split_tokens is not None:
        begin = config.split_tokens * 3 // 2
        if begin < engine.max_tokens:
            ends.add(begin - 1)
    return sorted(end for end in ends if 1 < end < engine.max_tokens - 1)


def _ends_of_wire(engine: Engine, config: Config, gate: Gate) -> set[int]:
    """The last token counts whose messages are too small for the wire, and too small for halves with exact rows.

    None where no size has the wire.
    """
    transport = _transport(config, gate)
    smallest = wire_threshold(config, gate, engine.tensor_parallel_size, transport).nbytes
    if smallest is None:
        return set()
    halves = exact_halves(config, transport)
    bounds = [smallest] if halves is None else [smallest, halves.from_bytes]
    return {max(nbytes - 1, 0) // row_bytes_of(engine) for nbytes in bounds}


def ranges_from(first: int, ends: list[int], max_tokens: int) -> tuple[tuple[int, int], ...]:
    """First and last token count of each range from ``first`` on.

    The first range and the last one have more than one size, because vLLM tunes the GEMMs of a range with one size.
    """
    within = [end for end in ends if first < end < max_tokens - 1]
    return tuple(zip([first, *(end + 1 for end in within)], [*within, max_tokens], strict=True))


def fuses_all(engine: Engine, config: Config, choices: tuple[Gate, ...]) -> bool:
    """Whether all sums of the engine's steps are fused, whichever of the kinds of node the workers find.

    Operators that keep a state may do sums by themselves, so nobody knows it of engines with such layers.
    """
    if not config.fuse or config.fuse_min_bytes or config.fuse_max_bytes is not None or engine.state_space:
        return False
    if FUSE.name in config.disable_passes:
        return False
    row_bytes = row_bytes_of(engine)
    return config.transport != "auto" or all(
        verdict.fused
        for gate in choices
        for verdict in gate.crossovers(row_bytes, world_size=engine.tensor_parallel_size, dtype=engine.dtype)
        if verdict.nbytes <= engine.max_tokens * row_bytes
    )


def row_bytes_of(engine: Engine) -> int:
    return engine.hidden_size * DTYPE_BYTES[engine.dtype]


def thresholds_of(engine: Engine, gate: Gate) -> list[dict[str, Any]]:
    """One entry per stretch of sizes that are decided alike: first token count, unfused backend, decision, source."""
    row_bytes = row_bytes_of(engine)
    return [
        {
            "from_tokens": verdict.nbytes // row_bytes,
            "from_bytes": verdict.nbytes,
            "fused": verdict.fused,
            "backend": str(verdict.backend),
            "entry": verdict.entry,
            "source": verdict.source,
        }
        for verdict in gate.crossovers(row_bytes, world_size=engine.tensor_parallel_size, dtype=engine.dtype)
    ]


def observed(settings: Settings, communicator: Any) -> Settings:
    """``settings``, but with only those backends on that vLLM's communicator of the group has set up: no others would run."""
    if not isinstance(settings, VllmSettings) or not hasattr(communicator, "ca_comm"):  # it is not vLLM's for CUDA
        return settings

    def active(name: str) -> bool:
        backend = getattr(communicator, name, None)
        return backend is not None and not getattr(backend, "disabled", False)

    return replace(
        settings,
        disable_custom_all_reduce=not active("ca_comm"),
        use_symm_mem=active("symm_mem_comm"),
        use_flashinfer=settings.use_flashinfer and active("fi_ar_comm"),
    )
