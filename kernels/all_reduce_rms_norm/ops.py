"""The torch operators: schemas, fake kernels, dispatch to a transport.

    all_reduce_rms_norm_start(x, residual, bias, weight, ...) -> (hidden, residual_out)
    mm_all_reduce_rms_norm_start(a, b, residual, bias, weight, ...) -> (hidden, residual_out)
    all_reduce_rms_norm_wait_(hidden!, residual_out!, keep, group_name, slot)
    all_reduce_rms_norm_hold_(results!, outputs)

``start`` returns outputs that hold nothing until ``wait_`` has run: between the two, independent work can proceed.
``mm_start`` is ``start`` with ``x = mm(a, b)``, which it writes to where peers read it if the transport has such memory.
Only an operator can do that: memory that outlives the graph must never be seen by a compiler, which would reuse it.
``wait_`` declares that it writes them, so no compiler moves a reader before it, and ``keep`` holds every input of the
call, so none is freed or reused while a peer or another stream may still read it. At most one call per ``(group, slot)``
is in flight: a start completes the one before it.

With ``overlap_sms`` above 0 the communication runs beside what the current stream does before ``wait_``, on at most that
many SMs (see ``beside.py``); NCCL and gloo always reduce beside it, on as many as they like. 0: the kernel is in the current
stream's own order, as everything is that ``start`` does on the way to it (``mm_start``'s matmul). That matmul leaves
``reserved_sms`` SMs to what runs beside it (see ``kernels/mm_leaving_sms.py``).

With ``results_in_slot`` a call may leave its results in the slot's memory, where the slot's next call overwrites them: who asks
for that has read them by then. To a compiler they are tensors like others, whose memory it gives to other values when
nothing reads them any more. ``hold_``, which does nothing, is what reads them last, after a graph's ``outputs``, which might be
given that memory, exist.

``eps_tensor``, a CPU tensor, takes the place of ``eps`` where a graph has it as an input (``dynamic=True``).

Registered with ``torch.library.Library`` (less overhead a call than ``custom_op``). This module imports neither Triton
nor any transport; those load at the first call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.library import Library

from tw_compile import compat
from tw_compile.kernels.all_reduce_rms_norm.spec import (
    NormSpec,
    Request,
    ResidualOut,
    check_hidden_scale,
    check_overlap_sms,
    rows_per_rank,
)
from tw_compile.kernels.all_reduce_rms_norm.transport import Started, Transport, get_transport
from tw_compile.kernels.mm_leaving_sms import check_reserved_sms

NAMESPACE = "tw_compile"
_library = Library(NAMESPACE, "DEF")

# Both ways to start a call: what they reduce, and then the same arguments.
_REQUEST = (
    "Tensor? residual, Tensor? bias, Tensor? weight, float eps, float weight_offset, ScalarType? cast_before_weight, "
    "ScalarType hidden_dtype, ScalarType residual_dtype, bool residual_sharded, str residual_out, str group_name, "
    "str transport, int slot, float scale=1.0, Tensor? hidden_scale=None, Tensor? eps_tensor=None, int overlap_sms=0, "
    "bool results_in_slot=False"
)
_library.define(f"all_reduce_rms_norm_start(Tensor x, {_REQUEST}) -> (Tensor, Tensor)")
_library.define(
    f"mm_all_reduce_rms_norm_start(Tensor a, Tensor b, {_REQUEST}, *, int reserved_sms=0) -> (Tensor, Tensor)"
)
_library.define(
    "all_reduce_rms_norm_wait_(Tensor(a!) hidden, Tensor(b!) residual_out, Tensor[] keep, str group_name, int slot) -> ()"
)

# What is held may be laid out as it is, so nothing is copied for it.
_library.define(
    "all_reduce_rms_norm_hold_(Tensor(a!)[] results, Tensor[] outputs) -> ()", tags=(torch.Tag.flexible_layout,)
)

_in_flight: dict[tuple[str, int], Started] = {}
_completed_early: set[tuple[str, int, int]] = set()
"""``(group_name, slot, address of hidden)`` of calls that were completed by the next start; their wait_ has nothing to do."""


def _start(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    transport, request = _request(x.contiguous(), *rest)
    _complete_earlier(request)
    return _begin(transport, request)


def _mm_start(a: torch.Tensor, b: torch.Tensor, *rest: Any, reserved_sms: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    _check_factors(a, b)
    check_reserved_sms(reserved_sms)
    # The message has a shape, a dtype and a device, but no memory before the transport has said where it goes.
    absent = a.new_empty(1).expand(a.shape[0], b.shape[1])
    transport, request = _request(absent, *rest)
    # Peers may read the slot's memory until the earlier call on it is complete. What completes it is on this stream, or this
    # stream waits for it, and it ends only when all peers have read (see kernels/_sync.py): the GEMM may overwrite it.
    _complete_earlier(request)
    buffer = transport.message_buffer(request)
    with compat.sm_carveout(reserved_sms):
        x = torch.mm(a, b) if buffer is None else torch.mm(a, b, out=buffer)
    return _begin(transport, replace(request, x=x))


def _check_factors(a: torch.Tensor, b: torch.Tensor) -> None:
    """ValueError unless ``mm(a, b)`` is defined."""
    if a.dim() != 2:
        raise ValueError(f"a: expected [tokens, k], got {list(a.shape)}")
    if b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"b: expected [k, hidden] with the k of a {list(a.shape)}, got {list(b.shape)}")
    if b.dtype != a.dtype:
        raise ValueError(f"b: expected the dtype of a, {a.dtype}, got {b.dtype}")


def _request(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    cast_before_weight: torch.dtype | None,
    hidden_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    residual_sharded: bool,
    residual_out: ResidualOut,
    group_name: str,
    transport: str,
    slot: int,
    scale: float = 1.0,
    hidden_scale: torch.Tensor | None = None,
    eps_tensor: torch.Tensor | None = None,
    overlap_sms: int = 0,
    results_in_slot: bool = False,
) -> tuple[Transport, Request]:
    check_hidden_scale(hidden_dtype, hidden_scale)
    check_overlap_sms(overlap_sms)
    _check_eps_tensor(eps_tensor)
    if eps_tensor is not None:
        eps = float(eps_tensor)
    norm = NormSpec(eps, weight_offset, cast_before_weight, hidden_dtype, residual_dtype, scale)
    request = Request(
        x,
        None if residual is None else residual.contiguous(),
        None if bias is None else bias.contiguous(),
        None if weight is None else weight.contiguous(),
        norm,
        residual_sharded,
        residual_out,
        group_name,
        slot,
        hidden_scale,
        overlap_sms,
        results_in_slot,
    )
    return get_transport(transport), request


def _check_eps_tensor(eps_tensor: torch.Tensor | None) -> None:
    """ValueError for what can't be read as a number without waiting for a device."""
    if eps_tensor is not None and (eps_tensor.numel() != 1 or eps_tensor.device.type != "cpu"):
        raise ValueError(
            f"eps_tensor: expected a CPU tensor of one element, got {list(eps_tensor.shape)} on {eps_tensor.device}"
        )


