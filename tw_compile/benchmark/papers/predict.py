"""What the planner and the gate say of an exhibit's shapes. Arithmetic: it needs no GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cache

from tw_compile.planning import LayerShape, Plan, layer_shape, load_profile, plan_layer
from tw_compile.planning.communication import all_reduce_us, fused_us, rms_norm_us
from tw_compile.planning.device import user_profile
from tw_compile.planning.ffn import FfnPlan, measured_halves, merged, plan_ffn
from tw_compile.planning.presets import preset_layer

MULTICAST = "multimem"
"""The kernel of profiles whose node has NVLink multicast, as the papers' nodes had."""


@cache
def layer_of(model: str, world_size: int) -> LayerShape:
    """The layer on one rank, its GEMMs merged as in inference engines."""
    from tw_compile.models.config import load_config, tensor_parallel_plan

    config = load_config(model)
    shape = layer_shape(config, tensor_parallel_plan(config), world_size, merged=True)
    return dataclasses.replace(shape, attention=dataclasses.replace(shape.attention, kernel="flash3"))


@cache
def plan(profile: str, model: str, world_size: int, tokens: int, multicast: bool = False, sequences: int = 1) -> Plan:
    """The plan of a layer whose ``tokens`` are those of ``sequences`` equal sequences."""
    lengths = (tokens // sequences,) * sequences
    kernel = MULTICAST if multicast else None
    return plan_layer(load_profile(profile), layer_of(model, world_size), tokens, kernel=kernel, sequences=lengths)


def hidden_share(found: Plan, us: float | None = None) -> float:
    """The share of the unfused layer's communication that a layer of ``us`` saves, or the layer as planned.

    It is more than 1 where time of the norms is saved, too, because fusing shares the norms out between ranks.
    """
    predicted = found.predicted
    return (predicted.unfused_us - (found.us if us is None else us)) / (
        predicted.unfused_us - predicted.no_communication_us
    )


def communication_share(found: Plan) -> float:
    """The share of the unfused layer's time that communication takes."""
    return 1.0 - found.predicted.no_communication_us / found.predicted.unfused_us


def fused_of_unfused(profile: str, world_size: int, tokens: int, hidden_size: int) -> float:
    """Time of the fused kernel divided by the time of all_reduce + norm, both with multicast."""
    device = load_profile(profile)
    kernel = device.fused[MULTICAST]
    fused = min(fused_us(kernel, tokens, hidden_size, world_size, ctas) for ctas in kernel.ctas)
    nbytes = 2 * tokens * hidden_size
    return fused / (all_reduce_us(device, nbytes, world_size, multicast=True) + rms_norm_us(device, nbytes))


def by_ctas(profile: str, world_size: int, tokens: int, hidden_size: int, ctas: tuple[int, ...]) -> dict[float, float]:
    """Time of the fused kernel with multicast divided by its best time, for each number of CTAs."""
    kernel = load_profile(profile).fused[MULTICAST]
    times = {float(count): fused_us(kernel, tokens, hidden_size, world_size, count) for count in ctas}
    return {count: us / min(times.values()) for count, us in times.items()}


@cache
def ffn_plan(profile: str, model: str, world_size: int, tokens: int, sizes: tuple[int, ...] = ()) -> FfnPlan:
    """Halves of the FFN on one rank of ``world_size``."""
    return plan_ffn(load_profile(profile), layer_of(model, world_size), tokens, sizes)


def tuned_halves(preset: str, world_size: int, counts: Iterable[int]) -> tuple[str, ...]:
    """What the user's own device profile has measured of the FFN of a shipped model on one rank, in words.

    Where the file is wrong, its error: a dry run needs no profile, and a benchmark says itself what is wrong.
    """
    try:
        profile = user_profile()
    except ValueError as error:
        return (str(error),)
    found = preset_layer(preset, world_size)
    if profile is None or found is None:
        return ()
    halves = (measured_halves(profile, merged(found[0]), tokens) for tokens in counts)
    return tuple(str(entry) for entry in halves if entry is not None)


def gate_fuses(tokens: int, hidden_size: int, backend: str) -> tuple[bool, str]:
    """Whether the gate fuses a message of 8 Hopper GPUs with multicast that ``backend`` would sum otherwise, and why."""
    from tw_compile.gating import Gate, Node, Settings
    from tw_compile.gating.layers import shipped_tables

    node = Node.parse("sm90", multicast=True)
    shipped = shipped_tables()
    tables = (shipped[node.device_class], shipped["generic"])
    gate = Gate(node, Settings(backend=backend), tables)
    verdict = gate.decide(2 * tokens * hidden_size, world_size=8, dtype="bfloat16")
    return verdict.fused, verdict.reason
