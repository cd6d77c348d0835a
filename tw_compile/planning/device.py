"""What the planner knows about a device: TOML files in ``configs/devices``, each value with its source beside it.

A profile of another device is a file of the same form, given by its path. ``device.toml`` in the user's config folder, which
``tw-compile tune`` writes, comes before the shipped profile of the devices that it names. Times are in microseconds (us), rates
in decimal units: 10^9 bytes and 10^12 floating-point operations a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Literal

from tw_compile.files import read_if_there, user_file
from tw_compile.planning.links import LinkTransport
from tw_compile.planning.measured_halves import MeasuredHalves, check_halves
from tw_compile.planning.tables import read_table

USER_FILE = "device.toml"
Traffic = Literal["multicast", "two_shot"]
MOST_SMS_BESIDE = 32
"""The most SMs that a call beside compute can have."""
MEASURED_RANKS = 4
"""The most ranks that have been seen to wait for each other beside GEMMs."""


@dataclass(frozen=True)
class Tile:
    """One shape of a GEMM's output tiles, computed by one CTA on one SM."""

    rows: int
    columns: int


@dataclass(frozen=True)
class GemmRates:
    """The rates of 16-bit matmuls.

    Attributes:
        tflops_per_sm: What one SM does while all SMs are busy, if its tiles were endless.
        edge: Loading operands costs a tile as much time as if it had this many more rows and columns.
        tile_us: Microseconds of a tile that do not depend on its depth: it fills its pipeline and stores its output.
        split_us: Microseconds to add up the parts of tiles whose depth several CTAs share.
        most_parts: The most CTAs that share one tile's depth; 1 where no tile is shared.
        long_us: A GEMM that runs longer than this reaches the power limit, and clocks fall.
        long_factor: Factor on the time of a GEMM beyond ``long_us``.
        grouped_efficiency: Rate of grouped GEMMs (mixture of experts) as a share of plain ones.
        grouped_short_efficiency: The same for their short tiles, where experts have few rows or columns.
        grouped_tile_us: ``tile_us`` of a grouped GEMM's tile, half of it for a short one.
        grouped_us: Microseconds before the first tile of a grouped GEMM: another kernel finds where the groups are.
        own_gemms: Whether halves may have our own GEMMs of ``kernels/gemm`` (joint, grouped); other devices can't run these
            GEMMs.
        memory_gb_per_s: The rate at which weights are read when there are few tokens. It exceeds the rate of ``DeviceProfile``,
            because GEMMs mostly read.
        short_sides: The lengths of tiles' short sides, ascending.
        long_sides: The lengths of their long sides; every short side goes with every long one, either of them along the tokens.
    """

    tflops_per_sm: float
    edge: float
    tile_us: float
    split_us: float
    most_parts: int
    long_us: float
    long_factor: float
    grouped_efficiency: float
    grouped_short_efficiency: float
    grouped_tile_us: float
    grouped_us: float
    own_gemms: bool
    memory_gb_per_s: float
    short_sides: tuple[int, ...]
    long_sides: tuple[int, ...]

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        sides = list(itertools.product(self.short_sides, self.long_sides))
        return tuple(Tile(*shape) for shape in dict.fromkeys((*sides, *((long, short) for short, long in sides))))


@dataclass(frozen=True)
class AttentionRates:
    """The rates of one attention kernel on the whole device. One CTA works on ``block_rows`` queries of one head.

    Attributes:
        tflops: The rate of causal attention. Only pairs of a query and a key that it sees count as work.
        full_tflops: The rate where all queries see all keys: then no block is half empty, and all SMs have equal work.
        latency_us: From the end of the kernel before to full speed, with clearing or copying what the kernel needs.
    """

    tflops: float
    full_tflops: float
    latency_us: float
    block_rows: int


@dataclass(frozen=True)
class AllReduceTimes:
    """An all_reduce without norm: a fixed latency, then its traffic (see :class:`FusedKernel`) at the rate of the links."""

    traffic: Traffic
    latency_us: float
    link_gb_per_s: float


CODED_KERNELS = ("push",)
"""The fused kernels whose rows can travel in codes, by their names in profiles."""


