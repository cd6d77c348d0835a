"""The ways to run the fused operator, as data: one for each line that the registries name. Imports no torch.

:class:`tw_compile.benchmark.ours.Operator` makes a contender of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.algorithms.entry import AlgorithmEntry
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.registry import Benchmarked

if TYPE_CHECKING:
    from tw_compile.kernels.collective.transport import Transport

FP8_SCALE = 0.02
"""With this scale few of the norm's results are clamped: normal inputs rarely give more than 448 times it."""


@dataclass(frozen=True)
class Variant:
    """One way to run the operator.

    Attributes:
        transport: Makes it for a number of CTAs.
        over: The name of that transport in the registry.
        sharded, narrow: The residual that is natural to it, see :attr:`Contender.residual_sharded`.
        sms: How many it has unless ``--sms`` says otherwise; None for those that choose themselves.
        most_sms: How many it can have.
        algorithm: Its name in tables of ``configs/kernels``; None where no table can ask for it.
        hidden_scale: See :attr:`Contender.hidden_scale`.
        in_slot: ``x`` lies in the slot's symmetric memory already, as if its producer had written it there, and the results
            stay there.
    """

    label: str
    transport: Callable[[int | None], Transport]
    over: str
    sharded: bool
    sms: int | None = None
    most_sms: int = 0
    algorithm: str | None = None
    in_slot: bool = False
    hidden_scale: float | None = None
    narrow: bool = False


def _named(name: str) -> Callable[[int | None], Transport]:
    def transport(sms: int | None) -> Transport:
        from tw_compile.kernels.collective.transport import get_transport

        return get_transport(name)

    return transport


def _only(entry: AlgorithmEntry) -> Callable[[int | None], Transport]:
    """The algorithm's transport, with that algorithm alone."""

    def transport(sms: int | None) -> Transport:
        alone: Transport = TRANSPORTS[entry.transport].make(entry.make(sms))
        return alone

    return transport


def variants(device_type: str) -> tuple[Variant, ...]:
    """The variants of all transports that move such tensors. Behind those of a transport follow those of its algorithms."""
    listed = []
    for transport in TRANSPORTS:
        if device_type in transport.device_types:
            listed += [_variant(line, transport.name, _named(transport.name)) for line in transport.benchmarked]
            listed += _of_algorithms(transport.name)
    return tuple(listed)


def _of_algorithms(transport: str) -> list[Variant]:
    """Variants with float8 results come last, as their times can't be compared with the others'."""
    pairs = [(entry, line) for entry in ALGORITHMS if entry.transport == transport for line in entry.benchmarked]
    pairs.sort(key=lambda pair: pair[1].quantises)
    return [
        replace(
            _variant(line, transport, _only(entry)),
            sms=entry.sms,
            most_sms=entry.most_sms,
            algorithm=entry.name if line.plain else None,
        )
        for entry, line in pairs
    ]


def _variant(line: Benchmarked, over: str, transport: Callable[[int | None], Transport]) -> Variant:
    return Variant(
        line.label,
        transport,
        over,
        line.sharded,
        in_slot=line.in_slot,
        hidden_scale=FP8_SCALE if line.quantises else None,
        narrow=line.narrow,
    )


OURS = variants("cuda")
OURS_ON_CPU = variants("cpu")
