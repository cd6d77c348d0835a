"""How many SMs a matmul should leave to a kernel beside it: measured on the device, once for each shape.

cuBLASLt can be told how many SMs there are, but not which. It may choose clusters of two, four or eight SMs. A cluster needs
SMs of one group (GPC), and the kernel beside the matmul has taken some SMs of the groups. So a matmul that is planned for
exactly the SMs that are left may find no place for its last clusters, and take a wave more. How many SMs it should leave can't
be computed from outside. So the few numbers that can make a difference are tried, beside a stand-in that takes the same SMs for
the same time.

Others may use the device or the host meanwhile, such as another process or a compiler's threads. That makes trials longer and
never shorter. So the time of a number of SMs is that of its shortest trial, provided that a second trial was as short. If a
number has no such second trial, there is no result. We are this careful because a wrong choice stays: what is compiled is
kept, and all ranks wait for the one that chose wrongly.

A trial takes some time even without a matmul. This time is measured, too, and subtracted. Otherwise it would count once for
each of several matmuls, but only once for the same matmuls joined into one.

Calls also come later than planned when another rank is late. So several numbers that are equally fast are compared once more,
beside a call that outlasts the matmul, and the number that is best there is taken. Many matmuls lose nothing by leaving SMs
that nobody takes. If a matmul leaves no SMs where some are taken, it loses a quarter to a half of its time, and a grouped one
up to all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from tw_compile import compat
from tw_compile.agree import agreed
from tw_compile.autotune.hold_sms import hold_sms
from tw_compile.kernels.collective.side_stream import cluster_size, side_stream
from tw_compile.kernels.runtime.program import FULL_SHARED_MAJORS

_MORE = (0, 4, 8, 12)
"""SMs to leave beyond those that are taken."""
_TRIALS = 4
"""The trials of each number of SMs in a round."""
_MOST_ROUNDS = 10
_REPRODUCED, _CLOCK_US = 1.02, 1.0
"""Another round is made unless the two shortest trials of a number differ by at most this factor, or by at most this many
microseconds, which is what events can tell."""
_LEAD_US = 500.0
"""The device waits this long before each trial, while the host enqueues it. Beside a compiler's threads this takes 150 to 250:
of trials of 322 us most took 330 to 400 when the device waited for 150 us (two H200, 28 November 2026)."""
_SETTLE_US = 4.0
"""The time from the fork to the matmul, so that the stand-in finds its SMs first."""
_BUSY_STEP_US = 10
_EQUAL = 1.01
"""Times that differ by at most this factor count as equal."""
_ENDLESS = 1.5
"""A call that has to be beside all of a matmul lasts this factor times the longest of the matmul's times."""


@dataclass(frozen=True)
class Operand:
    """The properties of a tensor that a matmul's time depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self, device: torch.device, rows: int) -> torch.Tensor:
        """Make such a tensor, with random values, because the power that a matmul takes depends on the values.

        A tensor of integers says where groups of ``rows`` rows end. Each row belongs to a random group.
        """
        if not self.dtype.is_floating_point:
            of_group = torch.randint(self.shape[0], (rows,), generator=torch.Generator().manual_seed(0))
            return of_group.bincount(minlength=self.shape[0]).cumsum(0).to(device, self.dtype)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device).normal_()


@dataclass(frozen=True)
class Reserve:
    """``sms`` to leave, and the microseconds that the matmul then takes beside the other kernel."""

    sms: int
    us: float


Matmul = Callable[..., object]
"""``(*operands, SMs to leave) -> result``"""


def measured_reserve(
    matmul: Matmul,
    operands: tuple[Operand, ...],
    device: torch.device,
    ctas: int,
    busy_us: float,
) -> Reserve | None:
    """The best number of SMs to leave to a kernel that has ``ctas`` CTAs for another ``busy_us`` when the matmul begins.

    ``matmul``: one of ``mm_leaving_sms.py``; it takes ``operands`` and the number of SMs. ``busy_us``: 0 if the kernel should
    have ended by then. Takes some milliseconds of the device the first time.

    Returns None where nothing can be measured: no device is in use, the stand-in is not for this device, others use the device
    all the time, there is no memory for the operands, or a CUDA graph is being captured.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return None
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability(device)[0] not in FULL_SHARED_MAJORS:
        return None
    busy = max(_BUSY_STEP_US, round(busy_us / _BUSY_STEP_US) * _BUSY_STEP_US) if busy_us > 0 else 0
    # A GEMM that is planned for fewer SMs may add up in another order, and ranks may compute the same GEMM.
    key = f"reserve/{getattr(matmul, '__name__', matmul)}/{operands}/{ctas}/{busy}"
    return agreed(key, lambda: measured_once(matmul, operands, device, ctas, busy))


