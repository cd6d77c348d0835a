"""Predict how long a layer takes over a slow link if its tokens are split in more than two parts.

    python -m tw_compile.benchmark.layer.parts --model llama-3.3-70b --tp 2 --tokens 512,1024,2048,4096,8192 --transport nccl

This uses the planner's model alone, and needs no GPU. A layer's parts go over two lanes, compute and communication, event by
event. The planner's windows are of two halves, and don't depend on each other. With more parts, sums may queue. So a long
window of one part hides what a short window of another part left exposed. The passes split tokens in two; this shows what that
leaves to gain.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from tw_compile.models.config import load_config, tensor_parallel_plan
from tw_compile.planning import communication, layer_shape, load_profile, plan_layer
from tw_compile.planning.links import LinkTransport, link_of_node
from tw_compile.planning.windows import Computation, Costs, Gemms

PARTS = (2, 3, 4)

_LAYERS, _SKIPPED = 12, 4
"""Layers that are simulated, and how many of the first ones are not yet in the steady state."""
_DONE = 1e-9


def even_parts(tokens: int, number: int, multiple: int = 32) -> tuple[int, ...]:
    """``tokens`` in parts that are multiples of ``multiple``, but for the last one, which has the rest."""
    each = tokens // number // multiple * multiple
    return (*(each,) * (number - 1), tokens - each * (number - 1))


def parts_us(costs: Costs, sizes: Sequence[int]) -> float:
    """Microseconds of a layer in the middle of a model whose tokens are computed in parts of ``sizes``.

    Every layer computes attention of all parts in turn, then their MLPs. Sums travel one at a time, in the order in which they
    were made; a part goes on when its own sum has arrived. Each sum has the most CTAs that the call may take.

    Raises:
        ValueError: ``sizes`` is empty, or has a part without tokens.
    """
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes: expected positive numbers of tokens, got {tuple(sizes)}")
    begins = [sum(sizes[:part]) for part in range(len(sizes))]
    attention = [
        _stage(costs, costs.attention_part(range(first, first + size)))
        for first, size in zip(begins, sizes, strict=True)
    ]
    mlp = [_stage(costs, costs.mlp_part(size, half=True)) for size in sizes]
    layer, ctas = costs.layer, costs.kernel.ctas_beside[-1]
    sums = [
        communication.beside_us(costs.profile, costs.kernel, size, layer.hidden_size, layer.world_size, ctas)
        for size in sizes
    ]
    contention = costs.kernel.contention if isinstance(costs.kernel, LinkTransport) else 1.0
    lanes = _Lanes(contention)
    ends = []
    for _ in range(_LAYERS):
        for stage, summed in ((attention, layer.attention_summed), (mlp, layer.mlp_summed)):
            for part, (beside_us, alone_us) in enumerate(stage):
                lanes.wait_for(part)
                lanes.compute(beside_us, alone_us)
                lanes.compute(costs.profile.window_us, costs.profile.window_us)
                if summed:
                    lanes.send(part, sums[part] / contention)
        ends.append(lanes.clock)
    return (ends[-1] - ends[_SKIPPED - 1]) / (_LAYERS - _SKIPPED)


class _Lanes:
    """Compute and communication side by side. Each is slower while the other one is busy; sums by the factor ``contention``."""

    def __init__(self, contention: float) -> None:
        self.clock = 0.0
        self._contention = contention
        self._sums: list[tuple[int, float]] = []
        """For each sum its part, and the microseconds that are left without compute beside it. The first sum is travelling."""

    def send(self, part: int, us: float) -> None:
        self._sums.append((part, us))

    def wait_for(self, part: int) -> None:
        """Compute nothing until all sums of a part have arrived."""
        while any(one == part for one, _ in self._sums):
            self._pass(self._first_arrives_in(1.0), 1.0)

    def compute(self, beside_us: float, alone_us: float) -> None:
        left = 1.0
        while left > _DONE:
            whole_us = beside_us if self._sums else alone_us
            us = min(left * whole_us, self._first_arrives_in(self._contention))
            self._pass(us, self._contention)
            left -= us / whole_us

    def _first_arrives_in(self, slower: float) -> float:
        return self._sums[0][1] * slower if self._sums else math.inf

    def _pass(self, us: float, slower: float) -> None:
        """Let ``us`` microseconds pass. Callers pass at most the time until the first sum arrives."""
        self.clock += us
        if self._sums:
            part, left = self._sums.pop(0)
            left -= us / slower
            if left > _DONE:
                self._sums.insert(0, (part, left))


def _stage(costs: Costs, steps: Sequence[Computation]) -> tuple[float, float]:
    """Microseconds of ``steps`` with a sum that travels beside all of them, and without one."""
    profile = costs.profile
    left = profile.sms_beside(costs.kernel, costs.kernel.ctas_beside[-1])
    beside, alone = 0.0, 0.0
    for step in steps:
        if isinstance(step, Gemms):
            ways = [step.gemms, *([(step.joint,)] if step.joint is not None else [])]
            beside += min(sum(costs.gemm(gemm, step.tokens, left).us for gemm in way) for way in ways)
            alone += min(sum(costs.gemm(gemm, step.tokens, profile.sms).us for gemm in way) for way in ways)
        else:
            beside, alone = beside + step(left), alone + step(profile.sms)
    return profile.contention * beside, alone


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each number of tokens, in microseconds a layer."""
    parser = argparse.ArgumentParser(prog="python -m tw_compile.benchmark.layer.parts")
    parser.add_argument("--model", default="llama-3.3-70b")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--tokens", default="512,1024,2048,4096,8192")
    parser.add_argument("--transport", default="nccl")
    parser.add_argument("--device-profile", default="H200")
    asked = parser.parse_args(argv)
    profile, link, config = load_profile(asked.device_profile), link_of_node(), load_config(asked.model)
    layer = layer_shape(config, tensor_parallel_plan(config), asked.tp)
    print(f"{asked.model}, TP{asked.tp}, {profile.name}, {link.rates(asked.transport)}")
    print("tokens  unsplit  no comm.  planned halves", *(f"{number} parts" for number in PARTS), sep="  ")
    for tokens in map(int, asked.tokens.split(",")):
        planned = plan_layer(profile, layer, tokens, kernel=asked.transport, link=link, min_gain=0.0).predicted
        costs = Costs(profile, layer, link.transport(asked.transport), (tokens,), link=link)
        halves = "-" if planned.split_us is None else f"{planned.split_us:.0f}"
        times = [f"{parts_us(costs, even_parts(tokens, number)):.0f}" for number in PARTS]
        cells = (f"{planned.unsplit_us:.0f}", f"{planned.no_communication_us:.0f}", halves, *times)
        widths = (7, 8, 14, *(7 for _ in PARTS))
        print(f"{tokens:6}", *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)), sep="  ")


if __name__ == "__main__":
    main()
