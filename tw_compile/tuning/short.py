"""The short form of a tuning: few sizes, few repeats, and a deadline that all ranks share.

It checks, times and decides as ``tw-compile tune`` does.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from tw_compile.benchmark.contender import Contender
from tw_compile.benchmark.results import Row
from tw_compile.benchmark.spec import BenchSpec, MessageSize, input_sets
from tw_compile.benchmark.worker import (
    CPU_CACHE_BYTES,
    ContenderAtSize,
    MakeTimer,
    SizeReference,
    admit,
    deviation_of,
    row_of,
)
from tw_compile.calibration import Calibration
from tw_compile.gating.table import size as bytes_text
from tw_compile.harness.measure import WARM_UP_ROUNDS, interleaved
from tw_compile.harness.problems import Form, exact, make_problem, unfused
from tw_compile.harness.ranks import Ranks, UnavailableError
from tw_compile.harness.table import mebibytes
from tw_compile.kernels.collective.fields import RMS_NORM

logger = logging.getLogger("tw_compile")

SECONDS = 3.0
"""The time for measuring all sizes together."""
LOADING_SECONDS = 30.0
"""The time for compiling and loading kernels, which happens at the first size. Afterwards the machine has them on disk."""
TOKENS = (64, 1, 1024, 16, 4096, 256, 4, 512, 128, 32)
"""In the order of their worth: if time runs out, the sizes that are done still span the whole range."""
HIDDEN = 8192
CALLS, REPEATS = 5, 9
"""``CALLS``: the most sets of inputs over which messages rotate. ``REPEATS``: timed replays."""
BYTES_A_REPLAY, FEWEST_CALLS, MOST_CALLS = 40 * 2**20, 2, 32
"""One replay has as many calls as move ``BYTES_A_REPLAY`` bytes together, within the two limits. The moment at which a rank
begins is uncertain by some 30 us. Many short calls share this error, and a few long calls take long enough."""
MOST_TIMES_THE_FASTEST = 10.0
"""A kernel of ours that takes more than this many times as long as the fastest way is left out, at this size and at larger
ones. It would not be chosen, and would use up the time of the others."""
_BYTES_A_MESSAGE_BYTE = 96
"""Peak memory of checks and candidates, for each byte of the message: float64 tensors, and buffers of each candidate."""


def short_spec(world_size: int, device: str = "cuda") -> BenchSpec:
    return BenchSpec(world_size, device, "bfloat16", (HIDDEN,), TOKENS, calls=CALLS, repeats=REPEATS)


def calls_of(nbytes: int) -> int:
    """The number of calls in one replay of messages of ``nbytes`` bytes."""
    return max(FEWEST_CALLS, min(MOST_CALLS, BYTES_A_REPLAY // nbytes))


class Deadline:
    """A deadline by rank 0's clock, so that all ranks go on, or stop, together."""

    def __init__(self, ranks: Ranks, seconds: float, clock: Callable[[], float]) -> None:
        self._ranks, self._clock = ranks, clock
        self._end = clock() + seconds

    def allows(self, seconds: float = 0.0) -> bool:
        """Whether work that takes ``seconds`` would be done in time. Collective."""
        return bool(self._ranks.gather(self._clock() + seconds < self._end)[0])


def lines(calibration: Calibration) -> list[str]:
    """What was measured and decided, for the terminal."""
    here = calibration.measured_on
    kernels = [f"{step.algorithm} ({step.sms} SMs) to {mebibytes(step.up_to_bytes)}" for step in calibration.steps]
    entries = [
        f"  {entry}: {'left' if entry.decision == 'left' else f'fused by {entry.transport}'}, {entry.source.kind}"
        for entry in calibration.table.entries
    ]
    measuring, loading = calibration.seconds
    planned = [] if calibration.profile is None else [f"device profile for the planner: {calibration.profile.name}"]
    return [
        f"{here.world_size} x {here.device_name}: {', '.join(kernels) or 'no kernels'}",
        *entries,
        *planned,
        *calibration.remarks,
        f"measured in {measuring:.1f} s, after {loading:.1f} s of loading kernels",
    ]


