"""Which kernel serves a message: measured per device and world size, as data in ``configs/kernels``.

A table is a TOML file. ``tw-compile bench kernel --table`` writes it, or ``tw-compile tune`` as ``kernels.toml`` in the user's
config folder. For its world sizes the user's table comes first, then what the ranks measured themselves
(``tw_compile/calibration.py``), then the shipped table. A table looks like this:

    device = "NVIDIA H200"          # as torch.cuda.get_device_name says
    [[steps]]
    world_size = 4
    up_to_bytes = 1048576           # of one rank's message, [tokens, hidden]
    algorithm = "push_two_shot"
    sms = 64

The steps of a world size are in ascending order of bytes, separately for each transport's kernels. The last step also serves
all larger messages. Without a table :func:`default_steps` are used. If an algorithm cannot serve a message, the transport's
algorithm that serves all messages takes its place.

Tables are measured in the form that each kernel is best in. Two-shot leaves the new residual on its owner. If all ranks want
all of its rows, two-shot moves 1 - 1 / world_size of a message more. So one-shot takes its place up to a larger size, and for
two ranks at all sizes.

Some calls are not in tables. Calls beside other work (``overlap_sms``) have few SMs, and stream makes the most of those.
Through host memory two ranks use one-shot up to a size, because it moves as many bytes as two-shot and waits once, not twice.
It computes all rows on both ranks, so with few SMs it is slower, and calls that have fewer than it uses have two-shot. If both
want all rows of the new residual, they use one-shot at all sizes. For calls whose rows a GEMM is fed (``feed_from``) there is
only one kernel, if it can serve the call. Calls whose rows travel in codes (``wire``) go to the kernel that supports codes,
alone and beside other work. If no kernel can, their rows travel as they are. A kernel of a table is passed over if it can't
compute the scales that a call asks for. The first kernel that can takes its place.

Over links without native atomics only the kernels of one ``route`` are chosen (``tw_compile/peer_routes.py``). None of them
serves all messages, so the transport asks (:meth:`Chooser.serves`) and gives the others away.

Reading tables imports no torch: the kernels are made only when one is chosen for a request.
"""

from __future__ import annotations

import itertools
import tomllib
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from tw_compile.files import read_if_there, user_file
from tw_compile.kernels.algorithms import ALGORITHMS, beside_work, feeding, two_beside, with_scales, with_wires
from tw_compile.kernels.algorithms.entry import AlgorithmEntry
from tw_compile.kernels.collective.wires import EXACT

if TYPE_CHECKING:
    from tw_compile.kernels.collective.algorithm import Algorithm
    from tw_compile.kernels.collective.slot import GroupState
    from tw_compile.kernels.collective.spec import Request

USER_FILE = "kernels.toml"
P2P, HOST = "p2p", "host"
_WORDS_BYTES = 2**20
"""Up to this size, host_words is fastest for a message of two ranks. Its words show by themselves that they have arrived. They
are four thirds of the bytes, but save the time of a fence."""
_WORDS_BYTES_OF_PEERS = 3 * 2**18
"""The same for more ranks, of all peers together. Computed, not measured: above, two-shot's fewer bytes save more than its
second hop costs."""
_HOST_ONE_SHOT_BYTES = 2**23
_PUSH_ONE_SHOT_BYTES = 2_344_687
"""For two ranks. More ranks use one-shot as long as its additional bytes take no longer than two-shot's second hop."""
_SECOND_HOP_BYTES = 375_000
"""Bytes that an NVLink link moves in the time of the second hop. Computed from the size where both are equally fast on four
H100."""
UNLIMITED = 2**62


_measured: dict[str, tuple[Step, ...]] = {}


@dataclass(frozen=True)
class Step:
    """Messages of at most ``up_to_bytes`` are served by ``algorithm`` on at most ``sms`` SMs."""

    world_size: int
    up_to_bytes: int
    algorithm: str
    sms: int


