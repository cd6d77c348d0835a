"""Ranges of long steps of which no plan can say whether the split pays: both ways are compiled, and the start measures.

The host launches a split step kernel by kernel, in about twice the time of a whole one. Where the GPU would be faster than
that, only a measurement on the machine at hand says whether the split pays. The same holds where the device's profile is an
estimate, and for kernels of which no times are known (quantised matmuls, experts). Ranges are cut before anything is compiled.
So such a range is compiled split and whole, and when vLLM has warmed up, all ranks run steps of a few sizes both ways, and time
how long the host launches one. From the size on where the slowest rank gains, steps of the range are split. Until then, and
after an error, they are whole.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tw_compile import agree
from tw_compile.config import Config
from tw_compile.environment import strict
from tw_compile.hosts.vllm.options import switched_off
from tw_compile.hosts.vllm.step_graphs import HEADROOM, TRIALS, capture_steps, of_models

if TYPE_CHECKING:
    from tw_compile.hosts.vllm.plan import Engine

logger = logging.getLogger("vllm.tw_compile")

RUNS = 3
"""Steps of one size and way that are timed together, as in a prefill, where the host prepares a step while the GPU is busy."""


class Way(StrEnum):
    """How a range is compiled: as planned, split wherever the GPU gains however long the host launches, or not split."""

    PLANNED = "planned"
    SPLIT = "split"
    WHOLE = "whole"


_way: ContextVar[Way] = ContextVar("way", default=Way.PLANNED)


def way_to_compile() -> Way:
    """The way of the graph that is compiled now."""
    return _way.get()


@contextmanager
def compiled_as(way: Way) -> Iterator[None]:
    """Graphs that are compiled inside are compiled this way."""
    token = _way.set(way)
    try:
        yield
    finally:
        _way.reset(token)


@dataclass
class Tried:
    """A range that is compiled both ways. Steps of at least ``split_from`` tokens are split; more than ``high``: none is."""

    low: int
    high: int
    split_from: int = field(init=False)

    def __post_init__(self) -> None:
        self.split_from = self.high + 1

    def sizes(self) -> list[int]:
        """The numbers of tokens that are timed."""
        return sorted({self.low, (self.low + self.high) // 2, self.high})

    @contextmanager
    def forced(self, split: bool) -> Iterator[None]:
        """Inside, all steps of the range are split, or none."""
        before, self.split_from = self.split_from, self.low if split else self.high + 1
        try:
            yield
        finally:
            self.split_from = before


tried_ranges: list[Tried] = []
"""Those of this process' model, in the order of its ranges, which is the same on all ranks."""


def profiles_memory() -> bool:
    """Whether the step that runs now is the one by which vLLM learns how much memory a step needs: it has no attention."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return is_forward_context_available() and not get_forward_context().attn_metadata


def measure_behind_warm_up() -> None:
    """Have :func:`measure` follow the warm-up of each worker of this process, as ``measuring.py`` does behind loading."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def compile_or_warm_up_model(self: Any, *args: Any, **named: Any) -> Any:
        _drop_graphs()  # of an earlier warm-up
        result = self.worker.compile_or_warm_up_model(*args, **named)
        measure(self.worker)
        return result

    if "compile_or_warm_up_model" not in vars(WorkerWrapperBase):
        WorkerWrapperBase.compile_or_warm_up_model = compile_or_warm_up_model


def measure(worker: Any) -> None:
    """:func:`choose_ways`, and then capture steps if that is asked for. What an earlier call found is dropped."""
    _drop_graphs()
    choose_ways(worker)
    if (asking := _pass_that_asks_for_graphs(worker)) is not None:
        _capture_steps(worker, asking.engine)


def _drop_graphs() -> None:
    for graphs in of_models:
        graphs.drop()


def _pass_that_asks_for_graphs(worker: Any) -> Any:
    """The pass in the worker's slot, if it is one of ours that asks for graphs of steps; else None."""
    from vllm.platforms import current_platform

    slot = worker.vllm_config.compilation_config.inductor_compile_config
    found = slot.get(current_platform.pass_key)
    config = getattr(found, "config", None)
    return found if isinstance(config, Config) and config.vllm_step_graphs == "auto" else None


