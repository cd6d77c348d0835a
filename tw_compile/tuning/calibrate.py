"""The ranks of an unmeasured node measure it, before they compile the first graph that needs all of them.

All ranks decide alike. The rank that comes first says what is on disk. Measuring begins only when all ranks have come.
Afterwards all ranks use the tables that rank 0 made from the times.
"""

from __future__ import annotations

import datetime
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
import torch.fx as fx

from tw_compile import __version__, compat
from tw_compile.agree import agreed, all_come, first_value, refuse
from tw_compile.benchmark.contender import Contender
from tw_compile.benchmark.spec import BenchSpec
from tw_compile.calibration import (
    LAYER,
    Calibration,
    MeasuredOn,
    calibration_of,
    default_folder,
    store,
    stored,
    text_of,
    use,
)
from tw_compile.config import Config
from tw_compile.current import current_node, measured_on
from tw_compile.gating.facts import Node
from tw_compile.gating.hosts import DEFAULT_HOST
from tw_compile.gating.table import Table
from tw_compile.harness.launch import Progress
from tw_compile.harness.problems import Context
from tw_compile.harness.ranks import Keep, Ranks, one_line, work_as_rank
from tw_compile.harness.requests import UsageError
from tw_compile.harness.versions import nccl_version
from tw_compile.kernels.collective.transport import group_facts
from tw_compile.kernels.collective.transports import TRANSPORTS, GroupFacts, choose_transport
from tw_compile.own_gate import calibrates, is_measured
from tw_compile.planning.device import shipped_profile
from tw_compile.planning.links import shipped_link
from tw_compile.tuning.candidates import candidates, for_planner
from tw_compile.tuning.estimate import estimated_profile, measured_link
from tw_compile.tuning.measured import run_made_with
from tw_compile.tuning.peer_routes import settle
from tw_compile.tuning.short import HIDDEN, SECONDS, ShortRun, short_spec
from tw_compile.tuning.tables import decide, shipped_gate

logger = logging.getLogger("tw_compile")

T = TypeVar("T")

OPTION = "tw_compile.calibrate"
COMING_SECONDS = 30.0
"""How long ranks wait for each other, because they begin to compile at different times. A rank that has not come by then may
never come: it compiles something else."""
ANSWER_SECONDS = 60.0
"""A rank that does not answer within this time counts as failed."""

Answer = tuple[Literal["measured", "stored", "measure", "failed"], str]
"""The state of a rank, and a text. ``measured``: the rank has measured tables, or no use for any. ``stored``: the text is a
stored calibration. ``measure``: the rank would have to measure. ``failed``: the rank can't tell."""

_BEGIN = f"{LAYER}/begin"
"""The key in the store under which the ranks that would measure meet."""

_calibrations = itertools.count()
"""Numbers the calibrations. All ranks begin a calibration together, so they agree on its number."""
asked_in: list[object] = []
"""The default process group for which this process has already looked for a calibration."""


def before_compile(config: Config, graph: fx.GraphModule) -> None:
    """Make this process use a calibration of the node. If there is none, all ranks measure, where ``graph`` needs all of them.

    Nothing is done where an option switches calibration or fusing off or names the transport, while a CUDA graph is captured,
    for groups that our kernels can't serve, or a second time in the same group.
    Nothing is measured for hosts whose all_reduce is not NCCL's, because a calibration does not time other ones. An error is
    logged in one line, and the public tables stay in use.

    Raises:
        RuntimeError: A rank died, or did not answer, while all measured. With ``strict``, any error is raised.
    """
    measures = config.calibrate == "auto" and config.host == DEFAULT_HOST
    if _may_calibrate(config) and (not measures or reduces_over_all_ranks(graph)):
        _calibrate(config, measures)


def measure_or_use_stored(config: Config) -> None:
    """As :func:`before_compile`, for hosts that come here with all ranks of the default group, before they compile."""
    if _may_calibrate(config):
        _calibrate(config, measures=config.calibrate == "auto")


def use_stored(config: Config) -> None:
    """Make this process use a stored calibration of the node. Nothing is measured, and no rank waits for another one."""
    if _may_calibrate(config):
        _calibrate(config, measures=False)


def _calibrate(config: Config, measures: bool) -> None:
    """Use a stored calibration, or measure one. All ranks do the same: where one rank can't tell its state, none measures.

    Over links without native atomics the ranks try first which kernels may use them.
    """
    asked_in[:] = [dist.group.WORLD]
    settle(measures, COMING_SECONDS)
    own: list[tuple[MeasuredOn, list[str]]] = []

    def own_answer() -> Answer:
        try:
            here, transports = this_node()
            own.append((here, transports))
            if not transports:
                return "measured", ""
            return answer(config, current_node(), here, transports[0], default_folder())
        except Exception as error:
            own.clear()
            if config.strict:
                raise
            logger.warning("tw_compile: no calibration is used: %s", one_line(error))
            return "failed", ""

    found, text = agreed(LAYER, own_answer)
    use(calibration_of(text, LAYER) if found == "stored" else None)
    if found != "measure" or not measures:
        return
    if not own:
        refuse(compat.default_store(), _BEGIN)
        return
    here, transports = own[0]
    if _all_are_here(here.world_size):
        use(measured_together(here, default_folder(), _device(), everyone(here, transports)))


