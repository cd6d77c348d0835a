"""What a calibration gives to the planner: a profile for a device without one, and the rates of a link through host memory.

Ranks time calls, a norm and one GEMM. All other values of the profile are H200's: tiles, attention, launches, and how much
kernels slow each other down. Rates among them are scaled by the measured times. ``evidence.ESTIMATES`` says how far such a
profile can be trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from tw_compile.benchmark.labels import NCCL
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.transports.selection import transport_of
from tw_compile.planning.device import DeviceProfile, FusedKernel, load_profile
from tw_compile.planning.gemm import Gemm, gemm_time
from tw_compile.planning.links import UNFUSED, Link
from tw_compile.tuning.link import fitted_ways
from tw_compile.tuning.measured import KernelRun
from tw_compile.tuning.profile import KERNELS, NORM_ALONE, alone_us, fitted, latency_and_rate

GEMM = "o_proj"
"""The label of the row for the GEMM ``[tokens, hidden / world_size] @ [hidden / world_size, hidden]``."""
BASE = "H200"
"""The profile with the most measured values."""
_ROUNDS = 8
_UNFUSED_ROW = NCCL


def estimated_profile(device_name: str, device_class: str, sms: int, run: KernelRun) -> DeviceProfile | None:
    """An estimated profile for a device of ``sms`` SMs without one. None where norm, GEMM or all_reduce was not timed."""
    base = load_profile(BASE)
    norms = [(4.0 * row.nbytes, row.p50_us) for row in run.rows if row.label == NORM_ALONE and row.p50_us]
    line = latency_and_rate(norms)
    gemms = [(row.tokens, row.hidden, row.p50_us) for row in run.rows if row.label == GEMM and row.p50_us]
    if line is None or not gemms:
        return None
    memory = line[1] / base.memory_gb_per_s
    capability = device_class.removesuffix("-multicast")
    profile = replace(
        base,
        name=f"{device_name}, estimated by a calibration of {run.world_size} ranks",
        device_names=(device_name,),
        estimated=True,
        device_class=capability,
        sms=sms,
        memory_gb_per_s=line[1],
        rotary_gb_per_s=base.rotary_gb_per_s * memory,
        gemm=replace(
            base.gemm,
            memory_gb_per_s=base.gemm.memory_gb_per_s * memory,
            own_gemms=capability == "sm90",
        ),
    )
    profile = _with_gemm_rate(profile, gemms, run.world_size)
    compute = profile.gemm.tflops_per_sm * sms / (base.gemm.tflops_per_sm * base.sms)
    attention = {
        name: replace(rates, tflops=rates.tflops * compute, full_tflops=rates.full_tflops * compute)
        for name, rates in base.attention.items()
    }
    profile = replace(
        profile, attention=attention, all_reduce={UNFUSED: base.all_reduce[UNFUSED]}, fused=_kernels(base, sms, run)
    )
    profile, measured = fitted(profile, [run], (), {})
    if f"all_reduce.{UNFUSED}.link_gb_per_s" not in measured:
        return None
    kernel = next(name for name in (base.kernel, *profile.fused) if name in profile.fused)
    return replace(profile, name=profile.name.removesuffix(", tuned"), kernel=kernel)


def _with_gemm_rate(profile: DeviceProfile, gemms: list[tuple[int, int, float]], world_size: int) -> DeviceProfile:
    """``profile`` with its SM rate changed so that it predicts the times of ``gemms``: tokens, hidden, microseconds."""
    for _ in range(_ROUNDS):
        factor = median(
            gemm_time(profile, Gemm(GEMM, hidden, hidden // world_size), tokens, profile.sms).us / us
            for tokens, hidden, us in gemms
        )
        rate = profile.gemm.tflops_per_sm * factor
        profile = replace(profile, gemm=replace(profile.gemm, tflops_per_sm=rate))
    return profile


def _kernels(base: DeviceProfile, sms: int, run: KernelRun) -> Mapping[str, FusedKernel]:
    """The kernels of ``base`` that were timed, with their CTA counts below ``sms``.

    If none was timed, all of them: the messages then take a link.
    """
    timed = {row.algorithm for row in run.rows if row.algorithm is not None and row.p50_us is not None}
    names = [name for name in base.fused if KERNELS.get(name) in timed] or list(base.fused)
    kernels = {name: base.fused[name] for name in names}
    fitting = {name: tuple(ctas for ctas in kernel.ctas if ctas < sms) for name, kernel in kernels.items()}
    return {name: replace(kernel, ctas=fitting[name]) for name, kernel in kernels.items() if fitting[name]}


def measured_link(base: Link, run: KernelRun) -> Link | None:
    """``base`` with the rates of its transports fitted to ``run``. None where nothing is fitted, as with peer access."""
    timed = {ALGORITHMS[row.algorithm].transport for row in run.rows if row.algorithm is not None}
    if "host" not in timed:
        return None
    link, found = base, False
    for transport, rates in base.transports.items():
        if transport == UNFUSED:
            times = list(alone_us(run, _UNFUSED_ROW, subtract_norm=rates.norm_apart))
        else:
            times = _fastest(run, transport)
        fit = fitted_ways(link, transport, times)
        link, found = fit.link, found or bool(fit.measured)
    return link if found else None


def _fastest(run: KernelRun, transport: str) -> list[tuple[int, int, float]]:
    """Ranks, bytes and microseconds of the transport's fastest kernel at each size."""
    times: dict[int, float] = {}
    for row in run.rows:
        if row.algorithm is not None and transport_of(row.algorithm) == transport and row.p50_us is not None:
            times[row.nbytes] = min(row.p50_us, times.get(row.nbytes, row.p50_us))
    return [(run.world_size, nbytes, us) for nbytes, us in sorted(times.items())]
