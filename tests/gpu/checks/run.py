"""Checks of the GPU transports on real GPUs: one process per rank, every check in the same processes.

    python tests/gpu/checks --world-size 4 --json results.json [--only accuracy,form] [--timeout 360]

Each rank has a GPU of its own. With fewer GPUs they share them, for results alone: slowly, joined by gloo, without the checks
that need NCCL, and with a hundredth of the calls where there are very many. ``sharing`` says how to run all of them::

    python tests/gpu/checks --world-size 8 --gpus 2 --timeout 580 [--only push]

Exits 0 when every check passed on every rank. ``tests/gpu/test_p2p.py`` runs this and reads the results. A check's name ends
in what it is about and begins with the transport (see ``transports``); it fails when another one served a call. Those of
``split_attention`` need no other rank; ``thousand_split_steps`` are about whole compiled models.

Two kinds of checks run only when ``--only`` is the beginning of their name. ``million_launches`` (10 to 90 s a transport)
reports how many launches were made, and how many of them were found right::

    python tests/gpu/checks --world-size 4 --only million_launches_push --timeout 580 --json million.json

``sanitizer_small`` is a few small calls for compute-sanitizer, which slows kernels down a hundredfold. Memory of its own for
each tensor shows the tool their bounds, and the kernel's name (``push``, ``stream``, ``multimem``,
``all_reduce_rms_norm_kernel``) keeps it from instrumenting all of NCCL and torch::

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --target-processes all --report-api-errors no \\
        --error-exitcode 1 --kernel-name kernel_substring=push \\
        python tests/gpu/checks --world-size 2 --only sanitizer_small_push --timeout 580
    compute-sanitizer --tool racecheck --target-processes all --error-exitcode 1 --kernel-name kernel_substring=stream \\
        python tests/gpu/checks --world-size 2 --only sanitizer_small_stream --timeout 580

Racecheck knows shared memory only; what peers do to each other's memory is what the other checks are for.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

# Multicast stays off in these processes, also where the caller's environment doesn't say so.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
# Without it torch refuses matmuls where new memory is filled with NaNs, which it does in its deterministic mode alone.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist

from gpu.checks import (
    accuracy,
    dynamic_fp8,
    fed,
    joint_gemms,
    layer_norm,
    overlap,
    pieces,
    prefetch,
    producer,
    split_attention,
    split_steps,
    stress,
    wires,
)
from gpu.checks.accuracy import FORMS, accuracy_of_form, accuracy_of_hidden_size
from gpu.checks.sharing import NEED_NCCL, share_gpus, shortened_by
from gpu.checks.transports import ALGORITHMS, MOST_COLUMNS, NEED_WHOLE_RESIDUALS
from tw_compile import compat
from tw_compile.child import Child, end
from tw_compile.harness.problems import Context, Form
from tw_compile.kernels.algorithms import ALGORITHMS as REGISTRY
from tw_compile.kernels.collective.transports import TRANSPORTS

Check = Callable[[Context], None]

_GRACE_SECONDS = 5.0
_LAST_WORDS_SECONDS = 5.0
"""Before ranks are killed: when they say where they are."""
HIDDEN_SIZES = (1024, 2880, 4096, 5120, 7168, 8192, 18432)
NCCL_FORMS = ("first_norm", "sharded", "from_sharded", "last_norm", "no_weight", "fp16", "fp32", "fp8", "fp32_residual")
OF_EVERY_ALGORITHM = (
    accuracy.chain_of_sharded_residuals,
    accuracy.values_that_are_not_finite,
    stress.shapes_in_turn,
    stress.ten_thousand_calls,
    stress.random_skew,
    stress.non_default_stream,
    stress.two_slots_on_two_streams,
    stress.two_groups_at_once,
    stress.captured_and_replayed,
    stress.growth_keeps_captured_graphs_alive,
    producer.mm_gives_the_same_bits,
    producer.mm_shapes_in_turn,
    producer.mm_random_skew,
    producer.mm_captured_and_replayed,
    stress.lost_peer_is_reported,
)
OVERLAPPED = (
    *(checked.name for entry in REGISTRY for checked in entry.checked if checked.beside),
    *(entry.name for entry in TRANSPORTS if entry.checked_beside),
)
"""Transports whose calls may be beside other work; those in the slot may, too, but leave results where the next call writes."""
OF_OVERLAPPED = (
    overlap.overlap_gives_the_same_bits,
    overlap.overlap_random_skew,
    overlap.overlap_captured_and_replayed,
    overlap.overlap_two_slots,
    overlap.overlap_mixed_on_one_slot,
)
ALONE = (
    accuracy.new_memory_holds_nan,
    accuracy.through_the_operators,
    accuracy.empty_message,
    accuracy.unsupported_messages_are_refused,
    accuracy.plain_shard_makes_one_shot_fall_back,
    accuracy.without_peer_access_host_memory_serves,
    accuracy.host_memory_without_room_in_dev_shm,
    overlap.overlap_by_default,
    stress.capture_without_room_uses_nccl,
    stress.first_use_in_capture_is_refused,
    stress.other_steps_are_loaded_before_capture,
    producer.mm_leaving_sms_is_a_matmul,
    producer.joint_mm_leaving_sms_is_as_near_as_matmuls,
    producer.gated_mm_leaving_sms_is_silu_times_a_product,
    producer.grouped_mm_leaving_sms_gives_the_same_bits,
    producer.mm_reserve_is_measured,
    joint_gemms.gemms_by_rows_are_as_near_as_matmuls,
    joint_gemms.gemms_of_few_rows_are_as_near_as_matmuls,
    joint_gemms.gemms_of_few_rows_give_the_same_bits,
    joint_gemms.turns_are_measured,
    joint_gemms.compiled_gemms_are_joined,
    *fed.ALONE,
    dynamic_fp8.nccl_dynamic_fp8_forms,
    pieces.pieces_in_graphs_of_their_own,
    split_steps.thousand_split_steps,
    split_steps.thousand_split_steps_of_experts,
)


def default_checks() -> dict[str, Check]:
    checks: dict[str, Check] = {}
    for name in ALGORITHMS:
        for size in (size for size in HIDDEN_SIZES if size <= MOST_COLUMNS.get(name, size)):
            checks[f"{name}_accuracy_{size}"] = partial(accuracy_of_hidden_size, transport=name, hidden_size=size)
        for form_name, form in FORMS.items():
            # Alone, a shard of the residual is nothing for one-shot: chain_of_sharded_residuals has that.
            if name not in NEED_WHOLE_RESIDUALS or form.residual != "sharded":
                checks[f"{name}_form_{form_name}"] = partial(
                    accuracy_of_form, transport=name, form=form, hidden_sizes=(2880, 4096)
                )
        for check in OF_EVERY_ALGORITHM:
            checks[f"{name}_{check.__name__}"] = partial(check, transport=name)
    for form_name in NCCL_FORMS:
        checks[f"nccl_form_{form_name}"] = partial(
            accuracy_of_form, transport="nccl", form=FORMS[form_name], hidden_sizes=(4096,)
        )
    checks["nccl_form_replicated"] = partial(accuracy_of_form, transport="nccl", form=Form(), hidden_sizes=(2880, 4096))
    checks["nccl_chain_of_sharded_residuals"] = partial(accuracy.chain_of_sharded_residuals, transport="nccl")
    for name in OVERLAPPED:
        for overlap_check in OF_OVERLAPPED:
            checks[f"{name}_{overlap_check.__name__}"] = partial(overlap_check, transport=name)
    for name, form_name in layer_norm.NAMES:
        if layer_norm.served(name, layer_norm.FORMS[form_name]):
            checks[f"layer_norm_{name}_form_{form_name}"] = partial(
                layer_norm.layer_norm_accuracy, transport=name, form=form_name
            )
    for name in ALGORITHMS:
        for layer_norm_check in layer_norm.OF_EVERY_ALGORITHM:
            checks[f"{layer_norm_check.__name__}_{name}"] = partial(layer_norm_check, transport=name)
    for name in layer_norm.BY_THE_OPERATORS:
        checks[f"layer_norm_by_the_operators_{name}"] = partial(layer_norm.layer_norm_by_the_operators, transport=name)
    for name in wires.KERNELS:
        for wire in wires.IN_CODES:
            for size in wires.HIDDEN_SIZES:
                checks[f"wire_{name}_{wire}_forms_{size}"] = partial(
                    wires.wire_forms, kernel=name, wire=wire, hidden_size=size
                )
            for wire_check in wires.OF_EVERY_WIRE:
                checks[f"{wire_check.__name__}_{name}_{wire}"] = partial(wire_check, kernel=name, wire=wire)
    for name in dynamic_fp8.KERNELS:
        for form_name in dynamic_fp8.forms_of(name):
            checks[f"dynamic_fp8_{name}_{form_name}"] = partial(
                dynamic_fp8.dynamic_fp8_form, kernel=name, form=dynamic_fp8.FORMS[form_name]
            )
        for dynamic_check in dynamic_fp8.OF_EVERY_KERNEL:
            checks[f"{dynamic_check.__name__}_{name}"] = partial(dynamic_check, kernel=name)
        if name in OVERLAPPED:
            checks[f"dynamic_fp8_beside_{name}"] = partial(dynamic_fp8.dynamic_fp8_beside, kernel=name)
    for name in prefetch.KERNELS:
        for prefetch_check in prefetch.OF_EVERY_KERNEL:
            checks[f"{prefetch_check.__name__}_{name}"] = partial(prefetch_check, transport=name)
    for name in split_attention.KERNELS:
        checks[f"split_attention_{name}"] = partial(split_attention.split_attention, kernel=name)
    return checks | {check.__name__: check for check in ALONE}


def sanitizer_small(ctx: Context, transport: str) -> None:
    """More rows than ranks and fewer, a row that fills its threads and one that doesn't, one and several phases."""
    for hidden_size in (1024, 1032):
        for form in (Form(), stress.FIRST_SITE):
            accuracy_of_hidden_size(ctx, transport, hidden_size, (1, 2 * ctx.world_size + 1), form)


