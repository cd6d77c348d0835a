"""How the project's torch operators are defined, and called without torch's dispatcher where nothing needs it.

An operator is what a compiler has to know: a schema and a fake kernel. Code that Inductor generates need not go through the
dispatcher to call it, though, which for each call turns all of its arguments into C++ values and back. In such code there is
nothing to dispatch on: no gradients, no modes, no fake tensors. It calls ``<operator>.direct`` (:func:`compat.lower_as_calls`),
which is the function that serves CPU and CUDA tensors alike.
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
    """The operator ``name(arguments) -> results``: ``run`` on CPU and CUDA tensors, ``fake`` on fake ones.

    Defined with ``torch.library.Library``, which costs a call less than ``custom_op``.
    """
    library.define(signature, tags=tuple(tags))
    name = signature.partition("(")[0]
    for key in ("CPU", "CUDA"):
        library.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return callable_directly(getattr(torch.ops.tw_compile, name).default, run)


def callable_directly(operator: torch._ops.OpOverload, run: Callable[..., Any]) -> torch._ops.OpOverload:
    """``operator``, which generated code calls as ``run`` from now on."""
    operator.direct = run  # type: ignore[attr-defined]
    _defined.append(operator)
    return operator


def defined() -> tuple[torch._ops.OpOverload, ...]:
    """All operators that this process has loaded."""
    return tuple(_defined)
