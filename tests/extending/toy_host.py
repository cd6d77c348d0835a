"""A host that tw_compile does not know: all there is to say about it, as its authors would say it in a file of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tw_compile.gating import Dispatch, HostFacts, Node, Settings
from tw_compile.gating.facts import Active, Backend
from tw_compile.hosts import Host
from tw_compile.passes.operators import AllReduceOperator, NormOperator

LARGE = 2**18
"""Bytes from which on its all_reduce is multimem."""


class ToyRefusal(StrEnum):
    TOY_IS_BUSY = "toy_is_busy"


@dataclass(frozen=True)
class ToySettings(Settings):
    host: str = "toy-1"
    large: bool = True


def read_settings(host: str, environment: Mapping[str, str], facts: HostFacts) -> ToySettings:
    return ToySettings(host, facts.backend, large=environment.get("TOY_LARGE", "1") == "1")


def active_backend(node: Node, settings: ToySettings, world_size: int, dtype: str, nbytes: int, hosts: int) -> Active:
    if settings.large and nbytes >= LARGE:
        return Active(Backend.MULTIMEM, f"{settings.host}: from {LARGE} bytes")
    return Active(Backend.CUSTOM, f"{settings.host}: below {LARGE} bytes")


TOY = Host(
    names=("toy-1", "toy-2"),
    dispatch=Dispatch(ToySettings, read_settings, active_backend, lambda settings: {LARGE}),
    operators=(
        AllReduceOperator("toy::sum_over", group_name="ranks"),
        NormOperator("toy::norm", rows=0, weight=1, eps=2),
        NormOperator("toy::add_norm", rows=1, residual=0, weight=2, eps=3),
    ),
    rules="toy_rules",
    refusals=ToyRefusal,
    compiles_ranges=True,
)