CHECKS = default_checks()
ON_REQUEST: dict[str, Check] = {
    f"{check.__name__}_{name}": partial(check, transport=name)
    for check in (stress.million_launches, sanitizer_small)
    for name in ALGORITHMS
}


def selected(only: str, shared_gpus: bool = False) -> list[str]:
    """Names of the checks that ``--only`` asks for, but for those that can't be made where ranks share GPUs."""
    parts = [part for part in map(str.strip, only.split(",")) if part] or [""]
    here = [name for name in CHECKS if not (shared_gpus and name.startswith(NEED_NCCL))]
    by_default = [name for name in here if any(part in name for part in parts)]
    return by_default + [name for name in ON_REQUEST if any(part and name.startswith(part) for part in parts)]


def join(rank: int, world_size: int, gpus: int, folder: str) -> Context:
    """Make this process one of ``world_size`` ranks on ``gpus`` GPUs: what every check of it gets, anew."""
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", world_size)
    if gpus < world_size:
        share_gpus()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    else:
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, device_id=device)
    assert dist.group.WORLD is not None
    fewer = shortened_by() if gpus < world_size else 1
    return Context(rank, world_size, device, compat.group_name(dist.group.WORLD), shortened_by=fewer)


def run_rank(rank: int, world_size: int, gpus: int, folder: str, names: list[str], deadline: float) -> None:
    """One rank: every check in order, a line of JSON when one starts and one when it ends.

    Shortly before ``deadline`` (of ``time.monotonic``) it says where it is: nobody can ask it when it has been killed.
    """
    faulthandler.dump_traceback_later(max(deadline - time.monotonic() - _LAST_WORDS_SECONDS, 1.0))
    context = join(rank, world_size, gpus, folder)
    with open(f"{folder}/rank{rank}.jsonl", "w", buffering=1) as report:
        for name in names:
            report.write(json.dumps({"check": name, "outcome": "started and did not end"}) + "\n")
            ctx = replace(context, failures=[], counts={})
            begin = time.perf_counter()
            failed = False
            try:
                (CHECKS | ON_REQUEST)[name](ctx)
                torch.cuda.synchronize()
            except Exception:
                ctx.failures.append(traceback.format_exc())
                failed = True
            outcome = "\n".join(ctx.failures) or "ok"
            seconds = round(time.perf_counter() - begin, 2)
            report.write(json.dumps({"check": name, "outcome": outcome, "seconds": seconds, **ctx.counts}) + "\n")
            if failed:
                # Peers may be inside a collective of this check: no common state to go on from.
                os._exit(1)
            dist.barrier()
    dist.destroy_process_group()


