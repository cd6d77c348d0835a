"""What the planner knows about links that are slower than peer memory: TOML files in ``configs/links``.

A link is a property of the node, and a device profile one of the GPU, so any profile goes with any link. A file of the same
form and name in the user's config folder, which ``tw-compile tune`` writes, comes before the shipped one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Literal

from tw_compile.files import read_if_there, user_file
from tw_compile.planning.tables import read_table

HOST_MEMORY = "host-memory"
USER_FILE = f"{HOST_MEMORY}.toml"
UNFUSED = "nccl"
"""The transport of an all_reduce that is not fused."""


@dataclass(frozen=True)
class LinkWay:
    """One way to sum a message: a fixed latency, then its traffic at the rate of the link.

    Attributes:
        traffic: See :func:`tw_compile.planning.communication.traffic_bytes`.
        gb_per_s: Each way, while both ways are busy.
        beside: Whether calls beside compute use it, too. None: as the shipped way of that name does, or else yes.
        sm_gb_per_s: What one SM moves each way, if calls may have fewer SMs than ``LinkTransport.sms``. None: they may not.
    """

    traffic: Literal["one_shot", "two_shot"]
    latency_us: float
    gb_per_s: float
    beside: bool | None = None
    sm_gb_per_s: float | None = None

    def rate(self, sms: int | None) -> float:
        """GB/s each way of a call on fewer SMs than usual; None: on as many as usual."""
        return self.gb_per_s if sms is None or self.sm_gb_per_s is None else min(self.gb_per_s, sms * self.sm_gb_per_s)


@dataclass(frozen=True)
class LinkTransport:
    """How a transport of the registry uses a link. It takes the fastest of its ways for each message.

    Attributes:
        only_without_peers: With peer access the transport uses that instead, and these rates do not apply.
        sms: The most SMs that a call occupies beside compute.
        contention: Factor on the time of a call while compute runs beside it.
        norm_apart: The norm is a separate kernel. It counts as compute of the half, not as part of the call.
        cluster: CTAs of a cluster of its kernel beside compute, see :meth:`DeviceProfile.sms_beside`.
        fewer_sms: Smaller numbers of SMs to choose from, ascending. Rows in codes never have them.
    """

    only_without_peers: bool
    sms: int
    contention: float
    norm_apart: bool
    ways: Mapping[str, LinkWay]
    cluster: int = 1
    fewer_sms: tuple[int, ...] = ()

    @property
    def ctas_beside(self) -> tuple[int, ...]:
        """The numbers of CTAs to choose from, as :class:`~tw_compile.planning.device.FusedKernel` has them."""
        return (*self.fewer_sms, self.sms)


@dataclass(frozen=True)
class Link:
    """One kind of link, and the rates of the transports that use it, by their names in the registry."""

    name: str
    transports: Mapping[str, LinkTransport]

    def serves(self, transport: str, peer_access: bool) -> bool:
        """Whether messages of ``transport`` take this link on a node whose GPUs have peer access, or have not."""
        rates = self.transports.get(transport)
        return rates is not None and not (peer_access and rates.only_without_peers)

    def rates(self, transport: str) -> str:
        """The rates of a transport, in words."""
        numbers = self.transport(transport)
        ways = " or ".join(
            f"{name} {way.latency_us:g} us and {way.gb_per_s:g} GB/s each way" for name, way in numbers.ways.items()
        )
        return f"{transport} over {self.name}: {ways}, {numbers.sms} SMs beside compute"

    def transport(self, name: str) -> LinkTransport:
        """The rates of the transport ``name``; ValueError when the link has none."""
        if name not in self.transports:
            raise ValueError(f"transport: expected one of {', '.join(self.transports)} ({self.name}), got {name!r}")
        return self.transports[name]


def parse_link(text: str, source: str) -> Link:
    """A link from TOML; ValueError names ``source``, the key, what was expected and what came."""
    link = read_table(Link, text, source)
    if UNFUSED not in link.transports:
        raise ValueError(f"{source}: transports: expected {UNFUSED} among them, got {', '.join(link.transports)}")
    for name, transport in link.transports.items():
        if transport.contention < 1.0:
            raise ValueError(
                f"{source}: transports.{name}: contention: expected at least 1, got {transport.contention}"
            )
        if transport.fewer_sms:
            where = f"{source}: transports.{name}: fewer_sms"
            if transport.fewer_sms[-1] >= transport.sms:
                raise ValueError(f"{where}: expected fewer than sms = {transport.sms}, got {transport.fewer_sms[-1]}")
            if all(way.sm_gb_per_s is None or way.beside is False for way in transport.ways.values()):
                raise ValueError(f"{where}: expected one of ways with sm_gb_per_s, got none")
        # Rows in codes have no one-shot way.
        kinds = {way.traffic for way in transport.ways.values()}
        beside = {way.traffic for way in transport.ways.values() if way.beside is not False}
        for kind in ("two_shot",) if "two_shot" in kinds else kinds:
            if kind not in beside:
                raise ValueError(
                    f"{source}: transports.{name}: ways: expected one of {kind} with beside = true, got none"
                )
    return link


@cache
def shipped_link() -> Link:
    """Host memory, as ``configs/links`` has it."""
    file = resources.files("tw_compile.configs") / "links" / f"{HOST_MEMORY}.toml"
    return parse_link(file.read_text(), f"configs/links/{HOST_MEMORY}.toml")


def link_of_node(measured: Link | None = None) -> Link:
    """Host memory, as the user's file has it if there is one, else as ranks ``measured`` it, else as shipped.

    Raises:
        ValueError: The user's file is wrong, or cannot be read.
    """
    file = user_file(USER_FILE)
    text = read_if_there(file, "link")
    return (measured or shipped_link()) if text is None else _completed(parse_link(text, str(file)))


def _completed(link: Link) -> Link:
    """``link`` with what it does not say of its ways beside compute: that is as the shipped ones of their names have it."""
    shipped = shipped_link().transports
    transports = dict(link.transports)
    for name, transport in link.transports.items():
        if name not in shipped:
            continue
        known = shipped[name]
        ways = {
            way: _completed_way(rates, known.ways[way]) if way in known.ways else rates
            for way, rates in transport.ways.items()
        }
        same = transport.sms == known.sms and not transport.fewer_sms
        transports[name] = replace(transport, ways=ways, fewer_sms=known.fewer_sms if same else transport.fewer_sms)
    return replace(link, transports=transports)


def _completed_way(way: LinkWay, known: LinkWay) -> LinkWay:
    beside = known.beside if way.beside is None else way.beside
    return replace(way, beside=beside, sm_gb_per_s=way.sm_gb_per_s or known.sm_gb_per_s)
