"""Runs steps of some ranges of token counts with parts that were compiled for these ranges, and some steps as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from tw_compile.hosts.vllm.step_graphs import StepGraphs, of_models
from tw_compile.hosts.vllm.ways import Tried, profiles_memory, tried_ranges
from tw_compile.kernels.collective.seam import leave_off


@dataclass(frozen=True)
class Steps:
    """How to run steps of some ranges of token counts, without the compiled parts.

    The argument with the number ``argument`` is the number of tokens. The arguments ``rows`` have a row for each token: their
    numbers, and which dimension that is. ``cuttable``: a step also runs with fewer tokens than vLLM has prepared it for. Steps
    with adapters, or of several data-parallel ranks, do not. ``short``: the fewest and the most tokens of steps that run by
    vLLM's pieces and may be captured, with attention; None: there are none. ``captures``: steps that run by compiled parts may
    be captured. ``code``, with its ``constants``, calls these parts by ``names``; it is empty if there are none. Parts in
    ``bare`` return no tuple. ``seamed`` is as in :class:`~tw_compile.hosts.vllm.groups.Cut`.
    """

    argument: int
    rows: tuple[tuple[int, int], ...]
    cuttable: bool
    short: tuple[int, int] | None = None
    captures: bool = True
    code: str = ""
    names: Sequence[str] = ()
    constants: Sequence[Any] = ()
    bare: frozenset[str] = frozenset()
    seamed: bool = False


Parts = dict[tuple[int, int], dict[str, Callable[..., Any]]]
"""For each range, the compiled parts by name."""


def dispatch(steps: Steps, parts: Parts, otherwise: Callable[..., Any], whole: Parts) -> Callable[..., Any]:
    """Runs steps of the ranges in ``parts``; ``otherwise``, which is vLLM's function, runs all others.

    Ranges in ``whole`` were compiled both ways, split in ``parts`` and whole there. Which one runs is chosen later
    (``ways.py``). Some numbers of tokens may be captured as CUDA graphs later (``step_graphs.py``).
    """
    if not parts:
        return _with_short_graphs(steps, otherwise)
    from vllm.compilation.codegen import compile_execution_fn

    def compiled(of_range: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
        run: Callable[..., Any] = compile_execution_fn(steps.code, of_range, steps.names, steps.constants)
        return run

    runs = [(low, high, compiled(of_range)) for (low, high), of_range in parts.items()]
    both = {ends: (Tried(*ends), compiled(of_range)) for ends, of_range in whole.items()}
    tried_ranges.extend(tried for tried, _ in both.values())

    def ways(tokens: int) -> list[tuple[str, AbstractContextManager[None]]]:
        for tried, _ in both.values():
            if tried.low <= tokens <= tried.high:
                return [("split", tried.forced(True)), ("whole", tried.forced(False))]
        return [("", nullcontext())]

    graphs = StepGraphs(runs[0][0], runs[-1][1], steps.rows, ways)
    if steps.captures:
        of_models.append(graphs)
    otherwise = _with_short_graphs(steps, otherwise)

    def finished(run: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        results = run(*arguments)
        return (leave_off(results[0]),) if steps.seamed else results

    prepared = False

    def prepare(arguments: Sequence[Any], tokens: int, chosen: Callable[..., Any]) -> None:
        """Run the longest step of each range, each way, but not ``chosen``, which follows.

        So vLLM counts the memory that our kernels and its own keep. vLLM's kernels for experts share a workspace, which vLLM
        locks when it has captured its graphs. An unsplit step of a lower range may need more of it than half of the longest
        step.
        """
        for low, high, run in runs:
            longest = min(high, tokens)
            if longest < low or (longest < tokens and not steps.cuttable):
                continue
            shorter = list(arguments)
            shorter[steps.argument] = longest
            for number, dim in steps.rows:
                shorter[number] = arguments[number].narrow(dim, 0, longest)
            for way in (run, *(whole_run for ends, (_, whole_run) in both.items() if ends == (low, high))):
                if way is not chosen:
                    finished(way, shorter)

    def call(*arguments: Any) -> Any:
        nonlocal prepared
        tokens = arguments[steps.argument]
        for low, high, run in runs:
            if low <= tokens <= high:
                if (low, high) in both:
                    tried, whole_run = both[low, high]
                    run = run if tokens >= tried.split_from else whole_run
                if not prepared and profiles_memory():
                    prepared = True
                    prepare(arguments, tokens, run)
                return graphs.run(partial(finished, run), arguments, tokens)
        return otherwise(*arguments)

    return call


def _with_short_graphs(steps: Steps, pieces: Callable[..., Any]) -> Callable[..., Any]:
    """``pieces``, with CUDA graphs of whole steps for some numbers of tokens in ``steps.short``."""
    if steps.short is None:
        return pieces
    low, high = steps.short
    graphs = StepGraphs(low, high, steps.rows, short=True)
    of_models.append(graphs)

    def run(arguments: Sequence[Any]) -> Any:
        return pieces(*arguments)

    def call(*arguments: Any) -> Any:
        tokens = arguments[steps.argument]
        return graphs.run(run, arguments, tokens) if low <= tokens <= high else pieces(*arguments)

    return call
