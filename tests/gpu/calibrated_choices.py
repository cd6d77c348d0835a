"""Calibrate a node as a program does that compiles a model, and hold what follows from it against ``bench kernel``.

    python tests/gpu/calibrated_choices.py --json calibrated.json [--world-size 4] [--timeout 110]

The ranks run twice, over NVLink and with peer access unused, without any table, shipped or the user's. In each run the first
compile measures the node. Then the ranks time the same candidates as ``tw-compile bench kernel`` does, with kernels whose waits
have no end, and what the gate now chooses is compared with the fastest. One table is printed, and one JSON file is written,
also where only the first run was done in time. Multicast is off, whatever the environment says.

Exits 0 when measuring took no longer than it may, every choice is within 3% of the best, and all ranks choose the same.
``tests/gpu/test_calibrate.py`` runs this.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    # The folder of tests in the place of this one, as pytest has it. Ranks get the same path.
    sys.path.pop(0)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_reduce

from tw_compile import calibration, make_backend
from tw_compile.benchmark.contenders import contenders
from tw_compile.benchmark.results import Row
from tw_compile.benchmark.spec import BenchSpec
from tw_compile.benchmark.worker import run_rank
from tw_compile.calibration import text_of
from tw_compile.config import Config
from tw_compile.current import current_gate
from tw_compile.environment import PEER_ACCESS
from tw_compile.gating import layers
from tw_compile.harness.launch import Progress, spawn_ranks
from tw_compile.harness.ranks import Keep, Ranks, work_as_rank
from tw_compile.harness.requests import RankError
from tw_compile.harness.start import all_versions
from tw_compile.harness.table import mebibytes
from tw_compile.harness.variables import MULTICAST_OFF, PEERS_UNUSED
from tw_compile.harness.versions import machine
from tw_compile.kernels.collective.transport import node_facts
from tw_compile.kernels.collective.transports import prefer_transport
from tw_compile.kernels.transports import selection
from tw_compile.kernels.transports.selection import step_for, steps_for
from tw_compile.planning.device import DeviceProfile, parse_profile, shipped_profile
from tw_compile.tuning import calibrate
from tw_compile.tuning.candidates import candidates
from tw_compile.tuning.short import HIDDEN, SECONDS, TOKENS

RANKS = 2
SLACK = 1.03
MOST_SECONDS = SECONDS + 0.5
"""The end is asked for before a size is begun, so the last one may go beyond it."""
RUNS: Mapping[str, Mapping[str, str]] = {
    "NVLink": {PEER_ACCESS: "1", "NCCL_P2P_DISABLE": "0"},
    "peer access unused": {PEER_ACCESS: "0", **PEERS_UNUSED},
}
"""What the runs are called, and the variables of each."""
UNFUSED = "nccl+norm"

Choice = tuple[str | None, str, int | None]
"""The algorithm, or None and the contender's label, and the SMs that it may have."""


def spec(world_size: int, timeout: float) -> BenchSpec:
    tokens = tuple(sorted(TOKENS))
    return BenchSpec(world_size, "cuda", "bfloat16", (HIDDEN,), tokens, calls=10, repeats=30, timeout=timeout)


def rank_process(bench: BenchSpec, rank: int, scratch: str, messages: Connection) -> None:
    """Entry point of a spawned rank."""
    work_as_rank(bench, rank, scratch, messages, functools.partial(as_rank, bench))


def as_rank(bench: BenchSpec, ranks: Ranks, progress: Progress, keep: Keep) -> dict[str, Any]:
    dist.all_reduce(torch.ones(1, device=ranks.ctx.device))  # NCCL's own memory comes with the first call
    free, begin = free_bytes(), time.monotonic()
    with without_tables():
        compile_once()
        found = calibration.in_use()
        compiled = time.monotonic()
        kept = free - free_bytes()
        here, transports = calibrate.this_node()
        by_rank = ranks.gather((None if found is None else text_of(found), choices(bench)))
        labels = tuple(candidate.label for candidate in candidates(transports))
        # Those of the benchmark, whose unfused way is compiled by Inductor, and whose kernels wait for ever.
        known = [contender for contender in contenders(bench) if contender.label in labels]
        rows = run_rank(bench, lambda _: known, ranks, progress, keep)["rows"]
    return {
        "calibrations": [text for text, _ in by_rank],
        "choices": [chosen for _, chosen in by_rank],
        "candidates": labels,
        "rows": rows,
        "peer_access": here.peer_access,
        "multicast": here.multicast,
        "kept_bytes": kept,
        "compile_seconds": compiled - begin,
        "bench_seconds": time.monotonic() - compiled,
    }


