"""Several ranks on one machine without a GPU: worker processes that stay, and a comparison of numerics on them."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from tw_compile import compat
from tw_compile.child import Child, end, wait_for_end
from tw_compile.leave import leave
from tw_compile.report import collect_reports
from tw_compile.testing.error_budget import budget, relative_error

_GRACE_SECONDS = 2.0
_NO_MORE_CALLS = b""


class RankError(RuntimeError):
    """A rank raised, died or didn't answer; the message holds its traceback."""


class GlooRanks:
    """``world_size`` worker processes joined by gloo; they start once and serve any number of calls.

    Use it as a context manager, or keep one for a whole test session and :meth:`close` it. After an error the workers
    are replaced by fresh ones, so one failing test doesn't disturb the next.

    Args:
        world_size: Number of ranks.
        timeout: Seconds that one call, or one collective, may take.
    """

    def __init__(self, world_size: int = 2, *, timeout: float = 300.0) -> None:
        if world_size < 1:
            raise ValueError(f"world_size: expected at least 1, got {world_size}")
        self.world_size = world_size
        self.timeout = timeout
        self._workers: list[tuple[Child, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> GlooRanks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(rank, *args)`` on every rank; what each returned. Function, arguments and results are pickled.

        Raises:
            RankError: A rank raised, died, or didn't return within ``timeout`` seconds.
        """
        if not self._workers:
            self._start()
        call = pickle.dumps((function, args))
        try:
            for _, connection in self._workers:
                with contextlib.suppress(ConnectionError):  # it has died, which collecting answers finds out
                    connection.send_bytes(call)
            return self._collect()
        except BaseException:
            self._stop(polite=False)
            raise

    def close(self) -> None:
        """End the workers; safe to call twice."""
        self._stop(polite=True)

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tw_compile_ranks_", ignore_cleanup_errors=True)
        folder = self._folder.name
        store = os.path.join(folder, "store")
        for rank in range(self.world_size):
            ours, theirs = multiprocessing.Pipe()
            with theirs:
                served = (theirs, rank, self.world_size, store, self.timeout)
                self._workers.append((Child(serve, *served, scratch=folder, daemon=True), ours))

    def _collect(self) -> list[Any]:
        deadline = time.monotonic() + self.timeout
        ranks = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        results: list[Any] = [None] * self.world_size
        errors: dict[int, str] = {}
        while ranks:
            ready = wait(list(ranks), max(0.0, deadline - time.monotonic()))
            if not ready:
                if not errors:
                    raise RankError(f"ranks {sorted(ranks.values())} did not answer within {self.timeout:g} seconds")
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = ranks.pop(connection)
                succeeded, answer = _receive(connection)
                if succeeded:
                    results[rank] = answer
                else:
                    errors[rank] = answer
                    # The other ranks may be waiting for this rank, so wait only a little longer for errors of their own.
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if errors:
            raise RankError("\n".join(f"rank {rank}:\n{error}" for rank, error in sorted(errors.items())))
        return results

    def _stop(self, *, polite: bool) -> None:
        workers, self._workers = self._workers, []
        if polite:
            for _, connection in workers:
                with contextlib.suppress(OSError):
                    connection.send_bytes(_NO_MORE_CALLS)
            for child, _ in workers:
                child.join(10.0)
        end([child for child, _ in workers], _GRACE_SECONDS)
        for _, connection in workers:
            connection.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _receive(connection: Connection) -> tuple[bool, Any]:
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return False, "the process died"


def serve(connection: Connection, rank: int, world_size: int, store: str, timeout: float) -> None:
    torch.set_num_threads(1)
    compat.write_plain_cpp()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
    )
    try:
        while (call := connection.recv_bytes()) != _NO_MORE_CALLS:
            connection.send_bytes(_answer(call, rank))
    except (EOFError, OSError):
        wait_for_end()
    dist.destroy_process_group()
    leave(0)


def _answer(call: bytes, rank: int) -> bytes:
    try:
        function, args = pickle.loads(call)
        return pickle.dumps((True, function(rank, *args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


@dataclass(frozen=True)
class OutputError:
    """One output tensor of one call, worst rank: relative errors against float64, and what is allowed."""

    call: int
    output: int
    error: float
    unfused_error: float
    budget: float

    @property
    def passed(self) -> bool:
        return self.error <= self.budget


@dataclass(frozen=True)
class Comparison:
    """Numerics of the compiled module on several ranks; ``counts`` are those of the first graph's report.

    ``graphs``: how many graphs have reports. ``split``: how many of them were split.
    """

    errors: list[OutputError]
    bitwise_equal_across_ranks: bool
    counts: dict[str, int]
    graphs: int
    split: int

    @property
    def passed(self) -> bool:
        return self.bitwise_equal_across_ranks and all(error.passed for error in self.errors)


def compare_on_gloo(
    module_factory: Callable[[int], torch.nn.Module],
    args_factory: Callable[[int, int], tuple[Any, ...]],
    *,
    calls: int = 1,
    ranks: GlooRanks | None = None,
    world_size: int = 2,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    factor: float = 1.1,
) -> Comparison:
    """Run a module compiled with ``backend="tw_compile"``, eagerly, and eagerly in float64, on gloo ranks; compare.

    Args:
        module_factory: ``module_factory(rank)`` builds this rank's shard. Picklable: a function of an importable module.
        args_factory: ``args_factory(rank, call)`` gives the arguments of a call.
        calls: How often the compiled module is called, back to back.
        ranks: Workers to run on; None starts ``world_size`` of them for this comparison.
        factor: The error may be at most this factor times the unfused error.

    Raises:
        ValueError: ``calls`` is below 1, so nothing would be compared.
    """
    if calls < 1:
        raise ValueError(f"calls: expected 1 or more, got {calls!r}")
    if ranks is None:
        with GlooRanks(world_size) as own:
            return compare_on_gloo(
                module_factory, args_factory, calls=calls, ranks=own, options=options, dynamic=dynamic, factor=factor
            )
    parts = ranks.run(_compare, module_factory, args_factory, calls, dict(options or {}), dynamic, factor)
    errors = [
        max(same, key=lambda error: (not error.passed, error.error / error.budget if error.budget else 0.0))
        for same in zip(*(p[0] for p in parts), strict=True)
    ]
    bits = [part[1] for part in parts]
    return Comparison(errors, all(one == bits[0] for one in bits), *parts[0][2:])


def _compare(
    rank: int,
    module_factory: Callable[[int], torch.nn.Module],
    args_factory: Callable[[int, int], tuple[Any, ...]],
    calls: int,
    options: dict[str, Any],
    dynamic: bool | None,
    factor: float,
) -> tuple[list[OutputError], list[bytes], dict[str, int], int, int]:
    module = module_factory(rank)
    # Each way has a module and arguments of its own, as it may write to them.
    arguments = [args_factory(rank, call) for call in range(calls)]
    of_unfused, of_reference = copy.deepcopy(arguments), _doubled(arguments)
    torch._dynamo.reset()
    with torch.no_grad(), collect_reports() as reports:
        compiled = torch.compile(module, backend="tw_compile", options=options, dynamic=dynamic)
        actual = [_tensors(compiled(*args)) for args in arguments]
        eager = module_factory(rank)
        unfused = [_tensors(eager(*args)) for args in of_unfused]
        module64 = module_factory(rank).double()
        reference = [_tensors(module64(*args)) for args in of_reference]
    errors = [
        OutputError(call, output, relative_error(a, r), relative_error(u, r), budget(u, r, factor))
        for call in range(calls)
        for output, (a, u, r) in enumerate(zip(actual[call], unfused[call], reference[call], strict=True))
    ]
    bits = [_bits(tensor) for outputs in actual for tensor in outputs]
    split = sum(report.split is not None and report.split.mode != "off" for report in reports)
    return errors, bits, reports[0].counts if reports else {}, len(reports), split


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _doubled(arguments: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """A copy in float64. A tensor that several calls get, as a cache, is also one tensor in the copy."""
    copies: dict[int, torch.Tensor] = {}

    def double(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)
        return copies[id(tensor)]

    return [tree_map_only(torch.Tensor, double, args) for args in arguments]


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
