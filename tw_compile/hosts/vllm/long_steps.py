"""Steps of more tokens than vLLM captures in CUDA graphs: run by groups of layers, and not by pieces that end at attention.

vLLM cuts a model at its attention so that the rest can be captured. Where nothing is captured, the cut only separates
all_reduces from the compute that could hide them. So the model's graph is cut a second time (``groups.py``) and compiled for
long steps. vLLM's own compiler manager compiles it, with vLLM's caches, passes and settings. All other steps run what vLLM
made.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from tw_compile.hosts.vllm import groups
from tw_compile.hosts.vllm.steps import Parts, Steps, dispatch
from tw_compile.hosts.vllm.ways import Way, compiled_as, way_to_compile

logger = logging.getLogger("vllm.tw_compile")

Ranges = tuple[tuple[int, int], ...]
"""The first and the last token count of each range."""


def add_long_steps(
    backend: Any,
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    function: Any,
    ranges: Ranges,
    layers: int,
    tried: Ranges,
    short: tuple[int, int] | None = None,
    captures: bool = True,
) -> Any:
    """Make ``function``, which ``backend`` made of ``graph``, run steps of ``ranges`` in groups of up to ``layers`` layers.

    Those ``tried`` are compiled both ways (``ways.py``). Steps of ``short[0]`` to ``short[1]`` tokens run as ``function`` runs
    them, and may be captured as CUDA graphs (``step_graphs.py``). ``captures``: long steps may be captured, too.

    Returns ``function``. Where vLLM saves everything it compiled with ``function``, the result is another object, which saves
    these groups, too.
    """
    from vllm import envs  # not at the top: without vLLM there are no groups of layers, but everything else works

    counts = [number for number, one in enumerate(example_inputs) if isinstance(one, torch.SymInt)]
    cut = groups.cut(graph, layers) if counts and ranges else None
    if ranges and cut is None:
        logger.info("tw_compile: no groups of layers: the graph has no layers that are known as such")
        short = None if short is None else (short[0], ranges[-1][1])
    if cut is None and (short is None or not counts):
        return function
    by_pieces = Steps(counts[0], _rows(graph), is_cuttable(backend.vllm_config), short, captures)
    steps, parts, whole = (by_pieces, {}, {}) if cut is None else _compiled(backend, cut, by_pieces, ranges, tried)
    result = function
    if envs.VLLM_USE_MEGA_AOT_ARTIFACT:
        from tw_compile.hosts.vllm.artifact import WithLongSteps

        result = WithLongSteps(function, steps, parts, whole)
    function.optimized_call = dispatch(steps, parts, function.optimized_call, whole)
    return result


def _compiled(
    backend: Any, cut: groups.Cut, by_pieces: Steps, ranges: Ranges, tried: Ranges
) -> tuple[Steps, Parts, Parts]:
    """``by_pieces`` with how to run steps of ``ranges`` by parts of ``cut``; the parts; those of ``tried`` that are whole."""
    from vllm.compilation.codegen import generate_execution_code

    begun = time.perf_counter()
    compile_part = _Compiler(backend, cut.module)
    first, last = ranges[0][0], ranges[-1][1]
    head, *rest = compile_part.names
    compiled_head = compile_part(head, first, last)

    def compiled(low: int, high: int, way: Way) -> dict[str, Callable[..., Any]]:
        distinct = rest[:1] if cut.seamed else rest  # parts between seams are the same graph: compile it once
        with compiled_as(way):
            made = [compile_part(name, low, high) for name in distinct]
        return {head: compiled_head, **dict(zip(rest, itertools.cycle(made) if cut.seamed else made, strict=False))}

    parts: Parts = {ends: compiled(*ends, Way.SPLIT if ends in tried else Way.PLANNED) for ends in ranges}
    whole: Parts = {ends: compiled(*ends, Way.WHOLE) for ends in tried}
    backend.compiler_manager.save_to_file()
    called = fx.GraphModule(cut.module, cut.module.graph)
    called.__dict__.update(parts[ranges[0]])  # compiled parts, because graphs would become part of the code
    bare = frozenset(name for name, part in cut.module.named_children() if not _returns_tuple(part))
    code, names, constants = generate_execution_code(called)
    steps = replace(by_pieces, code=code, names=names, constants=constants, bare=bare, seamed=cut.seamed)
    ends, took = ", ".join(str(high) for _, high in ranges), time.perf_counter() - begun
    message = "tw_compile: steps of %d tokens and more run by %d groups of layers, ranges end at %s, compiled in %.1f s"
    logger.info(message, first, len(rest), ends, took)
    return steps, parts, whole


def is_cuttable(engine: Any) -> bool:
    """:attr:`Steps.cuttable`. Adapters sort the tokens of a whole step, and data-parallel ranks say how many they have."""
    return engine.lora_config is None and bool(engine.parallel_config.data_parallel_size == 1)


def _rows(graph: fx.GraphModule) -> tuple[tuple[int, int], ...]:
    """The numbers of the inputs that have a row for each token, and which of their dimensions that is."""
    inputs = (node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder"))
    return tuple(
        (number, dim)
        for number, one in enumerate(inputs)
        if isinstance(one, torch.Tensor)
        for dim, size in enumerate(one.shape)
        if isinstance(size, torch.SymInt)
    )


def _returns_tuple(part: Any) -> bool:
    (output,) = part.graph.find_nodes(op="output")
    return isinstance(output.args[0], tuple | list)


class _Compiler:
    """vLLM's compiler for the parts of a graph, by their ``names``. It finds what it compiled at an earlier start of vLLM."""

    def __init__(self, backend: Any, cut: fx.GraphModule) -> None:
        self._backend = backend
        self._parts: dict[str, Any] = dict(cut.named_children())
        self.names = list(self._parts)

    def __call__(self, name: str, low: int, high: int) -> Callable[..., tuple[Any, ...]]:
        """The part ``name``, compiled for ``low`` to ``high`` tokens."""
        from vllm.config.utils import Range

        # After the indices of the pieces. The manager knows graphs by range and index, so each way has indices of its own.
        place = [*Way].index(way_to_compile()) * len(self.names) + self.names.index(name)
        part = self._parts[name]
        return self._backend.compiler_manager.compile(
            part,
            [node.meta["example_value"] for node in part.graph.find_nodes(op="placeholder")],
            self._backend.inductor_config,
            self._backend.compilation_config,
            compile_range=Range(start=low, end=high),
            graph_index=len(self._backend.piecewise_graphs) + place,
            num_graphs=0,  # so no part counts as the last one, after which the manager would log a time
        )
