"""The weave of one layer in its steady state: windows in which one half computes while the other half's sums travel.

With halves 1 and 2 the compute stream runs attention 1, attention 2, MLP 1, MLP 2 of every layer. The sum that a part ends
with travels during the next part, and the part after that needs it:

    window       computes                       travels
    attention 1  qkv, attention, o_proj of 1    the sum behind the previous layer's MLP of 2
    attention 2  qkv, attention, o_proj of 2    the sum behind o_proj of 1
    MLP 1        gate_up, down of 1             the sum behind o_proj of 2
    MLP 2        gate_up, down of 2             the sum behind down of 1

The next window needs both, so a window takes as long as the longer one. Windows don't depend on each other. So a layer takes
the sum over its windows, and the best CTA count can be chosen for each window alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tw_compile.planning import communication
from tw_compile.planning.communication import ELEMENT_BYTES, EXACT_ROWS, RowShares, elementwise_us
from tw_compile.planning.device import DeviceProfile, FusedKernel
from tw_compile.planning.gemm import Gemm, GemmTime, gemm_time, joint_gemm
from tw_compile.planning.layer import LayerShape, attention_us
from tw_compile.planning.links import UNFUSED, Link, LinkTransport

SLACK = 1.1
"""A sum may be late by this factor without harm, where that is possible.

The number of CTAs is chosen with this factor. A GEMM that begins when the sum has just arrived still leaves the sum's SMs free:
otherwise the GEMM would pay a whole wave when the sum is late.
"""

NEAR = 1.01
"""Windows whose times differ by at most this factor count as equal. More CTAs leave fewer clusters of SMs whole than the
predicted times of GEMMs account for: with a call on 12 CTAs instead of 4, q of 512 tokens of Llama-3.3-70B at TP4 took 52 us
instead of 29, in the trace of 2026-11-22."""


@dataclass(frozen=True)
class GemmPlan:
    """One GEMM of a window, planned for ``sms`` SMs; ``tile``, ``tiles`` and ``waves`` are predicted for that number.

    ``joint``: how many GEMMs of this name are computed as this one; 0 for a kernel that computes no more than one.
    """

    name: str
    tokens: int
    sms: int
    tile: tuple[int, int]
    tiles: int
    waves: int
    us: float
    joint: int = 0


@dataclass(frozen=True)
class PlannedWindow:
    """The work that runs side by side in one window, and for how long; times in microseconds.

    Attributes:
        computes: ``attention``, ``mlp``, or in join mode also ``qkv``, ``join`` (qkv of half 2, attention of all tokens,
            o_proj of half 1) and ``o_proj``.
        half: The half that computes, 1 or 2.
        travels: The half whose sum travels; None when none does.
        message_bytes: Bytes of that sum ``[tokens, hidden]``.
        ctas: CTAs of the kernel that sums; 0 when none runs.
    """

    computes: str
    half: int
    travels: int | None
    message_bytes: int
    ctas: int
    gemms: tuple[GemmPlan, ...]
    compute_us: float
    communication_us: float
    us: float


ATTENTION, MLP = "attention", "mlp"
"""The part of a layer that a sum follows."""


@dataclass(frozen=True)
class Wires:
    """How the rows of a layer's two sums travel: the sum behind attention and the sum behind the MLP."""

    attention: RowShares = EXACT_ROWS
    mlp: RowShares = EXACT_ROWS

    def __str__(self) -> str:
        same = self.attention == self.mlp
        return self.mlp.wire if same else f"{self.attention.wire} behind attention, {self.mlp.wire} behind the MLP"


ALL_EXACT = Wires()


@dataclass(frozen=True)
class _Calls:
    """The kernel or transport that serves the sums behind one part, and how their rows travel."""

    kernel: FusedKernel | LinkTransport
    rows: RowShares

    @property
    def ctas_beside(self) -> tuple[int, ...]:
        """The numbers of CTAs to choose from beside compute."""
        coded = isinstance(self.kernel, LinkTransport) and self.rows != EXACT_ROWS
        return self.kernel.ctas_beside[-1:] if coded else self.kernel.ctas_beside


@dataclass(frozen=True)
class Gemms:
    """GEMMs of one input, of ``tokens`` tokens.

    ``joint``: the GEMM as which they can be computed; None where they can't. ``gated_us``: microseconds of the kernel behind
    them, which a joint GEMM replaces.
    """

    gemms: tuple[Gemm, ...]
    tokens: int
    joint: Gemm | None = None
    gated_us: float = 0.0


Computation = Gemms | Callable[[int], float]
"""GEMMs, or a function from SMs to microseconds."""


