"""The decision whether a message of some size is fused, or left to the all_reduce that would carry it otherwise."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tw_compile.gating.backend import active_backend, backend_bounds
from tw_compile.gating.facts import Backend, Node, Settings
from tw_compile.gating.table import ANY, Entry, Key, Table, WireEntry, size
from tw_compile.gating.wire_accuracy import CheckpointAccuracy


@dataclass(frozen=True)
class Verdict:
    """What was decided about a message of ``nbytes``, and why.

    Attributes:
        backend: What an unfused all_reduce of it would use; ``backend_why`` says by which rule.
        fused: Whether fusing pays.
        transport: The transport that the table names, when fused: ``auto``, ``p2p``, ``multimem`` or ``nccl``.
        entry: The file and the range that decided; ``source``: where this range comes from.
        note: A remark about a message of which only the bounds of the size are known.
    """

    nbytes: int
    backend: Backend
    backend_why: str
    fused: bool
    transport: str | None
    entry: str
    source: str
    note: str = ""

    @property
    def reason(self) -> str:
        """The decision in one line."""
        decided = "fused" if self.fused else "left"
        note = f"; {self.note}" if self.note else ""
        return f"{size(self.nbytes)}, unfused it would be {self.backend}: {decided} by {self.entry}{note}"


@dataclass(frozen=True)
class Gate:
    """Decides by ``tables``: the first one that has a range for the world size and backend counts.

    A pure function of values that are equal on all ranks (:mod:`tw_compile.current` sees to it), so that no rank waits
    in a kernel that another one did not launch. The last table has a range for everything.

    ``accuracy``: what wires cost the running checkpoint in accuracy, where an option names a file that says it.
    """

    node: Node
    settings: Settings
    tables: tuple[Table, ...]
    accuracy: CheckpointAccuracy | None = None

    def __post_init__(self) -> None:
        if not self.tables or not self.tables[-1].ranges((ANY, ANY)):
            raise ValueError("tables: expected ranges for world_size 'any' and backend 'any' in the last one, got none")

    def digest(self) -> str:
        """Changes exactly when a decision may; part of the compile caches' key."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def decide(self, nbytes: int, *, world_size: int, dtype: str, hosts: int = 1) -> Verdict:
        """Decide about one message of ``nbytes`` per rank.

        Args:
            dtype: ``bfloat16``, ``float16`` or ``float32``.
            hosts: How many hosts the group spans.
        """
        active = active_backend(
            self.node, self.settings, world_size=world_size, dtype=dtype, nbytes=nbytes, hosts=hosts
        )
        table, entry = self.entry_for(nbytes, world_size, active.backend)
        return Verdict(
            nbytes,
            active.backend,
            active.why,
            entry.decision == "fused",
            entry.transport,
            f"{table.file}: {entry}",
            str(entry.source),
        )

    def decide_range(
        self, tokens: tuple[int, int | None], row_bytes: int, *, world_size: int, dtype: str, hosts: int = 1
    ) -> Verdict:
        """Decide about a message of which only the bounds of the token count are known (inclusive; None: unbounded).

        A graph knows only these bounds. One graph serves all sizes, so the message is fused if any size of the range would be.
        The fused operator is right at all sizes, and an unfused graph would lose what fusing is for. The message is left only
        where every size would be left.
        """
        verdicts = [
            self.decide(count * row_bytes, world_size=world_size, dtype=dtype, hosts=hosts)
            for count in self.token_counts(tokens, row_bytes)
        ]
        fused = [verdict for verdict in verdicts if verdict.fused]
        if len(fused) == len(verdicts):
            return replace(verdicts[0], note="so are all token counts of the graph")
        if not fused:
            return replace(verdicts[0], note="as are all token counts of the graph")
        left = next(verdict for verdict in verdicts if not verdict.fused)
        note = f"one graph for all token counts: also where it would be left, e.g. {left.reason}"
        return replace(fused[0], note=note)

    def crossovers(self, row_bytes: int, *, world_size: int, dtype: str, hosts: int = 1) -> list[Verdict]:
        """The first size of every stretch of sizes with one backend and one range, for whole rows."""
        firsts: list[Verdict] = []
        for count in self.token_counts((1, None), row_bytes):
            verdict = self.decide(count * row_bytes, world_size=world_size, dtype=dtype, hosts=hosts)
            if not firsts or (firsts[-1].backend, firsts[-1].entry) != (verdict.backend, verdict.entry):
                firsts.append(verdict)
        return firsts

    def entries(self, world_size: int, backend: str) -> tuple[Entry, ...]:
        """The ranges that count for a world size and backend; they go up in bytes and cover all sizes."""
        return self.ranges_for(world_size, backend)[1]

    def entry_for(self, nbytes: int, world_size: int, backend: str) -> tuple[Table, Entry]:
        """The range that decides about messages of ``nbytes`` where an unfused one would use ``backend``, and its table."""
        table, ranges = self.ranges_for(world_size, backend)
        return table, ranges[bisect_right([entry.from_bytes for entry in ranges], nbytes) - 1]

    def wire_entry(self, wire: str, *, world_size: int, transport: str) -> tuple[Table, WireEntry] | None:
        """What says from which size on ``wire`` is faster over ``transport`` than exact rows: table and entry, or None."""
        for table in self.tables:
            for ranks in (world_size, ANY):
                for entry in table.wires:
                    if (entry.wire, entry.world_size, entry.transport) == (wire, ranks, transport):
                        return table, entry
        return None

    def token_counts(self, tokens: tuple[int, int | None], row_bytes: int) -> list[int]:
        """Token counts of the range around every size at which a decision may change."""
        low, high = tokens
        bounds = backend_bounds(self.settings)
        for table in self.tables:
            bounds |= {entry.from_bytes for entry in table.entries}
        around = {bound // row_bytes + step for bound in bounds for step in (-1, 0, 1, 2)}
        inside = {count for count in around if low <= count and (high is None or count <= high)}
        return sorted(inside | {low} | (set() if high is None else {high}))

    def ranges_for(self, world_size: int, backend: str) -> tuple[Table, tuple[Entry, ...]]:
        for table in self.tables:
            for key in _keys(world_size, backend):
                if ranges := table.ranges(key):
                    return table, ranges
        raise AssertionError("the last table has a range for everything")


def _keys(world_size: int, backend: str) -> Iterator[Key]:
    """The keys that a table may have for a world size and backend, the most exact first."""
    for ranks in (world_size, ANY):
        for name in (str(backend), ANY):
            yield ranks, name
