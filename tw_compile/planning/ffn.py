"""Finds the best place to cut the FFN of a layer into two halves that one GPU computes one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tw_compile.planning.device import DeviceProfile
from tw_compile.planning.layer import LayerShape
from tw_compile.planning.plan import RESOLUTION, ROW_MULTIPLE, candidate_sizes
from tw_compile.planning.windows import Costs


@dataclass(frozen=True)
class FfnPlan:
    """Halves of an FFN on all SMs, with nothing beside them.

    Attributes:
        first: Tokens of the first half that is predicted best; of those that predictions can't tell apart, the most equal one.
        us: Predicted microseconds by tokens of the first half, for ``first`` and for the sizes asked for. 0: not split.
    """

    first: int
    us: dict[int, float]


def plan_ffn(profile: DeviceProfile, layer: LayerShape, tokens: int, sizes: Iterable[int] = ()) -> FfnPlan:
    """Compares sizes at which a GEMM's waves are full, and the middle; not a sweep. ``sizes``: further ones to predict.

    Raises:
        ValueError: There are too few tokens for two halves.
    """
    if tokens < 2 * ROW_MULTIPLE:
        raise ValueError(f"tokens: expected at least {2 * ROW_MULTIPLE} for two halves, got {tokens}")
    costs = Costs(profile, layer, profile.fused_kernel(None), (tokens,))

    def us(first: int) -> float:
        return sum(costs.alone_us(costs.mlp_part(rows)) for rows in (first, tokens - first) if rows)

    found = {size: us(size) for size in candidate_sizes(costs, tokens, (), math.lcm(ROW_MULTIPLE, layer.world_size))}
    least = min(found.values())
    near = [size for size, took in found.items() if took <= (1.0 + RESOLUTION) * least]
    first = min(near, key=lambda size: abs(2 * size - tokens))
    return FfnPlan(first, {size: us(size) for size in dict.fromkeys((0, first, *sizes))})
