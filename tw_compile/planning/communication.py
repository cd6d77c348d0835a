"""How long a message ``[tokens, hidden]`` takes between ranks: latency, then the time of links or SMs, whichever is longer."""

from __future__ import annotations

from dataclasses import dataclass

from tw_compile.planning.device import CODED_KERNELS, DeviceProfile, FusedKernel
from tw_compile.planning.links import LinkTransport

ELEMENT_BYTES = 2
COPY_SHARE = 0.5
"""The share of ``row_us`` that a row costs that is only copied. Fitted together with ``row_us`` to rows with none, one and two
copies."""


@dataclass(frozen=True)
class RowShares:
    """The bytes of a row on its way, as shares of 16 bits a column: for partial sums, and for results.

    ``wire`` is the name of the codes. The time to encode a row is not counted.
    """

    sums: float = 1.0
    results: float = 1.0
    wire: str = "exact"


EXACT_ROWS = RowShares()


def traffic_bytes(kind: str, nbytes: int, world_size: int, rows: RowShares = EXACT_ROWS) -> float:
    """Bytes that cross one direction of a rank's links for a message of ``nbytes``; ``rows`` counts in two-shot alone.

    Two-shot reads N-1 peers' parts of its own rows and writes those rows to N-1 peers. With multicast the switch adds up, so a
    rank sends its whole message once and its own rows once. One-shot reads N-1 peers' messages whole.
    """
    if kind == "multicast":
        return nbytes * (world_size + 1) / world_size
    if kind == "one_shot":
        return nbytes * (world_size - 1.0)
    return nbytes * (rows.sums + rows.results) * (world_size - 1) / world_size


def sm_us(
    kernel: FusedKernel,
    tokens: int,
    hidden_size: int,
    world_size: int,
    staged: bool = False,
    narrow: bool = False,
    in_slot: bool = False,
    rows: RowShares = EXACT_ROWS,
) -> float:
    """Microseconds that rows of ``[tokens, hidden]`` cost one rank's SMs, on a single CTA.

    Two-shot: for each row of its own a rank loads N ranks' parts and the residual. It stores the result for the peers and for
    itself, and the new residual. Then it loads and stores N-1 rows that peers have finished. ``staged``: the message is an
    ordinary tensor, and N-1 more rows are copied to where peers read them. ``narrow``: the residual has 16 bits, as in calls
    beside other work, and not 32. ``in_slot``: rows that peers have finished are read where they are, if the kernel can leave
    them there. Rows in codes can't stay there, because they have to be decoded. Multicast: one row and a 16-bit residual each
    way.
    """
    own = tokens / world_size
    if kernel.traffic == "multicast":
        moved, copied = 4.0, 0
    else:
        stays = in_slot and kernel.in_slot and rows == EXACT_ROWS
        peers = world_size - 1
        copied = peers * (staged + (not stays))
        summed = 2 + peers * (rows.sums + rows.results) + (2 if narrow else 4)
        moved = summed + peers * (staged * (1 + rows.sums) + (not stays) * (rows.results + 1))
    nbytes = moved * hidden_size * ELEMENT_BYTES
    return own * (kernel.row_us * (1.0 + COPY_SHARE * copied) + nbytes / (kernel.cta_gb_per_s * 1e3))


def fused_us(
    kernel: FusedKernel,
    tokens: int,
    hidden_size: int,
    world_size: int,
    ctas: int,
    staged: bool = False,
    narrow: bool = False,
    in_slot: bool = False,
    rows: RowShares = EXACT_ROWS,
) -> float:
    """all_reduce + residual + RMSNorm of ``[tokens, hidden]`` on ``ctas`` CTAs, alone. Last four arguments: see :func:`sm_us`.

    A smooth maximum of links and SMs, ``(links^p + sms^p)^(1/p)`` with p the kernel's ``sharpness``: measured kernels reach the
    links' rate gradually.
    """
    nbytes = tokens * hidden_size * ELEMENT_BYTES
    links = traffic_bytes(kernel.traffic, nbytes, world_size, rows) / (kernel.link_gb_per_s * 1e3)
    sms = sm_us(kernel, tokens, hidden_size, world_size, staged, narrow, in_slot, rows) / ctas
    return kernel.latency_us + (links**kernel.sharpness + sms**kernel.sharpness) ** (1.0 / kernel.sharpness)


