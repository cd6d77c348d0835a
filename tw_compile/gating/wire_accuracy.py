"""What ``tw-compile tune --wire ... --checkpoint`` has measured of one checkpoint: nats a token that a wire adds.

A file of option ``wire_accuracy`` is about one checkpoint. A graph does not say which checkpoint it is of. The user says it by
naming the file.

    schema_version = 1
    checkpoint = "llama"                 # as it was given
    digest = "3f5a..."                   # SHA-256 of names and values of all weights
    [[costs]]
    wire = "int8"
    world_size = 2
    sites = "all"                        # or "attention", "mlp": as option wire_sites
    added_nats = 0.0055
    standard_error = 0.0021
    tokens = 3066
    text = "prose.txt"
    date = "2026-11-24"
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tw_compile.files import read_text
from tw_compile.gating.table import assignments
from tw_compile.kernels.collective.wires import EXACT, WIRES

SCHEMA_VERSION = 1
BUDGET_NATS = 0.01
"""Added nats a token that a wire may cost: one percent more perplexity."""
SITES = ("all", "attention", "mlp")


@dataclass(frozen=True)
class AccuracyCost:
    """Nats a token that a wire adds to those of exact rows, with ``standard_error``, for ``tokens`` tokens of a text."""

    wire: str
    world_size: int
    sites: str
    added_nats: float
    standard_error: float
    tokens: int
    text: str
    date: str

    @property
    def key(self) -> tuple[str, int, str]:
        return self.wire, self.world_size, self.sites

    @property
    def within_budget(self) -> bool:
        return self.added_nats <= BUDGET_NATS

    def __str__(self) -> str:
        where = "" if self.sites == "all" else f" at sums of {self.sites}"
        return (
            f"{self.wire}{where}, {self.world_size} ranks: {self.added_nats:+.4f} +- {self.standard_error:.4f} nats a token, "
            f"{self.tokens} tokens of {self.text}, {self.date}"
        )


@dataclass(frozen=True)
class CheckpointAccuracy:
    """The contents of one file."""

    checkpoint: str
    digest: str
    costs: tuple[AccuracyCost, ...]

    @property
    def file_name(self) -> str:
        return f"wire-accuracy-{self.digest[:12]}.toml"

    def cost(self, wire: str, world_size: int, sites: str) -> AccuracyCost | None:
        """The cost at the same sums, or else at all sums; None where neither was measured."""
        by_key = {cost.key: cost for cost in self.costs}
        return by_key.get((wire, world_size, sites)) or by_key.get((wire, world_size, "all"))

    def with_costs(self, costs: Iterable[AccuracyCost]) -> CheckpointAccuracy:
        """A copy in which ``costs`` take the place of the costs of the same wire, ranks and sites."""
        return replace(self, costs=tuple({cost.key: cost for cost in (*self.costs, *costs)}.values()))


def load_accuracy(file: str) -> CheckpointAccuracy:
    """What the file of option ``wire_accuracy`` holds.

    Raises:
        ValueError: It cannot be read, or is wrong.
    """
    try:
        path = Path(file).expanduser()
    except RuntimeError as error:
        raise ValueError(f"wire_accuracy: expected a file that can be read, got {file!r} ({error})") from error
    return read_accuracy(read_text(path, "wire_accuracy"), file)


def read_accuracy(text: str, file: str) -> CheckpointAccuracy:
    """What ``text`` holds; ValueError names ``file``, the key, what was expected and what came."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: expected TOML, got {error}") from error
    version = values.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"{file}: schema_version: expected {SCHEMA_VERSION}, got {version!r}")
    _check_keys(values, ("schema_version", "checkpoint", "digest", "costs"), file)
    costs = values["costs"]
    if not isinstance(costs, list) or not costs:
        raise ValueError(f"{file}: costs: expected [[costs]] tables, got {costs!r}")
    read = tuple(_cost(cost, f"{file}: costs[{index}]") for index, cost in enumerate(costs))
    if len({cost.key for cost in read}) < len(read):
        raise ValueError(f"{file}: costs: expected one for a wire, a number of ranks and sites, got another one")
    return CheckpointAccuracy(_text(values, "checkpoint", file), _text(values, "digest", file), read)


def accuracy_text(accuracy: CheckpointAccuracy) -> str:
    """The TOML of ``accuracy``, as :func:`read_accuracy` reads it."""
    head = {"schema_version": SCHEMA_VERSION, "checkpoint": accuracy.checkpoint, "digest": accuracy.digest}
    lines = assignments(head.items())
    for cost in accuracy.costs:
        lines += ["", "[[costs]]", *assignments(vars(cost).items())]
    return "\n".join(lines) + "\n"


def _cost(values: Any, where: str) -> AccuracyCost:
    names = tuple(field.name for field in fields(AccuracyCost))
    _check_keys(values, names, where)
    wires = tuple(name for name in WIRES if name != EXACT)
    for name, choices in (("wire", wires), ("sites", SITES)):
        if values[name] not in choices:
            raise ValueError(f"{where}.{name}: expected one of {', '.join(choices)}, got {values[name]!r}")
    for name, least in (("world_size", 2), ("tokens", 1)):
        if type(values[name]) is not int or values[name] < least:
            raise ValueError(f"{where}.{name}: expected a number of at least {least}, got {values[name]!r}")
    for name in ("added_nats", "standard_error"):
        if type(values[name]) not in (int, float) or not math.isfinite(values[name]):
            raise ValueError(f"{where}.{name}: expected a finite number, got {values[name]!r}")
    for name in ("text", "date"):
        _text(values, name, where)
    return AccuracyCost(**values)


def _check_keys(values: Any, names: tuple[str, ...], where: str) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected a table, got {values!r}")
    for name in (*sorted(values.keys() - set(names)), *(name for name in names if name not in values)):
        came = "got" if name in values else "got no"
        raise ValueError(f"{where}: expected the keys {', '.join(names)}, {came} {name!r}")


def _text(values: dict[str, Any], name: str, where: str) -> str:
    value = values[name]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: {name}: expected text, got {value!r}")
    return value
