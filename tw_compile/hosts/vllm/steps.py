"""Runs steps of some ranges of token counts with parts that were compiled for these ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tw_compile.kernels.collective.seam import leave_off


@dataclass(frozen=True)
class Steps:
    """How to run steps of some ranges of token counts, without the compiled parts.

    ``code``, with its ``constants``, calls the parts by ``names``. Parts in ``bare`` return no tuple. The argument with the
    number ``argument`` is the number of tokens. ``seamed`` is as in :class:`~tw_compile.hosts.vllm.groups.Cut`.
    """

    code: str
    names: list[str]
    constants: list[Any]
    bare: frozenset[str]
    argument: int
    seamed: bool


Parts = dict[tuple[int, int], dict[str, Callable[..., Any]]]
"""For each range, the compiled parts by name."""


def dispatch(steps: Steps, parts: Parts, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Runs steps of the ranges in ``parts``; ``otherwise`` runs all others."""
    from vllm.compilation.codegen import compile_execution_fn

    runs = [
        (ends, compile_execution_fn(steps.code, of_range, steps.names, steps.constants))
        for ends, of_range in parts.items()
    ]

    def call(*arguments: Any) -> Any:
        tokens = arguments[steps.argument]
        for (low, high), run in runs:
            if low <= tokens <= high:
                results = run(*arguments)
                return (leave_off(results[0]),) if steps.seamed else results
        return otherwise(*arguments)

    return call
