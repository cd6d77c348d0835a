"""Steps of more tokens than vLLM captures in CUDA graphs: run by groups of layers, and not by pieces that end at attention.

vLLM cuts a model at its attention so that the rest can be captured. Where nothing is captured that only keeps sums over the
ranks from what they could hide behind. So its graph is cut a second time (``groups.py``) and compiled for long steps, by
vLLM's own compiler manager, with its caches, passes and settings; all other steps run what vLLM made.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from tw_compile.kernels.seam import leave_off
from tw_compile.vllm import groups

logger = logging.getLogger("vllm.tw_compile")

Ranges = tuple[tuple[int, int], ...]
"""First and last token count of each."""


def add_long_steps(
    backend: Any, graph: fx.GraphModule, example_inputs: Sequence[Any], function: Any, ranges: Ranges, layers: int
) -> None:
    """Have ``function``, which ``backend`` made of ``graph``, run steps of ``ranges`` in groups of up to ``layers`` layers."""
    counts = [number for number, one in enumerate(example_inputs) if isinstance(one, torch.SymInt)]
    cut = groups.cut(graph, layers) if counts else None
    if cut is None:
        logger.info("tw_compile: no groups of layers: the graph has no layers that are known as such")
        return
    begun = time.perf_counter()
    compile_part = _Compiler(backend, cut.module)
    first, last = ranges[0][0], ranges[-1][1]
    head, *rest = [name for name, _ in cut.module.named_children()]
    embed = compile_part(head, first, last)
    runs = []
    for low, high in ranges:
        stitched = fx.GraphModule(cut.module, cut.module.graph)
        distinct = rest[:1] if cut.seamed else rest  # seams join what was compiled to the same
        compiled = [compile_part(name, low, high) for name in distinct]
        stitched.__dict__[head] = embed
        stitched.__dict__.update(zip(rest, itertools.cycle(compiled) if cut.seamed else compiled, strict=False))
        runs.append((low, high, stitched.forward))
    backend.compiler_manager.save_to_file()
    function.optimized_call = _dispatch(function.optimized_call, runs, counts[0], cut.seamed)
    ends, took = ", ".join(str(high) for _, high in ranges), time.perf_counter() - begun
    message = "tw_compile: steps of %d tokens and more run by %d groups of layers, ranges end at %s, compiled in %.1f s"
    logger.info(message, first, len(rest), ends, took)


class _Compiler:
    """vLLM's compiler for the parts of a graph; it finds what it has compiled at an earlier start."""

    def __init__(self, backend: Any, parts: fx.GraphModule) -> None:
        self._backend = backend
        self._parts: dict[str, Any] = dict(parts.named_children())
        behind_pieces = len(backend.piecewise_graphs)
        self._numbers = {name: behind_pieces + place for place, name in enumerate(self._parts)}

    def __call__(self, name: str, low: int, high: int) -> Callable[..., tuple[Any, ...]]:
        """The part ``name`` for ``low`` to ``high`` tokens."""
        from vllm.config.utils import Range  # not at the top: without it there are no groups, but all else works

        part = self._parts[name]
        return self._backend.compiler_manager.compile(
            part,
            [node.meta["example_value"] for node in part.graph.find_nodes(op="placeholder")],
            self._backend.inductor_config,
            self._backend.compilation_config,
            compile_range=Range(start=low, end=high),
            graph_index=self._numbers[name],
            num_graphs=0,  # none is the last one, at which it would log a time
        )


def _dispatch(otherwise: Callable[..., Any], runs: list[Any], index: int, seamed: bool) -> Callable[..., Any]:
    """By the number of tokens, which is argument ``index``."""

    def call(*arguments: Any) -> Any:
        tokens = arguments[index]
        for low, high, run in runs:
            if low <= tokens <= high:
                results = run(*arguments)
                return (leave_off(results[0]),) if seamed else results
        return otherwise(*arguments)

    return call