@dataclass
class ShortRun:
    """One measurement by all ranks of a group; after :meth:`run` every rank has the same rows and remarks.

    Attributes:
        everyone: The contenders. One that fails, or is wrong, takes no part in later sizes.
        clock: Returns seconds. Only rank 0's clock counts.
        make: How calls are timed; None: in the usual way of the device.
        rows: The rows of the sizes that are done.
        remarks: Lines that say what was left out, and why.
        took: Seconds of measuring, and of loading kernels before it, by this rank's clock.
    """

    ranks: Ranks
    spec: BenchSpec
    everyone: Sequence[Contender]
    clock: Callable[[], float] = time.monotonic
    make: MakeTimer | None = None
    seconds: float = SECONDS
    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    took: tuple[float, float] = (0.0, 0.0)
    _slow_from: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        begin = loaded = self.clock()
        loading = True
        deadline = Deadline(self.ranks, LOADING_SECONDS, self.clock)
        sizes = list(self.spec.sizes())
        unmeasured: list[MessageSize] = []
        for size in sizes:
            if not deadline.allows() or not self._has_room(size):
                unmeasured.append(size)
                continue
            try:
                entries = self._check(size, deadline, loading)
            except UnavailableError as error:
                self._remark(f"no times at {bytes_text(size.nbytes)}: {error}")
                continue
            if loading:
                loading, loaded = False, self.clock()
                deadline = Deadline(self.ranks, self.seconds, self.clock)
            rows = self._time(size, entries, deadline)
            if rows is None:
                unmeasured.append(size)
            else:
                self.rows += rows
            del entries
            self._release()
        self.took = float(self.clock() - loaded), float(loaded - begin)
        if unmeasured:
            texts = ", ".join(bytes_text(size.nbytes) for size in unmeasured)
            self._remark(f"no times, for want of time or memory, at {texts}")

    def _has_room(self, size: MessageSize) -> bool:
        """Whether all ranks have enough memory for this size. Collective."""
        free = None
        if self.spec.device == "cuda":
            cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            free = torch.cuda.mem_get_info()[0] + cached
        return all(self.ranks.gather(free is None or _BYTES_A_MESSAGE_BYTE * size.nbytes < free))

    def _check(self, size: MessageSize, deadline: Deadline, loading: bool) -> list[ContenderAtSize]:
        """The contenders that take part at this size and passed the checks.

        If time runs out, the list is empty. While kernels are loaded (``loading``), it has those that were checked in time.
        """
        ctx, spec = self.ranks.ctx, self.spec
        sets, form = self._sets(size), Form(getattr(torch, spec.dtype))
        problems = self.ranks.together(
            lambda: [make_problem(ctx, size.tokens, size.hidden, form, index) for index in range(sets)]
        )
        reference = self.ranks.together(
            lambda: SizeReference({RMS_NORM: exact(ctx, problems[0])}, {RMS_NORM: unfused(ctx, problems[0])})
        )
        entries = []
        for contender in list(self.everyone):
            if contender.tokens is not None and size.tokens not in contender.tokens:
                continue
            if self._slow_from.get(contender.label, size.nbytes + 1) <= size.nbytes:
                continue
            if not deadline.allows():
                if not loading:
                    return []
                self._leave_out(contender, "the time for compiling kernels was over")
                continue
            entry = admit(
                replace(spec, calls=calls_of(size.nbytes)), self.ranks, contender, size, problems, reference, self.make
            )
            if entry.outcome == "timed":
                entries.append(entry)
            else:
                self._leave_out(contender, entry.reason or entry.outcome)
        return entries

    def _time(self, size: MessageSize, entries: list[ContenderAtSize], deadline: Deadline) -> list[Row] | None:
        """The rows of this size; None where timing would take too long, or where there is no contender to time."""
        first = self._first_times(entries)
        ways = [first[entry.contender.label] for entry in entries if entry.contender.kind != "bound"]
        if not ways:
            return None
        limit = MOST_TIMES_THE_FASTEST * min(ways)
        # Time the slow ones once more, because a first replay may include other work.
        first |= self._first_times([entry for entry in entries if first[entry.contender.label] > limit])
        timed = []
        for entry in entries:
            label, us = entry.contender.label, first[entry.contender.label]
            if us <= limit or entry.contender.kind != "ours":
                timed.append(entry)
                continue
            self._slow_from[label] = min(size.nbytes, self._slow_from.get(label, size.nbytes))
            self._remark(
                f"{label} is left out from {bytes_text(size.nbytes)} on: {us:.0f} us a call, limit {limit:.0f} us"
            )
        rounds = WARM_UP_ROUNDS + self.spec.repeats
        us = sum(first[entry.contender.label] for entry in timed) * calls_of(size.nbytes) * rounds
        if not deadline.allows(us * 1e-6):
            return None
        timers = {entry.contender.label: entry.timer for entry in timed if entry.timer is not None}
        times = interleaved(self.ranks, timers, self.spec.repeats)
        rows = []
        for entry in timed:
            deviation = self.ranks.agree(deviation_of(entry.contender, self.ranks))
            if deviation is not None:
                self._leave_out(entry.contender, deviation)
                continue
            rows.append(row_of(self.spec, entry, size, self._sets(size), times[entry.contender.label]))
        return rows

    def _first_times(self, entries: list[ContenderAtSize]) -> dict[str, float]:
        """Microseconds of one call by label, on the slowest rank."""
        own: dict[str, float] = {}
        for entry in entries:
            assert entry.timer is not None
            self.ranks.barrier()
            own[entry.contender.label] = entry.timer.run()
        by_rank = self.ranks.gather(own)
        return {label: max(times[label] for times in by_rank) for label in own}

    def _sets(self, size: MessageSize) -> int:
        cuda = self.spec.device == "cuda"
        cache = torch.cuda.get_device_properties(self.ranks.ctx.device).L2_cache_size if cuda else CPU_CACHE_BYTES
        calls = min(self.spec.calls, calls_of(size.nbytes))
        return input_sets(size.nbytes, cache, calls, self.spec.rotate_from)

    def _leave_out(self, contender: Contender, reason: str) -> None:
        self.everyone = [other for other in self.everyone if other is not contender]
        self._remark(f"{contender.label} is left out: {reason}")

    def _remark(self, text: str) -> None:
        self.remarks.append(text)
        if self.ranks.ctx.rank == 0:
            logger.warning("tw_compile: calibration: %s", text)

    def _release(self) -> None:
        """Free this size's buffers, once all peers are done with them."""
        if self.spec.device == "cuda":
            torch.cuda.synchronize()
            self.ranks.barrier()
            gc.collect(0)
            torch.cuda.empty_cache()
