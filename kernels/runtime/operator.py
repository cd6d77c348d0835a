"""How the project's torch operators are defined, and how generated code calls them without torch's dispatcher.

A compiler has to know an operator: its schema and its fake kernel. Code that Inductor generates need not call it through the
dispatcher, though. For each call, the dispatcher turns all arguments into C++ values and back. In generated code there is
nothing to dispatch on: no gradients, no fake tensors, and no mode but torch's own, which watches what operators return in the
first call of compiled code. So it calls ``<operator>.direct``
(:func:`compat.lower_as_calls`), the function that serves both CPU and CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import Library

NAMESPACE = "tw_compile"

library = Library(NAMESPACE, "FRAGMENT")
_defined: list[torch._ops.OpOverload] = []


def define(
    signature: str, run: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> torch._ops.OpOverload:
    """Define the operator ``name(arguments) -> results``: ``run`` for CPU and CUDA tensors, ``fake`` for fake tensors.

    It is defined with ``torch.library.Library``, because calls then cost less than with ``custom_op``.
    """
    library.define(signature, tags=tuple(tags))
    name = signature.partition("(")[0]
    for key in ("CPU", "CUDA"):
        library.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return callable_directly(getattr(torch.ops.tw_compile, name).default, run)


def callable_directly(operator: torch._ops.OpOverload, run: Callable[..., Any]) -> torch._ops.OpOverload:
    """Make generated code call ``run`` directly for ``operator`` from now on. Returns ``operator``."""
    operator.direct = run  # type: ignore[attr-defined]
    _defined.append(operator)
    return operator


def defined() -> tuple[torch._ops.OpOverload, ...]:
    """All operators that this process has loaded."""
    return tuple(_defined)