def serves_all(transport: str = P2P) -> Algorithm:
    """The algorithm of a transport that serves every message, also messages that no other algorithm serves."""
    return next(entry for entry in ALGORITHMS if entry.serves_all and entry.transport == transport).make()


def _at_most(entry: AlgorithmEntry, sms: int) -> Algorithm:
    """The algorithm on ``sms`` SMs, but at most on as many as it supports."""
    return entry.make(min(sms, entry.most_sms) if entry.most_sms else sms)


def _instead(entry: AlgorithmEntry, sms: int) -> Algorithm:
    """An algorithm that no table chose, for messages that the chosen one can't serve: on ``sms`` SMs or its own number."""
    return _at_most(entry, sms if entry.sms is None else min(sms, entry.sms))


def _short_beside(entry: AlgorithmEntry, request: Request) -> bool:
    """Whether a call beside other work is short enough for the algorithm, and has all SMs that the algorithm uses."""
    return request.x.nbytes <= entry.two_beside_bytes and request.overlap_sms >= (entry.sms or 0)


class Chooser(ABC):
    """Chooses the kernel of a request. The choice depends only on what all ranks share.

    ``route``: the route of the kernels that it may choose; empty if it may choose all. ``world_size``: 0 if it is not known.
    """

    def __init__(self, transport: str, route: str = "", world_size: int = 0) -> None:
        self.route = route
        self._with_wires = tuple(
            entry.make(entry.coded_sms(world_size)) for entry in self._allowed(with_wires(transport))
        )
        self._with_scales = tuple(entry.make() for entry in self._allowed(with_scales(transport)))
        self._last = () if route else (serves_all(transport),)

    def _allowed(self, entries: Iterable[AlgorithmEntry]) -> list[AlgorithmEntry]:
        return [entry for entry in entries if self.route in ("", entry.plain_link)]

    def serves(self, request: Request, state: GroupState) -> bool:
        """Whether one of the kernels serves the request as it is :meth:`settled`."""
        return self._serving(self.settled(request, state), state) is not None

    def settled(self, request: Request, state: GroupState) -> Request:
        """The request itself. If no kernel supports its wire: the same request with rows that travel as they are."""
        if request.wire == EXACT or self._serving(request, state) is not None:
            return request
        return replace(request, wire=EXACT)

    def choose(self, request: Request, state: GroupState) -> Algorithm:
        """The algorithm that serves a :meth:`settled` request."""
        chosen = self._serving(request, state)
        assert chosen is not None, "nothing serves the request"
        return chosen

    def _serving(self, request: Request, state: GroupState) -> Algorithm | None:
        candidates = self.candidates(request)
        if request.norm.scale_columns:
            candidates = (*candidates, *self._with_scales)
        return next((algorithm for algorithm in candidates if algorithm.obstacle(request, state) is None), None)

    @abstractmethod
    def candidates(self, request: Request) -> Sequence[Algorithm]:
        """The algorithms to try for the request, in this order."""

    @abstractmethod
    def alternatives(self, request: Request, state: GroupState) -> tuple[Algorithm, ...]:
        """All that may serve a message like the request, of any size."""