@contextlib.contextmanager
def without_tables() -> Iterator[None]:
    """No table of kernels, and of thresholds that of any device alone; no profile. The user's folder is an empty one."""
    generic = layers._shipped("generic")
    with (
        mock.patch.object(layers, "_shipped", lambda device_class: generic),
        mock.patch.object(selection, "shipped_tables", dict),
        mock.patch.object(calibrate, "shipped_profile", lambda device_name: None),
    ):
        yield


def free_bytes() -> int:
    """What is free on this rank's GPU when nobody uses what is garbage."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def compile_once() -> None:
    """The first compile of a graph that needs all ranks."""
    assert dist.group.WORLD is not None
    group, device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())

    def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = all_reduce(x, "sum", group) + residual
        return F.rms_norm(total, (HIDDEN,), weight), total

    x, residual, weight = (
        torch.ones(shape, device=device, dtype=torch.bfloat16) for shape in ((4, HIDDEN), (4, HIDDEN), (HIDDEN,))
    )
    backend = make_backend(Config(calibrate="auto", strict=True))
    _, total = torch.compile(block, backend=backend, dynamic=False)(x, residual, weight)
    assert bool((total == group.size() + 1).all()), "the compiled block is wrong"


def choices(bench: BenchSpec) -> dict[int, Choice]:
    """What this rank chooses, by the bytes of a message."""
    name, gate = torch.cuda.get_device_name(), current_gate(Config(calibrate="auto"))
    chosen: dict[int, Choice] = {}
    for size in bench.sizes():
        verdict = gate.decide(size.nbytes, world_size=bench.world_size, dtype=bench.dtype)
        if not verdict.fused:
            chosen[size.nbytes] = None, UNFUSED, None
            continue
        facts = node_facts("cuda", bench.world_size)
        transport = prefer_transport(facts, size.hidden, size.element_bytes, verdict.transport or "auto").name
        step = step_for(steps_for(name, bench.world_size, str(transport)), size.nbytes)
        chosen[size.nbytes] = (None, f"tw-{transport}", None) if step is None else (step.algorithm, "", step.sms)
    return chosen


def compared(rows: Sequence[Row], chosen: Mapping[int, Choice]) -> list[dict[str, Any]]:
    """For each size what was chosen, the fastest, and by which share the choice takes longer; None without a time."""
    sizes = []
    for nbytes, (algorithm, label, sms) in sorted(chosen.items()):
        timed = [row for row in rows if row.nbytes == nbytes and row.numerics == "ok" and row.p50_us is not None]
        best = min(timed, key=lambda row: row.p50_us or 0.0, default=None)
        ours = next(
            (
                row
                for row in timed
                if (row.label == label if algorithm is None else (row.algorithm, row.max_sms) == (algorithm, sms))
            ),
            None,
        )
        times = (None, None) if ours is None or best is None else (ours.p50_us, best.p50_us)
        slower = None if times[0] is None or times[1] is None else times[0] / times[1] - 1.0
        sizes.append(
            {
                "nbytes": nbytes,
                "chosen": label or f"{algorithm} ({sms} SMs)",
                "chosen_us": times[0],
                "best": None if best is None else best.label,
                "best_us": None if best is None else best.p50_us,
                "slower": slower,
            }
        )
    return sizes


def judged(found: Mapping[str, Any]) -> dict[str, Any]:
    """A run's result with what follows from it, and ``failures``: what is not as it should be, a line each."""
    failures, first = [], found["calibrations"][0]
    values = None if first is None else json.loads(first)
    if values is None:
        failures.append("nothing was measured")
    elif values["seconds"][0] > MOST_SECONDS:
        failures.append(f"measuring took {values['seconds'][0]:.2f} s, limit {MOST_SECONDS:.1f} s")
    if any(text != first for text in found["calibrations"]):
        failures.append("ranks have different calibrations")
    if any(chosen != found["choices"][0] for chosen in found["choices"]):
        failures.append("ranks choose differently")
    if found["multicast"]:
        failures.append("multicast is on")
    sizes = compared([Row(**row) for row in found["rows"]], found["choices"][0])
    for size in sizes:
        if size["slower"] is None or size["slower"] > SLACK - 1.0:
            how = "was not timed" if size["slower"] is None else f"is {size['slower']:.1%} slower than {size['best']}"
            failures.append(f"{mebibytes(size['nbytes'])}: {size['chosen']} {how}")
    kept = {name: value for name, value in found.items() if name not in ("calibrations", "choices")}
    return kept | {"sizes": sizes, "calibration": values, "failures": failures}


