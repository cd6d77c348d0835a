"""The torch operators: schemas, fake kernels, dispatch to a transport.

    all_reduce_rms_norm_start(x, residual, bias, weight, ...) -> (hidden, residual_out)
    mm_all_reduce_rms_norm_start(a, b, residual, bias, weight, ...) -> (hidden, residual_out)
    all_reduce_rms_norm_quant_start(x, ..., scale_columns, min_scale, divides_by_scale) -> (hidden, residual_out, scales)
    mm_all_reduce_rms_norm_quant_start(a, b, ..., scale_columns, ...) -> (hidden, residual_out, scales)
    all_reduce_rms_norm_wait_(hidden!, residual_out!, keep, group_name, slot, scales!)
    all_reduce_rms_norm_hold_(results!, outputs)

The outputs of ``start`` hold no results until ``wait_`` has run. Independent work can run between the two.
``mm_start`` is ``start`` with ``x = mm(a, b)``. It writes ``x`` to memory that peers read, if the transport has such memory.
Only an operator can do that: a compiler must never see memory that outlives the graph, because it would reuse that memory.
``wait_`` declares that it writes the outputs, so no compiler moves a reader before it. ``keep`` holds every input of the
call, so no input is freed or reused while a peer or another stream may still read it. At most one call per ``(group, slot)``
is in flight: a start completes the call before it.

``quant_start`` and ``mm_quant_start`` round to float8. The owner of a row computes its scales from the row. The operators
return the scales, too.

With ``overlap_sms`` above 0 the communication runs beside what the current stream does before ``wait_``, on at most that
many SMs (see ``side_stream.py``). NCCL and gloo always reduce beside the current stream, on as many SMs as they like. With 0
the kernel runs in the current stream's own order. Everything that ``start`` does before the kernel always runs in that order
(``mm_start``'s matmul). That matmul leaves ``reserved_sms`` SMs to what runs beside it (see
``kernels/gemm/mm_leaving_sms.py``).

With ``results_in_slot`` a call may leave its results in the slot's memory, where the slot's next call overwrites them. The
caller must have read them by then. To a compiler the results are ordinary tensors: it gives their memory to other values as
soon as nothing reads them any more. A graph's ``outputs`` might get that memory. So ``hold_``, which does nothing, is the last
reader of the results: it also takes ``outputs``, so it comes after them.

``prefetch`` are tensors, the weights that the next matmul reads. A kernel may bring up to ``prefetch_bytes`` of them into the
L2 cache while the message is under way (see ``prefetch.py``). No result depends on them, and ``wait_`` need not keep them.

``eps_tensor``, a CPU tensor, replaces ``eps`` where the graph has ``eps`` as an input (``dynamic=True``).

This module imports neither Triton nor any transport; those load at the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from tw_compile import compat
from tw_compile.kernels.collective.check_operands import check_operands, checks_operands
from tw_compile.kernels.collective.fields import (
    FORM_VALUES,
    LAYER_NORM,
    RMS_NORM,
    ROWS,
    SCALES_SCHEMA,
    SCHEMA,
    SINGLES,
    Arguments,
    values_of,
)
from tw_compile.kernels.collective.prefetch import check_prefetch, form_of_prefetch
from tw_compile.kernels.collective.spec import (
    OPERAND_ALIGNMENT,
    Operands,
    Request,
    check_overlap_sms,
    check_scales,
    check_wire,
    operand_values,
    request_of,
    rows_per_rank,
    scales_of,
)
from tw_compile.kernels.collective.transport import Started, Transport, get_transport
from tw_compile.kernels.epilogues import EPILOGUES
from tw_compile.kernels.gemm.mm_leaving_sms import check_reserved_sms, mm
from tw_compile.kernels.runtime.operator import define

if TYPE_CHECKING:
    from tw_compile.kernels.collective.known import Known

in_flight: dict[tuple[str, int], Started] = {}
completed_early: set[tuple[str, int, int]] = set()
"""``(group_name, slot, address of hidden)`` of calls that the slot's next start has completed; their wait_ does nothing."""


_rows, _singles, _form_values = values_of(ROWS), values_of(SINGLES), values_of(FORM_VALUES)