class Costs:
    """Times of one layer's pieces on one device. The time of a GEMM is computed once for each number of tokens and SMs.

    ``gemms_leave_sms``: whether GEMMs are planned for the SMs that a kernel beside them leaves, see :meth:`beside`. ``link``:
    what messages travel over, where that is not peer memory; ``kernel`` is then a transport of the link. ``joins_gemms``:
    whether GEMMs of one input are computed as one where nothing is split, if that is faster. ``wires``: how rows travel. Over
    peer memory another kernel than ``kernel`` may be needed to serve rows in codes.

    Raises:
        ValueError: The profile has no kernel that serves rows in codes.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        layer: LayerShape,
        kernel: FusedKernel | LinkTransport,
        sequences: Sequence[int],
        gemms_leave_sms: bool = True,
        link: Link | None = None,
        joins_gemms: bool = True,
        wires: Wires = ALL_EXACT,
    ) -> None:
        self.link = link
        self.joins_gemms = joins_gemms
        self.profile = profile
        self.layer = layer
        self.kernel = kernel
        self.sequences = sequences
        self.gemms_leave_sms = gemms_leave_sms
        self.mlp_of_half = tuple(gemm.of_half(profile) for gemm in layer.mlp)
        self.joint_qkv, self.joint_gate_up = (
            joint_gemm(profile, gemms) if gemms_leave_sms else None for gemms in (layer.qkv, layer.mlp[:-1])
        )
        self._gemms: dict[tuple[Gemm, int, int], GemmTime] = {}
        self._calls = {ATTENTION: self._calls_with(wires.attention), MLP: self._calls_with(wires.mlp)}
        attention, mlp = (calls.kernel for calls in self._calls.values())
        self.kernels = (attention,) if attention == mlp else (attention, mlp)

    def _calls_with(self, rows: RowShares) -> _Calls:
        kernel = self.kernel
        if rows != EXACT_ROWS and isinstance(kernel, FusedKernel):
            coded = None if kernel.multicast else self.profile.coded_kernel
            if coded is None:
                what = (
                    "multicast, whose switch adds rows as they are"
                    if kernel.multicast
                    else f"{self.profile.name}'s kernels"
                )
                raise ValueError(f"wire: expected exact with {what}, got {rows.wire}")
            kernel = self.profile.fused[coded]
        return _Calls(kernel, rows)

    def gemm(self, gemm: Gemm, tokens: int, sms: int) -> GemmTime:
        key = (gemm, tokens, sms)
        if key not in self._gemms:
            self._gemms[key] = gemm_time(self.profile, gemm, tokens, sms)
        return self._gemms[key]

    def beside(
        self, gemm: Gemm, tokens: int, ctas: int, left_us: float, kernel: FusedKernel | LinkTransport | None = None
    ) -> tuple[GemmTime, float]:
        """A GEMM that begins while ``ctas`` CTAs of ``kernel`` are taken for another ``left_us``, and its microseconds.

        The microseconds are without contention. ``kernel`` None: the kernel of exact rows.

        cuBLAS starts one CTA for each SM that it plans for, and each CTA takes its tiles in turn. Grouped GEMMs do the same.
        CTAs that find no SMs begin when the other kernel or the first of the other CTAs ends, and then take as long as all
        others.
        """
        free = self.profile.sms_beside(kernel or self.kernel, ctas)
        if self.gemms_leave_sms:
            time = self.gemm(gemm, tokens, free)
            return time, time.us
        time = self.gemm(gemm, tokens, self.profile.sms)
        return time, time.us + (min(time.us, left_us) if time.tiles > free else 0.0)

    def qkv(self, tokens: int) -> list[Computation]:
        """The projections, and what is done to queries and keys before attention."""
        layer, attention = self.layer, self.layer.attention
        elements = 2.0 * tokens * (attention.heads + attention.kv_heads) * attention.head_dim
        us = 2 * self.profile.launch_us + elements * ELEMENT_BYTES / (self.profile.rotary_gb_per_s * 1e3)
        if layer.gathered_columns:  # a gather is the second half of an all_reduce
            us += self.all_reduce_us(tokens * layer.gathered_columns * ELEMENT_BYTES // 2)
        return [Gemms(layer.qkv, tokens, self.joint_qkv), lambda sms: us]

    def attention(self, rows: range) -> list[Computation]:
        return [lambda sms: attention_us(self.profile, self.layer.attention, self.sequences, rows, sms)]

    def o_proj(self, tokens: int) -> list[Computation]:
        """The projection, and the norm behind it where no fused sum computes the norm."""
        return [Gemms((self.layer.o_proj,), tokens), *self._norm(tokens, self.layer.attention_summed)]

    def attention_part(self, rows: range) -> list[Computation]:
        return [*self.qkv(len(rows)), *self.attention(rows), *self.o_proj(len(rows))]

    def mlp_part(self, tokens: int, half: bool = False) -> list[Computation]:
        """The MLP. ``half``: whether it is computed for a half.

        A joint GEMM stores ``silu(gate) * up`` itself. For halves the time of that step is counted all the same. Without it,
        measured splits are 3% slower than predicted on average, and with it 1% (``benchmarks/split-notes.md``, "GEMMs of one
        input").
        """
        *gate_up, down = self.mlp_of_half if half else self.layer.mlp
        rows = tokens * down.experts_per_token
        us = gated_us = elementwise_us(self.profile, float(rows * (sum(gemm.columns for gemm in gate_up) + down.depth)))
        if down.experts > 1:  # rows go to their experts and come back weighted
            us += 2.0 * elementwise_us(self.profile, float((tokens + rows) * self.layer.hidden_size))
        first = Gemms(tuple(gate_up), tokens, self.joint_gate_up, gated_us)
        return [first, lambda sms: us, Gemms((down,), tokens), *self._norm(tokens, self.layer.mlp_summed)]

    def join(self, tokens: int) -> list[Computation]:
        """Queries, keys and values of both halves copied into one tensor each."""
        us = elementwise_us(self.profile, 2.0 * tokens * sum(gemm.columns for gemm in self.layer.qkv))
        return [lambda sms: us]

    def alone_us(self, steps: Sequence[Computation], joined: bool = False) -> float:
        """Microseconds of steps on all SMs, alone. ``joined``: whether GEMMs of one input are one where that is faster."""
        sms = self.profile.sms
        return sum(self._gemms_us(step, joined) if isinstance(step, Gemms) else step(sms) for step in steps)

    def _gemms_us(self, step: Gemms, joined: bool) -> float:
        """Microseconds of GEMMs on all SMs. ``joined`` applies to several GEMMs, and to a single one that is gated."""
        sms = self.profile.sms
        each = sum(self.gemm(gemm, step.tokens, sms).us for gemm in step.gemms)
        if step.joint is None or not joined or (len(step.gemms) == 1 and not step.gated_us):
            return each
        return min(each, self.gemm(step.joint, step.tokens, sms).us - step.gated_us)

    def window(
        self,
        computes: str,
        half: int,
        steps: Sequence[Computation],
        message_tokens: int = 0,
        in_slot: bool = False,
        summed: str = ATTENTION,
    ) -> PlannedWindow:
        """The window with the CTA count that makes it shortest, with :data:`SLACK`; of :data:`NEAR` ones the fewest CTAs.

        ``message_tokens``: tokens of the other half, whose sum behind the part ``summed`` travels; 0 when no sum travels.
        ``in_slot``: whether the sum's results are read where peers write them.
        """
        if not message_tokens:
            return self._window(computes, half, steps, 0, 0, False)
        options = [
            self._window(computes, half, steps, message_tokens, ctas, in_slot, summed)
            for ctas in self._calls[summed].ctas_beside
        ]
        costs = [max(window.compute_us, SLACK * window.communication_us) for window in options]
        return next(window for window, cost in zip(options, costs, strict=True) if cost <= NEAR * min(costs))

    def _window(
        self,
        computes: str,
        half: int,
        steps: Sequence[Computation],
        message_tokens: int,
        ctas: int,
        in_slot: bool,
        summed: str = ATTENTION,
    ) -> PlannedWindow:
        """The window with ``ctas`` CTAs for the call.

        While the sum travels, compute has the SMs that are left. GEMMs have as many of them as fit. Contention slows both.
        """
        profile, calls = self.profile, self._calls[summed]
        message = self.layer.message_bytes(message_tokens)
        communication_us = 0.0
        if ctas:
            communication_us = communication.beside_us(
                profile,
                calls.kernel,
                message_tokens,
                self.layer.hidden_size,
                self.layer.world_size,
                ctas,
                in_slot,
                calls.rows,
            )
        clock = 0.0
        gemms: list[GemmPlan] = []
        for step in steps:
            if isinstance(step, Gemms):
                ways = [(step.gemms, 0.0)]
                if ctas and step.joint is not None:
                    ways.append(((step.joint,), step.gated_us))
                ends = [
                    (*self._one_by_one(way, step.tokens, ctas, communication_us, clock, calls.kernel), saved_us)
                    for way, saved_us in ways
                ]
                # What a joint GEMM saves decides which way is taken, but does not count as time: see mlp_part.
                gemms += min(ends, key=lambda end: end[0] - end[2])[1]
                clock = min(end for end, *_ in ends)
            else:
                begun = ctas if clock < SLACK * communication_us else 0
                clock = self._after(clock, step(max(profile.sms - begun, 1)), communication_us)
        communication_us = communication.overlapped_us(calls.kernel, communication_us, clock)
        return PlannedWindow(
            computes=computes,
            half=half,
            travels=3 - half if ctas else None,
            message_bytes=message,
            ctas=ctas,
            gemms=tuple(gemms),
            compute_us=clock,
            communication_us=communication_us,
            us=max(clock, communication_us) + profile.window_us,
        )

    def _one_by_one(
        self,
        gemms: Sequence[Gemm],
        tokens: int,
        ctas: int,
        communication_us: float,
        clock: float,
        kernel: FusedKernel | LinkTransport,
    ) -> tuple[float, list[GemmPlan]]:
        """When the last of ``gemms`` ends if the first one begins at ``clock``, and what the GEMMs are planned for."""
        plans = []
        for gemm in gemms:
            begun = ctas if clock < SLACK * communication_us else 0
            time, us = self.beside(gemm, tokens, begun, max(communication_us - clock, 0.0), kernel)
            tile = (time.tile.rows, time.tile.columns)
            plans.append(GemmPlan(gemm.name, tokens, time.sms, tile, time.tiles, time.waves, us, len(gemm.joint)))
            clock = self._after(clock, us, communication_us)
        return clock, plans

    def _after(self, clock: float, us: float, communication_us: float) -> float:
        """When a step ends that begins at ``clock`` and takes ``us`` where nothing is beside it."""
        contention = self.profile.contention
        beside = min(max(communication_us - clock, 0.0), us * contention)
        return clock + us + beside * (1.0 - 1.0 / contention)

    def norm_us(self, tokens: int) -> float:
        return communication.rms_norm_us(self.profile, self.layer.message_bytes(tokens))

    @property
    def norm_apart(self) -> bool:
        """Whether the norm behind a sum is computed separately, and is no part of the call that sums."""
        return isinstance(self.kernel, LinkTransport) and self.kernel.norm_apart

    def all_reduce_us(self, nbytes: int) -> float:
        """The fastest all_reduce without norm, unfused."""
        ranks = self.layer.world_size
        if self.link is not None:
            return communication.link_us(self.link.transport(UNFUSED), nbytes, ranks)
        assert isinstance(self.kernel, FusedKernel)
        return communication.all_reduce_us(self.profile, nbytes, ranks, self.kernel.multicast)

    def call_alone(self, tokens: int, summed: str = ATTENTION) -> tuple[int, float]:
        """CTAs and microseconds of a call of ``[tokens, hidden]`` behind the part ``summed`` with nothing beside it."""
        calls, ranks = self._calls[summed], self.layer.world_size
        if isinstance(calls.kernel, LinkTransport):
            nbytes = self.layer.message_bytes(tokens)
            return calls.kernel.sms, communication.link_us(calls.kernel, nbytes, ranks, calls.rows)
        multicast, hidden_size = calls.kernel.multicast, self.layer.hidden_size
        return communication.fastest_alone(self.profile, multicast, tokens, hidden_size, ranks, calls.rows)

    def _norm(self, tokens: int, summed: bool) -> list[Computation]:
        """The norm behind a part, unless the call that sums computes it.

        A separate norm that waits for the sum runs one part later, and takes as long there.
        """
        if summed and not self.norm_apart:
            return []
        us = self.norm_us(tokens)
        return [lambda sms: us]


def weave(costs: Costs, first: int, tokens: int) -> tuple[PlannedWindow, ...]:
    """The four windows of a layer whose half 1 is its first ``first`` tokens.

    A result that only matmuls read stays in the slot: what the query, key and value projections read, and what a dense MLP
    reads, but not what experts gather.
    """
    second = tokens - first
    layer = costs.layer
    matmuls = layer.has_dense_mlp
    return (
        costs.window("attention", 1, costs.attention_part(range(first)), layer.mlp_summed * second, True, MLP),
        costs.window(
            "attention", 2, costs.attention_part(range(first, tokens)), layer.attention_summed * first, matmuls
        ),
        costs.window("mlp", 1, costs.mlp_part(first, True), layer.attention_summed * second, matmuls),
        costs.window("mlp", 2, costs.mlp_part(second, True), layer.mlp_summed * first, True, MLP),
    )


def weave_joined(costs: Costs, first: int, tokens: int) -> tuple[PlannedWindow, ...]:
    """The five windows of a layer whose attention runs once for all tokens, between split projections.

    Half 1's o_proj comes right behind attention, so that half 1's sum travels during half 2's o_proj.
    """
    second = tokens - first
    layer = costs.layer
    matmuls = layer.has_dense_mlp
    joined = [*costs.qkv(second), *costs.join(tokens), *costs.attention(range(tokens)), *costs.o_proj(first)]
    return (
        costs.window("qkv", 1, costs.qkv(first), layer.mlp_summed * second, True, MLP),
        costs.window("join", 2, joined),
        costs.window("o_proj", 2, costs.o_proj(second), layer.attention_summed * first, matmuls),
        costs.window("mlp", 1, costs.mlp_part(first, True), layer.attention_summed * second, matmuls),
        costs.window("mlp", 2, costs.mlp_part(second, True), layer.mlp_summed * first, True, MLP),
    )
