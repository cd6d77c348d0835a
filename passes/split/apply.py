"""The pass: choose a split, carry it out, and say what became of it."""

from __future__ import annotations

import torch.fx as fx

from tw_compile.config import Config
from tw_compile.passes.base import JoinReason, SplitRefused
from tw_compile.passes.split.choose import NotSplit, choose_split
from tw_compile.passes.split.duplicate import split_tokens
from tw_compile.planning import DeviceProfile
from tw_compile.report import Split


def split_graph(graph: fx.Graph, config: Config, profile: DeviceProfile | None) -> Split:
    """Split ``graph`` in place, as ``config.split`` has it, which is not ``off``.

    A refusal, or an exception, leaves the graph as it was.
    """
    device_profile = "" if profile is None else profile.name
    choice = choose_split(graph, config, profile)
    if isinstance(choice, NotSplit):
        return Split(config.split, "off", choice.reason, choice.detail, device_profile=device_profile, plan=choice.plan)
    result = split_tokens(graph, choice.first, axis=choice.axis)
    if isinstance(result, SplitRefused):
        return Split(config.split, "off", result.reason, result.detail, device_profile=device_profile, plan=choice.plan)
    # A schedule goes here: it orders the halves in ``graph`` by the windows of ``choice.plan``.
    return Split(
        asked=config.split,
        mode="join" if JoinReason.ATTENTION in result.joins else "split",
        unit=result.unit,
        sizes=tuple(int(size) if size.isdecimal() else size for size in (result.first, result.second)),
        duplicated=result.duplicated,
        shared=result.shared,
        joined=result.joined,
        slices=result.slices,
        cats=result.cats,
        joins=result.joins,
        join_details=tuple(result.details),
        device_profile=device_profile,
        plan=choice.plan,
    )
