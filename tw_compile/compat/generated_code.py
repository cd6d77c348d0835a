"""What Inductor makes of a function, for inspection and tests: its last graphs, or its wrapper code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.fx as fx


def compile_post_grad(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    post_pass: Callable[[fx.Graph], None] | None,
    sink: Callable[[fx.GraphModule], None],
) -> Callable[..., Any]:
    """Run Inductor up to and including its post-grad passes, with ``post_pass`` in the custom post slot.

    ``sink`` gets every graph as the post-grad passes left it; no kernel is generated, the returned callable interprets
    the graph. For inspection and tests: it takes about a second and needs no C++ compiler and no GPU.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes.post_grad import post_grad_passes

    def inner_compile(inner: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Callable[..., Any]:
        with config.patch(post_grad_custom_post_pass=post_pass):
            post_grad_passes(inner, is_inference=bool(kwargs.get("is_inference", False)))
        inner.recompile()
        sink(inner)

        def run(args: list[Any]) -> Any:
            args_copy = list(args)
            args.clear()
            return inner(*args_copy)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return compile_fx(gm, example_inputs, inner_compile=inner_compile)  # type: ignore[arg-type, return-value]


class _CodeTaken(Exception):
    """Raised in place of compiling generated code."""


def inductor_code(
    function: Callable[..., Any],
    args: Any,
    post_pass: Callable[[fx.Graph], None],
    device: str,
    dynamic: bool | None,
    options: dict[str, Any],
) -> str:
    """The wrapper code that Inductor generates for ``function``, with ``post_pass`` in the custom post slot.

    Nothing is compiled or run. On ``cuda`` the caller is inside ``fake_cuda()``; the device is presented as an H100.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    taken: list[str] = []

    def take(lowering: Any) -> Any:
        code = lowering.codegen()[0]
        taken.append(getattr(code, "value", code))
        raise _CodeTaken

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        patches = {"post_grad_custom_post_pass": post_pass, **options}
        return compile_fx(gm, example_inputs, config_patches=patches)

    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(config.patch(compile_threads=1, fx_graph_cache=False))
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", take))
        if device == "cuda":
            _make_lazy_patterns()
            stack.enter_context(_presented_h100())
        try:
            torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
        except Exception:
            if not taken:
                raise
        finally:
            torch._dynamo.reset()
    return taken[0]


def _make_lazy_patterns() -> None:
    """Let Inductor trace its own patterns while torch.cuda still tells the truth. It would use a GPU that is only presented."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return compile_post_grad(gm, example_inputs, None, graphs.append)

    torch.compile(lambda x: x + 1, backend=backend)(torch.empty(8, device="cuda"))
    torch._dynamo.reset()


@contextlib.contextmanager
def _presented_h100() -> Iterator[None]:
    """Make what Inductor asks of torch.cuda answer for one H100."""
    from types import SimpleNamespace

    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch.utils import _triton

    properties = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536, warp_size=32,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, total_memory=80 << 30,
        shared_memory_per_block_optin=232448, shared_memory_per_block=49152, gcnArchName="", L2_cache_size=50 << 20,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "set_rng_state": lambda state, device="cuda": None,
    }
    static = {name: staticmethod(answers[name]) for name in ("get_device_properties", "current_device", "is_available")}
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for name, method in static.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, method))
        for name in ("get_device_properties", "current_device"):
            stack.enter_context(mock.patch.object(CudaInterface.Worker, name, static[name]))
        stack.enter_context(mock.patch.object(scheduler, "has_triton", lambda: True))
        stack.enter_context(mock.patch.object(_triton, "triton_hash_with_backend", lambda: "0"))
        yield
