"""The registry's entry for a kernel over memory of slots: plain data, without torch."""

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
    """One way in which checks on GPUs run an algorithm. ``options`` are added to the algorithm's own options.

    ``beside``: whether it also runs beside other work, if the algorithm can. ``in_slot``: messages are made in the slot's
    memory, and results stay there. This is not done beside other work, because a call inside may overwrite them.
    """

    name: str
    options: Options = ()
    beside: bool = True
    in_slot: bool = False


@dataclass(frozen=True)
class AlgorithmEntry:
    """One algorithm.

    Attributes:
        name: The name in tables of ``configs/kernels``.
        factory: The class as the text ``module:attribute``. It is called with ``options``, and with ``max_sms`` if ``sms`` is a
            number.
        options: Keyword arguments for the class.
        transport: The transport whose memory it works on.
        sms: The SMs that the algorithm gets if no table says otherwise. None: it chooses by itself, whatever a table says.
        most_sms: The most SMs that it can use; 0 if that is not known before it is made.
        wire_sms: The SMs that it gets for rows in codes, if that is another number.
        two_wire_sms: The same for two ranks, if they get more. See :meth:`coded_sms`.
        beside: For calls beside other work algorithms are tried in ascending order of this number. None: it is not tried.
        two_beside_bytes: If there are two ranks, it is tried before those with ``beside`` up to this message size, if the call
            has ``sms`` SMs; and always if both want all rows of the new residual. 0: it is not.
        instead: The name of the algorithm that is tried next if this one can't serve a message.
        two_whole: The name of the algorithm that is tried first if two ranks both want all rows of the new residual. More ranks
            have it up to a larger size then.
        needs_whole_residual: Whether every rank must have all rows of the residual.
        needs_multicast: Whether it serves nothing without NVLink multicast.
        serves_all: Whether it serves every message whose rows travel as they are and whose scales are given. Exactly one entry
            of a transport has this; it is tried last. ``multimem`` uses the entry of ``p2p``.
        wires: Whether it lets rows travel in codes. Only such algorithms are tried for calls with a wire.
        scales: Whether it is tried for calls that compute the scales of float8 results from the rows.
        prefetches: Whether it can prefetch weights (``prefetch.py``).
        feeds: Whether it leaves it to a GEMM to exchange the rows of a result. It serves no other calls.
        plain_link: How it reaches rows over a link without native atomics: ``push`` by stores, ``pull`` by loads (it
            stores flags alone); empty: it needs atomics, or is not tried there.
        profile: The key under ``fused`` of device profiles for which ``tw-compile tune`` measures this algorithm; None: no key.
        benchmarked: Its lines in ``tw-compile bench kernel``; tables are made from the first plain one.
        checked: How checks on GPUs run it.
    """

    name: str
    factory: str
    options: Options = ()
    transport: str = "p2p"
    sms: int | None = None
    most_sms: int = 0
    wire_sms: int | None = None
    two_wire_sms: int | None = None
    beside: int | None = None
    two_beside_bytes: int = 0
    instead: str | None = None
    two_whole: str | None = None
    needs_whole_residual: bool = False
    needs_multicast: bool = False
    serves_all: bool = False
    wires: bool = False
    scales: bool = False
    prefetches: bool = False
    feeds: bool = False
    plain_link: str = ""
    profile: str | None = None
    benchmarked: tuple[Benchmarked, ...] = ()
    checked: tuple[Checked, ...] = ()

    def check_sms(self, sms: int) -> None:
        """ValueError if the algorithm can't have this number of SMs; imports nothing."""
        most = self.most_sms or sms
        if self.sms is not None and not 1 <= sms <= most:
            raise ValueError(f"max_sms: expected 1 to {most}, got {sms}")

    def coded_sms(self, world_size: int) -> int | None:
        """The SMs that calls of so many ranks get for rows in codes; None: as many as for other rows."""
        return (self.two_wire_sms if world_size == 2 else None) or self.wire_sms

    def make(self, sms: int | None = None, **options: Any) -> Algorithm:
        """The algorithm with at most ``sms`` SMs; imports its module. ValueError for a number that it can't have."""
        named = dict(self.options) | options
        if self.sms is not None:
            named["max_sms"] = self.sms if sms is None else sms
        algorithm: Algorithm = load(self.factory)(**named)
        return algorithm