@dataclass(frozen=True)
class FusedKernel:
    """A kernel that does all_reduce + residual + RMSNorm, and how its rate grows with its CTAs.

    Attributes:
        traffic: ``two_shot``: 2(N-1)/N bytes cross a link for each byte of the message; ``multicast``: (N+1)/N.
        cta_gb_per_s: The rate at which a lone CTA loads and stores, all bytes counted, see :func:`communication.sm_us`.
        row_us: Microseconds that a CTA needs for a row that it sums, beyond those for the bytes.
        sharpness: How abruptly the CTAs' rate turns into that of the links, see :func:`communication.fused_us`.
        ctas: The numbers of CTAs to choose from, ascending. Those above ``MOST_SMS_BESIDE`` are for calls alone.
        cluster: The most CTAs that it keeps together in one group of SMs; 1 where they are dealt out to all groups.
        in_slot: Whether results can be read where peers write them, instead of being copied.
    """

    traffic: Traffic
    latency_us: float
    link_gb_per_s: float
    cta_gb_per_s: float
    row_us: float
    sharpness: float
    ctas: tuple[int, ...]
    cluster: int
    in_slot: bool

    @property
    def multicast(self) -> bool:
        return self.traffic == "multicast"

    @property
    def ctas_beside(self) -> tuple[int, ...]:
        """The numbers of CTAs to choose from beside compute."""
        return tuple(ctas for ctas in self.ctas if ctas <= MOST_SMS_BESIDE) or (MOST_SMS_BESIDE,)


@dataclass(frozen=True)
class DeviceProfile:
    """One kind of GPU and its links.

    Attributes:
        device_names: The names that ``torch.cuda.get_device_name`` may return.
        gpcs: Groups of SMs. Both SMs of a GEMM's cluster are of one group, see :meth:`sms_beside`.
        memory_gb_per_s: The rate that elementwise kernels reach.
        rotary_gb_per_s: The rate that compiled rotary embedding reaches; it is lower, as it transposes heads and tokens.
        launch_us: From the end of one kernel to full speed of the next in a CUDA graph.
        window_us: Microseconds that are lost when two streams wait for each other.
        contention: Factor on the time of what computes beside a fused kernel on other SMs; they share power, L2 and memory.
        communication_contention: Factor on the time of the fused kernel beside compute, with two ranks. The fused kernel waits
            for memory more than others do. See :meth:`slower_beside`.
        kernel: The key of ``fused`` that plans are for unless told otherwise.
        prefetch_bytes: How much of the next weights a call of few tokens brings into the L2 cache while its message is under
            way; None: nothing, because nobody has measured on this device that it pays.
        estimated: Whether most of the profile is another device's, scaled by a few times that ranks have measured
            (``calibration.py``).
        device_class: Of an estimate, the class of the device: ``sm90``, or ``generic``. Estimates were checked for some.
        halves: Halves of FFNs that were timed on the device; shipped profiles have none.
    """

    name: str
    device_names: tuple[str, ...]
    sms: int
    gpcs: int
    memory_gb_per_s: float
    rotary_gb_per_s: float
    launch_us: float
    window_us: float
    contention: float
    communication_contention: float
    kernel: str
    gemm: GemmRates
    attention: Mapping[str, AttentionRates]
    all_reduce: Mapping[str, AllReduceTimes]
    fused: Mapping[str, FusedKernel]
    estimated: bool = False
    device_class: str | None = None
    prefetch_bytes: int | None = None
    halves: tuple[MeasuredHalves, ...] = ()

    def slower_beside(self, world_size: int) -> float:
        """Factor on the time of a fused kernel beside others.

        Each further rank that the kernel waits for adds the same, up to 4 ranks: more ranks have not been measured.
        """
        return 1.0 + (self.communication_contention - 1.0) * (min(world_size, MEASURED_RANKS) - 1)

    def sms_beside(self, kernel: FusedKernel | LinkTransport, ctas: int) -> int:
        """SMs that ``ctas`` CTAs of ``kernel`` leave to kernels of clusters of two, as cuBLAS's are.

        CTAs without clusters are dealt out to the groups in turn. A group with an odd number of free SMs has one SM of no use.
        Where nothing is left the result is 1: a number, but not a real speed.
        """
        if kernel.cluster > 1:
            return max(self.sms - ctas, 1)
        rounds, rest = divmod(ctas, 2 * self.gpcs)
        return max(self.sms - 2 * self.gpcs * rounds - 2 * min(rest, self.gpcs), 1)

    def attention_rates(self, kernel: str) -> AttentionRates:
        """The rates of the kernel with this name, or of the slowest kernel where the profile does not know the name."""
        slowest = min(self.attention.values(), key=lambda rates: rates.tflops)
        return self.attention.get(kernel, slowest)

    def fused_kernel(self, name: str | None = None) -> FusedKernel:
        """The kernel called ``name``, or the profile's own choice; ValueError when it has none of that name."""
        key = self.kernel if name is None else name
        if key not in self.fused:
            raise ValueError(f"kernel: expected one of {', '.join(self.fused)} ({self.name}), got {key!r}")
        return self.fused[key]

    @property
    def coded_kernel(self) -> str | None:
        """The name of the kernel that serves calls whose rows travel in codes; None where the profile has none."""
        return next((name for name in CODED_KERNELS if name in self.fused), None)

    def kernel_of_transport(self, transport: str, named: bool) -> str | None:
        """The kernel that plans are for where messages travel by ``transport``; None where there is none.

        ``named``: the profile was asked for by its name, and not found by the device. Then plans are for the profile's own
        choice, whatever the transport on this machine is. But multicast needs a kernel that uses it.
        """
        if named and transport != "multimem":
            return self.kernel
        if transport not in ("p2p", "multimem"):
            return None
        multicast = transport == "multimem"
        names = sorted(self.fused, key=lambda name: name != self.kernel)
        return next((name for name in names if self.fused[name].multicast == multicast), None)


