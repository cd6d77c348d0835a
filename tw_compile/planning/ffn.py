"""Finds the best place to cut the FFN of a layer into two halves that one GPU computes one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tw_compile.planning.device import DeviceProfile
from tw_compile.planning.gemm import Gemm
from tw_compile.planning.layer import LayerShape
from tw_compile.planning.measured_halves import MeasuredHalves
from tw_compile.planning.plan import RESOLUTION, ROW_MULTIPLE, candidate_sizes
from tw_compile.planning.windows import Costs


@dataclass(frozen=True)
class FfnPlan:
    """Halves of an FFN on all SMs, with nothing beside them.

    Attributes:
        first: Tokens of the first half: the measured one where there is one, else the modelled one.
        modelled: Tokens of the first half that is predicted best. Of those that predictions can't tell apart, it is the most
            equal one.
        us: Predicted microseconds by tokens of the first half, for both and for the sizes asked for. 0: not split.
        measured: What ``tw-compile tune --halves`` measured of this FFN on the device; None where it has not.
    """

    first: int
    modelled: int
    us: dict[int, float]
    measured: MeasuredHalves | None = None


def plan_ffn(
    profile: DeviceProfile, layer: LayerShape, tokens: int, sizes: Iterable[int] = (), dtype: str = "bfloat16"
) -> FfnPlan:
    """Takes the halves that the profile has of the same FFN and as many tokens.

    Without them it compares sizes at which a GEMM's waves are full, and the middle; not a sweep. ``sizes``: further ones to
    predict.

    Raises:
        ValueError: There are too few tokens for two halves.
    """
    if tokens < 2 * ROW_MULTIPLE:
        raise ValueError(f"tokens: expected at least {2 * ROW_MULTIPLE} for two halves, got {tokens}")
    costs = Costs(profile, layer, profile.fused_kernel(None), (tokens,))

    def us(first: int) -> float:
        return sum(costs.alone_us(costs.mlp_part(rows)) for rows in (first, tokens - first) if rows)

    found = {size: us(size) for size in candidate_sizes(costs, tokens, (), row_multiple(layer))}
    least = min(found.values())
    near = [size for size, took in found.items() if took <= (1.0 + RESOLUTION) * least]
    modelled = min(near, key=lambda size: abs(2 * size - tokens))
    measured = measured_halves(profile, layer, tokens, dtype)
    first = modelled if measured is None else measured.first
    return FfnPlan(first, modelled, {size: us(size) for size in dict.fromkeys((0, first, modelled, *sizes))}, measured)


def row_multiple(layer: LayerShape) -> int:
    """Half 1 has a multiple of so many tokens."""
    return math.lcm(ROW_MULTIPLE, layer.world_size)


def measured_halves(
    profile: DeviceProfile, layer: LayerShape, tokens: int, dtype: str = "bfloat16"
) -> MeasuredHalves | None:
    """What the profile has measured of the FFN of ``layer``; None where it has nothing, or gate and up are no single GEMM."""
    key = layer.hidden_size, layer.mlp[-1].depth, dtype, tokens
    if not layer.has_dense_mlp or layer.mlp != merged(layer).mlp:
        return None
    return next((entry for entry in profile.halves if entry.key == key), None)


def merged(layer: LayerShape) -> LayerShape:
    """``layer`` as inference engines compute it: queries, keys and values are one GEMM, gate and up another."""
    assert layer.has_dense_mlp
    qkv = Gemm("qkv", sum(gemm.columns for gemm in layer.qkv), layer.hidden_size)
    down = layer.mlp[-1]
    return replace(layer, qkv=(qkv,), mlp=(Gemm("gate_up", 2 * down.depth, layer.hidden_size), down))