def fastest_alone(
    profile: DeviceProfile,
    multicast: bool,
    tokens: int,
    hidden_size: int,
    world_size: int,
    rows: RowShares = EXACT_ROWS,
) -> tuple[int, float]:
    """CTAs and microseconds of the profile's fastest kernel of the transport when nothing runs beside it."""
    us, ctas = min(
        (fused_us(kernel, tokens, hidden_size, world_size, ctas, rows=rows), ctas)
        for name, kernel in profile.fused.items()
        if kernel.multicast == multicast and (rows == EXACT_ROWS or name in CODED_KERNELS)
        for ctas in kernel.ctas
    )
    return ctas, us


def all_reduce_us(profile: DeviceProfile, nbytes: int, world_size: int, multicast: bool) -> float:
    """The profile's fastest all_reduce without norm; those that need ``multicast`` take part only with it."""
    return min(
        times.latency_us + traffic_bytes(times.traffic, nbytes, world_size) / (times.link_gb_per_s * 1e3)
        for times in profile.all_reduce.values()
        if multicast or times.traffic != "multicast"
    )


def link_us(
    transport: LinkTransport,
    nbytes: int,
    world_size: int,
    rows: RowShares = EXACT_ROWS,
    beside: bool = False,
    sms: int | None = None,
) -> float:
    """A message over a link that is not peer memory, alone, by the transport's fastest way. Codes have no one-shot way.

    ``beside``: of those ways that calls beside compute have. ``sms``: of those that can have fewer SMs than the transport; None
    if it has all of them.
    """
    fewer = None if sms is None or sms >= transport.sms else sms
    return min(
        way.latency_us + traffic_bytes(way.traffic, nbytes, world_size, rows) / (way.rate(fewer) * 1e3)
        for way in transport.ways.values()
        if (rows == EXACT_ROWS or way.traffic == "two_shot")
        and not (beside and way.beside is False)
        and not (fewer is not None and way.sm_gb_per_s is None)
    )


def overlapped_us(kernel: FusedKernel | LinkTransport, us: float, compute_us: float) -> float:
    """Microseconds of a call that has compute beside ``compute_us`` of it.

    ``us``: what the call would take with compute beside all of it. Peer memory is fast, and nearly all of its calls are beside
    compute: those keep ``us``.
    """
    if not isinstance(kernel, LinkTransport):
        return us
    return min(us, us / kernel.contention + compute_us * (1.0 - 1.0 / kernel.contention))


def beside_us(
    profile: DeviceProfile,
    kernel: FusedKernel | LinkTransport,
    tokens: int,
    hidden_size: int,
    world_size: int,
    ctas: int,
    in_slot: bool = False,
    rows: RowShares = EXACT_ROWS,
) -> float:
    """Microseconds of a call of ``[tokens, hidden]`` with compute beside all of it; see :func:`sm_us` for ``in_slot``."""
    if isinstance(kernel, LinkTransport):
        nbytes = tokens * hidden_size * ELEMENT_BYTES
        return kernel.contention * link_us(kernel, nbytes, world_size, rows, beside=True, sms=ctas)
    alone = fused_us(kernel, tokens, hidden_size, world_size, ctas, narrow=True, in_slot=in_slot, rows=rows)
    return profile.slower_beside(world_size) * alone


def elementwise_us(profile: DeviceProfile, elements: float) -> float:
    """Microseconds of a kernel that reads or writes ``elements`` elements, and computes little."""
    return profile.launch_us + elements * ELEMENT_BYTES / (profile.memory_gb_per_s * 1e3)


def rms_norm_us(profile: DeviceProfile, nbytes: int) -> float:
    """Residual add and RMSNorm of a whole message on one rank: two reads and two writes."""
    return elementwise_us(profile, 4.0 * nbytes / ELEMENT_BYTES)