def _complete_earlier(request: Request) -> None:
    """Complete the call in flight on the request's slot, if there is one.

    There is when a compiler moved a start before the wait_ of an independent call, or when that call was abandoned by an
    exception. The slot is free once the call is complete, and completing it early is always right.
    """
    slot = (request.group_name, request.slot)
    earlier = _in_flight.pop(slot, None)
    if earlier is not None:
        if earlier.finish is not None:
            earlier.finish()
        _completed_early.add((*slot, earlier.hidden.data_ptr()))


def _check_room(request: Request) -> None:
    """ValueError where the calls beside other work would have more than half of the device's SMs.

    They must all run at once, and the other half is for a call that is not beside other work (see ``kernels/_sync.py``).
    """
    device = request.x.device
    if not request.overlap_sms or device.type != "cuda":
        return
    taken = sum(started.overlap_sms for started in _in_flight.values() if started.hidden.device == device)
    room = torch.cuda.get_device_properties(device).multi_processor_count // 2
    if taken + request.overlap_sms > room:
        raise ValueError(
            f"overlap_sms: expected at most {room} SMs, half of {device}, for all calls in flight together, "
            f"got {request.overlap_sms} and {taken} of calls that have not been waited for"
        )


def _begin(transport: Transport, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    _check_room(request)
    started = transport.start(request)
    _in_flight[(request.group_name, request.slot)] = started
    return started.hidden, started.residual


def _start_fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    cast_before_weight: torch.dtype | None,
    hidden_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    residual_sharded: bool,
    residual_out: ResidualOut,
    group_name: str,
    transport: str,
    slot: int,
    scale: float = 1.0,
    hidden_scale: torch.Tensor | None = None,
    eps_tensor: torch.Tensor | None = None,
    overlap_sms: int = 0,
    results_in_slot: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_hidden_scale(hidden_dtype, hidden_scale)
    check_overlap_sms(overlap_sms)
    _check_eps_tensor(eps_tensor)
    tokens, hidden_size = x.shape
    world_size = compat.resolve_process_group(group_name).size()
    rows = {"none": 0, "sharded": rows_per_rank(tokens, world_size), "replicated": tokens}[residual_out]
    return x.new_empty((tokens, hidden_size), dtype=hidden_dtype), x.new_empty(
        (rows, hidden_size), dtype=residual_dtype
    )


def _mm_start_fake(
    a: torch.Tensor, b: torch.Tensor, *rest: Any, reserved_sms: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_factors(a, b)
    check_reserved_sms(reserved_sms)
    return _start_fake(a.new_empty((a.shape[0], b.shape[1])), *rest)


def _wait_(
    hidden: torch.Tensor, residual_out: torch.Tensor, keep: list[torch.Tensor], group_name: str, slot: int
) -> None:
    started = _in_flight.get((group_name, slot))
    if started is not None and started.hidden.data_ptr() == hidden.data_ptr():
        del _in_flight[group_name, slot]
        if started.finish is not None:
            started.finish()
        return
    early = (group_name, slot, hidden.data_ptr())
    if early not in _completed_early:
        raise RuntimeError(
            f"all_reduce_rms_norm_wait_: no call with this output is in flight on group {group_name!r}, slot {slot}; "
            "every wait_ needs its own start before it"
        )
    _completed_early.remove(early)


def _wait_fake(
    hidden: torch.Tensor, residual_out: torch.Tensor, keep: list[torch.Tensor], group_name: str, slot: int
) -> None:
    return None


def _hold_(results: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    return None


for _key in ("CPU", "CUDA"):
    _library.impl("all_reduce_rms_norm_start", _start, _key)
    _library.impl("mm_all_reduce_rms_norm_start", _mm_start, _key)
    _library.impl("all_reduce_rms_norm_wait_", _wait_, _key)
    _library.impl("all_reduce_rms_norm_hold_", _hold_, _key)
torch.library.register_fake(f"{NAMESPACE}::all_reduce_rms_norm_start", _start_fake, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::mm_all_reduce_rms_norm_start", _mm_start_fake, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::all_reduce_rms_norm_wait_", _wait_fake, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::all_reduce_rms_norm_hold_", _hold_, lib=_library)

start = torch.ops.tw_compile.all_reduce_rms_norm_start.default
mm_start = torch.ops.tw_compile.mm_all_reduce_rms_norm_start.default
wait_ = torch.ops.tw_compile.all_reduce_rms_norm_wait_.default
hold_ = torch.ops.tw_compile.all_reduce_rms_norm_hold_.default
