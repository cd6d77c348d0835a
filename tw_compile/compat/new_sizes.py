"""Sizes that operators compute: PyTorch's "unbacked" symbols, and what Inductor tunes kernels with such sizes for."""

from __future__ import annotations

from functools import cache, partial, wraps
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch

_examples: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()
"""By shape environment, the examples of its new sizes. They are not stored as the environment's own hints, because these are
part of the cache keys of all its graphs."""


def new_size(like: torch.Tensor, low: int, high: int, example: int) -> torch.SymInt:
    """A size that an operator computes. Nothing is known about it, except that it is from ``low`` to ``high``.

    ``like`` is a fake tensor of a mode with symbols. ``example`` is one value of the size, which fits the examples of other
    sizes. Inductor may run kernels to tune them, on tensors of the examples' sizes. For a size without an example it would take
    the largest value. Then the halves would be larger than the whole, and read past its end (:func:`tune_for_examples`).
    """
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    environment = like.fake_mode.shape_env  # type: ignore[attr-defined]
    size = environment.create_unbacked_symint()
    _constrain_range_for_size(size, low, high)
    _examples.setdefault(environment, {})[size.node.expr] = example
    return size


def example_of(size: torch.SymInt, otherwise: int) -> int:
    """The value that ``size`` had when its graph was traced; ``otherwise`` if it had none."""
    return int(size.node.hint) if size.node.has_hint() else otherwise


@cache  # once a process
def tune_for_examples() -> None:
    """Have Inductor choose and tune kernels for the examples of sizes that it doesn't know.

    In 2.11 Inductor takes kernels with unknown sizes for small ones, of 8192 elements, whatever hints there are. This made the
    kernels of halves half as fast. Kernels without unknown sizes stay as they were.
    """
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.graph import GraphLowering
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V

    write_graph, write_kernel = GraphLowering.codegen, TritonKernel.codegen_kernel

    @wraps(write_graph)
    def codegen(graph: Any) -> Any:
        environment = graph.sizevars.shape_env
        with mock.patch.dict(environment.var_to_hint_override, _examples.get(environment, {})):
            return write_graph(graph)

    @wraps(write_kernel)
    def codegen_kernel(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = V.graph.sizevars
        by_example = partial(sizes.symbolic_hint, use_user_provided_hint_override=True)
        with mock.patch.object(sizes, "symbolic_hint", by_example):
            return write_kernel(kernel, *args, **kwargs)

    GraphLowering.codegen = codegen  # type: ignore[method-assign, assignment]
    if hasattr(SizeVarAllocator, "symbolic_hint"):  # by 2.14 it is gone, and examples are heeded
        TritonKernel.codegen_kernel = codegen_kernel  # type: ignore[method-assign, assignment]
