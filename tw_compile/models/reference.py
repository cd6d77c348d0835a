"""A float64 reference of a decoder: the same shards, the same collectives, every operation in double precision."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tw_compile.models.decoder import Decoder, assign_tensors, meta_model

MOST_SCORE_BYTES = 2**32
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


def reference_forward(
    decoder: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden state and residual of ``to_double(decoder)``, or of a part of it, for ``inputs``, computed eagerly in float64.

    The models cast to float32 in norms, rotary embeddings, routers and softmax, which would lose half of the digits of
    a float64 input. Every operation that names a lower floating-point type is therefore redirected to float64, below
    all Python and C++ code that may have asked for it.
    """
    with torch.no_grad(), _default_dtype(torch.float64), _AttentionByHeads(), _Float64Everywhere():
        return decoder(inputs)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor.detach().clone()


class _AttentionByHeads(TorchFunctionMode):
    """Attention of one head of one sequence at a time, if the scores of all heads would take more than ``MOST_SCORE_BYTES``.

    No flash kernel supports float64, so torch allocates the scores of all heads, several times.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention or score_bytes(*args[:2]) <= MOST_SCORE_BYTES:
            return func(*args, **kwargs)
        query, keys, values = args
        kwargs.pop("enable_gqa", None)
        mask = kwargs.pop("attn_mask", None)
        if mask is not None:
            mask = mask.expand(*query.shape[:3], keys.shape[2])
        group = query.shape[1] // keys.shape[1]
        outputs = torch.empty_like(query[..., :1].expand(*query.shape[:3], values.shape[3]))
        for sequence, head in itertools.product(range(query.shape[0]), range(query.shape[1])):
            theirs = (slice(sequence, sequence + 1), slice(head // group, head // group + 1))
            own = (slice(sequence, sequence + 1), slice(head, head + 1))
            own_mask = None if mask is None else mask[own]
            outputs[own] = func(query[own], keys[theirs], values[theirs], attn_mask=own_mask, **kwargs)
        return outputs


def score_bytes(query: torch.Tensor, keys: torch.Tensor) -> int:
    return query.shape[0] * query.shape[1] * query.shape[2] * keys.shape[2] * query.element_size()


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
