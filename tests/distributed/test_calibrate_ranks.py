"""Ranks measure their node: planted candidates, an end that all agree on, a rank that dies, and what is kept of it."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tw_compile import calibration, compat
from tw_compile.benchmark.contender import Contender, ContenderCall
from tw_compile.benchmark.spec import BenchSpec
from tw_compile.calibration import Calibration, MeasuredOn
from tw_compile.config import Config
from tw_compile.gating.facts import Node
from tw_compile.harness.problems import Problem
from tw_compile.harness.ranks import Ranks
from tw_compile.kernels.collective.reference import add_rms_norm
from tw_compile.kernels.collective.transports import GroupFacts
from tw_compile.testing import GlooRanks
from tw_compile.testing.gloo import RankError
from tw_compile.tuning import calibrate
from tw_compile.tuning.calibrate import measured_together
from tw_compile.tuning.short import ShortRun

HERE = MeasuredOn("A GPU", "sm90", 2, True, False, "570.1", "2.11", "abc")
SPEC = BenchSpec(2, "cpu", "bfloat16", (64,), (64, 2, 8), calls=2, repeats=5)
"""Messages of 8 KiB, 256 bytes and 1 KiB."""


class Planted(Contender):
    """Right, and as fast as it is told to be; ``flaw``: what is wrong with it on rank 1."""

    kind = "ours"

    def __init__(self, algorithm: str, sms: int, us: Callable[[int], float], flaw: str = "") -> None:
        self.label, self.algorithm, self.max_sms = f"{algorithm} {flaw}".strip(), algorithm, sms
        self.us, self.flaw = us, flaw

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        return functools.partial(_call, self.flaw, problem.request(ranks.ctx), self.us(problem.x.nbytes))


class Left(Planted):
    kind = "peer"

    def __init__(self, us: Callable[[int], float]) -> None:
        super().__init__("", 0, us)
        self.label, self.algorithm, self.max_sms = "nccl+norm", None, None


def _call(flaw: str, request: Any, us: float) -> tuple[torch.Tensor, torch.Tensor]:
    broken = dist.get_rank() == 1
    if flaw == "dies" and broken:
        os._exit(1)
    total = request.x.clone()
    dist.all_reduce(total)
    if flaw == "gives up" and broken:  # what its bounded kernel left is seen when the device is done
        raise RuntimeError("rank 1, CTA 0 gave up waiting for rank 0 at barrier 1")
    if flaw == "hangs" and broken:
        time.sleep(20)
    hidden, residual = add_rms_norm(total, request.residual, request.bias, request.weight, request.norm)
    if flaw == "wrong" and broken:
        hidden[-1, -1] += 1
    return hidden, residual


class Raises(Planted):
    """On rank 1 alone."""

    def deviation(self, ranks: Ranks) -> str | None:
        if dist.get_rank() == 1:
            raise OSError("no room")
        return None


class Told:
    """A timer that says what a call's candidate was told."""

    def __init__(self, calls: Sequence[Any], count: int) -> None:
        self._us = calls[0].args[-1]

    def run(self) -> float:
        return float(self._us)


def short(ranks: Ranks, spec: BenchSpec, everyone: Sequence[Contender], **options: Any) -> ShortRun:
    return ShortRun(ranks, SPEC, everyone, make=Told, **options)


def lines_of(work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What ``work`` returns, and what is said on the way."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tw_compile")
    logger.addHandler(handler)
    try:
        return work(), lines
    finally:
        logger.removeHandler(handler)


def small_is_fast(nbytes: int) -> float:
    return 5.0 if nbytes < 2000 else 40.0


def large_is_fast(nbytes: int) -> float:
    return 10.0 if nbytes < 2000 else 20.0


def good() -> list[Contender]:
    return [
        Left(lambda nbytes: 8.0 if nbytes == 1024 else 30.0),
        Planted("push_one_shot", 128, small_is_fast),
        Planted("push_two_shot", 128, large_is_fast),
    ]


