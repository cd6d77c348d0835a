"""How long a message of ``[tokens, hidden]`` takes between the ranks: latency, then traffic at the rate of links or CTAs."""

from __future__ import annotations

from tw_compile.planning.device import DeviceProfile, FusedKernel


def traffic_bytes(kind: str, nbytes: int, world_size: int) -> float:
    """Bytes that cross one direction of a rank's links for a message of ``nbytes``.

    Two-shot reads N-1 peers' parts of its own rows and writes those rows to N-1 peers. With multicast the switch adds up, so a
    rank sends its whole message once and its own rows once.
    """
    if kind == "multicast":
        return nbytes * (world_size + 1) / world_size
    return nbytes * 2.0 * (world_size - 1) / world_size


def fused_us(kernel: FusedKernel, nbytes: int, world_size: int, ctas: int) -> float:
    """all_reduce + residual + RMSNorm of ``nbytes`` on ``ctas`` CTAs, alone on the device.

    The rate is a smooth minimum of links and CTAs, ``(link^-p + (ctas * cta)^-p)^(-1/p)`` with p the kernel's ``sharpness``:
    measured kernels reach the links' rate gradually.
    """
    power = -kernel.sharpness
    rate = (kernel.link_gb_per_s**power + (ctas * kernel.cta_gb_per_s) ** power) ** (1.0 / power)
    return kernel.latency_us + traffic_bytes(kernel.traffic, nbytes, world_size) / (rate * 1e3)


def fastest_ctas(kernel: FusedKernel, nbytes: int, world_size: int) -> tuple[int, float]:
    """CTAs and microseconds of the kernel when nothing runs beside it."""
    us, ctas = min((fused_us(kernel, nbytes, world_size, ctas), ctas) for ctas in kernel.ctas)
    return ctas, us


def all_reduce_us(profile: DeviceProfile, nbytes: int, world_size: int, multicast: bool) -> float:
    """The profile's fastest all_reduce without norm; those that need ``multicast`` take part only with it."""
    return min(
        one.latency_us + traffic_bytes(one.traffic, nbytes, world_size) / (one.link_gb_per_s * 1e3)
        for one in profile.all_reduce.values()
        if multicast or one.traffic != "multicast"
    )


def rms_norm_us(profile: DeviceProfile, nbytes: int) -> float:
    """Residual add and RMSNorm of a whole message on one rank: two reads and two writes."""
    return profile.launch_us + 4.0 * nbytes / (profile.memory_gb_per_s * 1e3)
