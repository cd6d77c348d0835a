"""The operator's CUDA kernels in the emulator: calls are queued on all ranks, run, and held against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from emulator import Emulator
from emulator.memory import bits, copy, guarded, guarded_results, margins
from emulator.results import check
from emulator.wires import expected_bits
from tw_compile.kernels.algorithms.barrier_kernel import BarrierKernel
from tw_compile.kernels.algorithms.multimem.multimem import Multimem
from tw_compile.kernels.algorithms.multimem.multimem import Shape as MultimemShape
from tw_compile.kernels.algorithms.push.push import Push, PushParams, part_bytes, shared_bytes_for, threads_for
from tw_compile.kernels.algorithms.stream.stream import Shape, Stream
from tw_compile.kernels.collective.cuda_variant import numbers_of, row_defines
from tw_compile.kernels.collective.fields import RMS_NORM
from tw_compile.kernels.collective.slot import NOT_ARRIVED
from tw_compile.kernels.collective.spec import (
    NormSpec,
    Request,
    ResidualOut,
    operands_of,
    row_range,
    rows_per_rank,
    scales_of,
)
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.kernels.epilogues import EPILOGUES
from tw_compile.kernels.registry import load
from tw_compile.kernels.runtime.barrier import MAX_CTAS, MAX_WORLD_SIZE, REPORT_ROWS

ALGORITHMS = Path(__file__).parents[2] / "kernels" / "algorithms"
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
_SHARED_BYTES = 64 * 1024
_STALL_LIMIT = 200_000
SumOf = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""What all ranks' messages add up to, as float64."""


def _source(name: str, folder: Path | None) -> Path:
    """The CUDA source of an algorithm: the project's own, or a copy of that name in ``folder``."""
    return (ALGORITHMS / name if folder is None else folder) / f"{name}.cu"


@dataclass(frozen=True)
class Form:
    """What the operator is asked for; dtypes as in :class:`NormSpec`."""

    dtype: torch.dtype = BF16
    residual: str | None = "whole"  # or "sharded"
    residual_out: ResidualOut = "replicated"
    residual_dtype: torch.dtype = BF16
    bias: bool = False
    weight_dtype: torch.dtype | None = BF16
    weight_offset: float = 0.0
    cast: torch.dtype | None = None
    hidden_dtype: torch.dtype | None = None
    scale: float = 1.0
    epilogue: str = RMS_NORM
    norm_bias: bool = False
    wire: str = EXACT
    scale_columns: int = 0
    min_scale: float = 0.0
    divides: bool = False

    def on(self, wire: str) -> Form:
        """The same with rows that travel so."""
        return replace(self, wire=wire)

    def for_one_shot(self) -> Form:
        """The same with all rows of the residual, which is what a one-shot kernel takes and gives."""
        residual = "whole" if self.residual == "sharded" else self.residual
        return replace(self, residual=residual, residual_out="none" if self.residual_out == "none" else "replicated")

    @property
    def norm(self) -> NormSpec:
        hidden_dtype = self.hidden_dtype or self.dtype
        return NormSpec(
            1e-5,
            self.weight_offset,
            self.cast,
            hidden_dtype,
            self.residual_dtype,
            self.scale,
            self.epilogue,
            self.scale_columns,
            self.min_scale,
            self.divides,
        )


@dataclass
class Rank:
    """One rank's tensors of one call. ``given``: copies of what the request holds. ``results``: ``hidden``, and its scales."""

    request: Request
    hidden: torch.Tensor
    residual_out: torch.Tensor
    given: list[torch.Tensor]
    results: torch.Tensor

    @property
    def scales(self) -> torch.Tensor:
        return scales_of(self.hidden, self.request.norm.scale_columns)

    def inputs(self) -> dict[str, torch.Tensor | None]:
        return operands_of(self.request)._asdict()


@dataclass(eq=False)
class Call:
    """One call on all ranks, with what it must give: ``hidden`` and ``h`` are float64 ``[tokens, hidden]``.

    ``scales`` are those that it must make; ``hidden`` then is in their units if it is known to the bit (``to_the_bit``).
    """

    tokens: int
    ranks: list[Rank]
    hidden: torch.Tensor
    h: torch.Tensor
    scales: torch.Tensor | None = None
    to_the_bit: bool = False

    def outputs(self) -> list[torch.Tensor]:
        """The bits of all results of all ranks; rows that a shard has too many are left out."""
        found = [bits(own.results) for own in self.ranks]
        for rank, own in enumerate(self.ranks):
            begin, end = row_range(self.tokens, len(self.ranks), rank)
            rows = end - begin if own.request.residual_out == "sharded" else len(own.residual_out)
            found.append(bits(own.residual_out[:rows]))
        return found