def run_checks(world_size: int, gpus: int, names: list[str], timeout: float) -> dict[str, dict[str, Any]]:
    """Run ``names`` with ``world_size`` ranks on ``gpus`` GPUs: check -> :func:`joined` of its ranks' lines."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))  # what is done is reported all the same
    with tempfile.TemporaryDirectory() as folder:
        deadline = time.monotonic() + timeout
        ranks = [
            Child(run_rank, rank, world_size, gpus, folder, names, deadline, scratch=folder)
            for rank in range(world_size)
        ]
        try:
            # A list: who has ended has an exit code once it has been joined.
            while not all([rank.join(0) for rank in ranks]) and time.monotonic() < deadline and not stopped:
                if any(rank.exitcode not in (None, 0) for rank in ranks):
                    deadline = min(deadline, time.monotonic() + 5)
                time.sleep(0.1)
        finally:
            end(ranks, _GRACE_SECONDS)
        reports = [_read_report(Path(folder) / f"rank{rank}.jsonl") for rank in range(world_size)]
    return {name: joined([report.get(name, {"outcome": "did not start"}) for report in reports]) for name in names}


def joined(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of the ranks' lines: "ok" or what failed, by rank; seconds of the slowest rank; the lowest counts."""
    bad = [f"rank {rank}: {line['outcome']}" for rank, line in enumerate(lines) if line["outcome"] != "ok"]
    seconds = max(float(line.get("seconds", 0)) for line in lines)
    counts = set.intersection(*(set(line) for line in lines)) - {"check", "outcome", "seconds"}
    lowest = {count: min(line[count] for line in lines) for count in sorted(counts)}
    return {"outcome": "\n".join(bad) or "ok", "seconds": seconds, **lowest}


