"""Fake tensors: how to tell them apart, and how to make one like another without running an operator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch


def is_plain_fake(value: object, fake_mode: Any) -> bool:
    """Whether ``value`` is a fake tensor of ``fake_mode`` that its dtype, device, sizes and strides describe fully.

    They don't if the tensor's numbers are known (a constant), if it needs a gradient, or if it is sparse, or read as a
    conjugate.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(value, FakeTensor) or value.fake_mode is not fake_mode or value.constant is not None:
        return False
    return value.layout is torch.strided and not (value.requires_grad or value.is_conj() or value.is_neg())


def fake_like(plain: Any, memory_of: torch.Tensor | None = None) -> torch.Tensor:
    """A new fake tensor like ``plain`` (:func:`is_plain_fake`), in memory of its own or in that of another tensor.

    It is made in the way in which FakeTensorMode makes results that are in its cache. No guard on symbolic sizes is added.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._mode_utils import no_dispatch

    mode, shape, stride = plain.fake_mode, plain.shape, plain.stride()
    # set_ checks whether the memory is long enough for the tensor.
    memory = 0 if memory_of is None else memory_of.untyped_storage().nbytes()
    are_known = all(isinstance(size, int) for size in (*shape, *stride, plain.storage_offset(), memory))
    no_guards = contextlib.nullcontext() if are_known else mode.shape_env.suppress_guards()
    with no_dispatch(), no_guards:  # no dispatch to the tensor's own mode or to other active modes
        meta = torch.empty_strided(shape, stride, dtype=plain.dtype, device="meta")
        if memory_of is not None:
            meta.set_(memory_of.untyped_storage(), plain.storage_offset(), shape, stride)
        return FakeTensor(mode, meta, plain.fake_device)


def copy_dynamo_marks(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``target``, with the marks that ``torch._dynamo.mark_dynamic`` and similar functions left on ``source``."""
    marks = {
        name: value for name, value in vars(source).items() if name.startswith("_dynamo_") or name == "_specialize_on"
    }
    vars(target).update(marks)
    return target


def size_keys(sizes: Iterable[int | torch.SymInt]) -> tuple[object, ...]:
    """Hashable values that are equal for equal sizes, without a guard: a symbolic size has no hash of its own."""
    return tuple([size if isinstance(size, int) else size.node.expr for size in sizes])


def symbols_of(sizes: Iterable[int | torch.SymInt]) -> set[object]:
    """The symbols that symbolic sizes are computed of."""
    return {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}