def table(name: str, world_size: int, run: Mapping[str, Any]) -> list[str]:
    """A run for the terminal."""
    values = run["calibration"] or {"seconds": (0.0, 0.0), "remarks": []}
    measuring, loading = values["seconds"]
    lines = [
        f"{world_size} x {run['device_name']}, {name}: measured in {measuring:.2f} s after {loading:.1f} s of loading kernels; "
        f"first compile {run['compile_seconds']:.1f} s, of which {mebibytes(max(run['kept_bytes'], 0))} of memory stay; "
        f"bench {run['bench_seconds']:.1f} s",
        f"{'message':>10}  {'chosen':<28}{'us':>9}  {'best':<20}{'us':>9}  slower",
    ]
    for size in run["sizes"]:
        chosen_us, best_us = ("-" if size[key] is None else f"{size[key]:.1f}" for key in ("chosen_us", "best_us"))
        slower = "-" if size["slower"] is None else f"{size['slower']:.1%}"
        message, best = mebibytes(size["nbytes"]), size["best"] or "-"
        lines.append(f"{message:>10}  {size['chosen']:<28}{chosen_us:>9}  {best:<20}{best_us:>9}  {slower}")
    if values.get("profile"):
        lines.append(f"estimated profile: {estimate(parse_profile(values['profile'], name))}")
    return [*lines, *values["remarks"], *(f"FAILED: {failure}" for failure in run["failures"])]


def estimate(profile: DeviceProfile) -> str:
    """What ranks made of their times for the planner, beside the shipped profile if there is one."""
    shipped = next((known for name in profile.device_names if (known := shipped_profile(name)) is not None), None)
    values = {
        "TFLOP/s of an SM": lambda of: of.gemm.tflops_per_sm,
        "GB/s of memory": lambda of: of.memory_gb_per_s,
        "GB/s of NCCL": lambda of: of.all_reduce["nccl"].link_gb_per_s,
    }
    return ", ".join(
        f"{what} {value(profile):.4g}" + ("" if shipped is None else f" (shipped {value(shipped):.4g})")
        for what, value in values.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, help="where the result goes")
    parser.add_argument("--world-size", type=int, default=RANKS, help="ranks, each with a GPU of its own")
    parser.add_argument("--timeout", type=float, default=110.0, help="seconds for both runs together")
    arguments = parser.parse_args()
    world_size = arguments.world_size
    if not 2 <= world_size <= torch.cuda.device_count():
        parser.error(
            f"--world-size: expected 2 to the GPUs that are there, {torch.cuda.device_count()}, got {world_size}"
        )
    begin = time.monotonic()
    report: dict[str, Any] = {"machine": machine(), "versions": all_versions("cuda"), "runs": {}}
    for name, variables in RUNS.items():
        left = arguments.timeout - (time.monotonic() - begin)
        with tempfile.TemporaryDirectory() as folder:
            environment = {**MULTICAST_OFF, "XDG_CONFIG_HOME": folder, "TW_COMPILE_THRESHOLDS": "", **variables}
            with mock.patch.dict("os.environ", environment):
                try:
                    found = spawn_ranks(spec(world_size, max(left, 1.0)), lambda what: None, rank_process)
                except RankError as error:
                    print(f"{name}: FAILED: {error}")
                    return 1
        run = report["runs"][name] = judged(found)
        report["seconds"] = time.monotonic() - begin
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
        print(*table(name, world_size, run), "", sep="\n", flush=True)
    print(f"all in {report['seconds']:.0f} s")
    return int(any(run["failures"] for run in report["runs"].values()))


if __name__ == "__main__":
    sys.exit(main())
