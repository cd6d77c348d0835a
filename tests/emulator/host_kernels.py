"""The kernels over host memory in the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from emulator.kernels import ALGORITHMS, Call, Form, Machine, make_call, partial_sums, table
from tw_compile.kernels.algorithms.host.host_rows import COUNTERS_BYTES, HostRowsParams, Shape, half_bytes, outbox_bytes
from tw_compile.kernels.algorithms.host.host_words import NAMES, HostWordsParams, erased_lines, shape_of
from tw_compile.kernels.collective.cuda_variant import row_defines, statistics_bytes
from tw_compile.kernels.collective.slot import HOST_MAX_CTAS
from tw_compile.kernels.collective.spec import rows_per_rank


def _source(name: str, folder: Path | None) -> Path:
    return (ALGORITHMS / "host" if folder is None else folder) / f"{name}.cu"


@dataclass
class Outbox:
    """What a slot of these kernels has; by rank."""

    buffers: list[torch.Tensor]
    table: torch.Tensor
    states: list[torch.Tensor]
    status: list[torch.Tensor]


class HostMachine(Machine):
    """A kernel over host memory, with ``slots`` outboxes of ``capacity`` bytes a rank."""

    def __init__(
        self,
        name: str,
        world_size: int,
        hidden_size: int,
        form: Form,
        seed: int,
        *,
        defines: dict[str, Any],
        capacity: int,
        state_words: int,
        slots: int = 1,
        spin_limit: int = 0,
        sources: Path | None = None,
        **options: Any,
    ) -> None:
        example = make_call(form, partial_sums(world_size, 1, hidden_size, form.dtype, 0), 0).ranks[0].request
        defines = row_defines(example, world_size, spin_limit) | defines
        super().__init__(_source(name, sources), defines, form, hidden_size, world_size, seed, **options)
        self.slots = []
        for _ in range(slots):
            buffers = self.symmetric(capacity, 0, "outbox")
            self.slots.append(Outbox(buffers, table(buffers), self.private(state_words), self.status()))


class WordsMachine(HostMachine):
    """``host_words.cu``; ``calls`` calls have gone before. ``at_once``: vectors of a row that a thread receives at a time."""

    def __init__(
        self,
        world_size: int,
        hidden_size: int,
        form: Form,
        *,
        most_tokens: int,
        seed: int,
        threads: int,
        at_once: int = 3,
        names: int = NAMES,
        calls: int = 0,
        **options: Any,
    ) -> None:
        shape = shape_of(hidden_size, form.dtype.itemsize, threads, at_once)
        self.threads, self.names, self.capacity = threads, names, 2 * most_tokens * shape.row_bytes
        defines = shape.defines() | {"NAMES": names}
        described = {"defines": defines, "capacity": self.capacity, "state_words": 2}
        super().__init__("host_words", world_size, hidden_size, form, seed, **described, **options)
        for outbox in self.slots:
            for state in outbox.states:
                state[1] = calls

    def call(
        self,
        tokens: int,
        max_sms: int,
        *,
        slot: int = 0,
        skip: Sequence[int] = (),
        xs: Sequence[torch.Tensor] | None = None,
    ) -> Call:
        """Queues a call; ``skip``: ranks that do not launch it; ``xs``: partial sums by rank, random ones if not given."""
        call, mine = self.add_call([x.clone() for x in xs] if xs else self.random_x(tokens)), self.slots[slot]
        for rank, own in enumerate(call.ranks):
            if rank in skip:
                continue
            params = HostWordsParams(
                outboxes=mine.table.data_ptr(),
                state=mine.states[rank].data_ptr(),
                status=mine.status[rank].data_ptr(),
                part_bytes=self.capacity // 2,
                erased=erased_lines(self.capacity // 2, self.names),
                **self.shared_parameters(rank, own),
            )
            self.follow(rank, slot, own)
            shared_bytes = statistics_bytes(own.request, 1, self.threads // 32)
            grid = min(tokens, max_sms)
            given = {"programmatic": self.programmatic}
            launch = self.emulator.launch(rank, slot, grid, self.threads, shared_bytes, params, **given)
            self.latest[rank, slot] = launch
        return call

    def run(self) -> None:
        super().run()
        for outbox in self.slots:
            assert all(torch.equal(state, outbox.states[0]) for state in outbox.states), "ranks counted different calls"
            assert all(state[0] == 0 for state in outbox.states), "CTAs of a call were counted wrongly"


class RowsMachine(HostMachine):
    """``host_rows.cu``; ``first_turn`` turns have gone before."""

    def __init__(
        self,
        world_size: int,
        hidden_size: int,
        form: Form,
        *,
        one_shot: bool,
        shape: Shape,
        seed: int,
        first_turn: int = 0,
        **options: Any,
    ) -> None:
        self.one_shot, self.shape, self.threads = one_shot, shape, shape.threads
        self.capacity = outbox_bytes(shape)
        defines = {"ONE_SHOT": int(one_shot), **shape.defines()}
        described = {"defines": defines, "capacity": self.capacity, "state_words": 2 * HOST_MAX_CTAS}
        super().__init__("host_rows", world_size, hidden_size, form, seed, **described, **options)
        for outbox in self.slots:
            for buffer, state in zip(outbox.buffers, outbox.states, strict=True):
                state[::2] = first_turn
                buffer[: COUNTERS_BYTES // 4] = first_turn

    def call(
        self,
        tokens: int,
        max_sms: int,
        *,
        slot: int = 0,
        skip: Sequence[int] = (),
        xs: Sequence[torch.Tensor] | None = None,
    ) -> Call:
        """Queues a call; ``skip``: ranks that do not launch it; ``xs``: partial sums by rank, random ones if not given."""
        call, mine = self.add_call([x.clone() for x in xs] if xs else self.random_x(tokens)), self.slots[slot]
        rows = tokens if self.one_shot else rows_per_rank(tokens, self.world_size)
        grid = min(-(-rows // self.shape.groups), max_sms)
        for rank, own in enumerate(call.ranks):
            if rank in skip:
                continue
            params = HostRowsParams(
                outboxes=mine.table.data_ptr(),
                state=mine.states[rank].data_ptr(),
                status=mine.status[rank].data_ptr(),
                half_bytes=half_bytes(self.capacity),
                **self.shared_parameters(rank, own),
            )
            cta, given = (self.shape.block, self.shape.shared_bytes), {"programmatic": self.programmatic}
            self.emulator.launch(rank, slot, grid, *cta, params, **given)
        return call

    def run(self) -> None:
        super().run()
        for outbox in self.slots:
            assert all(torch.equal(state, outbox.states[0]) for state in outbox.states), "ranks counted different turns"
