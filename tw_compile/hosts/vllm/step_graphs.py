"""Steps as CUDA graphs, of a few sizes, with attention in the graph: a shorter step runs padded.

The host launches a long step kernel by kernel. Short steps are captured by vLLM. But unless all requests have one token each,
attention is outside, so the host launches a graph and an attention for each layer. Where the GPU is faster than the host, a
step takes as long as the host does. Here the whole step is in one graph, which is one launch. The metadata of attention differ
from step to step. So the graph reads metadata from memory of its own, for as many requests as a step can have, and each step's
metadata are copied there.

What the host passes to attention's kernels as numbers is fixed when a step is captured: the longest query and the longest
context that a step can have. FlashAttention 3 only chooses its kernel by them. Each request's own lengths lie in tensors.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tw_compile import agree
from tw_compile.hosts.vllm.options import switched_off

logger = logging.getLogger("vllm.tw_compile")

LEAST_GAIN = 0.01
"""The part of its time that a step must gain. A graph keeps memory."""

TRIALS = 3
"""Ways to run a step are timed so often, in turns, and the shortest time of each counts. Others that use the GPU or the host
meanwhile make a trial longer and never shorter. A wrong choice would stay for as long as the engine runs."""

HEADROOM = 1.25
"""What the host needs for a step while it serves, of what it needs while steps are timed, where the GPU's time grows too.

On four H100 it took 1.2 to 1.5 times as long, and the GPU 1.1 times (``docs/decisions/host-launch-time.md``).
"""

HEADROOM_OF_PIECES = 1.75
"""The same for steps by vLLM's pieces, of which the host launches fewer kernels, so the rest of its work weighs more.

Engines took 1.3 times as long as the host needed to launch such steps, and others at least 1.74 times
(``docs/decisions/step-graphs.md``). Steps of 512 tokens without a graph took 7% to 27% longer there. On a faster host a graph
that is kept costs what the GPU loses, which was 1% to 7%.
"""

LEAST_FREE_BYTES = 2**30
"""A graph is captured only where so much of the GPU's memory is free. vLLM does not count what it takes."""

_FLASH_ATTENTION = 3

_SPLITS, _SPLITS_BYTES, _MOST_SPLIT_REQUESTS, _SPLIT_TOKENS = 32, 2**27, 992, 512
"""FlashAttention 3 may split a request's keys among CTAs. Else a few CTAs would go through a long context alone. A graph has
memory for at most so many parts, of at most so many bytes together. For up to so many requests, FlashAttention finds each one's
number of parts on the GPU. 32 parts are what vLLM's own graphs have by default. In steps of more tokens that are no graphs of
vLLM's, vLLM's heuristics split nothing on Hopper, and splitting costs up to a quarter of the attention of a prompt."""

Run = Callable[[Sequence[Any]], tuple[Any, ...]]
"""Runs a step, given its arguments."""
Timed = Callable[[Callable[[int], None], int], float]


@dataclass(frozen=True)
class Limits:
    """The most that a step can have: ``requests``, and tokens of one request with its context (``length``).

    ``splits``: whether attention may split a request's keys, as vLLM does in short steps.
    """

    requests: int
    length: int
    splits: bool = False


@dataclass(frozen=True)
class _Attention:
    """Memory for the metadata of layers that share theirs. ``layer`` is the name of one of them."""

    layer: str
    metadata: Any
    slots: torch.Tensor

    def fits(self, metadata: Any) -> bool:
        """Whether a step with these metadata can run. The same on all ranks, which have equal shapes."""
        from tw_compile.hosts.vllm.attention import is_plain

        own = self.metadata
        return (
            is_plain(metadata)
            and metadata.num_actual_tokens <= own.num_actual_tokens
            and len(metadata.seq_lens) <= len(own.seq_lens)
            and metadata.block_table.shape[1] <= own.block_table.shape[1]
        )

    def fill(self, metadata: Any) -> None:
        """Copy the metadata of a step. Requests behind those of the step have no tokens."""
        own, tokens, requests = self.metadata, metadata.num_actual_tokens, len(metadata.seq_lens)
        own.query_start_loc[: requests + 1].copy_(metadata.query_start_loc[: requests + 1])
        own.query_start_loc[requests + 1 :].fill_(tokens)
        own.seq_lens[:requests].copy_(metadata.seq_lens)
        own.seq_lens[requests:].zero_()
        own.block_table[:requests, : metadata.block_table.shape[1]].copy_(metadata.block_table)
        self.slots[:tokens].copy_(metadata.slot_mapping[:tokens])
        self.slots[tokens:].fill_(-1)