class Selector(Chooser):
    """Chooses by the bytes of the message. Beside other work only two ranks do, and others by the request's form alone.

    Steps whose kernels are not of ``route`` are left out. If no step is left, all kernels of the route are tried.
    """

    def __init__(self, steps: Sequence[Step] = (), transport: str = P2P, route: str = "") -> None:
        from tw_compile.kernels.collective.spec import MAX_OVERLAP_SMS

        super().__init__(transport, route, steps[0].world_size if steps else 0)
        steps = [step for step in steps if self._allowed([ALGORITHMS[step.algorithm]])]
        self._bytes = [step.up_to_bytes for step in steps]
        pairs = itertools.zip_longest(steps, steps[1:])
        self._bytes_of_whole = [up_to_bytes_of_whole(step, following) for step, following in pairs]
        self._feeding = tuple(entry.make() for entry in self._allowed(feeding(transport)))
        beside = self._allowed(beside_work(transport))
        self._beside = (*(_at_most(entry, MAX_OVERLAP_SMS) for entry in beside), *self._last)
        of_two = self._allowed(two_beside(transport)) if steps and steps[0].world_size == 2 else []
        self._two_beside = tuple((entry, entry.make()) for entry in of_two)
        self._candidates: list[tuple[Algorithm, ...]] = []
        self._of_whole: list[tuple[Algorithm, ...]] = []
        for step in steps:
            preferred = ALGORITHMS[step.algorithm]
            second = () if preferred.instead is None else (_instead(ALGORITHMS[preferred.instead], step.sms),)
            self._candidates.append((preferred.make(step.sms), *second, *self._last))
            first = (
                () if preferred.two_whole is None or step.world_size != 2 else (ALGORITHMS[preferred.two_whole].make(),)
            )
            self._of_whole.append((*first, *self._candidates[-1]))
        if not steps:
            alone = self._last or tuple(
                entry.make() for entry in self._allowed(ALGORITHMS) if entry.transport == transport
            )
            self._candidates.append(alone)
            self._of_whole.append(alone)

    def candidates(self, request: Request) -> Sequence[Algorithm]:
        """See :class:`Chooser`."""
        if request.wire != EXACT:
            return self._with_wires
        whole = request.residual_out == "replicated"
        if request.overlap_sms:
            first = (algorithm for entry, algorithm in self._two_beside if whole or _short_beside(entry, request))
            return (*first, *self._beside)
        candidates, ends = (self._of_whole, self._bytes_of_whole) if whole else (self._candidates, self._bytes)
        by_size = candidates[min(bisect_left(ends, request.x.nbytes), len(candidates) - 1)]
        return (*self._feeding, *by_size) if request.feed_from else by_size

    def alternatives(self, request: Request, state: GroupState) -> tuple[Algorithm, ...]:
        """See :class:`Chooser`. All algorithms of the table, or all beside other work. With a wire one serves all sizes."""
        if request.wire != EXACT:
            return (self.choose(request, state),)
        if request.overlap_sms:
            of_long = (*self._beside, *(self._with_scales if request.norm.scale_columns else ()))
            serving = (algorithm for algorithm in of_long if algorithm.obstacle(request, state) is None)
            return (*(algorithm for _, algorithm in self._two_beside), *itertools.islice(serving, 1))
        alternatives: list[Algorithm] = []
        for *preferred, last in self._of_whole if request.residual_out == "replicated" else self._candidates:
            if self.route:
                alternatives += [*preferred, last]
            elif preferred:
                # Whether one-shot serves a request depends on the memory of the residual; others depend on the form alone.
                served = preferred[-1].obstacle(request, state) is None
                alternatives += preferred if served else [*preferred, last]
        if request.norm.scale_columns:
            alternatives += self._with_scales
        if request.feed_from:
            alternatives += self._feeding
        return tuple(dict.fromkeys(alternatives))


class Insist(Chooser):
    """One algorithm for everything that it can serve; for benchmarks and tests.

    Attributes:
        refusals: Why it could not serve the requests that others served instead.
    """

    def __init__(self, algorithm: Algorithm, transport: str = P2P, route: str = "") -> None:
        super().__init__(transport, route)
        self._candidates = (algorithm, *self._last)
        self.refusals: set[str] = set()

    def choose(self, request: Request, state: GroupState) -> Algorithm:
        """See :class:`Chooser`."""
        if (refusal := self._candidates[0].obstacle(request, state)) is not None:
            self.refusals.add(refusal)
        return super().choose(request, state)

    def candidates(self, request: Request) -> Sequence[Algorithm]:
        """See :class:`Chooser`."""
        return self._candidates if request.wire == EXACT else (self._candidates[0], *self._with_wires)

    def alternatives(self, request: Request, state: GroupState) -> tuple[Algorithm, ...]:
        """See :class:`Chooser`. There are none: the first call of the algorithm loads it."""
        return ()