def _capture_steps(worker: Any, engine: Engine | None) -> None:
    """:func:`step_graphs.capture_steps`. An error costs what it costs :func:`choose_ways`."""
    from vllm.distributed.parallel_state import get_tp_group

    obstacle = "the pass does not know its engine" if engine is None else engine.graphs_obstacle()
    if obstacle is not None:
        if get_tp_group().rank_in_group == 0:
            logger.info("tw_compile: no steps as CUDA graphs: %s", obstacle)
        return

    with _trial("no steps as CUDA graphs", _drop_graphs):
        capture_steps(worker, steps_of(worker), steps_of(worker, as_served=True), milliseconds, _launch_milliseconds)


@contextmanager
def _trial(failure: str, undo: Callable[[], None]) -> Iterator[None]:
    """Steps that run inside leave random numbers as they were. An error undoes what was found, and costs one line.

    Errors that one rank alone may have, ``RuntimeError``, are raised. In strict mode all are.
    """
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
            yield
    except RuntimeError:
        raise
    except Exception as error:
        undo()
        if strict():
            raise
        logger.warning("tw_compile: %s: %s: %s", failure, type(error).__name__, error)


def choose_ways(worker: Any) -> None:
    """Time both ways of each range that was compiled both ways, with all ranks, and choose. An error costs one line.

    Errors that one rank alone may have are raised, as the others wait for its calls.

    Raises:
        RuntimeError: A rank died, did not answer, or had no memory, while all measured. In strict mode, any error is raised.
    """
    if not tried_ranges or switched_off(os.environ):
        return
    from vllm.distributed.parallel_state import get_tp_group

    begun, group = time.perf_counter(), get_tp_group()
    if group.world_size != dist.get_world_size():
        return  # ranks of pipeline or data parallelism, with ranges of their own, need not be here at the same time

    def undo() -> None:
        for tried in tried_ranges:
            tried.split_from = tried.high + 1

    with _trial("steps stay whole that were not timed", undo):
        for tried in tried_ranges:
            times = _timed(tried, steps_of(worker), lambda own: agree.gather(own, group.cpu_group))
            tried.split_from = split_from(tried, times)
            if group.rank_in_group == 0:
                logger.info("tw_compile: %s", line(tried, times, time.perf_counter() - begun))


@dataclass(frozen=True)
class Times:
    """Milliseconds of a whole and of a split step of each size, and those that the host needs to launch a split one."""

    whole_ms: Sequence[float]
    split_ms: Sequence[float]
    launch_ms: float


def split_from(tried: Tried, times: Times) -> int:
    """The number of tokens from which the split is faster at all sizes timed, between two sizes by a straight line.

    A host that serves needs :data:`HEADROOM` times as long to launch a split step as one that does nothing else. If that is
    more than a step takes unsplit, it stays unsplit.
    """
    sizes = tried.sizes()
    host_ms = HEADROOM * times.launch_ms
    gains = [whole - max(split, host_ms) for whole, split in zip(times.whole_ms, times.split_ms, strict=True)]
    first = next((place for place in range(len(sizes), 0, -1) if gains[place - 1] <= 0.0), 0)
    if first == 0:
        return tried.low
    if first == len(sizes):
        return tried.high + 1
    (below, above), (loss, gain) = sizes[first - 1 : first + 1], gains[first - 1 : first + 1]
    return below + 1 + int((above - below - 1) * -loss / (gain - loss))


def line(tried: Tried, times: Times, seconds: float) -> str:
    """What was measured and chosen, in words."""
    both = ", ".join(
        f"{split:.1f} and {whole:.1f} ms for {tokens}"
        for tokens, split, whole in zip(tried.sizes(), times.split_ms, times.whole_ms, strict=True)
    )
    host = f"the host launches a split one in {times.launch_ms:.1f} ms"
    chosen = f"are split from {tried.split_from} tokens on" if tried.split_from <= tried.high else "stay whole"
    steps = f"launched by the host, steps of {tried.low} to {tried.high} tokens {chosen}"
    return f"{steps}: split and whole they take {both}; {host}; measured in {seconds:.1f} s"