def _memory(context: Any, tokens: int, limits: Limits, tables: dict[str, torch.Tensor]) -> list[_Attention] | None:
    """Memory for the metadata of steps of up to ``tokens`` tokens; None if the context has others than are known.

    ``tables``: block tables, by the layer that names them. Graphs run one at a time and write theirs before, so they share
    them: with long contexts and many requests a table is the largest part.
    """
    from tw_compile.hosts.vllm.attention import is_plain

    if not isinstance(context.attn_metadata, dict) or not all(map(is_plain, context.attn_metadata.values())):
        return None
    impls = [context.no_compile_layers[layer].impl for layer in context.attn_metadata]
    if any(impl.vllm_flash_attn_version != _FLASH_ATTENTION for impl in impls):
        return None  # version 2 has a grid for the longest query of each request that a step can have
    of_layers = {id(one): (layer, one) for layer, one in reversed(context.attn_metadata.items())}
    made = []
    for layer, metadata in of_layers.values():
        requests = min(limits.requests, tokens)
        slots = metadata.slot_mapping.new_full((tokens,), -1)
        width = metadata.block_table.shape[1]
        if layer not in tables or tables[layer].shape[1] != width:
            tables[layer] = metadata.block_table.new_zeros((limits.requests, width))
        own = copy(metadata)
        part_bytes = max(impl.num_heads * impl.head_size for impl in impls) * tokens * 4
        vars(own).update(
            num_actual_tokens=tokens,
            max_query_len=min(tokens, limits.length),
            max_seq_len=limits.length,
            query_start_loc=metadata.query_start_loc.new_zeros(requests + 1),
            seq_lens=metadata.seq_lens.new_zeros(requests),
            block_table=tables[layer][:requests],
            slot_mapping=slots,
        )
        splits = most_splits(metadata, requests, tokens, part_bytes) if limits.splits else 1
        for name, value in (("scheduler_metadata", None), ("max_num_splits", splits)):
            if hasattr(own, name):
                setattr(own, name, value)
        own.padded = True
        made.append(_Attention(layer, own, slots))
    return made