def _start(x: torch.Tensor, *rest: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = Arguments(*rest, **named)
    if checks_operands():
        check_operands(arguments, x.device)
    form = form_of_call((x.shape, x.dtype), (x,), arguments)
    known = _known(x.device, arguments, form)
    if known is not None:
        complete_earlier(arguments.group_name, arguments.slot)
        return _begin_again(known, x, arguments)
    request = _request(x.contiguous(), arguments, form)
    complete_earlier(request.group_name, request.slot)
    return begin(get_transport(arguments.transport), request)


def _mm_start(
    a: torch.Tensor, b: torch.Tensor, *rest: Any, reserved_sms: int = 0, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = Arguments(*rest, **named)
    if checks_operands():
        check_operands(arguments, a.device)
    form = form_of_call((a.shape, b.shape, a.dtype, b.dtype), (), arguments)
    known = _known(a.device, arguments, form)
    # Peers may read the slot's memory until the slot's earlier call is complete. The earlier call's kernel is on this stream,
    # or this stream waits for it. That kernel ends only when all peers have read (see kernels/runtime/barrier.py). So the GEMM
    # may overwrite the memory.
    if known is not None:
        complete_earlier(arguments.group_name, arguments.slot)
        return _begin_again(known, mm(a, b, reserved_sms, known.buffer), arguments)
    _check_factors(a, b)
    check_reserved_sms(reserved_sms)
    # The message has a shape, a dtype and a device, but no memory before the transport has said where it goes.
    request = _request(a.new_empty(1).expand(a.shape[0], b.shape[1]), arguments, form)
    transport = get_transport(arguments.transport)
    complete_earlier(request.group_name, request.slot)
    buffer = transport.message_buffer(request)
    return begin(transport, replace(request, x=mm(a, b, reserved_sms, buffer)))


def form_of_call(message: Hashable, tensors: tuple[torch.Tensor, ...], arguments: Arguments) -> Hashable | None:
    """``Request.form`` of a call.

    ``message``: shapes and dtypes of the tensors that make the message. ``tensors``: those of them that kernels read directly.

    Returns None where operands would have to be copied, or where a value would have to be read from a tensor (``eps_tensor``).
    """
    if arguments.eps_tensor is not None:
        return None
    # The message's shape determines the shapes of operands that all rows share (biases, weight).
    described: list[Hashable] = [message, _form_values(arguments)]
    for tensor in _rows(arguments):
        if tensor is None:
            described.append(None)
        elif tensor.data_ptr() % OPERAND_ALIGNMENT or not tensor.is_contiguous():
            return None
        else:
            described.append(tensor.dtype)
    for tensor in tensors:
        if tensor.data_ptr() % OPERAND_ALIGNMENT or not tensor.is_contiguous():
            return None
    residual = arguments.residual
    if residual is not None:
        described.append(residual.shape)
        if arguments.residual_sharded:
            described.append(_place(residual))  # tells whether the shard is a slice, see `whole_residual`
    for tensor in _singles(arguments):
        if tensor is not None:
            described.append((tensor.shape, tensor.dtype))
    if arguments.prefetch:
        described.append(form_of_prefetch(arguments.prefetch))
    return tuple(described)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().nbytes(), int(tensor.storage_offset())


def _known(device: torch.device, arguments: Arguments, form: Hashable | None) -> Known | None:
    return None if form is None else get_transport(arguments.transport).known(arguments.group_name, device, form)


def _begin_again(known: Known, x: torch.Tensor, arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    check_room(x.device, arguments.overlap_sms)
    started = known.start(Operands(x, *operand_values(arguments)), arguments.prefetch)
    in_flight[arguments.group_name, arguments.slot] = started
    return started.hidden, started.residual


def _check_factors(a: torch.Tensor, b: torch.Tensor) -> None:
    """ValueError unless ``mm(a, b)`` is defined."""
    if a.dim() != 2:
        raise ValueError(f"a: expected [tokens, k], got {list(a.shape)}")
    if b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"b: expected [k, hidden] with the k of a {list(a.shape)}, got {list(b.shape)}")
    if b.dtype != a.dtype:
        raise ValueError(f"b: expected the dtype of a, {a.dtype}, got {b.dtype}")


def _request(x: torch.Tensor, arguments: Arguments, form: Hashable | None) -> Request:
    check_scales(arguments, x.shape[1])
    check_overlap_sms(arguments.overlap_sms)
    check_wire(arguments.wire, x.shape[1])
    check_prefetch(arguments.prefetch, arguments.prefetch_bytes, x.device)
    _check_eps_tensor(arguments.eps_tensor)
    if arguments.eps_tensor is not None:
        arguments = arguments._replace(eps=float(arguments.eps_tensor))
    return request_of(x, arguments, form)


def _check_eps_tensor(eps_tensor: torch.Tensor | None) -> None:
    """ValueError if ``eps_tensor`` can't be read as a number without waiting for a device."""
    if eps_tensor is not None and (eps_tensor.numel() != 1 or eps_tensor.device.type != "cpu"):
        raise ValueError(
            f"eps_tensor: expected a CPU tensor of one element, got {list(eps_tensor.shape)} on {eps_tensor.device}"
        )


def complete_earlier(group_name: str, slot: int) -> None:
    """Complete the call in flight on the slot, if there is one.

    There is one if a compiler moved a start before the wait_ of an independent call, or if an exception abandoned that call.
    The slot is free once the call is complete. Completing a call early is always correct.
    """
    earlier = in_flight.get((group_name, slot))
    if earlier is not None:
        if earlier.finish is not None:
            earlier.finish()  # if this fails, the call stays in flight
        del in_flight[group_name, slot]
        completed_early.add((group_name, slot, earlier.hidden.data_ptr()))


def check_room(device: torch.device, overlap_sms: int) -> None:
    """ValueError if the calls beside other work would hold more than half of the device's SMs.

    All these calls must run at once. The other half of the SMs is for a call that is not beside other work
    (``kernels/runtime/barrier.py``).
    """
    if not overlap_sms or device.type != "cuda":
        return
    taken = sum(started.overlap_sms for started in in_flight.values() if started.hidden.device == device)
    room = _sms(device) // 2
    if taken + overlap_sms > room:
        raise ValueError(
            f"overlap_sms: expected at most {room} SMs, half of {device}, for all calls in flight together, "
            f"got {overlap_sms} and {taken} of calls that have not been waited for"
        )


@cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def begin(transport: Transport, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    check_room(request.x.device, request.overlap_sms)
    started = transport.start(request)
    in_flight[(request.group_name, request.slot)] = started
    return started.hidden, started.residual


def _start_fake(x: torch.Tensor, *rest: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = Arguments(*rest, **named)
    check_scales(arguments, x.shape[1])
    check_overlap_sms(arguments.overlap_sms)
    check_wire(arguments.wire, x.shape[1])
    check_prefetch(arguments.prefetch, arguments.prefetch_bytes, x.device)
    _check_eps_tensor(arguments.eps_tensor)
    tokens, hidden_size = x.shape
    world_size = compat.resolve_process_group(arguments.group_name).size()
    rows = {"none": 0, "sharded": rows_per_rank(tokens, world_size), "replicated": tokens}[arguments.residual_out]
    return x.new_empty((tokens, hidden_size), dtype=arguments.hidden_dtype), x.new_empty(
        (rows, hidden_size), dtype=arguments.residual_dtype
    )


def _mm_start_fake(
    a: torch.Tensor, b: torch.Tensor, *rest: Any, reserved_sms: int = 0, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_factors(a, b)
    check_reserved_sms(reserved_sms)
    return _start_fake(a.new_empty((a.shape[0], b.shape[1])), *rest, **named)


_Start = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _with_scales(start: _Start, *args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of ``start``, then the scales that the call makes."""
    hidden, residual_out = start(*args, **named)
    return hidden, residual_out, scales_of(hidden, named["scale_columns"])


def _with_scales_fake(start: _Start, *args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    columns = named["scale_columns"]
    if columns < 1:
        raise ValueError(f"scale_columns: expected the columns that share a scale, got {columns}")
    hidden, residual_out = start(*args, **named)
    scales = hidden.new_empty((hidden.shape[0], hidden.shape[1] // columns), dtype=torch.float32)
    return hidden, residual_out, scales


def wait_here(
    hidden: torch.Tensor,
    residual_out: torch.Tensor,
    keep: list[torch.Tensor],
    group_name: str,
    slot: int,
    scales: torch.Tensor | None = None,
) -> None:
    started = in_flight.get((group_name, slot))
    if started is not None and started.hidden.data_ptr() == hidden.data_ptr():
        if started.finish is not None:
            started.finish()
        del in_flight[group_name, slot]
        return
    early = (group_name, slot, hidden.data_ptr())
    if early not in completed_early:
        raise RuntimeError(
            f"all_reduce_rms_norm_wait_: no call with this output is in flight on group {group_name!r}, slot {slot}; "
            "every wait_ needs its own start before it"
        )
    completed_early.remove(early)


def is_in_flight(hidden: torch.Tensor, group_name: str, slot: int) -> bool:
    """Whether a ``wait_`` for the call with this output is still to come."""
    started = in_flight.get((group_name, slot))
    now = started is not None and started.hidden.data_ptr() == hidden.data_ptr()
    return now or (group_name, slot, hidden.data_ptr()) in completed_early


def is_complete(hidden: torch.Tensor, group_name: str, slot: int) -> bool:
    """Whether the call with this output was completed by the slot's next start, before its ``wait_``.

    A call in flight may have its output where an abandoned one had it, whose ``wait_`` never came.
    """
    started = in_flight.get((group_name, slot))
    now = started is not None and started.hidden.data_ptr() == hidden.data_ptr()
    return not now and (group_name, slot, hidden.data_ptr()) in completed_early


def _wait_fake(
    hidden: torch.Tensor,
    residual_out: torch.Tensor,
    keep: list[torch.Tensor],
    group_name: str,
    slot: int,
    scales: torch.Tensor | None = None,
) -> None:
    return None


def _hold_(results: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    return None


@cache
def operators_of(epilogue: str) -> tuple[torch._ops.OpOverload, torch._ops.OpOverload]:
    """``start`` and ``mm_start`` with this epilogue. The first call defines the operators.

    ``wait_`` completes their calls, as it does for all epilogues.

    Raises:
        ValueError: No epilogue has this name.
    """
    name = EPILOGUES[epilogue].name
    functions = (_start, _start_fake, _mm_start, _mm_start_fake)
    if name != RMS_NORM:
        functions = tuple(partial(function, epilogue=name) for function in functions)  # type: ignore[assignment]
    run, fake, mm_run, mm_fake = functions
    return (
        define(f"all_reduce_{name}_start(Tensor x, {SCHEMA}) -> (Tensor, Tensor)", run, fake),
        define(
            f"mm_all_reduce_{name}_start(Tensor a, Tensor b, {SCHEMA}, *, int reserved_sms=0) -> (Tensor, Tensor)",
            mm_run,
            mm_fake,
        ),
    )


@cache
def quant_operators_of(epilogue: str) -> tuple[torch._ops.OpOverload, torch._ops.OpOverload]:
    """As :func:`operators_of`, but the operators compute the scales of float8 results and return them as the third result."""
    name = EPILOGUES[epilogue].name
    run, fake, mm_run, mm_fake = (
        partial(with_scales, function if name == RMS_NORM else partial(function, epilogue=name))
        for with_scales, function in (
            (_with_scales, _start),
            (_with_scales_fake, _start_fake),
            (_with_scales, _mm_start),
            (_with_scales_fake, _mm_start_fake),
        )
    )
    keywords = f"*, {SCALES_SCHEMA}"
    results = "(Tensor, Tensor, Tensor)"
    return (
        define(f"all_reduce_{name}_quant_start(Tensor x, {SCHEMA}, {keywords}) -> {results}", run, fake),
        define(
            f"mm_all_reduce_{name}_quant_start(Tensor a, Tensor b, {SCHEMA}, {keywords}, int reserved_sms=0) -> {results}",
            mm_run,
            mm_fake,
        ),
    )


start, mm_start = operators_of(RMS_NORM)
STARTS, MM_STARTS = zip(
    *(operators(epilogue) for operators in (operators_of, quant_operators_of) for epilogue in (RMS_NORM, LAYER_NORM)),
    strict=True,
)
"""The operators of the epilogues that the passes find."""
QUANT_STARTS = tuple(operator for epilogue in (RMS_NORM, LAYER_NORM) for operator in quant_operators_of(epilogue))
"""The operators among them that return scales."""
wait_ = define(
    "all_reduce_rms_norm_wait_(Tensor(a!) hidden, Tensor(b!) residual_out, Tensor[] keep, str group_name, int slot, "
    "Tensor(c!)? scales=None) -> ()",
    wait_here,
    _wait_fake,
)
hold_ = define(
    "all_reduce_rms_norm_hold_(Tensor(a!)[] results, Tensor[] outputs) -> ()",
    _hold_,
    _hold_,
    tags=(torch.Tag.flexible_layout,),  # tensors of any layout will do, so Inductor copies none for this operator
)
