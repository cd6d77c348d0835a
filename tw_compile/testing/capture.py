"""Capture the graphs that a post-grad pass sees, without a GPU and without generating code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.fx as fx

from tw_compile.compat import compile_post_grad, fake_process_group, fold_constants_on_cpu, trace_flash_attention

__all__ = ["capture_graphs", "fake_cuda", "fake_process_group"]


def capture_graphs(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    pass_: Callable[[fx.Graph], None] | None = None,
    dynamic: bool | None = None,
) -> list[fx.GraphModule]:
    """Compile ``function`` (a module or a function) for ``args`` and return its post-grad graphs.

    ``pass_`` runs in Inductor's custom post-grad slot. The function is run once, without gradients, graph breaks are
    errors, and Dynamo's caches are cleared before and after.
    """
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return compile_post_grad(gm, example_inputs, pass_, graphs.append)

    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    finally:
        torch._dynamo.reset()
    return graphs


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Tensors made inside have no storage, and ``device="cuda"`` works on a machine without a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with (
        FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()),
        mock.patch("torch.cuda.get_device_capability", lambda device=None: (9, 0)),
        fold_constants_on_cpu(),
        trace_flash_attention(),
    ):
        yield
