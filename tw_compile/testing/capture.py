"""Capture the graphs that a post-grad pass sees, without a GPU and without generating code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.fx as fx

from tw_compile.compat import (
    BackendCompilerFailed,
    FakeTensorMode,
    ShapeEnv,
    compile_post_grad,
    fake_process_group,
    fold_constants_on_cpu,
    trace_fused_attention,
    without_graph_cache,
)

__all__ = ["capture_graphs", "fake_cuda", "fake_process_group"]


def capture_graphs(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    pass_: Callable[[fx.Graph], None] | None = None,
    dynamic: bool | None = None,
) -> list[fx.GraphModule]:
    """Compile ``function`` (a module or a function) for ``args`` and return its post-grad graph, a list of one.

    ``pass_`` runs in Inductor's custom post-grad slot. Compilation ends there: what would follow (guards, running the
    graph) is left out, and no cache is read or written. Graph breaks are errors; gradients are off.
    """
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return compile_post_grad(gm, example_inputs, pass_, sink)

    def sink(gm: fx.GraphModule) -> None:
        graphs.append(gm)
        raise _CapturedError

    torch._dynamo.reset()
    try:
        with torch.no_grad(), without_graph_cache():
            torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, _CapturedError):
            raise
    finally:
        torch._dynamo.reset()
    return graphs


class _CapturedError(Exception):
    """The graph has been taken; not an error."""


@contextlib.contextmanager
def fake_cuda(*, cudnn: bool = False) -> Iterator[None]:
    """Tensors made inside have no storage, and ``device="cuda"`` works on a machine without a GPU.

    ``cudnn``: attention without a mask uses cuDNN's kernel instead of flash, as torch prefers on H100 and later.
    """
    with (
        FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()),
        mock.patch("torch.cuda.get_device_capability", lambda device=None: (9, 0)),
        fold_constants_on_cpu(),
        trace_fused_attention(cudnn),
    ):
        yield