def _timed(tried: Tried, run: Callable[[int], None], gather: Callable[[list[float]], list[list[float]]]) -> Times:
    """The times of a range on the slowest rank: of each step the shortest of :data:`TRIALS`.

    The host launches as many kernels for the shortest step as for the longest. The shortest is launched, because a host that is
    far ahead of the GPU waits for it.
    """
    sizes, trials = tried.sizes(), []
    for _ in range(TRIALS):
        own = []
        for split in (False, True):
            with tried.forced(split):
                own += [milliseconds(run, tokens) for tokens in sizes]
        trials.append(own)
    shortest = [min(times) for times in zip(*trials, strict=True)]
    with tried.forced(True):
        launch_ms = _launch_milliseconds(run, sizes[0])
    *slowest, launch_ms = [max(times) for times in zip(*gather([*shortest, launch_ms]), strict=True)]
    return Times(slowest[: len(sizes)], slowest[len(sizes) :], launch_ms)


def milliseconds(run: Callable[[int], None], tokens: int) -> float:
    """Milliseconds of one of :data:`RUNS` steps of ``tokens`` tokens, on this rank. One more step runs before."""
    run(tokens)
    _synchronise()
    begun = time.perf_counter()
    for _ in range(RUNS):
        run(tokens)
    _synchronise()
    return (time.perf_counter() - begun) / RUNS * 1e3


def _launch_milliseconds(run: Callable[[int], None], tokens: int) -> float:
    """Milliseconds that the host needs to launch one of :data:`RUNS` steps, on this rank. The device is idle before each."""
    seconds = 0.0
    for _ in range(RUNS):
        _synchronise()
        begun = time.perf_counter()
        run(tokens)
        seconds += time.perf_counter() - begun
    _synchronise()
    return seconds / RUNS * 1e3


def _synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def steps_of(worker: Any, as_served: bool = False) -> Callable[[int], None]:
    """Runs a step of so many tokens with attention, as vLLM itself does to warm kernels up.

    ``as_served``: with vLLM's CUDA graphs, and padded to their sizes, as a step that vLLM serves; else without.

    vLLM 0.24 has two model runners. The first gives every request of such a step as many keys as the step has tokens. A block
    table has no room for more than the longest context, and attention would read pages behind it, so there the keys end. The
    second runner's requests have the keys of their own tokens. It runs attention, and CUDA graphs at sizes that were captured,
    unasked. Graphs that we capture leave vLLM's graphs of pieces out by themselves.

    Raises:
        TypeError: The runner's ``_dummy_run`` has not the options that either has.
    """
    from vllm.config import CUDAGraphMode

    dummy_run, longest = worker.model_runner._dummy_run, worker.vllm_config.model_config.max_model_len
    known = inspect.signature(dummy_run).parameters.keys()
    mode = None if as_served else CUDAGraphMode.NONE  # None: as vLLM's dispatcher says
    first = {"cudagraph_runtime_mode": mode, "force_attention": True, "skip_eplb": True}
    keys = "profile_seq_lens"
    if known >= {*first, keys}:
        return lambda tokens: dummy_run(tokens, **first, **{keys: min(tokens, longest)})
    if known >= {"skip_attn", "skip_eplb"}:
        return lambda tokens: _dummy_run_of_few(worker.model_runner, tokens)
    expected = f"either {sorted({*first, keys})} or ['skip_attn', 'skip_eplb']"
    raise TypeError(
        f"_dummy_run of {type(worker.model_runner).__name__}: expected options {expected}, got {sorted(known)}"
    )


def _dummy_run_of_few(runner: Any, tokens: int) -> None:
    """A step of vLLM's second runner, of requests with 16 tokens or more.

    Where there may be as many requests as tokens, the runner would give each request one token. vLLM has graphs of whole steps
    for that, which run no function of the model.
    """
    most = getattr(runner, "max_num_reqs", None)
    if most is None:
        runner._dummy_run(tokens, skip_attn=False, skip_eplb=True)
        return
    runner.max_num_reqs = max(min(most, tokens // 16), 1)
    try:
        runner._dummy_run(tokens, skip_attn=False, skip_eplb=True)
    finally:
        runner.max_num_reqs = most
