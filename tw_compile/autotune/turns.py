"""Measures at which numbers of rows our kernel computes GEMMs of one input faster than the library, once for each shape.

The time of a GEMM grows in steps, when its tiles fill another wave. The steps of two kernels lie at different numbers of rows.
So no single number says where one of them wins. Both kernels are timed at numbers of rows that are close enough to see the
steps. A result also holds for fewer rows, down to the next smaller number, because fewer rows fill no more tiles. (With
their depth split they may have other tiles, and take up to a quarter longer.)

In a model the weights come from the device's memory, because other layers have used the L2 cache since. So each trial finds the
cache filled with something else. As in ``measured_reserve.py``, trials of both kernels take turns, and the shortest trial
counts if a second one was as short. Where either kernel has no such trial, the library keeps those rows.

The two kernels may differ in the last bit, and ranks may compute the same GEMM, as that of a router whose choices must be equal
on all ranks. So all ranks take the result of the rank that came first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from tw_compile import compat
from tw_compile.agree import agreed
from tw_compile.autotune.hold_sms import hold_sms
from tw_compile.autotune.measured_reserve import shortest
from tw_compile.kernels.gemm import by_rows
from tw_compile.kernels.runtime.wgmma import has_instructions

MOST_ROWS = 8192
"""The kernel that is faster for this many rows is taken for more rows, too."""
_LEAD_US = 500.0
"""The device waits this long before each trial, while the host enqueues it, as in ``measured_reserve.py``."""
_LIBRARY, _OURS = 0, 1

Turns = tuple[int, ...]
"""See ``kernels/gemm/by_rows.py``."""


@dataclass(frozen=True)
class Gemms:
    """GEMMs of one bfloat16 input ``[rows, depth]``, with matrices ``[depth, columns]`` in the memory layout of ``nn.Linear``.

    ``gated``: there are two matrices, and the result is ``silu(a @ gate) * (a @ up)``. ``halves``: these two matrices are the
    halves of one.
    """

    depth: int
    columns: tuple[int, ...]
    biased: bool = False
    gated: bool = False
    halves: bool = False


def rows_to_measure(least: int, most: int | None) -> tuple[int, ...]:
    """Numbers of rows from ``least`` to ``most`` (None: unbounded) at which the kernels are timed, in ascending order."""
    end = min(MOST_ROWS if most is None else most, MOST_ROWS)
    steps = (1, 16, 32, 64, 96, *range(128, 2048, 128), *range(2048, MOST_ROWS + 1, 256))
    inside = [rows for rows in steps if least < rows < end]
    return tuple(dict.fromkeys((min(least, end), *inside, end)))


def measured_turns(gemms: Gemms, rows: Sequence[int], device: torch.device) -> Turns | None:
    """Where our kernel is faster among ``rows``, which are ascending; empty if it is faster nowhere.

    None where nothing can be measured: no device is in use, the kernel is not for this device, there is no memory for the
    operands, or a CUDA graph is being captured.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return None
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if not has_instructions(device):
        return None
    key = tuple(rows)
    return agreed(f"turns/{gemms}/{key}", lambda: _measured_once(gemms, key, device))


def turns_of(rows: Sequence[int], ours: Sequence[bool]) -> Turns:
    """The numbers of rows where the choice changes, if ``ours[i]`` holds from ``rows[i - 1] + 1`` to ``rows[i]`` rows."""
    turns, before, begin = [], False, 0
    for count, is_ours in zip(rows, ours, strict=True):
        if is_ours != before:
            turns.append(begin)
        before, begin = is_ours, count + 1
    return tuple(turns)


@cache
def _measured_once(gemms: Gemms, rows: tuple[int, ...], device: torch.device) -> Turns | None:
    with compat.real_tensors(), torch.cuda.device(device), torch.no_grad():
        try:
            run = _runner(gemms, rows[-1], device)
            cold = torch.empty(
                2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device
            )
            ours = []
            for count in rows:
                for which in (_LIBRARY, _OURS):
                    run(count, which)  # chooses and loads its kernel
                times = shortest((_LIBRARY, _OURS), partial(_time_cold, partial(run, count), cold, device))
                ours.append(len(times) == 2 and times[_OURS] < times[_LIBRARY])
            return turns_of(rows, ours)
        except torch.cuda.OutOfMemoryError:
            return None


def _runner(gemms: Gemms, most: int, device: torch.device) -> Callable[[int, int], object]:
    """A function that computes ``gemms`` for a number of rows, at most ``most``, by the library or by our kernel."""

    def values(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()

    a = values(most, gemms.depth)
    if gemms.halves:
        matrices = [half.t() for half in values(sum(gemms.columns), gemms.depth).split(gemms.columns)]
    else:
        matrices = [values(columns, gemms.depth).t() for columns in gemms.columns]
    biases = [values(columns) for columns in gemms.columns] if gemms.biased else []

    def run(rows: int, which: int) -> object:
        turns = (0,) if which == _OURS else ()
        if gemms.gated:
            return by_rows.gated_mm_on_cuda(a[:rows], matrices[0], matrices[1], turns)
        return by_rows.joint_mm_on_cuda(a[:rows], matrices, biases, turns)

    return run


def _time_cold(run: Callable[[int], object], cold: torch.Tensor, device: torch.device, which: int) -> float:
    """Microseconds of ``run(which)`` while the L2 cache holds ``cold``, which is written right before."""
    stream = torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    hold_sms(stream, 1, _LEAD_US)
    cold.zero_()
    begin.record(stream)
    run(which)
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) * 1e3