def steps_of(text: str, source: str) -> tuple[str, tuple[Step, ...]]:
    """The device and the steps of a table; ValueError names ``source``, the key, what was expected and what came."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: expected TOML, got {error}") from error
    unknown = sorted(table.keys() - {"device", "steps"})
    if unknown:
        raise ValueError(f"{source}: expected the keys device and steps, got {unknown[0]!r}")
    device = _typed(table, "device", str, source)
    entries = table.get("steps", [])
    if not isinstance(entries, list):
        raise ValueError(f"{source}: steps: expected [[steps]] tables, got {entries!r}")
    steps = tuple(_step(entry, f"{source}: steps[{index}]") for index, entry in enumerate(entries))
    for transport in dict.fromkeys(transport_of(step.algorithm) for step in steps):
        for before, after in itertools.pairwise(steps_over(steps, transport)):
            if _place(after) <= _place(before):
                raise ValueError(
                    f"{source}: steps: expected to go up in world_size and then up_to_bytes, got "
                    f"{_place(after)} after {_place(before)}"
                )
    return device, steps


def table_text(device: str, steps: Iterable[Step], comment: str) -> str:
    """The TOML of a table, as :func:`steps_of` reads it; ``comment`` says where the figures come from."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines.append(f'device = "{device}"')
    for step in steps:
        lines += ["", "[[steps]]", f"world_size = {step.world_size}", f"up_to_bytes = {step.up_to_bytes}"]
        lines += [f'algorithm = "{step.algorithm}"', f"sms = {step.sms}"]
    return "\n".join(lines) + "\n"


def steps_for(device_name: str, world_size: int, transport: str = P2P) -> tuple[Step, ...]:
    """The steps of the user's table for this device, else what ranks measured themselves, else the shipped steps.

    Empty if there are no measured steps for this world size.

    Raises:
        ValueError: The user's file is wrong, or cannot be read.
    """
    layers = (user_table(), _measured, shipped_tables())
    return next((steps for layer in layers if (steps := _steps(layer, device_name, world_size, transport))), ())


