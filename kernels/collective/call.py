"""A call with everything decided but its tensors, so that later calls of the same form can reuse it.

A model makes calls of few forms, each of them many times. To decide which kernel serves a form, on how many SMs and from which
memory, takes Python longer than to enqueue a launch. Without CUDA graphs the host would need longer for this than the GPU needs
for the kernel. So it is decided once per form. Only CUDA C++ kernels do this: Triton's own launcher looks at all arguments
anyway.
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
"""Writes most addresses at once. This is faster than setting the attributes one after the other."""
_BEHIND = -len(LAST_POINTERS)
"""Index, from the end of the operands, of the first operand whose address is set by itself."""


@dataclass(frozen=True)
class Call:
    """The launches of a call, in their order.

    Attributes:
        launches: The parameters and the number of CTAs of each launch. The parameters begin with tensors' addresses, and end
            with the addresses of tensors that few calls have. Each call fills the addresses in before the launch copies the
            parameters. A slot's calls follow each other, so no two threads do this at once.
        options: The other arguments of :meth:`Kernel.launch`.
        hidden: Makes the memory that the kernel writes its results to, ``[tokens, hidden]``.
        residual_out: Makes the memory for the new residual.
        residual_of: Turns the caller's residual into the residual that the kernel reads; None: they are the same.
        residual_out_of: Turns the kernel's new residual into the residual that the caller gets; None: they are the same.
        prefetches: Whether the parameters have a field ``prefetch`` (``prefetch.Prefetched``) that needs addresses.
        fed: Where the kernel leaves this rank's rows, and where a GEMM finds all rows. Rows are copied to ``hidden`` only if no
            GEMM is fed. None: the kernel writes all rows to ``hidden``.
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

        ``prefetch``: the tensors that a kernel with a parameter of that name prefetches into L2; other kernels ignore it.
        ``outputs``: the result of :meth:`allocate`, if the caller has called it already; None: this method calls it.

        Returns ``(hidden, residual_out)`` as the caller of the operator gets them.
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
                if address:  # either all calls of a form have this operand, or none has
                    setattr(params, name, address)
            if prefetch and self.prefetches:
                params.prefetch.begin[: len(prefetch)] = [tensor.data_ptr() // LINE * LINE for tensor in prefetch]
            self.kernel.launch(params, stream=stream, grid=ctas, **self.options)
        return hidden, residual_out if self.residual_out_of is None else self.residual_out_of(residual_out)


def allocators(request: Request, residual_rows: int) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """Two functions that allocate uninitialised ``hidden [tokens, hidden]`` and ``residual_out [residual_rows, hidden]``.

    The functions hold no reference to a tensor.
    """
    (tokens, hidden_size), device, norm = request.x.shape, request.x.device, request.norm
    return (
        partial(empty_hidden, tokens, hidden_size, norm, device),
        partial(torch.empty, (residual_rows, hidden_size), dtype=norm.residual_dtype, device=device),
    )