def partial_sums(world_size: int, tokens: int, hidden_size: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Random ``[tokens, hidden]`` of each rank; some words of each are what a word that has not arrived is."""
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(tokens, hidden_size, generator=generator).to(dtype) for _ in range(world_size)]
    for rank, x in enumerate(xs):
        x[:, 8 * rank : 8 * rank + 8] = torch.tensor([0.0, -0.0]).repeat(4)[: x[:, 8 * rank :].shape[1]]
    return xs


def exact_sum(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float64."""
    return torch.stack([x.double() for x in xs]).sum(0)


def make_call(form: Form, xs: Sequence[torch.Tensor], seed: int, sum_of: SumOf = exact_sum) -> Call:
    """A call with ``xs[rank] [tokens, hidden]``; everything else is random, and each rank's memory its own."""
    generator = torch.Generator().manual_seed(seed)
    world_size, (tokens, hidden_size) = len(xs), xs[0].shape

    def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    norm = form.norm
    residual = random(tokens, hidden_size, dtype=form.residual_dtype) if form.residual else None
    bias = random(hidden_size, dtype=form.dtype) if form.bias else None
    weight = random(hidden_size, dtype=form.weight_dtype) if form.weight_dtype else None
    norm_bias = random(hidden_size, dtype=form.weight_dtype or form.dtype) if form.norm_bias else None
    if weight is not None:
        zeros = 32 if norm.scale_columns in (0, hidden_size) else norm.scale_columns
        weight[-zeros:] = -form.weight_offset  # results that are zeros of both signs
    hidden_scale = torch.tensor([0.02]) if norm.hidden_dtype == FP8 and not norm.scale_columns else None
    ranks = []
    for rank, x in enumerate(xs):
        own = copy(residual)
        if residual is not None and form.residual == "sharded":
            begin, end = row_range(tokens, world_size, rank)
            own = torch.full((rows_per_rank(tokens, world_size), hidden_size), float("nan"), dtype=residual.dtype)
            own[: end - begin] = residual[begin:end]
        sharded, wanted = form.residual == "sharded", form.residual_out
        request = Request(
            x, own, copy(bias), copy(weight), norm, sharded, wanted, "", 0, copy(hidden_scale), wire=form.wire
        )
        request = replace(request, norm_bias=copy(norm_bias))
        hidden, residual_out = request.allocate(world_size)
        results = guarded_results(hidden, norm)
        hidden = results[: hidden.numel()].view(hidden.shape) if norm.scale_columns else results
        made = Rank(request, hidden, guarded(residual_out), [], results)
        made.given = [tensor.clone() for tensor in made.inputs().values() if tensor is not None]
        ranks.append(made)
    # A cast before the weight is part of what is asked for, but no part of what is exact.
    exact = replace(
        norm, hidden_dtype=torch.float64, residual_dtype=torch.float64, cast_before_weight=None, scale_columns=0
    )
    want_hidden, want_h = load(EPILOGUES[norm.epilogue].reference)(
        sum_of(xs), residual, bias, weight, exact, None, norm_bias
    )
    if hidden_scale is not None:
        want_hidden = (want_hidden / hidden_scale.double()).clamp(-448, 448)
    scales = None
    if norm.scale_columns:
        largest = want_hidden.unflatten(-1, (-1, norm.scale_columns)).abs().amax(-1)
        scales = (largest / 448).clamp_min(norm.min_scale).float()
    return Call(tokens, ranks, want_hidden, want_h, scales)


class Machine:
    """One kernel variant on all ranks. Calls on one slot follow each other, calls on different slots may overlap.

    ``threads``: those of a row. ``arch``: what ``__CUDA_ARCH__`` is; before 900 no launch is programmatic.
    """

    threads: int
    sum_of: SumOf = staticmethod(exact_sum)

    def __init__(
        self,
        source: Path,
        defines: dict[str, Any],
        form: Form,
        hidden_size: int,
        world_size: int,
        seed: int,
        *,
        arch: int = 900,
        **options: Any,
    ) -> None:
        self.form, self.hidden_size, self.world_size = form, hidden_size, world_size
        self.programmatic = arch >= 900
        self.data_seed, self.drawn = options.pop("data_seed", seed), 0
        options.setdefault("stall_limit", _STALL_LIMIT)
        defines = defines | {"EMULATED_ARCH": arch} | options.pop("more_defines", {})
        self.emulator = Emulator(source, source.stem, world_size, seed, defines=defines, **options)
        self.calls: list[Call] = []
        self.latest: dict[tuple[int, int], int] = {}  # launch of a rank and a slot
        self.written: list[torch.Tensor] = []  # guarded
        self.reports: list[torch.Tensor] = []  # status of a rank and a slot

    def symmetric(self, nbytes: int, fill: int, name: str) -> list[torch.Tensor]:
        """Guarded memory of ``nbytes``, rounded up, on every rank: int32 words ``fill``."""
        buffers = []
        for rank in range(self.world_size):
            buffer = guarded(torch.empty(-(-nbytes // 4), dtype=torch.int32), fill)
            self.emulator.alloc(rank, buffer, symmetric=True, name=name)
            self.written.append(buffer)
            buffers.append(buffer)
        return buffers

    def private(self, *shape: int) -> list[torch.Tensor]:
        """Guarded int32 zeros of every rank."""
        buffers = [guarded(torch.empty(shape, dtype=torch.int32), 0) for _ in range(self.world_size)]
        for rank, buffer in enumerate(buffers):
            self.emulator.alloc(rank, buffer, name="state of the slot")
        self.written += buffers
        return buffers

    def status(self) -> list[torch.Tensor]:
        status = self.private(REPORT_ROWS, MAX_WORLD_SIZE)
        self.reports += status
        return status

    def next_seed(self) -> int:
        self.drawn += 1
        return 1000 * self.data_seed + self.drawn

    def random_x(self, tokens: int) -> list[torch.Tensor]:
        return partial_sums(self.world_size, tokens, self.hidden_size, self.form.dtype, self.next_seed())

    @property
    def row_threads(self) -> int:
        """The threads that share a row, for machines that have rows in codes or make scales."""
        return self.threads

    def add_call(self, xs: Sequence[torch.Tensor]) -> Call:
        call = make_call(self.form, xs, self.next_seed(), self.sum_of)
        norm = self.form.norm
        if self.form.wire != EXACT or (norm.scale_columns and norm.epilogue == RMS_NORM):
            hidden, h = expected_bits([own.request for own in call.ranks], self.row_threads)
            call.scales = scales_of(hidden, norm.scale_columns) if norm.scale_columns else None
            call.hidden, call.h, call.to_the_bit = hidden.double(), h.double(), True
        self.calls.append(call)
        self.written += [tensor for own in call.ranks for tensor in (own.results, own.residual_out)]
        return call

    def shared_parameters(self, rank: int, own: Rank) -> dict[str, Any]:
        """The parameters that all kernels have: addresses and numbers."""
        tensors = own.inputs() | {"hidden": own.results, "residual_out": own.residual_out}
        addresses = {
            name: None if tensor is None or tensor.numel() == 0 else self.emulator.alloc(rank, tensor, name=name)
            for name, tensor in tensors.items()
        }
        return addresses | numbers_of(self.form.norm) | {"rank": rank, "tokens": len(own.request.x)}

    def follow(self, rank: int, slot: int, own: Rank) -> None:
        """A kernel behind the latest launch makes what the next one reads: whoever reads it before that finds NaNs."""
        for made in (own.request.x, own.request.residual):
            if made is not None and (rank, slot) in self.latest:
                self.emulator.write_behind(self.latest[rank, slot], made.data_ptr(), made.clone())
                made.fill_(float("nan"))

    def run(self) -> None:
        """Runs what is queued; everything that was called is right, and nothing else was written."""
        self.emulator.run()
        for call in self.calls:
            check(call)
        for report in self.reports:
            assert not report.any(), "a rank gave up waiting"
        self.check_margins()

    def check_margins(self) -> None:
        for tensor in self.written:
            assert bool((margins(tensor) == 0xFF).all()), "memory around a buffer was written"


def table(buffers: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers])


@dataclass
class Inbox:
    """What a slot of ``push.cu`` has; by rank."""

    buffers: list[torch.Tensor]
    table: torch.Tensor
    states: list[torch.Tensor]
    status: list[torch.Tensor]


class PushMachine(Machine):
    """``push.cu`` with ``slots`` inboxes a rank; launches of at most ``most_rows`` local rows."""

    def __init__(
        self,
        world_size: int,
        hidden_size: int,
        form: Form,
        *,
        one_shot: bool,
        most_tokens: int,
        seed: int,
        threads: int | None = None,
        cluster: int = 1,
        most_rows: int = 2**20,
        slots: int = 1,
        spin_limit: int = 0,
        sources: Path | None = None,
        **options: Any,
    ) -> None:
        self.one_shot, self.cluster, self.most_rows = one_shot, cluster, most_rows
        self.threads = threads or threads_for(hidden_size, world_size, cluster)
        example = make_call(form, partial_sums(world_size, most_tokens, hidden_size, form.dtype, 0), 0).ranks[0].request
        defines = row_defines(example, world_size, spin_limit)
        defines |= {"ONE_SHOT": int(one_shot), "THREADS": self.threads, "CTAS_PER_SM": 1, "CLUSTER": cluster, "FED": 0}
        super().__init__(_source("push", sources), defines, form, hidden_size, world_size, seed, **options)
        capacity = Push(one_shot).needs(example, world_size)["inbox"]
        self.part_bytes = part_bytes(capacity)
        self.slots = []
        for _ in range(slots):
            buffers = self.symmetric(capacity, NOT_ARRIVED, "inbox")
            self.slots.append(Inbox(buffers, table(buffers), self.private(4), self.status()))

    @property
    def row_threads(self) -> int:
        return self.cluster * self.threads

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
        call = self.add_call([x.clone() for x in xs] if xs else self.random_x(tokens))
        inbox = self.slots[slot]
        for rank, own in enumerate(call.ranks):
            if rank in skip:
                continue
            shared = self.shared_parameters(rank, own)
            self.follow(rank, slot, own)
            rows = tokens if self.one_shot else rows_per_rank(tokens, self.world_size)
            for begin in range(0, rows, self.most_rows):
                end = min(begin + self.most_rows, rows)
                params = PushParams(
                    inboxes=inbox.table.data_ptr(),
                    state=inbox.states[rank].data_ptr(),
                    status=inbox.status[rank].data_ptr(),
                    part_bytes=self.part_bytes,
                    begin=begin,
                    end=end,
                    **shared,
                )
                grid = self.cluster * min(end - begin, max(1, max_sms // self.cluster))
                shared_bytes = shared_bytes_for(own.request, self.threads, self.cluster)
                given = {"programmatic": self.programmatic, "cluster": self.cluster}
                launch = self.emulator.launch(rank, slot, grid, self.threads, shared_bytes, params, **given)
                self.latest[rank, slot] = launch
        return call

    def run(self) -> None:
        super().run()
        for inbox in self.slots:
            for buffer, state in zip(inbox.buffers, inbox.states, strict=True):
                parts = bits(buffer)[: 3 * self.part_bytes].view(3, -1).view(torch.int32)
                part, counted = divmod(int(state[0]), 2**16)
                assert part in range(3) and counted == 0, "CTAs of a call were counted wrongly"
                for clean in (part, (part + 1) % 3):
                    assert bool((parts[clean] == NOT_ARRIVED).all()), "a part of an inbox was not cleared"


@dataclass
class BarrierSlot:
    """What a slot of a kernel with barriers has; by rank. ``launches``: the latest one, if there is one."""

    buffers: dict[str, list[torch.Tensor]]
    tables: dict[str, torch.Tensor]
    epochs: list[torch.Tensor]
    status: list[torch.Tensor]
    launches: dict[int, int]


class BarrierMachine(Machine):
    """The kernel of ``algorithm`` with ``slots`` slots a rank; ``first_epoch`` barriers have gone before."""

    def __init__(
        self,
        algorithm: type[BarrierKernel],
        world_size: int,
        hidden_size: int,
        form: Form,
        *,
        defines: dict[str, Any],
        block: int,
        shared_bytes: int,
        staged: bool,
        private_output: bool,
        most_tokens: int,
        seed: int,
        slots: int = 1,
        spin_limit: int = 0,
        first_epoch: int = 0,
        sources: Path | None = None,
        **options: Any,
    ) -> None:
        self.algorithm, self.block, self.shared_bytes = algorithm, block, shared_bytes
        self.staged, self.private_output = staged, private_output
        xs = partial_sums(world_size, most_tokens, hidden_size, form.dtype, 0)
        example = make_call(form, xs, 0).ranks[0].request
        defines = row_defines(example, world_size, spin_limit) | defines
        defines |= {"STAGED": int(staged), "PULL": int(private_output)}
        super().__init__(_source(algorithm.name, sources), defines, form, hidden_size, world_size, seed, **options)
        self.slots = []
        for _ in range(slots):
            needs = algorithm(max_sms=1).needs(example, world_size)
            buffers = {name: self.symmetric(size, -1, name) for name, size in needs.items()}
            buffers["pads"] = self.symmetric(MAX_CTAS * MAX_WORLD_SIZE * 4, first_epoch, "pads")
            tables = {name: self.table_of(tensors) for name, tensors in buffers.items()}
            epochs = self.private(MAX_CTAS)
            for epoch in epochs:
                epoch.fill_(first_epoch)
            self.slots.append(BarrierSlot(buffers, tables, epochs, self.status(), {}))

    def table_of(self, buffers: list[torch.Tensor]) -> torch.Tensor:
        """The addresses by which kernels find the buffers of all ranks."""
        return table(buffers)

    def run(self) -> None:
        super().run()
        for slot in self.slots:
            assert all(torch.equal(epochs, slot.epochs[0]) for epochs in slot.epochs), (
                "ranks counted different barriers"
            )

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
        mine = self.slots[slot]
        call = self.add_call([x.clone() for x in xs] if xs else self.random_x(tokens))
        for rank, own in enumerate(call.ranks):
            if rank not in skip:
                grid = self.algorithm(max_sms=max_sms).sms(tokens, self.world_size)
                self.launch(mine, slot, rank, own, grid)
        return call

    def launch(self, slot: BarrierSlot, stream: int, rank: int, own: Rank, grid: int) -> None:
        shared = self.shared_parameters(rank, own)
        behind = {}
        if not self.staged:
            # A kernel makes the partial sums in the slot when the call before has ended.
            shared["x"] = slot.buffers["x"][rank].data_ptr()
            if rank in slot.launches:
                self.emulator.write_behind(slot.launches[rank], shared["x"], own.request.x)
            else:
                bits(slot.buffers["x"][rank])[: own.request.x.nbytes] = bits(own.request.x).flatten()
        if not self.private_output:
            # Results in a slot are overwritten by the next call, but not before the kernels in between have read them.
            for result, name, target in (
                ("hidden", "hidden", own.results),
                ("residual_out", "residual", own.residual_out),
            ):
                if name in slot.buffers:
                    shared[result] = slot.buffers[name][rank].data_ptr()
                    behind[shared[result]] = target
        params = self.algorithm.params(
            **{
                f"{name}_table": slot.tables[name].data_ptr()
                for name in ("x", "hidden", "residual")
                if name in slot.tables
            },
            pads=slot.tables["pads"].data_ptr(),
            epochs=slot.epochs[rank].data_ptr(),
            status=slot.status[rank].data_ptr(),
            **shared,
        )
        launch = self.emulator.launch(rank, stream, grid, self.block, self.shared_bytes, params, programmatic=True)
        slot.launches[rank] = launch
        for address, target in behind.items():
            self.emulator.read_behind(launch, address, target)


class StreamMachine(BarrierMachine):
    """``stream.cu``."""

    def __init__(self, world_size: int, hidden_size: int, form: Form, *, shape: Shape, **options: Any) -> None:
        defines = shape.defines() | {"SHARED_BYTES": _SHARED_BYTES}
        cta = {"defines": defines, "block": shape.block, "shared_bytes": _SHARED_BYTES}
        self.threads = shape.threads
        super().__init__(Stream, world_size, hidden_size, form, **cta, **options)


def rounded_sum(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """As the switch adds: in float32, here in rank order, and rounded once to the dtype of the messages."""
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    return total.to(xs[0].dtype).double()


class MultimemMachine(BarrierMachine):
    """``multimem.cu`` with the switch's instructions, or ``by_peers``: with loads and stores of peers in their place."""

    sum_of = staticmethod(rounded_sum)

    def __init__(
        self,
        world_size: int,
        hidden_size: int,
        form: Form,
        *,
        shape: MultimemShape,
        by_peers: bool = False,
        **options: Any,
    ) -> None:
        self.by_peers = by_peers
        defines = shape.defines() | {"EMULATED_MULTICAST": int(by_peers)}
        shared_bytes = 2 * shape.block // 32 * EPILOGUES[form.epilogue].statistics_bytes
        cta = {"defines": defines, "block": shape.block, "shared_bytes": shared_bytes}
        super().__init__(Multimem, world_size, hidden_size, form, **cta, **options)

    def table_of(self, buffers: list[torch.Tensor]) -> torch.Tensor:
        addresses = table(buffers)
        return addresses if self.by_peers else torch.cat([addresses, torch.tensor([self.emulator.multicast(buffers)])])
