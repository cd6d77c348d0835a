"""A debug mode that checks whether operands are equal on all ranks where they must be.

Fused operators assume that residual, bias, weight and the scale of the hidden states are equal on all ranks of the group, as
tensor parallelism makes them. A graph can't prove that. If they differ, ranks get other numbers than the unfused graph gives
them, and nothing else shows it. With ``TW_COMPILE_CHECK_INPUTS=1`` the first calls on each group compare a digest of each such
operand between the ranks. All ranks raise if a digest differs.

The check waits for the device and for the other ranks, so it is off by default. Calls that are captured in a CUDA graph are not
checked, but the calls that warm the graph up are. All ranks must set the variable, because all must make the same calls.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.environment import CHECK_INPUTS as VARIABLE
from tw_compile.environment import checks_inputs
from tw_compile.kernels.collective.fields import OPERANDS, Arguments
from tw_compile.kernels.collective.wires import WIRES

MOST_CALLS = 512
"""How many calls on each group are checked: three forwards of a model with 80 layers, which makes 160 calls per forward."""
_CHUNK = 1 << 20
_PRIME = 65521
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
calls_checked: dict[str, int] = {}


@cache
def checks_operands() -> bool:
    """Whether ``TW_COMPILE_CHECK_INPUTS`` is set. The variable is read only once, because every call asks for it."""
    return checks_inputs()


def check_operands(arguments: Arguments, device: torch.device) -> None:
    """Compare the operands of one call between the ranks of its group. All ranks must get here for the same call.

    Raises:
        RuntimeError: An operand differs. All ranks raise, and the message names the operand, the call and the ranks.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    name = arguments.group_name
    number = calls_checked.get(name, 0)
    if number >= MOST_CALLS:
        return
    calls_checked[name] = number + 1
    operands: dict[str, torch.Tensor | None] = {}
    for field in OPERANDS:
        own_rows = field.role.own_rows_if is not None and getattr(arguments, field.role.own_rows_if)
        operands[field.name] = None if own_rows else getattr(arguments, field.name)
    group = compat.resolve_process_group(name)
    values = {operand: 0 if tensor is None else digest(tensor) for operand, tensor in operands.items()}
    values["wire"] = [*WIRES, arguments.wire].index(
        arguments.wire
    )  # ranks with different ones would not understand each other
    gathered = _gathered(torch.tensor([*values.values()], dtype=torch.int64), group, device)
    for index, operand in enumerate(values):
        others = [rank for rank, values in enumerate(gathered) if values[index] != gathered[0][index]]
        if others:
            raise RuntimeError(
                f"{VARIABLE}: {operand} of call {number} on group {name!r}, slot {arguments.slot}: expected the same values on "
                f"all ranks, got others than rank 0's on rank {', '.join(map(str, others))}"
            )


def digest(tensor: torch.Tensor) -> int:
    """64 bits for the bits of a tensor: the sum of its elements, each weighted by its position, with wrap-around."""
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, len(bits), _CHUNK):
        part = bits[first : first + _CHUNK].to(torch.int64)
        place = torch.arange(first, first + len(part), device=flat.device) % _PRIME + 1
        total += ((part + _PRIME) * place * (place + _PRIME)).sum()
    return int(total)


def _gathered(digests: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """The digests of all ranks, in rank order."""
    own = digests.to(device) if dist.get_backend(group) == "nccl" else digests
    of_ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(of_ranks, own, group=group)
    return [values.tolist() for values in of_ranks]
