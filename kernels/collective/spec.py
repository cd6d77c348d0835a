"""A call as one value (:class:`Request`), built from the operator's fields, and which token rows each rank owns."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from tw_compile.kernels.collective.fields import (
    HINTS,
    MESSAGE,
    OPERANDS,
    RMS_NORM,
    ROWS,
    Arguments,
    ResidualOut,
    names,
    of_kind,
    values_of,
)
from tw_compile.kernels.collective.prefetch import MOST_TOKENS
from tw_compile.kernels.collective.wires import EXACT, WIRES

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max

OPERAND_ALIGNMENT = 16
"""Alignment in bytes of the tensors that CUDA C++ kernels get. The widest accesses and bulk copies need it."""

MAX_OVERLAP_SMS = 32
"""The most SMs of a call beside other work: kernels with barriers have no more CTAs (``kernels/runtime/barrier.py``)."""


def rows_per_rank(tokens: Any, world_size: int) -> Any:
    """Rows of a shard: ``ceil(tokens / world_size)``; works on SymInts. The last shards may hold fewer valid rows."""
    return (tokens + world_size - 1) // world_size


def row_range(tokens: int, world_size: int, rank: int) -> tuple[int, int]:
    """The half-open range of token rows that ``rank`` owns; empty for trailing ranks of tiny messages."""
    per_rank = rows_per_rank(tokens, world_size)
    begin = min(rank * per_rank, tokens)
    return begin, min(begin + per_rank, tokens)


@dataclass(frozen=True)
class NormSpec:
    """What is computed from the reduced sum. Everything is in float32 unless said otherwise. Has the fields of the kind "norm".

    ``h = scale * sum + bias + residual`` is rounded to ``residual_dtype`` when it is kept. The ``epilogue`` computes ``hidden``
    from ``h`` (``kernels/epilogues``). RMSNorm has ``y = h * rsqrt(mean(h^2) + eps)``. LayerNorm has
    ``y = (h - mean(h)) * rsqrt(mean((h - mean(h))^2) + eps)``. For both:

    - no weight: ``hidden = y``
    - ``cast_before_weight`` is None: ``hidden = y * (weight_offset + weight)`` (torch RMSNorm; Gemma with offset 1)
    - else ``hidden = y.to(cast_before_weight) * weight`` (Hugging Face Llama),

    plus ``Request.norm_bias``, rounded to ``hidden_dtype``. For float8_e4m3fn this is a static quantisation with one scale
    (``Request.hidden_scale``): the float32 values are not rounded to another dtype before. They are multiplied by
    ``1 / hidden_scale`` (float32, rounded), clamped to +-448 and rounded to nearest even.

    With ``scale_columns`` above 0 the scales are computed from the rows. Each row has one scale for every ``scale_columns``
    neighbouring columns, which may be all columns: ``max(amax(|values|) / 448, min_scale)`` in float32. The values are
    multiplied by ``1 / scale`` (rounded), or divided by ``scale`` if ``divides_by_scale``. The scales are returned, see
    :func:`scales_of`.
    """

    eps: float
    weight_offset: float
    cast_before_weight: torch.dtype | None
    hidden_dtype: torch.dtype
    residual_dtype: torch.dtype
    scale: float = 1.0
    epilogue: str = RMS_NORM
    scale_columns: int = 0
    min_scale: float = 0.0
    divides_by_scale: bool = False


SCALE_GROUPS = (64, 128)
"""How many columns may share a scale that is computed from them. All columns of a row may share one, too."""
_SCALES_ALIGNMENT = 16


def check_scales(arguments: Arguments, hidden_size: int) -> None:
    """ValueError unless ``hidden_scale`` or ``scale_columns`` fits ``hidden_dtype`` and ``hidden_size``."""
    columns, min_scale = arguments.scale_columns, arguments.min_scale
    if not columns:
        check_hidden_scale(arguments.hidden_dtype, arguments.hidden_scale)
        return
    if arguments.hidden_dtype != FP8:
        raise ValueError(f"hidden_dtype: expected {FP8} with scale_columns {columns}, got {arguments.hidden_dtype}")
    if arguments.hidden_scale is not None:
        raise ValueError(f"hidden_scale: expected None with scale_columns {columns}, got a tensor")
    if columns != hidden_size and (columns not in SCALE_GROUPS or hidden_size % columns):
        groups = " or ".join(map(str, SCALE_GROUPS))
        raise ValueError(
            f"scale_columns: expected the hidden size, {hidden_size}, or {groups} if that is a multiple, got {columns}"
        )
    if not 0 <= min_scale < float("inf"):
        raise ValueError(f"min_scale: expected a number from 0 on, got {min_scale}")


def scales_bytes(tokens: int, hidden_size: int, scale_columns: int) -> int:
    """Bytes behind float8 rows ``[tokens, hidden]`` for their scales and the padding that aligns these; 0 without scales."""
    return (
        _scales_begin(tokens * hidden_size) - tokens * hidden_size + 4 * tokens * (hidden_size // scale_columns)
        if (scale_columns)
        else 0
    )


def _scales_begin(codes: int) -> int:
    return -(-codes // _SCALES_ALIGNMENT) * _SCALES_ALIGNMENT


def scales_of(hidden: torch.Tensor, scale_columns: int) -> torch.Tensor:
    """The float32 scales ``[tokens, hidden / scale_columns]`` of ``hidden [tokens, hidden]`` that :func:`empty_hidden` made.

    The scales lie behind the rows in the same storage, and begin at a multiple of 16 bytes. So kernels find them without
    another address, also in memory that peers write.
    """
    tokens, hidden_size = hidden.shape
    begin = hidden.storage_offset() + _scales_begin(hidden.numel())
    shape = (tokens, hidden_size // scale_columns)
    return hidden.new_empty(0, dtype=torch.float32).set_(hidden.untyped_storage(), begin // 4, shape, (shape[1], 1))


def empty_hidden(tokens: int, hidden_size: int, norm: NormSpec, device: torch.device) -> torch.Tensor:
    """Uninitialised ``hidden [tokens, hidden]``, with room behind it for the scales if they are computed from the rows."""
    if not norm.scale_columns:
        return torch.empty((tokens, hidden_size), dtype=norm.hidden_dtype, device=device)
    nbytes = tokens * hidden_size + scales_bytes(tokens, hidden_size, norm.scale_columns)
    memory = torch.empty(nbytes, dtype=norm.hidden_dtype, device=device)
    return memory[: tokens * hidden_size].view(tokens, hidden_size)


def check_hidden_scale(hidden_dtype: torch.dtype, hidden_scale: torch.Tensor | None) -> None:
    """ValueError unless there is a scale exactly if ``hidden_dtype`` is float8_e4m3fn; it is float32 and has one element."""
    if hidden_scale is None:
        if hidden_dtype == FP8:
            raise ValueError(f"hidden_scale: expected a float32 tensor [1] for hidden_dtype {hidden_dtype}, got None")
        return
    got = f"{hidden_scale.dtype} {list(hidden_scale.shape)}"
    if hidden_dtype != FP8:
        raise ValueError(f"hidden_scale: expected None for hidden_dtype {hidden_dtype} (only {FP8} has one), got {got}")
    if hidden_scale.dtype != torch.float32 or hidden_scale.numel() != 1:
        raise ValueError(f"hidden_scale: expected a float32 tensor [1], got {got}")


def check_wire(wire: str, hidden_size: Any) -> None:
    """ValueError unless a wire has this name, and ``hidden_size`` is a multiple of the group of its codes."""
    if wire == EXACT:
        return
    if wire not in WIRES:
        raise ValueError(f"wire: expected one of {', '.join(WIRES)}, got {wire!r}")
    if hidden_size % WIRES[wire].group:
        raise ValueError(
            f"wire: expected a hidden size that is a multiple of {WIRES[wire].group} for {wire}, got {hidden_size}"
        )


def check_overlap_sms(overlap_sms: int) -> None:
    """ValueError unless ``overlap_sms`` is 0 or a number of SMs that a call beside other work can have."""
    if not 0 <= overlap_sms <= MAX_OVERLAP_SMS:
        raise ValueError(
            f"overlap_sms: expected 0 (not beside other work) or 1 to {MAX_OVERLAP_SMS} SMs, got {overlap_sms}"
        )


@dataclass(frozen=True)
class Request:
    """One call: ``x [tokens, hidden]`` is this rank's partial sum; tensors are contiguous.

    ``residual`` is ``[tokens, hidden]``, or ``[rows_per_rank, hidden]`` (this rank's rows) when ``residual_sharded``.
    ``bias``, ``weight`` and ``norm_bias`` are ``[hidden]``. ``residual_out`` says which rows of ``h`` the caller wants back.
    ``hidden_scale`` is float32 ``[1]``, with ``norm.hidden_dtype`` float8_e4m3fn only. ``overlap_sms``: the SMs that the call
    may use beside what the current stream does until ``wait_``; 0: the call runs in the current stream's own order.
    ``results_in_slot``: the rows that peers write for this rank may stay in the slot's memory, where the slot's next call
    overwrites them. ``wire``: how rows travel, a name of ``wires.WIRES``. ``prefetch``: tensors of which a kernel may bring up
    to ``prefetch_bytes`` into the L2 cache meanwhile, see ``prefetch.py``. ``outputs``: the tensors for the results, if they
    exist before the launch.
    ``feed_from``: the number of tokens from which on a GEMM may be fed the rows of the result (``fed_mm.py``); 0: never.
    ``form``: equal for calls that differ only in the contents and addresses of tensors; None: the form is not remembered.
    """

    x: torch.Tensor
    residual: torch.Tensor | None
    bias: torch.Tensor | None
    weight: torch.Tensor | None
    norm: NormSpec
    residual_sharded: bool
    residual_out: ResidualOut
    group_name: str
    slot: int
    hidden_scale: torch.Tensor | None = None
    overlap_sms: int = 0
    results_in_slot: bool = False
    wire: str = EXACT
    norm_bias: torch.Tensor | None = None
    prefetch: list[torch.Tensor] | None = None
    prefetch_bytes: int = 0
    feed_from: int = 0
    outputs: tuple[torch.Tensor, torch.Tensor] | None = None
    form: Hashable | None = None

    def limited(self, sms: int) -> int:
        """``sms``, but at most as many as the call may use."""
        return min(sms, self.overlap_sms) if self.overlap_sms else sms

    def allocate(self, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialised ``(hidden, residual_out)``; ``residual_out`` has 0 rows if the caller does not want it."""
        if self.outputs is not None:
            return self.outputs
        rows = self.residual_rows(world_size)
        return (
            empty_hidden(self.x.shape[0], self.x.shape[1], self.norm, self.x.device),
            self.x.new_empty((rows, self.x.shape[1]), dtype=self.norm.residual_dtype),
        )

    def residual_rows(self, world_size: int) -> int:
        """Rows of the new residual that the caller wants back."""
        tokens = self.x.shape[0]
        return {"none": 0, "sharded": rows_per_rank(tokens, world_size), "replicated": tokens}[self.residual_out]


class Operands(NamedTuple):
    """The tensors of a :class:`Request`, all of them contiguous and at multiples of :data:`OPERAND_ALIGNMENT`."""

    x: torch.Tensor
    residual: torch.Tensor | None
    bias: torch.Tensor | None
    weight: torch.Tensor | None
    hidden_scale: torch.Tensor | None
    norm_bias: torch.Tensor | None


operand_values = values_of(names(OPERANDS))
"""Takes the tensors out of :class:`Arguments`, in the order in which :class:`Operands` has them behind ``x``."""
_operands = attrgetter(MESSAGE, *names(OPERANDS))


def operands_of(request: Request) -> Operands:
    return Operands(*_operands(request))


_NORM = names(of_kind("norm"))
_norm_values = values_of(_NORM)
_PLAIN = (*names(field for field in OPERANDS if not field.role.rows), *names(of_kind("layout")), *HINTS)
_PLAIN += tuple(name for name in names(of_kind("routing")) if name != "transport")
_plain_values = values_of(_PLAIN)
_row_values = values_of(ROWS)


def request_of(x: torch.Tensor, arguments: Arguments, form: Hashable | None) -> Request:
    """The request for these arguments. ``x`` is contiguous; operands are made contiguous."""
    rows = (tensor if tensor is None else tensor.contiguous() for tensor in _row_values(arguments))
    fields: dict[str, Any] = dict(zip(_PLAIN, _plain_values(arguments), strict=True))
    fields.update(zip(ROWS, rows, strict=True))
    if not may_prefetch(x.shape[0], arguments):
        fields |= {"prefetch": None, "prefetch_bytes": 0}
    norm = NormSpec(**dict(zip(_NORM, _norm_values(arguments), strict=True)))
    return Request(x=x, norm=norm, form=form, **fields)


def may_prefetch(tokens: int, arguments: Arguments) -> bool:
    """Whether a call of ``tokens`` tokens may prefetch the tensors that it is given.

    A call beside other work may not: its prefetch would compete with the reads of that work.
    """
    asked = arguments.prefetch and arguments.prefetch_bytes
    return bool(asked) and tokens <= MOST_TOKENS and not arguments.overlap_sms


def whole_residual(residual: torch.Tensor, tokens: int, world_size: int, rank: int) -> torch.Tensor | None:
    """All rows, ``[tokens, hidden]``, of a sharded residual, if the call that made it computed them all; else None.

    Such a call (see :func:`slice_of_whole_residual`) returns a slice of a tensor that holds every rank's rows. The graph
    expects a shard, so the slice has a shard's shape. Only its storage shows the difference. The answer is the same on all
    ranks: either all of them computed all rows, or none did.
    """
    per_rank, hidden_size = residual.shape
    row_bytes = hidden_size * residual.element_size()
    storage = residual.untyped_storage()
    if storage.nbytes() != world_size * per_rank * row_bytes:
        return None
    if residual.storage_offset() != rank * per_rank * hidden_size:
        return None
    return residual.as_strided((tokens, hidden_size), (hidden_size, 1), 0)


def slice_of_whole_residual(whole: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
    """This rank's rows of ``whole [world_size * rows_per_rank, hidden]``, which has a storage of its own."""
    per_rank = whole.shape[0] // world_size
    return whole[rank * per_rank : (rank + 1) * per_rank]
