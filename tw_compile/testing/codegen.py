"""The code that Inductor generates for a rewritten graph, without compiling it and without a GPU."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from tw_compile import compat
from tw_compile.config import Config
from tw_compile.pipeline import TWCompilePass
from tw_compile.testing.capture import fake_cuda
from tw_compile.testing.rewriting import on_fake_cuda, process_group


def generated_code(
    module: Callable[..., Any],
    args: Sequence[Any],
    *,
    world_size: int = 2,
    device: Literal["cuda", "cpu"] = "cpu",
    config: Config | None = None,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
) -> str:
    """The Python wrapper that Inductor writes for ``module``: in which order operators run and when buffers are freed.

    Args:
        device: For ``cuda`` the code is that of an H100; parameters and ``args`` are replaced by fake CUDA tensors.
        options: Inductor options to generate under.
    """
    passes = TWCompilePass(Config() if config is None else config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(process_group(world_size))
        if device == "cuda":
            stack.enter_context(fake_cuda())
            module, args = on_fake_cuda(module, args)
        return compat.inductor_code(module, args, passes, device, dynamic, options or {})


def calls_of(code: str, name: str) -> list[int]:
    """The line numbers (from 0) on which ``code`` calls the operator ``name``, through torch's dispatcher or directly."""
    call = re.compile(rf"{re.escape(name)}\.default(\.direct)?\(")
    return [number for number, line in enumerate(code.splitlines()) if call.search(line)]