def together(folder: str, everyone: list[Contender], **options: Any) -> Calibration | None:
    run = functools.partial(short, **options)
    return measured_together(HERE, Path(folder), torch.device("cpu"), everyone, run, answer_seconds=3.0)


def _measure(rank: int, folder: str, flaws: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    bad = [Planted("stream", 16, small_is_fast, flaw) for flaw in flaws]
    slow = [Planted("stream", 8, lambda nbytes: 1000.0 if nbytes == 8192 else 2.0, "slow")]
    found, lines = lines_of(lambda: together(folder, [*good(), *bad, *slow]))
    return asdict(found), lines


@pytest.mark.timeout(120)
def test_what_is_wrong_or_gives_up_is_left_out_and_all_ranks_go_by_the_same(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    (first, lines), (second, silent) = gloo_ranks.run(_measure, str(tmp_path), ("wrong", "gives up"))
    assert first == second
    wrong, gives_up, slow = first["remarks"]
    assert wrong.startswith("stream wrong is left out: rank 1: hidden: ")
    assert gives_up.startswith("stream gives up is left out: rank 1: RuntimeError: rank 1, CTA 0 gave up waiting")
    assert slow == "stream slow is left out from 8 KiB on: 1000 us a call, limit 200 us"
    assert [line for line in lines if "left out" in line] == [
        f"tw_compile: calibration: {remark}" for remark in (wrong, gives_up, slow)
    ]
    assert silent == []  # rank 0 speaks for all

    # By the decisions of tune: the kernel at each size, and the size at which nothing is faster than all_reduce and norm.
    assert [(step["algorithm"], step["sms"]) for step in first["steps"]] == [("stream", 8), ("push_two_shot", 128)]
    ((file,), kept) = list(tmp_path.iterdir()), calibration.stored(tmp_path, HERE)
    assert file.name == HERE.file_name and kept is not None and asdict(kept) == first
    assert {row["label"] for row in first["rows"] if row["nbytes"] == 8192} == {
        "nccl+norm",
        "push_one_shot",
        "push_two_shot",
    }


def _measure_good(rank: int, folder: str) -> dict[str, Any]:
    return asdict(together(folder, good()))  # type: ignore[call-overload]


@pytest.mark.timeout(120)
def test_decisions_are_those_of_tune(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    found, _ = gloo_ranks.run(_measure_good, str(tmp_path))
    assert [step["algorithm"] for step in found["steps"]] == ["push_one_shot", "push_two_shot"]
    measured = calibration.calibration_of((tmp_path / HERE.file_name).read_text(), "file")
    entries = [entry for entry in measured.table.entries if entry.source.kind == "measured"]
    assert entries and all(
        (entry.world_size, entry.backend, entry.decision) == (2, "nccl", "fused") for entry in entries
    )
    assert entries[0].source.values[-1] == "tw_compile.calibrate" and found["remarks"] == ()


def _measure_multimem(rank: int, folder: str) -> tuple[dict[str, Any], list[str]]:
    planted = [Planted("multimem", 16, lambda nbytes: 4.0, flaw) for flaw in ("", "wrong")]
    found, lines = lines_of(lambda: together(folder, [*good(), *planted]))
    return asdict(found), [line for line in lines if "left out" in line]


@pytest.mark.timeout(120)
def test_multimem_is_a_transport_of_its_own_and_wrong_results_of_it_are_left_out(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    (found, lines), (other, _) = gloo_ranks.run(_measure_multimem, str(tmp_path))
    assert found == other
    (line,) = lines
    assert line.startswith("tw_compile: calibration: multimem wrong is left out: rank 1: hidden: ")
    # The kernels of p2p are compared with each other, as if there were no multimem.
    assert [step["algorithm"] for step in found["steps"]] == ["push_one_shot", "push_two_shot", "multimem"]
    measured = calibration.calibration_of((tmp_path / HERE.file_name).read_text(), "file")
    fused = {entry.transport for entry in measured.table.entries if entry.source.kind == "measured"}
    assert fused == {"multimem"}


def _measure_in_time(rank: int, folder: str, seconds: float) -> tuple[list[str], list[int]]:
    # Rank 0's clock goes on by a second each time that it is looked at; rank 1's stands still.
    clock = functools.partial(next, itertools.count()) if rank == 0 else lambda: 0.0
    found = together(folder, good(), clock=clock, seconds=seconds)
    assert found is not None
    return list(found.remarks), sorted({row["nbytes"] for row in found.rows})


@pytest.mark.timeout(120)
def test_the_end_is_that_of_rank_0s_clock(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    for remarks, sizes in gloo_ranks.run(_measure_in_time, str(tmp_path), 4):
        assert remarks == ["no times, for want of time or memory, at 256 bytes, 1 KiB"]
        assert sizes == [8192]
    for remarks, sizes in gloo_ranks.run(_measure_in_time, str(tmp_path), 100):
        assert remarks == [] and sizes == [256, 1024, 8192]


def _measure_flawed(rank: int, folder: str, flaw: str) -> None:
    together(folder, [*good(), Planted("stream", 16, small_is_fast, flaw)])


def _measure_raising(rank: int, folder: str) -> list[str]:
    found = together(folder, [*good(), Raises("stream", 16, small_is_fast)])
    assert found is not None
    return list(found.remarks)


@pytest.mark.timeout(120)
def test_a_candidate_that_cannot_be_checked_on_one_rank_is_left_out(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    for remarks in gloo_ranks.run(_measure_raising, str(tmp_path)):
        assert remarks == ["stream is left out: rank 1: OSError: no room"]


def _measure_failing(rank: int, folder: str) -> tuple[bool, list[str], float]:
    times = iter(range(2))

    def clock() -> float:
        if rank == 1 and next(times, None) is None:
            raise OSError("no clock")
        return 0.0

    found, lines = lines_of(lambda: together(folder, good(), clock=clock))
    total = torch.ones(1)
    dist.all_reduce(total)
    return found is None, lines, float(total)


@pytest.mark.timeout(120)
def test_an_error_of_one_rank_costs_one_line_and_all_go_on_without(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    first, second = gloo_ranks.run(_measure_failing, str(tmp_path))
    line = "tw_compile: this node is not measured: "
    assert first == (True, [f"{line}a rank failed"], 2.0)  # and the program's own group works
    assert second == (True, [f"{line}OSError: no clock"], 2.0)
    assert list(tmp_path.iterdir()) == []


def _measure_unlike(rank: int, folder: str) -> bool:
    here = replace(HERE, device_name=f"GPU {rank}")
    return measured_together(here, Path(folder), torch.device("cpu"), good(), short, answer_seconds=3.0) is None


@pytest.mark.timeout(120)
def test_ranks_on_different_devices_measure_nothing(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    assert gloo_ranks.run(_measure_unlike, str(tmp_path)) == [True, True] and list(tmp_path.iterdir()) == []


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("flaw", ["dies", "hangs"])
def test_a_rank_that_dies_or_hangs_is_an_error_and_nothing_is_kept(flaw: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    with GlooRanks(2, timeout=60.0) as ranks, pytest.raises(RankError) as error:
        ranks.run(_measure_flawed, str(tmp_path), flaw)
    assert "tw_compile.calibrate: expected all 2 ranks to answer within 3 s while they measure" in str(error.value)
    assert time.monotonic() - begin < 40 and list(tmp_path.iterdir()) == []


def _compile(rank: int, folder: str, late: float) -> tuple[list[str | None], list[str]]:
    """Compile twice, as backends do, on what is taken for a node of GPUs without tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", folder)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(calibrate, "COMING_SECONDS", 0.5)
        patch.setattr(calibrate, "over_nccl", lambda: True)
        patch.setattr(calibrate, "current_node", lambda: Node((9, 0), False))
        patch.setattr(calibrate, "group_facts", lambda name, device: GroupFacts(device, 2, 1))
        patch.setattr(calibrate, "candidates", lambda transports: good())
        patch.setattr(calibrate, "for_planner", lambda transports, has_profile: [])
        patch.setattr(
            calibrate,
            "measured_together",
            lambda here, folder, device, everyone: measured_together(
                here, folder, torch.device("cpu"), everyone, short
            ),
        )
        calibrate.asked_in.clear()
        names: list[str | None] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            calibrate.before_compile(Config(calibrate="auto"), graph)
            used = calibration.in_use()
            names.append(None if used is None else used.measured_on.device_name)
            return graph

        assert dist.group.WORLD is not None
        name = compat.group_name(dist.group.WORLD)
        reduce = torch.ops._c10d_functional.all_reduce

        def alone(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        def model(x: torch.Tensor) -> torch.Tensor:
            return torch.ops._c10d_functional.wait_tensor(reduce(x, "sum", name)) * 2

        def work() -> None:
            torch.compile(alone, backend=backend)(torch.ones(3))
            time.sleep(late * rank)
            for size in (3, 4):
                got = torch.compile(model, backend=backend, dynamic=False)(torch.ones(size))
                assert torch.equal(got, torch.full((size,), 4.0))

        try:
            _, lines = lines_of(work)
        finally:
            calibration.use(None)
            torch._dynamo.reset()
        return names, lines


@pytest.mark.full
@pytest.mark.timeout(120)
def test_the_first_graph_that_needs_all_ranks_measures_and_later_processes_read(tmp_path: Path) -> None:
    for _ in range(2):
        with GlooRanks(2, timeout=60.0) as ranks:
            for names, _ in ranks.run(_compile, str(tmp_path), 0.0):
                assert names == [None, "A GPU", "A GPU"]
        (file,) = (tmp_path / "tw_compile" / "calibration").iterdir()
        values = json.loads(file.read_text())
        if "read" in values["remarks"]:
            break
        file.write_text(json.dumps(values | {"remarks": ["read"]}))
    assert json.loads(file.read_text())["remarks"] == ["read"]  # nobody wrote it again


@pytest.mark.full
@pytest.mark.timeout(120)
def test_ranks_that_do_not_come_in_time_leave_the_node_unmeasured(tmp_path: Path) -> None:
    with GlooRanks(2, timeout=60.0) as ranks:
        for names, lines in ranks.run(_compile, str(tmp_path), 3.0):
            assert names == [None, None, None]
            assert any("not all of 2 ranks came to compile" in line for line in lines)
    assert not (tmp_path / "tw_compile").exists()


class Norm(Planted):
    """Faster than whatever communicates."""

    kind = "bound"
    reduces = False


def _measure_for_the_planner(rank: int, folder: str) -> dict[str, Any]:
    norm, gemm, few = (
        Norm("", 0, lambda nbytes: 0.5),
        Norm("", 0, lambda nbytes: 1000.0),
        Planted("stream", 8, lambda nbytes: 1.0),
    )
    norm.label, gemm.label, few.label = "no-communication", "o_proj", "tw-stream-8sm"
    norm.algorithm = gemm.algorithm = None
    gemm.tokens = few.tokens = (8,)
    return asdict(together(folder, [*good(), norm, gemm, few]))  # type: ignore[call-overload]


@pytest.mark.timeout(120)
def test_what_is_timed_for_the_planner_decides_nothing_about_messages(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    found, other = gloo_ranks.run(_measure_for_the_planner, str(tmp_path))
    assert found == other and found["remarks"] == ()
    assert [step["algorithm"] for step in found["steps"]] == ["push_one_shot", "push_two_shot"]
    timed = {
        label: {row["tokens"] for row in found["rows"] if row["label"] == label}
        for label in ("o_proj", "tw-stream-8sm")
    }
    assert timed == {"o_proj": {8}, "tw-stream-8sm": {8}}
    assert {row["tokens"] for row in found["rows"] if row["label"] == "no-communication"} == {2, 8, 64}
