"""The kernels over memory of slots, each in a folder. A new kernel needs a folder with its entry, and a line here.

Other projects add kernels by ``ALGORITHMS.register``.
"""

from __future__ import annotations

from tw_compile.kernels.algorithms.entry import AlgorithmEntry
from tw_compile.kernels.algorithms.host import entries as host
from tw_compile.kernels.algorithms.multimem.entries import MULTIMEM
from tw_compile.kernels.algorithms.push.entries import FED, FORCED, ONE_SHOT, TWO_SHOT
from tw_compile.kernels.algorithms.stream.entries import STREAM
from tw_compile.kernels.algorithms.two_shot.entries import SERVES_ALL
from tw_compile.kernels.registry import Registry

ALGORITHMS: Registry[AlgorithmEntry] = Registry(
    "algorithm",
    (ONE_SHOT, TWO_SHOT, *FORCED, FED, STREAM, MULTIMEM, SERVES_ALL, host.WORDS, host.ONE_SHOT, host.TWO_SHOT),
)


def with_wires(transport: str) -> list[AlgorithmEntry]:
    """The algorithms of a transport that let rows travel in codes, in the order in which they are tried."""
    return [entry for entry in ALGORITHMS if entry.wires and entry.transport == transport]


def with_scales(transport: str) -> list[AlgorithmEntry]:
    """The algorithms of a transport that compute scales from any message's rows, in the order in which they are tried."""
    of_transport = [entry for entry in ALGORITHMS if entry.scales and entry.transport == transport]
    return [entry for entry in of_transport if not entry.needs_whole_residual]


def feeding(transport: str) -> list[AlgorithmEntry]:
    """The algorithms of a transport that leave it to a GEMM to exchange rows, in the order in which they are tried."""
    return [entry for entry in ALGORITHMS if entry.feeds and entry.transport == transport]


def beside_work(transport: str) -> list[AlgorithmEntry]:
    """The algorithms of a transport that serve calls beside other work, in the order in which they are tried."""
    ranked = [
        (entry.beside, entry) for entry in ALGORITHMS if entry.beside is not None and entry.transport == transport
    ]
    return [entry for _, entry in sorted(ranked, key=lambda pair: pair[0])]


def two_beside(transport: str) -> list[AlgorithmEntry]:
    """The algorithms of a transport that two ranks use for short messages beside other work."""
    return [entry for entry in ALGORITHMS if entry.two_beside_bytes and entry.transport == transport]
