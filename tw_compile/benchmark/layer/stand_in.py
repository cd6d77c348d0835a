"""One rank of a group on a single GPU: layers whose calls are stand-ins, which hold SMs for as long as the planner says.

    python -m tw_compile.benchmark.layer.stand_in --model mixtral-8x22b --tp 4 --tokens 2048,4096
        [--layers 4] [--sweep-split] [--json FILE]

Shows what a schedule does to compute where there are no other GPUs: what halves cost, whether matmuls find SMs, what is
exposed. It does not measure a group. Nothing is summed, so the outputs are not results. Nothing moves, so memory and links slow
nothing down. A call takes the time that the planner predicts for calls beside other work. The unfused layer's time is the
measured time without communication, plus the planner's time of the all_reduces. A layer that the plan leaves whole, or splits
elsewhere, is also split in the middle, to show what that would have taken. Each variant is compiled with empty caches, and the
seconds that this takes are reported. The file is written after each number of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tw_compile import Config, collect_reports, compat
from tw_compile.autotune.hold_sms import hold_sms
from tw_compile.benchmark.layer.spec import LayerSpec
from tw_compile.benchmark.layer.subject import CompiledRun, Subject
from tw_compile.benchmark.layer.subjects import build_subject
from tw_compile.benchmark.layer.symmetric import DropAllReduces
from tw_compile.benchmark.layer.variants import (
    FUSED,
    GEMMS_APART,
    HALF_MULTIPLE,
    NO_COMMUNICATION,
    PLANNED,
    SWEPT,
    swept,
)
from tw_compile.harness.measure import HEAD_START_CYCLES, WARM_UP_ROUNDS, capture, gpu_us
from tw_compile.harness.problems import Context
from tw_compile.harness.start import all_versions
from tw_compile.harness.versions import machine
from tw_compile.kernels.collective import transport
from tw_compile.kernels.collective.side_stream import cluster_size, fork_and_join
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transport import Started, Transport
from tw_compile.planning import DeviceProfile, communication, load_profile, profile_of_device
from tw_compile.testing import fake_process_group

VARIANTS: dict[str, dict[str, Any] | None] = {
    NO_COMMUNICATION: None,
    **{variant.label: variant.config for variant in (FUSED, GEMMS_APART, PLANNED)},
}
"""Options of our variants, by label; None: torch.compile, with the all_reduces taken out."""
_SLOTS = 6
_ALONE_SMS = 32


class StandIn(Transport):
    """Holds SMs for the time that ``profile`` has for a call. The normalised rows are those of ``rows``, which never change."""

    name = "p2p"

    def __init__(self, profile: DeviceProfile, world_size: int, rows: torch.Tensor) -> None:
        """``rows`` [slots x tokens of the longest call, hidden]."""
        self._profile, self._world_size, self._rows = profile, world_size, rows

    def start(self, request: Request) -> Started:
        tokens, device = len(request.x), request.x.device
        first = request.slot * (len(self._rows) // _SLOTS)
        outputs = self._rows[first : first + tokens], request.allocate(self._world_size)[1]
        us, ctas = self._us(request), request.overlap_sms
        if not ctas:
            hold_sms(compat.current_stream(device), _ALONE_SMS, us)
            return Started(*outputs)

        def launch(side: torch.cuda.Stream) -> Started:
            hold_sms(side, ctas, us, cluster_size(ctas, device))
            return Started(*outputs)

        return fork_and_join(device, request.group_name, request.slot, ctas, (request, outputs), launch)

    def _us(self, request: Request) -> float:
        profile, (tokens, hidden_size) = self._profile, request.x.shape
        if not request.overlap_sms:
            return communication.fastest_alone(profile, False, tokens, hidden_size, self._world_size)[1]
        alone = communication.fused_us(
            profile.fused[profile.kernel],
            tokens,
            hidden_size,
            self._world_size,
            request.overlap_sms,
            narrow=True,
            in_slot=request.results_in_slot,
        )
        return profile.slower_beside(self._world_size) * alone


def time_layers(spec: LayerSpec, profile: DeviceProfile) -> Iterator[dict[str, Any]]:
    """For each number of tokens, the microseconds that every variant takes for a layer, and what the planner predicts."""
    device = torch.device("cuda", torch.cuda.current_device())
    with fake_process_group(spec.world_size), torch.no_grad():
        subject = build_subject(spec, device)
        rows = torch.randn(_SLOTS * max(spec.tokens), subject.hidden_size, device=device).to(torch.bfloat16)
        _start_compiler(device)
        transport.instances[StandIn.name] = StandIn(profile, spec.world_size, rows)
        for tokens in spec.tokens:
            yield _time(spec, profile, subject, tokens, Context(0, spec.world_size, device, "0"))


def _time(spec: LayerSpec, profile: DeviceProfile, subject: Subject, tokens: int, ctx: Context) -> dict[str, Any]:
    inputs = subject.inputs(spec, ctx, tokens)
    graphs, splits = {}, {}
    waiting = list(variants(spec, tokens).items())
    seconds: dict[str, float] = {}
    while waiting:
        label, options = waiting.pop(0)
        with tempfile.TemporaryDirectory() as caches, compat.cold_compile(caches), collect_reports() as reports:
            graphs[label], seconds[label] = _captured(subject, inputs, profile, options)
        found_split = next((report.split for report in reports if report.split is not None), None)
        sizes = () if found_split is None else found_split.sizes
        check_split(label, options, sizes)
        splits[label] = found_split
        middle = middle_of(tokens)
        if label == PLANNED.label and sizes[:1] != (middle,):
            waiting.append((f"{SWEPT}{middle}", {"split": str(middle)}))
    times: dict[str, list[float]] = {label: [] for label in graphs}
    for number in range(WARM_UP_ROUNDS + spec.repeats):
        for label, (graph, _) in graphs.items():
            compat.delay_stream(HEAD_START_CYCLES)
            us = gpu_us(graph.replay)
            if number >= WARM_UP_ROUNDS:
                times[label].append(us / spec.layers)
    medians: dict[str, Any] = {label: round(statistics.median(own), 1) for label, own in times.items()}
    nbytes = tokens * subject.hidden_size * inputs.element_size()
    sums = 2 * communication.all_reduce_us(profile, nbytes, spec.world_size, multicast=False)
    split = splits[PLANNED.label]
    plan = None if split is None else split.plan
    return {
        "model": spec.model,
        "world_size": spec.world_size,
        "tokens": tokens,
        "us_a_layer": medians,
        "all_reduces_us": round(sums, 1),
        "unfused_us": round(medians[NO_COMMUNICATION] + sums, 1),
        "split": None if split is None else list(split.sizes),
        "compile_seconds": {label: round(took, 1) for label, took in seconds.items()},
        "predicted": None if plan is None else {name: round(us, 1) for name, us in vars(plan.predicted).items() if us},
    }


def middle_of(tokens: int) -> int:
    """Half of the tokens, rounded down to a size that a half of a plan may have."""
    return max(tokens // 2 // HALF_MULTIPLE * HALF_MULTIPLE, 1)


def variants(spec: LayerSpec, tokens: int) -> dict[str, dict[str, Any] | None]:
    """What is timed for ``tokens`` tokens, by its label."""
    return VARIANTS | {variant.label: variant.config for variant in (swept(tokens) if spec.sweep_split else ())}


def check_split(label: str, options: dict[str, Any] | None, sizes: Sequence[int | str]) -> None:
    """Raise RuntimeError if a variant is not split at the place that its options name."""
    first = (options or {}).get("split", "auto")
    if first == "off" and sizes:
        raise RuntimeError(f"{label}: expected no split, got {sizes}")
    if first not in ("auto", "off") and (not sizes or sizes[0] != int(first)):
        raise RuntimeError(f"{label}: expected a first half of {first} tokens, got {sizes or 'no split'}")


def _captured(
    subject: Subject, inputs: torch.Tensor, profile: DeviceProfile, ours: dict[str, Any] | None
) -> tuple[tuple[torch.cuda.CUDAGraph, CompiledRun], float]:
    """The captured layers, and how many seconds the first call took, which compiles them."""
    backend, options = "inductor", dict[str, Any]({compat.POST_GRAD_HOOK: DropAllReduces()})
    if ours is not None:
        # A stand-in has no rows to feed.
        config = Config(strict=True, transport="p2p", device_profile=profile.name, **{"feed_mm": "never", **ours})
        backend, options = "tw_compile", config.as_options()
    run = CompiledRun(torch.compile(subject, dynamic=False, backend=backend, options=options), inputs)
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    return (capture([run], 1), run), took


def _start_compiler(device: torch.device) -> None:
    """Compile something small, so that no variant's seconds include what only a process's first compilation does."""
    with tempfile.TemporaryDirectory() as caches, compat.cold_compile(caches):
        torch.compile(lambda x: (x @ x).sin() + 1)(torch.zeros(64, 64, device=device, dtype=torch.bfloat16))
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="a preset, a config.json or a folder that holds one")
    parser.add_argument("--tp", type=int, required=True, help="ranks of the group, of which this is one")
    parser.add_argument("--tokens", required=True, help="numbers of tokens, with commas")
    parser.add_argument("--layers", type=int, default=4, help="how many of the model's")
    parser.add_argument("--sweep-split", action="store_true", help="split at up to 15 given places, too")
    parser.add_argument("--device-profile", help="what calls take (default: that of this GPU)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("stand_in: expected a GPU, got none")
    profile = (
        profile_of_device(torch.cuda.get_device_name())
        if given.device_profile is None
        else load_profile(given.device_profile)
    )
    if profile is None:
        parser.error(f"--device-profile: expected one for {torch.cuda.get_device_name()}, which has none, got nothing")
    os.environ["LOCAL_WORLD_SIZE"] = str(given.tp)  # all ranks on this host: calls over peer-to-peer memory need it
    tokens = tuple(int(count) for count in given.tokens.split(","))
    asked: dict[str, Any] = {"layers": given.layers, "repeats": 20, "sweep_split": given.sweep_split}
    spec = LayerSpec("layer", given.model, given.tp, "cuda", "bfloat16", tokens, **asked)
    device = {"device_name": torch.cuda.get_device_name()}
    result: dict[str, Any] = {"command": "stand_in", "machine": machine(), **device, "versions": all_versions("cuda")}
    result["rows"] = []
    for row in time_layers(spec, profile):
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        if given.json:
            given.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