def _read_report(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["check"]: line for line in map(json.loads, lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--world-size", type=int, required=True, help="number of ranks")
    parser.add_argument(
        "--gpus", type=int, help="number of GPUs, which ranks share if it is lower (default: one a rank)"
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument(
        "--only",
        default="",
        help="run the checks whose name has one of these parts in it (PART[,...])",
    )
    parser.add_argument("--timeout", type=float, default=360, help="seconds until workers are killed")
    arguments = parser.parse_args()
    world_size = arguments.world_size
    gpus = world_size if arguments.gpus is None else arguments.gpus
    if not 1 <= gpus <= world_size:
        parser.error(f"--gpus: expected 1 to {world_size}, the world size, got {gpus}")
    names = selected(arguments.only, gpus < world_size)
    if not names:
        where = " and works where ranks share GPUs" if gpus < world_size else ""
        parser.error(f"--only: no check has {arguments.only!r} in its name{where}")
    results = run_checks(world_size, gpus, names, arguments.timeout)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    for name, result in results.items():
        counts = "".join(f", {key} {value}" for key, value in result.items() if key not in ("outcome", "seconds"))
        print(f"{result['seconds']:7.2f} s  {name}: {result['outcome']}{counts}")
    seconds = sum(result["seconds"] for result in results.values())
    print(f"{seconds:7.2f} s  in all, {world_size} ranks on {gpus} GPUs")
    return int(any(result["outcome"] != "ok" for result in results.values()))
