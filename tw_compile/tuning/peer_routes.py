"""Try how rows go fastest between GPUs whose link has no native atomics, in processes that may be ended.

Each route (:mod:`tw_compile.peer_routes`) has processes of its own, one for each rank, on the ranks' own GPUs. So a kernel that
never ends, or a GPU error, ends with them. They time all kernels of the route as a calibration does, which also checks each
kernel's results against float64. Then every word that travels is checked in hundreds of calls, whose inputs change: such links
have been seen to deliver wrong words now and then.

Ranks of vLLM may have no children by multiprocessing. So rank 0 starts this module as a program, and that starts the processes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import permutations
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from tw_compile import child, compat, peer_routes
from tw_compile.agree import agreed, all_come, first_value, refuse
from tw_compile.environment import peer_access
from tw_compile.harness.launch import Entry, Progress, spawn_ranks
from tw_compile.harness.problems import BF16, EPS, Form, Problem
from tw_compile.harness.ranks import Keep, Ranks, one_line, work_as_rank
from tw_compile.harness.requests import RankError
from tw_compile.harness.variables import PEERS_UNUSED, for_measurements
from tw_compile.kernels.collective.peer_access import is_plain, local_world_size
from tw_compile.kernels.collective.transport import Transport, get_transport
from tw_compile.kernels.transports.slot_transport import SlotTransport
from tw_compile.peer_routes import HOST, ROUTES, Tried
from tw_compile.tuning.candidates import SPIN_LIMIT, candidates
from tw_compile.tuning.short import ShortRun, short_spec

logger = logging.getLogger("tw_compile")

ROUTE_SECONDS = 60.0
"""A route that has not ended by then is out. Starting processes and loading kernels takes most of it."""
ALL_SECONDS = len(ROUTES) * ROUTE_SECONDS + 30.0
TOKENS = (64, 1, 1024, 16, 256)
"""Of the messages that are timed, in the order of their worth."""
CHECKED_TOKENS = (1, 65, 1024)
CHECKED_CALLS = 200
"""Calls of each size of :data:`CHECKED_TOKENS` whose words are all checked."""
_CHECKED_HIDDEN = 4096
_CHANGES = 5
"""So many calls follow each other with different inputs, so a word of an earlier call is a wrong one."""
_TOLERANCE = 2**-6

Answer = tuple[Literal["no", "known", "try"], str]
"""``no``: the node has no such links, or peer access is switched off. ``known``: the text says what was tried. ``try``: nobody
has tried."""
_KEY = "peer_routes"


@dataclass(frozen=True)
class RouteSpec:
    """One route, tried by ``world_size`` ranks."""

    route: str
    world_size: int
    device: str = "cuda"
    timeout: float = ROUTE_SECONDS


def settle(measures: bool, coming_seconds: float) -> None:
    """Have all ranks of the default group use what was tried of this node's links. Where nothing was, they try if they may.

    Nothing is done on nodes whose links have native atomics, nor for ranks of several hosts. All ranks have the same outcome.
    ``coming_seconds``: how long ranks wait for each other before rank 0 tries.
    """
    found, text = agreed(_KEY, _own_answer)
    if found == "no":
        return
    ranks = dist.get_world_size()
    if found == "try":
        store, begin = compat.default_store(), f"{_KEY}/begin"
        if not measures:
            refuse(store, begin)
            return
        if not all_come(store, begin, ranks, coming_seconds):
            return
        text = _tried_by_rank_0(store, ranks)
    tried = peer_routes.tried_of(text, _KEY) if text else None
    peer_routes.use(tried)
    if tried is not None and dist.get_rank() == 0:
        logger.info("tw_compile: %s", tried.line)


def _own_answer() -> Answer:
    ranks = dist.get_world_size()
    try:
        if ranks != local_world_size() or not peer_access() or not needs_trial(ranks):
            return "no", ""
        tried = peer_routes.in_use()
    except Exception as error:
        logger.warning("tw_compile: nothing is known of links without native atomics: %s", one_line(error))
        return "no", ""
    return ("try", "") if tried is None or tried.ranks < ranks else ("known", peer_routes.text_of(tried))


def needs_trial(ranks: int) -> bool:
    """Whether the first ``ranks`` GPUs all have peer access, and a link without native atomics. False if some are not seen."""
    if torch.cuda.device_count() < ranks:
        return False
    pairs = list(permutations(range(ranks), 2))
    return all(torch.cuda.can_device_access_peer(*pair) for pair in pairs) and any(is_plain(*pair) for pair in pairs)


def _tried_by_rank_0(store: dist.Store, ranks: int) -> str:
    """What rank 0 finds, as text; empty where it finds nothing in time. The same on all ranks."""
    key, text = f"{_KEY}/tried", ""
    if dist.get_rank() == 0:
        try:
            logger.info(
                "tw_compile: trying how rows go fastest over links without native atomics, once, in at most %.0f s",
                ALL_SECONDS,
            )
            text = by_program(ranks)
        except Exception as error:
            logger.warning(
                "tw_compile: rows go through host memory, as nothing else could be tried: %s", one_line(error)
            )
    else:
        with contextlib.suppress(RuntimeError):  # rank 0 has not answered in time: the empty text is the first one
            store.wait([f"tw_compile/{key}"], timedelta(seconds=ALL_SECONDS + 30.0))
    return first_value(text, store, key)


def by_program(ranks: int) -> str:
    """Run :func:`try_routes` in a program of its own, keep its outcome and return it as text.

    Raises:
        RuntimeError: It failed, or did not end in time. The message has the last line of what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="tw_compile_") as scratch:
        result, log = Path(scratch, "tried.json"), Path(scratch, "log")
        theirs, line = Pipe(duplex=False)
        paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        with theirs, line, log.open("w") as output:
            program = subprocess.Popen(
                [sys.executable, "-m", __name__, str(ranks), str(result), str(theirs.fileno()), scratch],
                env={**os.environ, "PYTHONPATH": paths},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
            try:
                code = program.wait(ALL_SECONDS)
            finally:
                child.kill_group(program.pid)
                program.wait()
        if code or not result.exists():
            last = (log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
            raise RuntimeError(f"the program that tries routes ended with {code}: {last}")
        text = result.read_text()
    peer_routes.store(peer_routes.default_folder(), peer_routes.tried_of(text, _KEY))
    return text


def try_routes(
    ranks: int, progress: Progress, entry: Entry[RouteSpec] | None = None, seconds: float = ROUTE_SECONDS
) -> Tried:
    """Try all routes with ``ranks`` ranks, each in processes of its own for at most ``seconds``, and choose one.

    ``entry``: what the processes run instead of :func:`rank_process`, for tests.
    """
    us: dict[str, dict[str, float]] = {}
    reasons: dict[str, str] = {}
    # NCCL only sets ranks up and gives the results to compare with. It may hang over such links, too.
    with for_measurements(), mock.patch.dict(os.environ, PEERS_UNUSED):
        for route in ROUTES:
            progress(route)
            try:
                found = spawn_ranks(RouteSpec(route, ranks, timeout=seconds), progress, entry or rank_process)
            except RankError as error:
                found = {"reason": str(error).splitlines()[0], "us": {}}
            if found["reason"]:
                reasons[route] = found["reason"]
            else:
                us[route] = found["us"]
    return Tried(peer_routes.here(), ranks, fastest(us), us, reasons)


def fastest(us: Mapping[str, Mapping[str, float]]) -> str:
    """The route that is fastest by the geometric mean over the sizes that all were timed at; ``host`` without times."""
    sizes = set.intersection(*(set(times) for times in us.values())) if us else set()
    if not sizes:
        return HOST
    return min(ROUTES, key=lambda route: sum(math.log(us[route][size]) for size in sizes) if route in us else math.inf)


def rank_process(spec: RouteSpec, rank: int, scratch: str, messages: Connection) -> None:
    """Entry point of a spawned rank."""
    work_as_rank(spec, rank, scratch, messages, partial(try_route, spec))


def try_route(spec: RouteSpec, ranks: Ranks, progress: Progress, keep: Keep) -> dict[str, Any]:
    """Time a route's kernels and check their results. Returns ``us`` by bytes, and the ``reason`` if the route is out."""
    peer_routes.try_alone(spec.route)
    name = "host" if spec.route == HOST else "p2p"
    progress("timing")
    contenders = [one for one in candidates([name]) if one.kind == "ours"]
    short = ShortRun(ranks, replace(short_spec(spec.world_size), tokens=TOKENS), contenders)
    short.run()
    us: dict[str, float] = {}
    for row in short.rows:
        if row.numerics == "ok" and row.p50_us is not None:
            size = str(row.nbytes)
            us[size] = min(row.p50_us, us.get(size, math.inf))
    if not us:
        return {"us": {}, "reason": "; ".join(short.remarks) or "no kernel of it serves such messages"}
    progress("checking")
    wrong = wrong_words(ranks, _bounded(name))
    return {
        "us": us,
        "reason": f"{wrong} wrong words in {CHECKED_CALLS * len(CHECKED_TOKENS)} calls" if wrong else None,
    }


def _bounded(name: str) -> Transport:
    transport = get_transport(name)
    if isinstance(transport, SlotTransport):
        transport.limit_spins(SPIN_LIMIT)
    return transport


def wrong_words(
    ranks: Ranks, transport: Transport, calls: int = CHECKED_CALLS, hidden_size: int = _CHECKED_HIDDEN
) -> int:
    """How many elements of the results of many calls are wrong, on the rank with the most.

    All inputs are small integers, so sums are exact in bfloat16 in any order, and the new residual must equal them. The
    normalised rows may be off by rounding. Every rank knows all ranks' inputs.
    """
    ctx = ranks.ctx
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)

    def integers(*shape: int, most: int, seed: int) -> torch.Tensor:
        return torch.randint(-most, most + 1, shape, generator=ctx.generator(seed), device=ctx.device).to(BF16)

    def ones(count: int) -> torch.Tensor:
        return torch.ones(count, dtype=BF16, device=ctx.device)

    for tokens in CHECKED_TOKENS:
        messages = [integers(tokens, hidden_size, most=4, seed=rank + 1) for rank in range(ctx.world_size)]
        residual, zeros = integers(tokens, hidden_size, most=8, seed=0), torch.zeros_like(ones(hidden_size))
        total = sum(messages, residual.float())
        for call in range(calls):
            change = call % _CHANGES
            x = messages[ctx.rank] + change
            problem = Problem(Form(BF16), x, residual, zeros, ones(hidden_size), zeros)
            started = transport.start(problem.request(ctx))
            if started.finish is not None:
                started.finish()
            h = total + change * ctx.world_size
            y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
            wrong += (started.residual.float() != h).sum()
            wrong += ((started.hidden.float() - y).abs() > _TOLERANCE * (1 + y.abs())).sum()
    if isinstance(transport, SlotTransport):
        transport.check()
    return int(max(ranks.gather(int(wrong))))


def main(ranks: str, result: str, line: str, scratch: str) -> None:
    child.live_with(int(line), scratch)
    tried = try_routes(int(ranks), lambda text: print(text, flush=True))
    Path(result).write_text(peer_routes.text_of(tried))


if __name__ == "__main__":
    main(*sys.argv[1:])
