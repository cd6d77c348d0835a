"""How rows go between GPUs that reach each other over a link without native atomics: what the ranks of a node have tried.

CUDA promises nothing about plain loads and stores over such a link. Some move bytes faster than host memory does, some are fast
one way only, and some never end or deliver wrong bytes. So each route is tried in processes that may be ended
(:mod:`tw_compile.tuning.peer_routes`), and results are checked. The fastest route that gave right results is used from then on:

- ``push``: kernels that only store to the peers' memory;
- ``pull``: kernels that load from it, and store flags alone;
- ``host``: kernels over pinned host memory, as without peer access.

A file keeps what was tried, one for each kind of node, in the folder ``routes`` of the user's config folder. Another driver,
torch, device or version of this package has another file. This module needs no GPU, but to find the device's name.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tw_compile.files import keep, name_of_node, read_if_there, user_folder
from tw_compile.sources import source_digest

logger = logging.getLogger("tw_compile")

PUSH, PULL, HOST = "push", "pull", "host"
ROUTES = (HOST, PUSH, PULL)
"""In the order in which they are tried. Loads over such a link have been seen never to end, so they come last."""
FOLDER = "routes"
SCHEMA_VERSION = 1

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class TriedOn:
    """What the outcome depends on, beside the number of ranks."""

    device_name: str
    driver: str
    torch: str
    source: str

    @property
    def file_name(self) -> str:
        return name_of_node(self.device_name, asdict(self)) + ".json"


@dataclass(frozen=True)
class Tried:
    """What was tried by ``ranks`` ranks, one on each of the first GPUs.

    Attributes:
        route: The one to use.
        us: For each route that gave right results: microseconds of the fastest call, by the message's bytes as text.
        reasons: Why the other routes are out.
    """

    on: TriedOn
    ranks: int
    route: str
    us: dict[str, dict[str, float]]
    reasons: dict[str, str]

    @property
    def line(self) -> str:
        """The outcome in words."""
        sizes = set.intersection(*(set(times) for times in self.us.values())) if self.us else set()
        largest = max(sizes, key=int, default=None)
        said = []
        for route in ROUTES:
            if route in self.reasons:
                said.append(f"{route} is out ({self.reasons[route]})")
            elif largest is not None and route in self.us:
                said.append(f"{route} takes {self.us[route][largest]:.0f} us for {int(largest) / 2**20:.0f} MiB")
        return f"rows go by {self.route} over the link without native atomics, tried by {self.ranks} ranks: {', '.join(said)}"


def on_device(name: str) -> TriedOn:
    """What a trial on devices of that name depends on."""
    import torch

    return TriedOn(name, driver_version(), torch.__version__, source_digest()[:12])


def here() -> TriedOn:
    """What a trial on this process's current device depends on. Initialises CUDA."""
    import torch

    return on_device(torch.cuda.get_device_name())


def driver_version() -> str:
    """The version that the driver's kernel module reports; ``unknown`` where a container hides it."""
    try:
        words = _DRIVER.read_text().split()
    except OSError:
        return "unknown"
    return next((word for word in words if re.fullmatch(r"[0-9]+(\.[0-9]+)+", word)), "unknown")


def text_of(tried: Tried) -> str:
    """The file's text, as :func:`tried_of` reads it."""
    return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(tried)}, indent=1) + "\n"


def tried_of(text: str, source: str) -> Tried:
    """What ``text`` holds; ValueError names ``source``, what was expected and what came."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: expected JSON, got {error}") from error
    version = values.pop("schema_version", None) if isinstance(values, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"{source}: schema_version: expected {SCHEMA_VERSION}, got {version!r}")
    names = [field.name for field in fields(Tried)]
    if sorted(values) != sorted(names):
        raise ValueError(f"{source}: expected the keys {', '.join(names)}, got {', '.join(sorted(values))}")
    for name, kind in {"on": dict, "ranks": int, "route": str, "us": dict, "reasons": dict}.items():
        if type(values[name]) is not kind:
            raise ValueError(f"{source}: {name}: expected {kind.__name__}, got {values[name]!r}")
    on = values["on"]
    if sorted(on) != sorted(field.name for field in fields(TriedOn)) or {type(value) for value in on.values()} != {str}:
        raise ValueError(
            f"{source}: on: expected texts of {', '.join(field.name for field in fields(TriedOn))}, got {on!r}"
        )
    if values["route"] not in ROUTES:
        raise ValueError(f"{source}: route: expected one of {', '.join(ROUTES)}, got {values['route']!r}")
    return Tried(**{**values, "on": TriedOn(**on)})


def default_folder() -> Path | None:
    """The folder with the files, which need not exist; None where the user has no home."""
    folder = user_folder()
    return None if folder is None else folder / FOLDER


def stored(folder: Path | None, on: TriedOn) -> Tried | None:
    """What is kept of a node like ``on``; None without a file. If the file can't be used, one warning names it."""
    if folder is None:
        return None
    file = folder / on.file_name
    try:
        text = read_if_there(file, FOLDER)
        tried = None if text is None else tried_of(text, str(file))
    except ValueError as error:
        logger.warning("tw_compile: what was tried of this node is not used: %s", error)
        return None
    return tried if tried is None or tried.on == on else None


def store(folder: Path | None, tried: Tried) -> Path | None:
    """Write the file and return its path; where that fails, warn and return None. The next process then tries again."""
    return keep(folder, tried.on.file_name, text_of(tried), "what was tried of this node")


_alone: list[str] = []
_found: list[Tried | None] = []


def use(tried: Tried | None) -> None:
    """Use this outcome in this process from now on."""
    _found[:] = [tried]


def forget() -> None:
    """Look at the file again at the next question, as a new process does."""
    _found.clear()
    _alone.clear()


def try_alone(route: str) -> None:
    """Use ``route`` in this process, whatever was tried before: for the processes that try it."""
    _alone[:] = [route]


def known() -> Tried | None:
    """The outcome that this process uses, if it has been asked for; looks for no file."""
    return _found[0] if _found else None


def in_use() -> Tried | None:
    """The outcome that this process uses: what :func:`use` was given, else the file for its current device."""
    if not _found:
        use(stored(default_folder(), here()))
    return _found[0]


def over_link(ranks: int) -> str:
    """``push`` or ``pull``, if rows of ``ranks`` ranks go over links without native atomics; empty if they don't.

    Ask this only of such links: it looks for the file.
    """
    if _alone:
        return _alone[0] if _alone[0] != HOST else ""
    return route_of(in_use(), ranks)


def route_of(tried: Tried | None, ranks: int) -> str:
    """As :func:`over_link`, of an outcome."""
    return "" if tried is None or tried.route == HOST or ranks > tried.ranks else tried.route