@cache
def measured_once(
    matmul: Matmul, operands: tuple[Operand, ...], device: torch.device, ctas: int, busy_us: int
) -> Reserve | None:
    with compat.real_tensors(), torch.cuda.device(device), torch.no_grad():
        try:
            tensors = [operand.make(device, operands[0].shape[0]) for operand in operands]
            numbers = (0, *(ctas + more for more in _MORE))
            for sms in numbers:
                matmul(*tensors, sms)  # chooses and loads its kernel
            nothing = shortest((0,), lambda sms: time_beside(lambda: None, device, ctas, 0.0))
            if not nothing:
                return None

            def trial(sms: int, us: float) -> float:
                busy = us + nothing[0] if us else 0.0  # the call begins this much earlier than the matmul
                return time_beside(partial(matmul, *tensors, sms), device, ctas, busy) - nothing[0]

            return choose(numbers, trial, busy_us)
        except torch.cuda.OutOfMemoryError:
            return None


Trial = Callable[[int, float], float]
"""``(SMs to leave, microseconds that the call is there) -> microseconds``"""


def choose(numbers: Sequence[int], trial: Trial, busy_us: float) -> Reserve | None:
    """The best of ``numbers`` beside a call of ``busy_us``; None where its time can't be reproduced."""
    times = shortest(numbers, lambda sms: trial(sms, busy_us))
    if not times:
        return None
    equal = as_good_as_the_best(times)
    if len(equal) > 1:
        endless = shortest(equal, lambda sms: trial(sms, _ENDLESS * max(times.values())))
        equal = as_good_as_the_best(endless) if endless else equal
    return Reserve(equal[0], times[equal[0]])


def shortest(numbers: Sequence[int], trial: Callable[[int], float]) -> dict[int, float]:
    """The shortest trial of each of ``numbers`` that has a second trial as short.

    Empty if a number without such a trial may be the fastest: one of its trials was shorter than all others.
    """
    trials: dict[int, list[float]] = {sms: [] for sms in numbers}
    for _ in range(_MOST_ROUNDS):
        for _ in range(_TRIALS):
            for sms in numbers:  # in turns, so that what changes with time changes all numbers alike
                trials[sms].append(trial(sms))
        if all(_is_reproduced(found) for found in trials.values()):
            break
    fastest = min(numbers, key=lambda sms: min(trials[sms]))
    if not _is_reproduced(trials[fastest]):
        return {}
    return {sms: min(found) for sms, found in trials.items() if _is_reproduced(found)}


def _is_reproduced(trials: list[float]) -> bool:
    shortest, second = sorted(trials)[:2]
    return shortest > 0.0 and second <= max(shortest * _REPRODUCED, shortest + _CLOCK_US)


def as_good_as_the_best(times: Mapping[int, float]) -> list[int]:
    """The numbers of SMs whose times are within ``_EQUAL`` of the best time, the smallest number first."""
    limit = min(times.values()) * _EQUAL
    return sorted(sms for sms, us in times.items() if us <= limit)


def time_beside(matmul: Callable[[], object], device: torch.device, ctas: int, busy_us: float) -> float:
    """Microseconds from the fork of the two streams to the end of the matmul, which begins ``_SETTLE_US`` after the fork.

    With ``busy_us`` 0 nothing runs beside the matmul.
    """
    current, side = torch.cuda.current_stream(device), side_stream(device, 0)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    hold_sms(current, 1, _LEAD_US)
    begin.record(current)
    side.wait_event(begin)
    if busy_us:
        hold_sms(side, ctas, busy_us, cluster_size(ctas, device))
    hold_sms(current, 1, _SETTLE_US)
    matmul()
    end.record(current)
    current.wait_stream(side)
    end.synchronize()
    return begin.elapsed_time(end) * 1e3
