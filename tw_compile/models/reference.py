"""A float64 reference of a decoder: the same shards, the same collectives, every operation in double precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tw_compile.models.decoder import Decoder, assign_tensors, meta_model

_LOWER_PRECISION = (torch.float32, torch.bfloat16, torch.float16)


def to_double(decoder: Decoder) -> Decoder:
    """A copy of ``decoder`` with its shards in float64; run it with :func:`reference_forward`.

    The copy is built anew: the sharded forwards are closures over their module, which ``deepcopy`` would share. Experts
    run one after the other, as grouped GEMMs have no float64 kernel.
    """
    device = next(decoder.parameters()).device
    model, sharded = meta_model(decoder.config, torch.float64, device.type, experts="eager")
    copy = Decoder(model, sharded)
    tensors = {**dict(decoder.named_parameters()), **dict(decoder.named_buffers())}
    assign_tensors(copy, {name: _double(tensor) for name, tensor in tensors.items()})
    return copy.eval().requires_grad_(False)


def reference_forward(decoder: Decoder, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden state and residual of ``to_double(decoder)`` for ``input_ids``, computed eagerly in float64.

    The models cast to float32 in norms, rotary embeddings, routers and softmax, which would lose half of the digits of
    a float64 input. Every operation that names a lower floating-point type is therefore redirected to float64, below
    all Python and C++ code that may have asked for it.
    """
    with torch.no_grad(), _default_dtype(torch.float64), _Float64Everywhere():
        return decoder(input_ids)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor.detach().clone()


class _Float64Everywhere(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def raised(value: Any) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value in _LOWER_PRECISION else value

        return func(*tree_map(raised, args), **tree_map(raised, kwargs or {}))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