def profile_names() -> list[str]:
    """Names of the profiles shipped in ``configs/devices``."""
    return sorted(_shipped())


def load_profile(source: str) -> DeviceProfile:
    """A shipped profile by its name, in any case, or a TOML file by its path. Raises ValueError for anything else."""
    shipped = {name.lower(): profile for name, profile in _shipped().items()}
    if source.lower() in shipped:
        return shipped[source.lower()]
    path = Path(source)
    text = read_if_there(path, "device profile") if path.suffix == ".toml" else None
    if text is None:
        raise ValueError(
            f"device profile: expected one of {', '.join(profile_names())} or the path of a TOML file, got {source!r}"
        )
    return parse_profile(text, source)


def profile_of_device(device_name: str) -> DeviceProfile | None:
    """The profile of a device by the name that CUDA gives it, the user's own before a shipped one; None where there is none.

    Raises:
        ValueError: The user's file is wrong, or cannot be read.
    """
    own = user_profile()
    return own if own is not None and device_name in own.device_names else shipped_profile(device_name)


def user_profile() -> DeviceProfile | None:
    """The profile of the user's own file; None where there is no file."""
    file = user_file(USER_FILE)
    text = read_if_there(file, "device profile")
    return None if text is None else parse_profile(text, str(file))


def shipped_profile(device_name: str) -> DeviceProfile | None:
    return next((profile for profile in _shipped().values() if device_name in profile.device_names), None)


@cache
def _shipped() -> dict[str, DeviceProfile]:
    folder = resources.files("tw_compile.configs") / "devices"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    profiles = [parse_profile(file.read_text(), f"configs/devices/{file.name}") for file in files]
    return {profile.name: profile for profile in profiles}


def parse_profile(text: str, source: str) -> DeviceProfile:
    """A profile from TOML; ValueError names ``source``, the key, what was expected and what came."""
    profile = read_table(DeviceProfile, text, source)
    if profile.kernel not in profile.fused:
        raise ValueError(f"{source}: kernel: expected one of {', '.join(profile.fused)}, got {profile.kernel!r}")
    factors = {
        "contention": profile.contention,
        "communication_contention": profile.communication_contention,
        "gemm: long_factor": profile.gemm.long_factor,
    }
    for name, factor in factors.items():
        if factor < 1.0:
            raise ValueError(f"{source}: {name}: expected at least 1, got {factor}")
    for name, kernel in profile.fused.items():
        if kernel.ctas[-1] >= profile.sms:
            raise ValueError(
                f"{source}: fused.{name}: ctas: expected fewer than the {profile.sms} SMs, got {kernel.ctas[-1]}"
            )
    check_halves(profile.halves, source)
    return profile
