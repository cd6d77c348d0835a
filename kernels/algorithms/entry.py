"""What a registry knows of a kernel over memory of slots: plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tw_compile.kernels.registry import Benchmarked, load

if TYPE_CHECKING:
    from tw_compile.kernels.collective.algorithm import Algorithm

Options = tuple[tuple[str, Any], ...]
"""Keyword arguments of a class."""


@dataclass(frozen=True)
class Checked:
    """One way in which checks on GPUs run an algorithm: made with ``options``, besides its own.

    ``beside``: also beside other work, where it can be. Results in the slot's memory can't: a call inside may overwrite them.
    """

    name: str
    options: Options = ()
    beside: bool = True


@dataclass(frozen=True)
class AlgorithmEntry:
    """One algorithm.

    Attributes:
        name: What tables of ``configs/kernels`` call it.
        factory: ``module:attribute`` of the class; called with ``options``, and ``max_sms`` where it has a number of SMs.
        transport: Which transport's memory it works on.
        sms: SMs that it has unless a table says otherwise; None: its own number, whatever a table says.
        most_sms: SMs that it can have.
        beside: Where it is asked among those that serve calls beside other work, lowest first; None: not there.
        instead: Which algorithm is asked next where this one can't serve a message.
        needs_whole_residual: Whether every rank must have all rows of the residual.
        serves_all: Whether it serves what no other does; of exactly one of a transport.
        profile: The key of ``fused`` in device profiles whose figures are measured with it; None: they are not.
        benchmarked: Its lines in the benchmark of the operator; the first plain one is what tables are made of.
        checked: How checks on GPUs run it.
    """

    name: str
    factory: str
    options: Options = ()
    transport: str = "p2p"
    sms: int | None = None
    most_sms: int = 0
    beside: int | None = None
    instead: str | None = None
    needs_whole_residual: bool = False
    serves_all: bool = False
    profile: str | None = None
    benchmarked: tuple[Benchmarked, ...] = ()
    checked: tuple[Checked, ...] = ()

    def make(self, sms: int | None = None, **options: Any) -> Algorithm:
        """The algorithm with at most ``sms`` SMs; imports its module. ValueError for a number that it can't have."""
        named = dict(self.options) | options
        if self.sms is not None:
            named["max_sms"] = self.sms if sms is None else sms
        algorithm: Algorithm = load(self.factory)(**named)
        return algorithm