def everyone(here: MeasuredOn, transports: Sequence[str]) -> list[Contender]:
    """All contenders that are timed on a node with these ``transports``."""
    return [*candidates(transports), *for_planner(transports, shipped_profile(here.device_name) is not None)]


def this_node() -> tuple[MeasuredOn, list[str]]:
    """What all ranks of the default group run on, and the transports whose kernels can serve these ranks."""
    assert dist.group.WORLD is not None
    facts, node = group_facts(compat.group_name(dist.group.WORLD), "cuda"), current_node()
    here = measured_on(torch.cuda.get_device_name(), facts.world_size, node, facts.peer_access)
    return here, transports_of(facts, node)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _may_calibrate(config: Config) -> bool:
    if not calibrates(config) or dist.group.WORLD in asked_in:
        return False
    return over_nccl() and dist.is_gloo_available() and not torch.cuda.is_current_stream_capturing()


def over_nccl() -> bool:
    """Whether NCCL does the all_reduces of CUDA tensors. Otherwise the backend is that of a test, or there is none."""
    return "cuda:nccl" in dist.get_backend_config()


def reduces_over_all_ranks(graph: fx.GraphModule) -> bool:
    """Whether an all_reduce in ``graph`` is over all ranks of the default group. Then every rank compiles such a graph."""
    ranks = dist.get_world_size()
    groups = {name for name, size, _ in compat.process_group_facts() if size == ranks}
    return any(
        "all_reduce" in str(node.target) and not groups.isdisjoint(_texts((*node.args, *node.kwargs.values())))
        for module in graph.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function"
    )


def _texts(arguments: Sequence[Any]) -> set[str]:
    return {argument for argument in arguments if isinstance(argument, str)}


def transports_of(facts: GroupFacts, node: Node) -> list[str]:
    """The transports whose kernels are timed: the one that ``auto`` takes, and ``multimem`` with multicast.

    Empty if ``auto`` takes NCCL or nothing.
    """
    choice = choose_transport(facts, HIDDEN, torch.bfloat16.itemsize)
    if choice.name in (None, "nccl"):
        return []
    also = TRANSPORTS["multimem"]
    multicast = node.multicast and also.obstacle(facts, HIDDEN, torch.bfloat16.itemsize) is None
    return [str(choice.name), *([also.name] if multicast else [])]


def answer(config: Config, node: Node, here: MeasuredOn, transport: str, folder: Path | None) -> Answer:
    """This rank's own state: what it would do if it were alone."""
    if is_measured(config, node, here.device_name, here.world_size, transport):
        return "measured", ""
    calibration = stored(folder, here)
    return ("measure", "") if calibration is None else ("stored", text_of(calibration))


def _all_are_here(ranks: int) -> bool:
    if all_come(compat.default_store(), _BEGIN, ranks, COMING_SECONDS):
        return True
    logger.warning(
        "tw_compile: this node is not measured: not all of %s ranks came to compile within %.0f s (%s=off does not wait)",
        ranks,
        COMING_SECONDS,
        OPTION,
    )
    return False


def measured_together(
    here: MeasuredOn,
    folder: Path | None,
    device: torch.device,
    contenders: Sequence[Contender],
    run: Callable[..., ShortRun] = ShortRun,
    answer_seconds: float = ANSWER_SECONDS,
) -> Calibration | None:
    """Measure with all ranks of the default group, and store the calibration in ``folder``. Collective.

    Returns None where nothing could be timed.

    Raises:
        RuntimeError: A rank died, or did not answer in time.
    """
    world = dist.group.WORLD
    assert world is not None
    rank = dist.get_rank()
    if rank == 0:
        logger.info(
            "tw_compile: measuring %s x %s, once, in %.0f s (%s)", here.world_size, here.device_name, SECONDS, OPTION
        )
    store, key = compat.default_store(), f"{LAYER}/{next(_calibrations)}"
    control = _control_group(f"{key}/control", here.world_size, answer_seconds)
    if control is None:
        return None
    ranks = _Answering(Context(rank, here.world_size, device, compat.group_name(world)), control)
    found, failure, failed = None, "", f"{key}/failed"
    try:
        found = _measured(ranks, here, folder, contenders, run)
    except _NoAnswerError as error:
        # A rank that failed but lives has already put this into the store: the others waited for it in vain.
        if not first_value(False, store, failed):
            raise RuntimeError(
                f"{OPTION}: expected all {here.world_size} ranks to answer within {answer_seconds:.0f} s while they measure "
                f"this node, got {error}; a rank died or hangs. 'off' leaves it out"
            ) from error
        failure = "a rank failed"
    except Exception as error:
        if not first_value(True, store, failed):  # the others have already given up on this rank
            raise
        failure = one_line(error)
    dist.destroy_process_group(control)
    if failure:
        logger.warning("tw_compile: this node is not measured: %s", failure)
    return found


