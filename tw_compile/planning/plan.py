"""The plan of a layer: whether its tokens are split, where, and what each window runs with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from tw_compile.planning.device import DeviceProfile, shipped_profile
from tw_compile.planning.evidence import ESTIMATES, Evidence, LayerError, measured_layers
from tw_compile.planning.gemm import full_wave_tokens
from tw_compile.planning.layer import LayerShape
from tw_compile.planning.links import UNFUSED, Link, shipped_link
from tw_compile.planning.windows import ALL_EXACT, ATTENTION, MLP, Costs, PlannedWindow, Wires, weave, weave_joined

ROW_MULTIPLE = 16
MAX_CANDIDATES = 32
# Predictions that differ by at most this share say nothing about which split is faster. Then cut attention is taken before
# joined attention, and more equal halves before others.
RESOLUTION = 0.01

UNEVEN = 0.08
"""What halves of different sizes cost beyond the time of their windows: this share of it, times the difference of the sizes as
a share of all tokens. So 3 and 5 eighths of the tokens take 2.0% longer, as seven measured layers did on average
(``configs/layers``). Halves of equal size took what their windows say. Windows count waves, and other sizes are chosen because
they fill waves. But a GPU at its power limit runs full waves at a lower clock, so that gains less
(``benchmarks/halves-notes.md``). It does not count for layers with experts, nor where every GEMM is too short for the limit
(``GemmRates.long_us``): there no such cost was seen."""

UNEVEN_OVER_LINKS = 1.3
"""The same for every layer whose messages take a link slower than peer memory. Llama-3.1-8B in halves of 896 + 1152 tokens took
15% and 16% more than in equal ones, where their windows say 2% less (``benchmarks/host-memory-notes.md``, "Unequal halves")."""


class Mode(StrEnum):
    """``split``: each half has its own attention; ``join``: attention of all tokens between split projections."""

    OFF = "off"
    SPLIT = "split"
    JOIN = "join"


class Off(StrEnum):
    """Why tokens are not split."""

    NO_COMMUNICATION = "no_communication"
    TOO_FEW_TOKENS = "too_few_tokens"
    ONE_SEQUENCE = "one_sequence"
    NOT_FASTER = "not_faster"
    HOST_SLOWER = "host_slower"


@dataclass(frozen=True)
class Predicted:
    """Microseconds of one layer in the middle of a model.

    The time of the split layer is that of the best split found; None where there was none to try.

    Attributes:
        unfused_us: The fastest all_reduce, then residual add and RMSNorm.
        no_communication_us: Without the all_reduces, norms kept.
        fused_us: all_reduce + residual + RMSNorm fused, nothing split.
        split_us: The weave's windows, with what :data:`UNEVEN` or :data:`UNEVEN_OVER_LINKS` adds. If the host needs longer to
            launch the layer, its time.
    """

    unfused_us: float
    no_communication_us: float
    fused_us: float
    split_us: float | None

    @property
    def unsplit_us(self) -> float:
        """The time of the layer without a split: the faster one of unfused and fused."""
        return min(self.unfused_us, self.fused_us)


@dataclass(frozen=True)
class GemmWaves:
    """Waves of the GEMMs of one name: of all tokens on all SMs, and of the halves on the SMs that their windows leave them."""

    name: str
    whole: int
    first: int
    second: int


@dataclass(frozen=True)
class Plan:
    """What to do with a layer of ``tokens`` tokens.

    Attributes:
        mode: Whether and how tokens are split.
        sizes: Tokens of each half, or ``(tokens,)``; they add up to ``tokens``, no half is empty.
        cuts_sequence: Whether half 2 begins within a sequence, and so sees keys of half 1.
        off: Why tokens are not split, when the mode is ``off``.
        reason: The decision in words.
        fused_ctas: CTAs of the fused kernel where nothing runs beside it: fuse-only layers, prologue and epilogue.
        windows: The windows of a layer in the steady state, in order. They are those of the best split even if it does not pay.
        waves: The waves of each GEMM, for the same split as ``windows``.
        candidates: How many sizes of half 1 were compared.
        margin: The gain, as a share of the unsplit layer's time, from which on the layer is split.
        rates: The rates of the link that messages take, in words; empty where they go by peer memory.
    """

    tokens: int
    mode: Mode
    sizes: tuple[int, ...]
    cuts_sequence: bool
    off: Off | None
    reason: str
    fused_ctas: int
    predicted: Predicted
    windows: tuple[PlannedWindow, ...]
    waves: tuple[GemmWaves, ...]
    candidates: int
    margin: float
    rates: str = ""

    @property
    def us(self) -> float:
        """Predicted time of the layer as planned: split, or the fused operators alone."""
        if self.mode is Mode.OFF or self.predicted.split_us is None:
            return self.predicted.fused_us
        return self.predicted.split_us

    @property
    def harmless(self) -> bool:
        """Whether the best split found costs no more time than predictions can tell apart.

        The split need not pay.
        """
        if self.off not in (None, Off.NOT_FASTER) or self.predicted.split_us is None:
            return False
        return self.saved_us >= -RESOLUTION * self.predicted.unsplit_us

    @property
    def saved_us(self) -> float:
        """Microseconds that the best split saves against the unsplit layer. Below 0 it costs time; 0: there is no split."""
        split_us = self.predicted.split_us
        return 0.0 if split_us is None else self.predicted.unsplit_us - split_us

    @property
    def gain(self) -> float:
        """How many times faster the planned layer is than the unfused layer."""
        return self.predicted.unfused_us / self.us


def plan_layer(
    profile: DeviceProfile,
    layer: LayerShape,
    tokens: int,
    *,
    kernel: str | None = None,
    sequences: Sequence[int] | None = None,
    attention: str = "auto",
    cut_sequences: bool = True,
    first: int | None = None,
    gemms_leave_sms: bool = True,
    joins_gemms: bool = True,
    row_multiple: int = ROW_MULTIPLE,
    min_gain: float | None = None,
    host_us: float = 0.0,
    link: Link | None = None,
    wires: Wires = ALL_EXACT,
) -> Plan:
    """Choose the halves of ``tokens`` tokens and the CTAs and SMs of every window, so that a layer is predicted fastest.

    The sizes that are compared are those where a GEMM's waves are full, the middle, and borders of sequences; not a sweep. The
    plan is a function of the arguments alone, so it is equal on all ranks.

    Args:
        kernel: A fused kernel of the profile; default: the profile's own choice. With ``link``: a transport of the link;
            default: ``nccl``.
        sequences: Tokens of each sequence of the batch, in order; default: one sequence.
        attention: ``auto``, or ``split`` or ``join`` to insist on a mode.
        cut_sequences: Whether half 2 may begin within a sequence. If so, half 1 is a multiple of ``row_multiple``. If not,
            every border between two sequences may be chosen.
        first: Tokens of half 1, where that is settled; default: several sizes are compared.
        gemms_leave_sms: Whether GEMMs can be told to leave SMs to the kernel beside them.
        joins_gemms: Whether an unsplit layer computes GEMMs of one input as one where that is faster.
        row_multiple: Half 1 must be a multiple of this, and also of the number of ranks.
        min_gain: The split must be predicted faster than every unsplit layer by this share of its time; default: the margin
            of :func:`evidence`.
        host_us: Microseconds that the host needs to launch a split layer. If the device is faster, it waits for the host, and
            the layer takes that long.
        link: The link that messages travel over; default: peer memory, with the rates of the profile.
        wires: How rows of fused sums travel. The rows' bytes are counted, and the time to encode rows is not. Unfused sums are
            exact.

    Raises:
        ValueError: No kernel serves rows in codes, or an argument is out of range.
    """
    transport = UNFUSED if kernel is None else kernel
    calls = profile.fused_kernel(kernel) if link is None else link.transport(transport)
    min_gain = evidence(profile, kernel, link, wires).margin if min_gain is None else min_gain
    batch = _checked(tokens, sequences, attention, first, row_multiple, min_gain)
    costs = Costs(profile, layer, calls, batch, gemms_leave_sms, link, joins_gemms, wires)
    unfused, silent, fused, ctas = _unsplit(costs, tokens)
    starts = _starts(batch)
    multiple = math.lcm(row_multiple, layer.world_size)
    candidates: list[int] = []
    off = None
    if not (layer.attention_summed or layer.mlp_summed):
        off = Off.NO_COMMUNICATION
    else:
        candidates = (
            [first]
            if first is not None
            else candidate_sizes(costs, tokens, starts, multiple if cut_sequences else None)
        )
        if not candidates:
            off = Off.TOO_FEW_TOKENS if cut_sequences else Off.ONE_SEQUENCE
    weaves = [
        (sum(window.us for window in windows) * _uneven(costs, windows, first, tokens), first, windows)
        for mode in ((Mode.SPLIT, Mode.JOIN) if attention == "auto" else (Mode(attention),))
        for first in candidates
        if (windows := _weave(costs, first, tokens, mode, attention == "auto" and first in starts))
    ]
    near = min(us for us, _, _ in weaves) * (1.0 + RESOLUTION) if weaves else 0.0
    best = next((weave for weave in weaves if weave[0] <= near), None)
    predicted = Predicted(unfused, silent, fused, max(best[0], host_us) if best else None)
    most = predicted.unsplit_us * (1.0 - min_gain)
    if best is not None and max(best[0], host_us) > most:
        off = Off.NOT_FASTER if best[0] > most else Off.HOST_SLOWER
    windows = best[2] if best else ()
    mode = Mode.OFF if off or best is None else Mode.JOIN if len(windows) == 5 else Mode.SPLIT
    first = best[1] if best is not None else tokens
    return Plan(
        tokens=tokens,
        mode=mode,
        sizes=(tokens,) if mode is Mode.OFF else (first, tokens - first),
        cuts_sequence=mode is not Mode.OFF and first not in starts,
        off=off,
        reason=_reason(off, predicted, min_gain, multiple, best[0] if best else 0.0),
        fused_ctas=ctas,
        predicted=predicted,
        windows=windows,
        waves=_waves(costs, tokens, windows),
        candidates=len(candidates),
        margin=min_gain,
        rates="" if link is None else link.rates(transport),
    )


def evidence(
    profile: DeviceProfile, kernel: str | None = None, link: Link | None = None, wires: Wires = ALL_EXACT
) -> Evidence:
    """How far the planner is off for ``profile``'s device with ``kernel``, a fused kernel; default: the profile's own.

    With ``link``, ``kernel`` is a transport; default: ``nccl``. Over peer memory, calls with ``wires`` have a kernel of their
    own (:attr:`DeviceProfile.coded_kernel`), and layers with that kernel count. The errors are those of the shipped profile and
    link. A tuned profile or link is believed as much.
    """
    device = next((name for name in profile.device_names if shipped_profile(name) is not None), None)
    if link is None:
        coded = profile.coded_kernel if wires != ALL_EXACT else None
        name, over = coded or kernel or profile.kernel, ""
    else:
        name, over = UNFUSED if kernel is None else kernel, link.name
    if device is not None:
        return _evidence(device, name, over)
    checked = ESTIMATES.get((profile.device_class or "", name, over)) if profile.estimated else None
    return Evidence((), profile.estimated, checked)


@cache
def _evidence(device_name: str, kernel: str, link_name: str) -> Evidence:
    profile = shipped_profile(device_name)
    assert profile is not None
    link = shipped_link() if link_name == shipped_link().name else None
    errors = []
    for layer in measured_layers(device_name, kernel, link_name):
        plan = plan_layer(
            profile,
            layer.shape,
            layer.tokens,
            kernel=kernel,
            first=layer.first,
            joins_gemms=layer.joined,
            min_gain=0.0,
            link=link,
        )
        predicted = vars(plan.predicted)
        ratio = layer.ratio * predicted[layer.unsplit] / predicted["split_us"] - 1.0
        errors.append(LayerError(layer, ratio, {name: us / predicted[name] - 1.0 for name, us in layer.times.items()}))
    return Evidence(tuple(errors))


def _checked(
    tokens: int,
    sequences: Sequence[int] | None,
    attention: str,
    first: int | None,
    row_multiple: int,
    min_gain: float,
) -> tuple[int, ...]:
    """The sequences; ValueError for what makes no sense."""
    if tokens < 1:
        raise ValueError(f"tokens: expected a positive number, got {tokens}")
    batch = (tokens,) if sequences is None else tuple(sequences)
    if not batch or min(batch) < 1 or sum(batch) != tokens:
        raise ValueError(f"sequences: expected positive lengths that add up to {tokens}, got {sequences!r}")
    if attention not in ("auto", Mode.SPLIT, Mode.JOIN):
        raise ValueError(f"attention: expected auto, split or join, got {attention!r}")
    if first is not None and not 0 < first < tokens:
        raise ValueError(f"first: expected 1 to {tokens - 1} tokens, got {first}")
    if row_multiple < 1:
        raise ValueError(f"row_multiple: expected a positive number, got {row_multiple}")
    if not 0.0 <= min_gain < 1.0:
        raise ValueError(f"min_gain: expected a share from 0 to 1, got {min_gain}")
    return batch


def _unsplit(costs: Costs, tokens: int) -> tuple[float, float, float, int]:
    """Microseconds unfused, without communication and fused, and the CTAs of the fused calls.

    In a fused layer, GEMMs of one input may be computed as one. The GEMMs of the other two are what Inductor makes of them.
    """
    layer = costs.layer
    steps = [*costs.attention_part(range(tokens)), *costs.mlp_part(tokens)]
    compute, joined = costs.alone_us(steps), costs.alone_us(steps, costs.joins_gemms)
    sums = layer.attention_summed + layer.mlp_summed
    silent = compute if costs.norm_apart else compute + sums * costs.norm_us(tokens)
    if not sums:
        return silent, silent, silent - compute + joined, costs.kernel.ctas_beside[0]
    parts = [part for part, summed in ((ATTENTION, layer.attention_summed), (MLP, layer.mlp_summed)) if summed]
    calls = [costs.call_alone(tokens, part) for part in parts]
    ctas, us = max(ctas for ctas, _ in calls), sum(us for _, us in calls)
    return silent + sums * costs.all_reduce_us(layer.message_bytes(tokens)), silent, joined + us, ctas


def _uneven(costs: Costs, windows: Sequence[PlannedWindow], first: int, tokens: int) -> float:
    """The factor by which a split layer takes longer than its windows."""
    difference = abs(2 * first - tokens) / tokens
    if costs.link is not None:
        return 1.0 + UNEVEN_OVER_LINKS * difference
    long_us = costs.profile.gemm.long_us
    limited = costs.layer.has_dense_mlp and any(gemm.us > long_us for window in windows for gemm in window.gemms)
    return 1.0 + UNEVEN * difference if limited else 1.0


def _starts(sequences: Sequence[int]) -> frozenset[int]:
    """Where sequences begin, without the begin of the first one."""
    starts, position = [], 0
    for length in sequences[:-1]:
        position += length
        starts.append(position)
    return frozenset(starts)


def candidate_sizes(costs: Costs, tokens: int, starts: Iterable[int], multiple: int | None) -> list[int]:
    """Sizes of half 1 to compare, those next to the middle first; multiples of ``multiple``, or borders of sequences."""
    middle = tokens // 2
    if multiple is None:
        wanted = set(starts)
    else:
        wanted = {size for size in starts if size % multiple == 0}
        down = middle // multiple * multiple
        wanted |= {down, down + multiple}
        sms = costs.profile.sms
        joint = [candidate for candidate in (costs.joint_qkv, costs.joint_gate_up) if candidate is not None]
        for gemm in dict.fromkeys((*(of_layer.of_half(costs.profile) for of_layer in costs.layer.gemms), *joint)):
            beside = [costs.profile.sms_beside(kernel, ctas) for kernel in costs.kernels for ctas in kernel.ctas_beside]
            for budget in dict.fromkeys((sms, *beside)):
                tile = costs.gemm(gemm, middle or 1, budget).tile
                for size in full_wave_tokens(gemm, tile, budget, middle):
                    wanted |= {size // multiple * multiple, (tokens - size) // multiple * multiple}
    sizes = [size for size in wanted if 0 < size < tokens]
    return sorted(sizes, key=lambda size: (abs(2 * size - tokens), size))[:MAX_CANDIDATES]


def _weave(costs: Costs, first: int, tokens: int, mode: Mode, whole_sequences: bool) -> tuple[PlannedWindow, ...]:
    """The windows of the mode. A join has none where no cut has parted a sequence."""
    if mode is Mode.SPLIT:
        return weave(costs, first, tokens)
    return () if whole_sequences else weave_joined(costs, first, tokens)


def _waves(costs: Costs, tokens: int, windows: Sequence[PlannedWindow]) -> tuple[GemmWaves, ...]:
    result = []
    for name in dict.fromkeys(gemm.name for gemm in costs.layer.gemms):
        same = [gemm for gemm in costs.layer.gemms if gemm.name == name]
        halves = [
            counts for window in windows if (counts := [gemm.waves for gemm in window.gemms if gemm.name == name])
        ]
        if halves:  # each half in a window of its own
            whole = sum(costs.gemm(gemm, tokens, costs.profile.sms).waves for gemm in same)
            first, second = halves
            result.append(GemmWaves(name, whole, sum(first), sum(second)))
    return tuple(result)


def _reason(off: Off | None, predicted: Predicted, min_gain: float, multiple: int, device_us: float) -> str:
    """The decision in words; ``device_us``: what the device takes for a split layer, however long the host launches it."""
    if off is Off.NO_COMMUNICATION:
        return "no all_reduce that could be hidden"
    if off is Off.TOO_FEW_TOKENS:
        return f"fewer tokens than two halves need, of which the first is a multiple of {multiple}"
    if off is Off.ONE_SEQUENCE:
        return "one sequence, which may not be cut"
    assert predicted.split_us is not None
    if off is Off.HOST_SLOWER:
        return (
            f"split is predicted to take {device_us:.0f} us, and the host {predicted.split_us:.0f} us to launch it; unsplit it "
            f"takes {predicted.unsplit_us:.0f} us"
        )
    share = predicted.split_us / predicted.unsplit_us
    text = f"split is predicted to take {share:.1%} of the unsplit layer's time"
    return f"{text}, more than {1.0 - min_gain:.1%}" if off is Off.NOT_FASTER else text
