"""A call with everything settled but its tensors, so that others of its form can be made again.

A model makes calls of few forms, each many times over. What serves a form, on how many SMs and from which memory, takes Python
longer to settle than a launch does to be enqueued; without CUDA graphs it would take the host longer than the kernel takes the
GPU. So it is settled once. Only CUDA C++ kernels have this: Triton's own launcher looks at all arguments anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import Any

import torch

from tw_compile.kernels.collective.fields import LAST_POINTERS, POINTERS
from tw_compile.kernels.collective.prefetch import LINE
from tw_compile.kernels.collective.spec import Operands, Request, empty_hidden
from tw_compile.kernels.gemm.fed import FedRows
from tw_compile.kernels.runtime.launch import Kernel

Outputs = tuple[torch.Tensor, torch.Tensor]
_write_pointers = Struct(f"{len(POINTERS)}P").pack_into
"""Writes most addresses at once, which is faster than setting one attribute after the other."""
_BEHIND = -len(LAST_POINTERS)
"""Of operands, the place of the first whose address is written by itself."""


@dataclass(frozen=True)
class Call:
    """The launches of a call, in their order.

    Attributes:
        launches: The parameters and the number of CTAs of each launch. The parameters begin with tensors' addresses, and end
            with those that few calls have; each call fills them in before it copies them. A slot's calls follow each other, so
            no two threads do this at once.
        options: The other arguments of :meth:`Kernel.launch`.
        hidden: Makes the memory that the kernel writes its results to, ``[tokens, hidden]``.
        residual_out: Makes the memory for the new residual.
        residual_of: Makes of the caller's residual the one that the kernel reads; None: they are the same.
        residual_out_of: Makes of the kernel's new residual the one that the caller gets; None: they are the same.
        prefetches: Whether the parameters have a field ``prefetch`` (``prefetch.Prefetched``) whose addresses are wanted.
        fed: Where the kernel leaves this rank's rows, and a GEMM finds all rows; ``hidden`` gets them only if no GEMM is fed.
            None: they are written to ``hidden``.
    """

    kernel: Kernel
    launches: Sequence[tuple[Structure, int]]
    options: Mapping[str, Any]
    hidden: Callable[[], torch.Tensor]
    residual_out: Callable[[], torch.Tensor]
    residual_of: Callable[[torch.Tensor], torch.Tensor] | None = None
    residual_out_of: Callable[[torch.Tensor], torch.Tensor] | None = None
    prefetches: bool = False
    fed: FedRows | None = None

    def allocate(self) -> Outputs:
        """``(hidden, residual_out)`` as the kernel writes them."""
        return self.hidden(), self.residual_out()

    def enqueue(
        self,
        operands: Operands,
        outputs: Outputs | None,
        stream: int,
        prefetch: Sequence[torch.Tensor] | None = None,
    ) -> Outputs:
        """Launch on ``stream``, the handle of a stream of the current device.

        ``prefetch`` is what a kernel with a parameter of that name asks L2 for; other kernels leave it.
        ``outputs`` are those of :meth:`allocate` if the caller has called that already; None: this calls it.

        Returns ``(hidden, residual_out)`` as the caller wants them.
        """
        hidden, residual_out = self.allocate() if outputs is None else outputs
        if self.residual_of is not None and operands.residual is not None:
            operands = operands._replace(residual=self.residual_of(operands.residual))
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in operands]
        first, last = addresses[:_BEHIND], addresses[_BEHIND:]
        results = hidden if self.fed is None else self.fed.rows
        for params, ctas in self.launches:
            _write_pointers(params, 0, *first, results.data_ptr(), residual_out.data_ptr())
            for name, address in zip(LAST_POINTERS, last, strict=True):
                if address:  # calls of one form all have it, or none does
                    setattr(params, name, address)
            if prefetch and self.prefetches:
                params.prefetch.begin[: len(prefetch)] = [tensor.data_ptr() // LINE * LINE for tensor in prefetch]
            self.kernel.launch(params, stream=stream, grid=ctas, **self.options)
        return hidden, residual_out if self.residual_out_of is None else self.residual_out_of(residual_out)


def allocators(request: Request, residual_rows: int) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """Make uninitialised ``hidden [tokens, hidden]`` and ``residual_out [residual_rows, hidden]``; they keep no tensor."""
    (tokens, hidden_size), device, norm = request.x.shape, request.x.device, request.norm
    return (
        partial(empty_hidden, tokens, hidden_size, norm, device),
        partial(torch.empty, (residual_rows, hidden_size), dtype=norm.residual_dtype, device=device),
    )