class _NoAnswerError(RuntimeError):
    """A rank did not come to a collective in time."""


class _Answering(Ranks):
    """Tells missing ranks apart from this rank's own errors: a failed collective raises :class:`_NoAnswerError`."""

    def gather(self, value: Any) -> list[Any]:
        """See :class:`Ranks`."""
        return self._answered(lambda: super(_Answering, self).gather(value))

    def barrier(self) -> None:
        """See :class:`Ranks`."""
        self._answered(super().barrier)

    def _answered(self, meet: Callable[[], T]) -> T:
        try:
            return meet()
        except RuntimeError as error:
            raise _NoAnswerError(one_line(error)) from error


def _measured(
    ranks: Ranks, here: MeasuredOn, folder: Path | None, contenders: Sequence[Contender], run: Callable[..., ShortRun]
) -> Calibration | None:
    if len(set(ranks.gather(here))) > 1:
        logger.warning("tw_compile: this node is not measured: its ranks run on different devices")
        return None
    short = run(ranks, short_spec(here.world_size, ranks.ctx.device.type), contenders)
    with torch.no_grad():
        short.run()
    # Kernels on fewer SMs are timed for the planner only. A message that travels alone gets the kernel that is fastest alone.
    beside = frozenset(contender.label for contender in contenders if contender.tokens is not None)
    text, file = ranks.gather(_kept(here, short, folder, beside) if ranks.ctx.rank == 0 else None)[0]
    if ranks.ctx.rank == 0:
        logger.info("tw_compile: measured this node in %.1f + %.1f s, see %s", *short.took, file or "no file")
    return None if text is None else calibration_of(text, LAYER)


def _control_group(key: str, world_size: int, seconds: float) -> dist.ProcessGroup | None:
    """A gloo group of all ranks, which works whatever state the GPUs are in. None on all ranks if one rank can't make it."""
    store = compat.default_store()
    obstacle = "a rank did not come"
    try:
        control: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=seconds))
        if all_come(store, key, world_size, seconds):
            return control
    except RuntimeError as error:  # for example from sockets with unknown addresses
        obstacle = str(error)
        refuse(store, key)
    logger.warning("tw_compile: this node is not measured, as its ranks can't meet by gloo: %s", obstacle)
    return None


def _kept(
    here: MeasuredOn, short: ShortRun, folder: Path | None, beside: frozenset[str]
) -> tuple[str | None, str | None]:
    """The text of the calibration, and the file that keeps it, if there is one. Both are None where nothing was timed."""
    if not any(row.kind != "bound" for row in short.rows):
        logger.warning("tw_compile: this node is not measured: no candidate could be timed")
        return None, None
    calibration = decided(here, short, beside)
    return text_of(calibration), str(store(folder, calibration) or "") or None


def decided(here: MeasuredOn, short: ShortRun, beside: Collection[str] = ()) -> Calibration:
    """The calibration that follows from the times, by the rules of ``tw-compile tune``.

    ``beside``: labels of contenders that take no part in thresholds and kernel tables.
    """
    made_with = {
        "world_size": here.world_size,
        "device_name": here.device_name,
        "torch": here.torch,
        "nccl": nccl_version(),
        "commit": __version__,
        "date": datetime.date.today().isoformat(),
    }
    alone = [row for row in short.rows if row.label not in beside]
    decided_by = decide([run_made_with(made_with, alone, OPTION)], shipped_gate(here.device_class))
    run = run_made_with(made_with, short.rows, OPTION)
    device = short.ranks.ctx.device
    profile = None
    if device.type == "cuda" and shipped_profile(here.device_name) is None:
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        profile = estimated_profile(here.device_name, here.device_class, sms, run)
    table = Table(LAYER, here.device_class, decided_by.entries)
    rows = tuple(asdict(row) for row in short.rows)
    link = measured_link(shipped_link(), run)
    return Calibration(here, table, decided_by.steps, tuple(short.remarks), rows, short.took, profile, link)


def rank_process(spec: BenchSpec, rank: int, scratch: str, messages: Connection) -> None:
    """Entry point of a spawned rank of ``tw-compile tune --quick``."""
    work_as_rank(spec, rank, scratch, messages, _as_rank)


def _as_rank(ranks: Ranks, progress: Progress, keep: Keep) -> dict[str, Any]:
    settle(True, COMING_SECONDS)
    here, transports = this_node()
    if not transports:
        raise UsageError(f"--quick: expected ranks that kernels of ours can serve, got {here}")
    progress(f"measuring {here.world_size} x {here.device_name}")
    found = measured_together(here, default_folder(), ranks.ctx.device, everyone(here, transports))
    return {"calibration": None if found is None else text_of(found)}
