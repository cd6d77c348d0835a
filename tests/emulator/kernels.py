"""The operator's CUDA kernels in the emulator: one call after another on every rank, held against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from emulator import Emulator
from tw_compile.kernels.all_reduce_rms_norm.cuda_variant import row_defines
from tw_compile.kernels.all_reduce_rms_norm.push import Push, PushParams, part_bytes, threads_for
from tw_compile.kernels.all_reduce_rms_norm.reference import add_rms_norm
from tw_compile.kernels.all_reduce_rms_norm.spec import NormSpec, Request, ResidualOut, row_range, rows_per_rank
from tw_compile.kernels.all_reduce_rms_norm.stream import Stream, StreamParams

SOURCES = Path(__file__).parents[2] / "kernels" / "all_reduce_rms_norm"
NOT_ARRIVED = -(2**31)
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


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


@dataclass
class Rank:
    """One rank's tensors of one call."""

    request: Request
    hidden: torch.Tensor
    residual_out: torch.Tensor


@dataclass
class Call:
    """One call on all ranks, with what it must give."""

    tokens: int
    form: Form
    ranks: list[Rank]
    hidden: torch.Tensor  # [tokens, hidden], float64
    h: torch.Tensor


def make_call(world_size: int, tokens: int, hidden_size: int, form: Form, seed: int) -> Call:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    per_rank = rows_per_rank(tokens, world_size)
    norm = NormSpec(
        1e-5, form.weight_offset, form.cast, form.hidden_dtype or form.dtype, form.residual_dtype, form.scale
    )
    xs = [random(tokens, hidden_size, dtype=form.dtype) for _ in range(world_size)]
    xs[0][:, ::7] = -0.0
    residual = random(tokens, hidden_size, dtype=form.residual_dtype) if form.residual else None
    bias = random(hidden_size, dtype=form.dtype) if form.bias else None
    weight = random(hidden_size, dtype=form.weight_dtype) if form.weight_dtype else None
    hidden_scale = torch.tensor([0.02]) if norm.hidden_dtype == FP8 else None
    ranks = []
    for rank in range(world_size):
        own = copy(residual)
        if residual is not None and form.residual == "sharded":
            begin, end = row_range(tokens, world_size, rank)
            own = torch.full((per_rank, hidden_size), float("nan"), dtype=residual.dtype)
            own[: end - begin] = residual[begin:end]
        request = Request(
            xs[rank],
            own,
            copy(bias),
            copy(weight),
            norm,
            form.residual == "sharded",
            form.residual_out,
            "",
            0,
            copy(hidden_scale),
        )
        hidden, residual_out = request.allocate(world_size)
        hidden.view(torch.uint8).fill_(0xFF)
        residual_out.view(torch.uint8).fill_(0xFF)
        ranks.append(Rank(request, hidden, residual_out))
    exact = replace(norm, hidden_dtype=torch.float64, residual_dtype=torch.float64, cast_before_weight=None)
    total = torch.stack([x.double() for x in xs]).sum(0)
    # A cast before the weight is part of what is asked for, but no part of what is exact.
    want_hidden, want_h = add_rms_norm(total, residual, bias, weight, exact)
    if hidden_scale is not None:
        want_hidden = want_hidden / hidden_scale.double()
    return Call(tokens, form, ranks, want_hidden, want_h)


def copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Every rank has memory of its own."""
    return None if tensor is None else tensor.clone()


class Machine:
    """One kernel variant on all ranks: calls are queued, then all run at once and are checked."""

    def __init__(self, entry: str, defines: dict[str, Any], world_size: int, seed: int, **options: Any) -> None:
        self.world_size = world_size
        self.emulator = Emulator(SOURCES / f"{entry}.cu", entry, world_size, seed, defines=defines, **options)
        self.calls: list[Call] = []

    def private(self, rank: int, tensor: torch.Tensor | None, name: str) -> int | None:
        return None if tensor is None else self.emulator.alloc(rank, tensor, name=name)

    def symmetric(self, size: int, fill: int, name: str) -> list[tuple[torch.Tensor, int]]:
        """A buffer of ``size`` int32 words on every rank, with memory around it that no kernel may touch; its addresses."""
        buffers = []
        for rank in range(self.world_size):
            buffer = torch.full((size + 64,), fill, dtype=torch.int32)[32:-32]
            buffers.append((buffer, self.emulator.alloc(rank, buffer, symmetric=True, name=name)))
        return buffers

    def arguments(self, rank: int, own: Rank) -> dict[str, int | None]:
        request = own.request
        tensors = {
            "x": request.x,
            "residual": request.residual,
            "bias": request.bias,
            "weight": request.weight,
            "hidden_scale": request.hidden_scale,
            "hidden": own.hidden,
            "residual_out": own.residual_out if own.residual_out.numel() else None,
        }
        return {name: self.private(rank, tensor, name) for name, tensor in tensors.items()}

    def run(self) -> None:
        self.emulator.run()
        for call in self.calls:
            check(call, self.world_size)


def table(buffers: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    return torch.tensor([address for _, address in buffers])


class PushMachine(Machine):
    """``push.cu`` with one inbox a rank."""

    def __init__(
        self,
        world_size: int,
        hidden_size: int,
        form: Form,
        *,
        one_shot: bool,
        most_tokens: int,
        seed: int,
        **options: Any,
    ) -> None:
        self.hidden_size, self.form, self.one_shot, self.seed = hidden_size, form, one_shot, seed
        self.threads = threads_for(hidden_size)
        example = make_call(world_size, 1, hidden_size, form, 0).ranks[0].request
        defines = row_defines(example, world_size, options.pop("spin_limit", 0))
        defines |= {"ONE_SHOT": int(one_shot), "THREADS": self.threads}
        super().__init__("push", defines, world_size, seed, **options)
        request = make_call(world_size, most_tokens, hidden_size, form, 0).ranks[0].request
        capacity = Push(one_shot).needs(request, world_size)["inbox"]
        self.part_bytes = part_bytes(capacity)
        self.inboxes = self.symmetric(capacity // 4, NOT_ARRIVED, "inbox")
        self.table = table(self.inboxes)
        self.states = [torch.zeros(5, dtype=torch.int32) for _ in range(world_size)]
        self.status = [torch.zeros((128, 8), dtype=torch.int32) for _ in range(world_size)]
        for rank in range(world_size):
            self.private(rank, self.states[rank], "state")

    def call(self, tokens: int, max_ctas: int, skip: tuple[int, ...] = ()) -> None:
        call = make_call(self.world_size, tokens, self.hidden_size, self.form, self.seed + len(self.calls))
        self.calls.append(call)
        norm = call.ranks[0].request.norm
        for rank, own in enumerate(call.ranks):
            if rank in skip:
                continue
            params = PushParams(
                *self.arguments(rank, own).values(),
                self.table.data_ptr(),
                self.states[rank].data_ptr(),
                self.status[rank].data_ptr(),
                self.part_bytes,
                rank,
                tokens,
                norm.eps,
                norm.weight_offset,
                norm.scale,
            )
            grid = Push(self.one_shot, max_ctas).ctas(tokens, self.world_size)
            self.emulator.launch(rank, 0, grid, self.threads, 2 * self.threads // 32 * 4, params, programmatic=True)


class StreamMachine(Machine):
    """``stream.cu`` with one slot a rank."""

    def __init__(
        self,
        world_size: int,
        hidden_size: int,
        form: Form,
        *,
        staged: bool,
        private_output: bool,
        most_tokens: int,
        seed: int,
        stages: int = 2,
        **options: Any,
    ) -> None:
        self.hidden_size, self.form, self.seed = hidden_size, form, seed
        self.staged, self.private_output, self.most_tokens = staged, private_output, most_tokens
        example = make_call(world_size, most_tokens, hidden_size, form, 0).ranks[0].request
        self.shape = Stream(1, private_output)._shape(example)
        # Few stages: the ring goes round, and what a full one would hide is tested.
        self.shared_bytes = 64 * 1024
        defines = row_defines(example, world_size, options.pop("spin_limit", 0))
        defines |= {"THREADS": self.shape.threads, "GROUPS": self.shape.groups, "STAGES": stages}
        defines |= {"STAGED": int(staged), "PULL": int(private_output), "SHARED_BYTES": self.shared_bytes}
        super().__init__("stream", defines, world_size, seed, **options)
        needs = Stream(1, private_output).needs(example, world_size)
        self.buffers = {name: self.symmetric(-(-size // 4), -1, name) for name, size in needs.items()}
        self.buffers["pads"] = self.symmetric(32 * 8, 0, "pads")
        self.tables = {name: table(buffers) for name, buffers in self.buffers.items()}
        self.epochs = [torch.zeros(32, dtype=torch.int32) for _ in range(world_size)]
        self.status = [torch.zeros((32, 8), dtype=torch.int32) for _ in range(world_size)]

    def call(self, tokens: int, max_ctas: int, skip: tuple[int, ...] = ()) -> None:
        call = make_call(self.world_size, tokens, self.hidden_size, self.form, self.seed + len(self.calls))
        self.calls.append(call)
        norm = call.ranks[0].request.norm
        for rank, own in enumerate(call.ranks):
            if not self.staged:
                own.request = replace(own.request, x=self.slot_view("x", rank, own.request.x).copy_(own.request.x))
            if not self.private_output:
                own.hidden = self.slot_view("hidden", rank, own.hidden)
                if own.request.residual_out == "replicated":
                    own.residual_out = self.slot_view("residual", rank, own.residual_out)
            if rank in skip:
                continue
            residual_table = self.tables.get("residual")
            params = StreamParams(
                *self.slot_arguments(rank, own).values(),
                self.tables["x"].data_ptr(),
                self.tables["hidden"].data_ptr(),
                None if residual_table is None else residual_table.data_ptr(),
                self.tables["pads"].data_ptr(),
                self.epochs[rank].data_ptr(),
                self.status[rank].data_ptr(),
                rank,
                tokens,
                norm.eps,
                norm.weight_offset,
                norm.scale,
            )
            grid = Stream(max_ctas).ctas(tokens, self.world_size)
            self.emulator.launch(rank, 0, grid, self.shape.block, self.shared_bytes, params, programmatic=True)

    def slot_view(self, name: str, rank: int, like: torch.Tensor) -> torch.Tensor:
        return self.buffers[name][rank][0].view(torch.uint8)[: like.nbytes].view(like.dtype).view(like.shape)

    def slot_arguments(self, rank: int, own: Rank) -> dict[str, int | None]:
        """As :meth:`arguments`, but what lies in the slot is known to the emulator already."""
        request, in_slot = own.request, {}
        if not self.staged:
            in_slot["x"] = request.x.data_ptr()
            own = replace(own, request=replace(request, x=torch.zeros(1)))
        if not self.private_output:
            in_slot["hidden"] = own.hidden.data_ptr()
            own = replace(own, hidden=torch.zeros(1))
            if request.residual_out == "replicated":
                in_slot["residual_out"] = own.residual_out.data_ptr()
                own = replace(own, residual_out=torch.zeros(1))
        return self.arguments(rank, own) | in_slot


def check(call: Call, world_size: int) -> None:
    """All ranks have equal bits, every element was written, and is what float64 says but for the roundings of the types."""
    first = call.ranks[0]
    norm = first.request.norm
    for rank, own in enumerate(call.ranks):
        assert torch.equal(bits(own.hidden), bits(first.hidden)), f"rank {rank} has other bits than rank 0"
        begin, end = row_range(call.tokens, world_size, rank)
        if norm_out := own.request.residual_out != "none":
            rows = slice(begin, end) if own.request.residual_out == "sharded" else slice(0, call.tokens)
            kept = own.residual_out[: rows.stop - rows.start].double()
            close(kept, call.h[rows], norm.residual_dtype)
        assert norm_out or len(own.residual_out) == 0
    hidden, want = first.hidden.double(), call.hidden
    if norm.hidden_dtype == FP8:
        want = want.clamp(-448, 448)
    rounded = norm.cast_before_weight or norm.hidden_dtype
    close(hidden, want, rounded if norm.hidden_dtype != FP8 else FP8)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Within the rounding of ``dtype``, twice where a value is rounded twice; float32 sums err by less."""
    eps = torch.finfo(dtype).eps if dtype != FP8 else 0.125
    tolerance = (1.01 * eps * want.abs()).clamp_min(2**-9 if dtype == FP8 else 1e-5)
    wrong = ~((got - want).abs() <= tolerance)
    assert not wrong.any(), f"{int(wrong.sum())} elements of {wrong.numel()}, first at {wrong.nonzero()[0].tolist()}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