def default_steps(transport: str, world_size: int) -> tuple[Step, ...]:
    """Steps for devices that nobody has measured: the kernels that were fastest on measured devices.

    One-shot waits once where two-shot waits twice, but all ranks receive and compute all rows. Over peer memory (2 H200, 2 and
    4 H100) this pays for short messages. With more ranks the messages must be shorter. Through host memory (2 H100, 2 H200) two
    ranks gain from one-shot up to 8 MiB; more ranks never gain.

    If the kernel of a step can't run on the device, the kernel that serves all messages takes its place.
    """
    if transport == P2P:
        most = _PUSH_ONE_SHOT_BYTES
        if world_size > 2:
            most = int(_SECOND_HOP_BYTES / ((world_size - 1) * (1 - 2 / world_size)))
        return (
            Step(world_size, most, "push_one_shot", 128),
            Step(world_size, UNLIMITED, "push_two_shot", 128),
        )
    two = world_size == 2
    one_shot = (Step(world_size, _HOST_ONE_SHOT_BYTES, "host_one_shot", 8),) if two else ()
    return (
        Step(world_size, _WORDS_BYTES if two else _WORDS_BYTES_OF_PEERS // (world_size - 1), "host_words", 32),
        *one_shot,
        Step(world_size, UNLIMITED, "host_two_shot", 8),
    )


def step_for(steps: Sequence[Step], nbytes: int) -> Step | None:
    """The step that serves a message of ``nbytes`` bytes, of the steps of one world size; None without steps."""
    return next((step for step in steps if nbytes <= step.up_to_bytes), steps[-1] if steps else None)


def up_to_bytes_of_whole(step: Step, following: Step | None) -> int:
    """Where ``step`` ends if all ranks want all rows of the new residual; ``following`` follows it.

    One-shot ends where its further bytes take as long as two-shot's second hop. Of a message it moves ``n - 1``, two-shot
    ``2 (1 - 1 / n)``, or half as much again with the residual. So ``(n - 1) (1 - 2 / n)`` further messages become
    ``(n - 1) (1 - 3 / n)``. On four H200, before clusters shared rows, Triton's two-shot took 12.1 us for 1 MiB, and 15.0 with
    the whole residual, where one-shot took 14.2 (``benchmarks/results/2026-11-22-4xh200-kernel-tp4.csv``).
    """
    second = None if following is None else ALGORITHMS[following.algorithm].two_whole
    if step.world_size <= 3 or second != step.algorithm:
        return step.up_to_bytes
    return step.up_to_bytes * (step.world_size - 2) // (step.world_size - 3)


def shipped_steps(device_name: str, world_size: int, transport: str = P2P) -> tuple[Step, ...]:
    return _steps(shipped_tables(), device_name, world_size, transport)


def usual_steps(device_name: str, world_size: int) -> tuple[Step, ...]:
    """The steps that apply if no measurement says otherwise: for each transport the shipped steps, or else the defaults."""
    return tuple(
        step
        for transport in (P2P, HOST)
        for step in shipped_steps(device_name, world_size, transport) or default_steps(transport, world_size)
    )


def user_steps(device_name: str, world_size: int, transport: str = P2P) -> tuple[Step, ...]:
    """The steps of the user's own table."""
    return _steps(user_table(), device_name, world_size, transport)


def use_measured(tables: dict[str, tuple[Step, ...]]) -> None:
    """Use these steps, by device, where the user has no table. Ranks of this process measured them (``calibration.py``)."""
    _measured.clear()
    _measured.update(tables)


def user_table() -> dict[str, tuple[Step, ...]]:
    """The steps of the user's own file by device; empty where there is no file."""
    file = user_file(USER_FILE)
    text = read_if_there(file, "kernels")
    return {} if text is None else dict([steps_of(text, str(file))])


def _steps(tables: dict[str, tuple[Step, ...]], device_name: str, world_size: int, transport: str) -> tuple[Step, ...]:
    of_device = tables.get(device_name, ())
    return steps_over([step for step in of_device if step.world_size == world_size], transport)


def steps_over(steps: Iterable[Step], transport: str) -> tuple[Step, ...]:
    """The steps whose kernels work on the memory of ``transport``."""
    return tuple(step for step in steps if transport_of(step.algorithm) == transport)


def transport_of(algorithm: str) -> str:
    """The transport on whose memory an algorithm works."""
    return ALGORITHMS[algorithm].transport


def _place(step: Step) -> tuple[int, int]:
    return step.world_size, step.up_to_bytes


@cache
def shipped_tables() -> dict[str, tuple[Step, ...]]:
    folder = resources.files("tw_compile.configs") / "kernels"
    if not folder.is_dir():
        return {}
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return dict(steps_of(file.read_text(), f"configs/kernels/{file.name}") for file in files)


def _typed(table: dict[str, Any], key: str, kind: type, where: str) -> Any:
    value = table.get(key)
    if type(value) is not kind:
        raise ValueError(f"{where}: {key}: expected {kind.__name__}, got {value!r}")
    return value


def _step(entry: Any, where: str) -> Step:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected a table, got {entry!r}")
    names = [field.name for field in fields(Step)]
    unknown = sorted(entry.keys() - set(names))
    if unknown:
        raise ValueError(f"{where}: expected the keys {', '.join(names)}, got {unknown[0]!r}")
    step = Step(*(_typed(entry, name, str if name == "algorithm" else int, where) for name in names))
    if step.algorithm not in ALGORITHMS:
        known = ", ".join(ALGORITHMS.names())
        raise ValueError(f"{where}: algorithm: expected one of {known}, got {step.algorithm!r}")
    for name in ("world_size", "up_to_bytes"):
        if getattr(step, name) < 1:
            raise ValueError(f"{where}: {name}: expected a positive number, got {getattr(step, name)}")
    try:
        ALGORITHMS[step.algorithm].check_sms(step.sms)
    except ValueError as error:
        raise ValueError(f"{where}: sms: {error}") from error
    return step