def most_splits(metadata: Any, requests: int, tokens: int, part_bytes: int) -> int:
    """Into how many parts attention may split a request's keys; each part of all results takes ``part_bytes``."""
    asked = getattr(metadata, "max_num_splits", 0)  # 0: by vLLM's heuristics, which plan on the host
    if requests > _MOST_SPLIT_REQUESTS or (not asked and tokens > _SPLIT_TOKENS):
        return 1
    return max(min(asked or _SPLITS, _SPLITS_BYTES // part_bytes), 1)


class StepGraph:
    """A captured step of ``tokens`` tokens. Steps of ``least`` to ``tokens`` tokens run by it.

    ``rows``: the numbers of the arguments that have a row for each token, and which of their dimensions that is.
    """

    def __init__(
        self, tokens: int, arguments: Sequence[Any], rows: Sequence[tuple[int, int]], attention: list[_Attention]
    ) -> None:
        self.tokens = tokens
        self.least = tokens + 1
        self.arguments = list(arguments)
        self._rows = rows
        self._attention = attention
        self._graph: Any = None
        self._results: tuple[Any, ...] = ()
        self.first_results: tuple[Any, ...] = ()
        for number, _ in rows:
            self.arguments[number] = _with_strides_of(arguments[number])

    def context_of(self, context: Any) -> Any:
        """``context`` with this graph's memory for metadata, and without vLLM's graphs of pieces.

        It is a new object, so nothing is kept of what an earlier one held.
        """
        from vllm.config import CUDAGraphMode

        own, given = copy(context), context.attn_metadata
        own.cudagraph_runtime_mode = CUDAGraphMode.NONE
        by_metadata = {id(given[one.layer]): one for one in self._attention}
        of_layers = {layer: by_metadata[id(metadata)] for layer, metadata in given.items()}
        own.attn_metadata = {layer: one.metadata for layer, one in of_layers.items()}
        own.slot_mapping = {
            layer: of_layers[layer].slots if layer in of_layers else slots
            for layer, slots in context.slot_mapping.items()
        }
        return own

    def serves(self, context: Any) -> bool:
        """Whether a step with this context can run. The same on all ranks."""
        given = context.attn_metadata
        return isinstance(given, dict) and all(
            one.layer in given and one.fits(given[one.layer]) for one in self._attention
        )

    def fill(self, arguments: Sequence[Any], tokens: int, context: Any) -> None:
        """Copy what differs between steps. Rows behind ``tokens`` stay as they are: no row's results depend on another row."""
        for number, dim in self._rows:
            self.arguments[number].narrow(dim, 0, tokens).copy_(arguments[number])
        for one in self._attention:
            one.fill(context.attn_metadata[one.layer])

    def run_on_own_memory(self, run: Run, context: Any) -> tuple[Any, ...]:
        """The step that this graph's memory holds, uncaptured."""
        from vllm.forward_context import override_forward_context

        with override_forward_context(self.context_of(context)):
            return run(self.arguments)

    def capture(self, run: Callable[[], tuple[Any, ...]]) -> None:
        """Capture ``run``, which reads this graph's memory."""
        self._graph, self._results = captured(run)

    def run(self, arguments: Sequence[Any], tokens: int) -> tuple[Any, ...]:
        """Run a step of ``tokens`` tokens. The results are valid until the graph's next step."""
        self.fill(arguments, tokens, get_forward_context())
        self._graph.replay()
        return tuple(one[:tokens] for one in self._results)


def _with_strides_of(argument: torch.Tensor) -> torch.Tensor:
    """A copy of ``argument``, which lies in memory as ``argument`` does: a step's strides are arguments, too.

    vLLM's positions of images, ``[3, tokens]``, are a part of longer rows.
    """
    copied = torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device=argument.device)
    return copied.copy_(argument)


def get_forward_context() -> Any:
    from vllm import forward_context

    return forward_context.get_forward_context()


def captured(run: Callable[[], tuple[Any, ...]]) -> tuple[Any, tuple[Any, ...]]:
    """``run`` as a CUDA graph, and the results that its replays write, in the memory that vLLM's graphs share."""
    from vllm.distributed.parallel_state import graph_capture
    from vllm.platforms import current_platform

    graph = torch.cuda.CUDAGraph()
    device = torch.device("cuda", torch.cuda.current_device())
    with graph_capture(device=device), torch.cuda.graph(graph, pool=current_platform.get_global_graph_pool()):
        results = run()
    return graph, results


@dataclass
class StepGraphs:
    """The graphs of a model's long steps, or of its short ones, by their size.

    Attributes:
        low, high: The fewest and the most tokens of such a step.
        rows: As for :class:`StepGraph`.
        ways: For a number of tokens: each way in which such a step was compiled, by its name, and what it has to run inside of.
            The name is empty if there is only one.
        short: Whether these steps run by vLLM's pieces if not as graphs.
        limits: While they are set, the step that runs gets memory for a graph.
        tables: Block tables that all graphs share, see ``_memory``.
        prepared: The graph that has got memory. The next step of its size is captured.
        obstacle: Why the last step that was to be captured was not.
    """

    low: int
    high: int
    rows: tuple[tuple[int, int], ...]
    ways: Callable[[int], Sequence[tuple[str, AbstractContextManager[None]]]] = lambda tokens: (("", nullcontext()),)
    short: bool = False
    graphs: dict[int, StepGraph] = field(default_factory=dict)
    limits: Limits | None = None
    tables: dict[str, torch.Tensor] = field(default_factory=dict)
    prepared: StepGraph | None = None
    obstacle: str = ""

    def drop(self) -> None:
        """Forget all graphs, and why there were no more."""
        self.graphs.clear()
        self.obstacle = ""

    def run(self, run: Run, arguments: Sequence[Any], tokens: int) -> Any:
        """The step of ``tokens`` tokens that runs now: as a graph if there is one for it, or else by ``run(arguments)``."""
        if self.limits is not None:
            return self.prepare(run, arguments, tokens)
        if self.prepared is not None:
            return self.capture(run, tokens)
        graph = self.of(tokens)
        return run(arguments) if graph is None else graph.run(arguments, tokens)

    def of(self, tokens: int) -> StepGraph | None:
        """The graph for the step of so many tokens that runs now, if there is one. The same on all ranks."""
        fitting = [size for size, graph in self.graphs.items() if graph.least <= tokens <= size]
        if not fitting:
            return None
        graph = self.graphs[min(fitting)]
        return graph if graph.serves(get_forward_context()) else None

    def prepare(self, run: Run, arguments: Sequence[Any], tokens: int) -> tuple[Any, ...]:
        """Run the step of ``tokens`` tokens by ``run(arguments)``, on memory for a graph if there is room for it."""
        context, graph = get_forward_context(), None
        try:
            graph = self._with_memory(arguments, tokens, context)
        except RuntimeError as error:
            self.obstacle = f"{type(error).__name__}: {error}"
        self.prepared = graph
        if graph is None:
            return run(arguments)  # the same calls as the other ranks make
        graph.first_results = graph.run_on_own_memory(run, context)  # allocates what the kernels need
        return graph.first_results

    def capture(self, run: Run, tokens: int) -> tuple[Any, ...]:
        """Capture the prepared step. Nothing runs: the results are those of its first run.

        vLLM's ranks exchange addresses when a capture ends, so all of them must come here.
        """
        graph, self.prepared, context = self.prepared, None, get_forward_context()
        assert graph is not None and graph.tokens == tokens
        try:
            graph.capture(lambda: graph.run_on_own_memory(run, context))
        except RuntimeError as error:
            self.obstacle = f"{type(error).__name__}: {error}"
        else:
            self.graphs[tokens] = graph
        results, graph.first_results = graph.first_results, ()
        return results

    def _with_memory(self, arguments: Sequence[Any], tokens: int, context: Any) -> StepGraph | None:
        """A graph with memory for the step; None if there is not enough, or the step is of a kind that is not known."""
        assert self.limits is not None
        if torch.cuda.is_initialized() and (free := torch.cuda.mem_get_info()[0]) < LEAST_FREE_BYTES:
            self.obstacle = f"{free / 2**20:.0f} MiB of memory are free, and 1 GiB should be"
            return None
        attention = _memory(context, tokens, self.limits, self.tables)
        if attention is None:
            self.obstacle = "attention is not FlashAttention 3's, or its steps are of another kind"
            return None
        graph = StepGraph(tokens, arguments, self.rows, attention)
        graph.fill(arguments, tokens, context)
        return graph


of_models: list[StepGraphs] = []
"""Those of this process' models, in the order in which they were compiled, which is the same on all ranks."""


def capture_steps(
    worker: Any, run: Callable[[int], None], served: Callable[[int], None], timed: Timed, launched: Timed
) -> None:
    """Capture steps with all ranks, from the shortest size on, as long as all have room. Keep those that gain.

    ``run`` runs a step of so many tokens without vLLM's graphs, ``served`` as vLLM does, with its graphs and padding.
    ``timed(run, tokens)`` says how many milliseconds a step takes. ``launched(run, tokens)`` says how many the host needs to
    launch it while it does nothing else.
    """
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if switched_off(os.environ):
        return
    if group.world_size != dist.get_world_size():
        if group.rank_in_group == 0:
            obstacle = "ranks of pipeline or data parallelism have steps of their own"
            logger.info("tw_compile: no steps as CUDA graphs: %s", obstacle)
        return
    config = worker.vllm_config
    most = config.scheduler_config.max_num_seqs, config.model_config.max_model_len
    captured = config.compilation_config.cudagraph_capture_sizes or ()

    def slowest(value: float) -> float:
        return max(one for (one,) in agree.gather([value], group.cpu_group))

    for graphs in of_models:
        begun, way = time.perf_counter(), served if graphs.short else run
        sizes = sizes_of(graphs.low, graphs.high, captured if graphs.short else ())
        limits = Limits(*most, splits=graphs.short)
        headroom = HEADROOM_OF_PIECES if graphs.short else HEADROOM
        times = StepTimes(partial(timed, way), partial(launched, way), slowest, headroom)
        said = _capture(graphs, sizes, limits, run, times) if sizes else []
        if group.rank_in_group == 0:
            kind, seconds = "short" if graphs.short else "long", time.perf_counter() - begun
            logger.info("tw_compile: %s steps as CUDA graphs: %s; in %.1f s", kind, "; ".join(said) or "none", seconds)
        elif graphs.obstacle:
            logger.info("tw_compile: rank %d captures no more steps: %s", group.rank_in_group, graphs.obstacle)


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step of so many tokens on this rank, and how all ranks learn of the slowest one's.

    ``timed``: of steps that follow each other, while nothing else is done. ``launched``: of the host, which needs ``headroom``
    times as long while it serves.
    """

    timed: Callable[[int], float]
    launched: Callable[[int], float]
    slowest: Callable[[float], float]
    headroom: float = HEADROOM

    def replayed(self, tokens: int) -> float:
        """Of a graph. The host launches it at once."""
        return self.slowest(self.timed(tokens))

    def uncaptured(self, tokens: int) -> float:
        """Of a step that is no graph of ours. While it serves, the host may be slower than the GPU."""
        return self.slowest(max(self.timed(tokens), self.headroom * self.launched(tokens)))


def _capture(
    graphs: StepGraphs, sizes: Sequence[int], limits: Limits, run: Callable[[int], None], times: StepTimes
) -> list[str]:
    """Capture steps of one model. Returns what was done, in words."""
    said: list[str] = []
    slowest = times.slowest
    before = graphs.low - 1, times.uncaptured(graphs.low)
    for size in sizes:
        captured_ways = []
        for way, inside in graphs.ways(size):
            with inside:
                _capture_step(graphs, limits, run, size, slowest)
            if slowest(float(size not in graphs.graphs)):
                graphs.graphs.pop(size, None)
                return [*said, f"{size} tokens can't be captured, {graphs.obstacle or 'by another rank'}"]
            graph = graphs.graphs.pop(size)
            graph.least = size
            captured_ways.append((way, graph))
        uncaptured, found = math.inf, [math.inf for _ in captured_ways]  # those of the slowest rank, on all ranks
        for _ in range(TRIALS):
            graphs.graphs.pop(size, None)
            uncaptured = min(uncaptured, times.uncaptured(size))
            for place, (_, graph) in enumerate(captured_ways):
                graphs.graphs[size] = graph
                found[place] = min(found[place], times.replayed(size))
        replayed = min(found)
        way, graph = captured_ways[found.index(replayed)]
        graphs.graphs[size] = graph
        graph.least = least_tokens(before, (size, uncaptured), replayed)
        if graph.least > size:
            del graphs.graphs[size]
            said.append(f"nothing gained by {size} tokens, {replayed:.1f} and {uncaptured:.1f} ms")
        else:
            steps = f"{graph.least} to {size} tokens" + (f" {way}" if way else "")
            said.append(f"{steps}, {replayed:.1f} ms and not {uncaptured:.1f}")
        before = size, uncaptured
    return said


def _capture_step(
    graphs: StepGraphs, limits: Limits, run: Callable[[int], None], size: int, slowest: Callable[[float], float]
) -> None:
    """Give the step memory, and capture it if all ranks have room for it."""
    graphs.limits = limits
    try:
        run(size)
        graphs.limits = None
        if graphs.prepared is None and not graphs.obstacle:
            graphs.obstacle = "vLLM runs such a step without the model's function"
        if not slowest(float(graphs.prepared is None)):
            run(size)  # is captured
    finally:
        graphs.limits = graphs.prepared = None


def sizes_of(low: int, high: int, captured: Sequence[int] = ()) -> list[int]:
    """The numbers of tokens that are tried: 64, 96, and their doubles, from ``low`` on, and ``high``.

    From 65 tokens on at most a third of a step is padding. Up to the largest size in ``captured`` vLLM pads steps to these
    sizes, so no others are tried there.
    """
    doubles = (size << power for power in range(high.bit_length()) for size in (64, 96))
    sizes, padded = [*(size for size in doubles if low < size < high), high], max(captured, default=0)
    return [size for size in sizes if size > padded or size in captured]


def least_tokens(before: tuple[int, float], size: tuple[int, float], replayed: float) -> int:
    """The fewest tokens of a step that gains if it runs as one of ``size``, which takes ``replayed`` milliseconds as a graph.

    ``before`` and ``size``: tokens, and milliseconds uncaptured. Between the two the time is taken for a straight line. If no
    step gains, the result is more than the tokens of ``size``.
    """
    (fewer, shorter), (tokens, longer) = before, size
    enough = replayed * (1 + LEAST_GAIN)
    if shorter > enough:
        return fewer + 1
    if longer <= enough:
        return tokens + 1
    return fewer + 1 + int((tokens - fewer - 1) * (enough - shorter) / (longer - shorter))
