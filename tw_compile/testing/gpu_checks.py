"""Checks of the GPU transports on real GPUs: one process per GPU, every check in the same processes.

    python -m tw_compile.testing.gpu_checks --world-size 4 --json results.json [--only accuracy] [--timeout 240]

Exits 0 when every check passed on every rank. ``tests/gpu/test_p2p.py`` runs this and reads the results. Accuracy is held
against an error budget: the error against float64 (root mean square, overall and in the worst row, and maximum) may be at
most 1.1 times that of the unfused way: NCCL all_reduce in the message's dtype, then residual add and norm as Hugging Face
models do them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

# Multicast stays off in these processes, also where the caller's environment doesn't say so.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tw_compile import compat
from tw_compile.kernels.all_reduce_rms_norm import ops
from tw_compile.kernels.all_reduce_rms_norm.p2p import P2PTransport
from tw_compile.kernels.all_reduce_rms_norm.slot import GroupState
from tw_compile.kernels.all_reduce_rms_norm.spec import Request, ResidualOut, row_range
from tw_compile.kernels.all_reduce_rms_norm.transport import Transport, get_transport
from tw_compile.kernels.all_reduce_rms_norm.two_shot import TwoShot
from tw_compile.testing.gpu_problems import (
    BF16,
    EPS,
    Context,
    Form,
    Problem,
    call,
    exact,
    expect_same_on_all_ranks,
    expect_within_budget,
    make_problem,
    unfused,
)

HIDDEN_SIZES = (1024, 2880, 4096, 5120, 7168, 8192, 18432)
TOKENS = (1, 2, 3, 5, 63, 64, 1000, 1025, 4096)


Check = Callable[[Context], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@cache
def emulated_multicast() -> Transport:
    """The kernel's multicast way with loops in the place of the switch's instructions, in groups of any size."""
    return P2PTransport("emulated_multicast", TwoShot(emulate_multimem=True))


def accuracy(ctx: Context, transport: str, tokens: int, hidden_size: int, form: Form) -> None:
    """Error budget, equal bits on all ranks, equal bits on a second run."""
    label = f"[{tokens}, {hidden_size}]"
    problem = make_problem(ctx, tokens, hidden_size, form)
    used = emulated_multicast() if transport == "emulated_multicast" else get_transport(transport)
    hidden, residual = call(used, problem.request(ctx))
    again, residual_again = call(used, problem.request(ctx))
    want_hidden, want_h = exact(ctx, problem)
    base_hidden, base_h = unfused(ctx, problem)
    begin, end = row_range(tokens, ctx.world_size, ctx.rank)
    if form.out == "sharded":
        want_h, base_h = want_h[begin:end], base_h[begin:end]
        residual, residual_again = residual[: end - begin], residual_again[: end - begin]
    values, base_values = problem.dequantised(hidden), problem.dequantised(base_hidden)
    expect_within_budget(ctx, f"hidden {label}", values, base_values, want_hidden)
    if form.out == "none":
        ctx.expect(residual.shape == (0, hidden_size), f"residual {label}: {tuple(residual.shape)}")
    else:
        expect_within_budget(ctx, f"residual {label}", residual, base_h, want_h)
    expect_same_on_all_ranks(ctx, f"hidden {label}", hidden)
    if form.out == "replicated":
        expect_same_on_all_ranks(ctx, f"residual {label}", residual)
    if transport != "nccl":
        equal = torch.equal(hidden.view(torch.uint8), again.view(torch.uint8))
        ctx.expect(equal, f"hidden {label}: second run differs")
        ctx.expect(torch.equal(residual, residual_again), f"residual {label}: second run differs")


def accuracy_of_hidden_size(ctx: Context, hidden_size: int, transport: str = "p2p") -> None:
    for tokens in TOKENS:
        accuracy(ctx, transport, tokens, hidden_size, Form())


def accuracy_of_form(ctx: Context, transport: str, form: Form, hidden_sizes: tuple[int, ...]) -> None:
    for hidden_size in hidden_sizes:
        for tokens in (1, 5, 63, 1025):
            accuracy(ctx, transport, tokens, hidden_size, form)


for _hidden_size in HIDDEN_SIZES:
    CHECKS[f"accuracy_{_hidden_size}"] = partial(accuracy_of_hidden_size, hidden_size=_hidden_size)

FORMS = {
    "first_norm": Form(residual="none", out="sharded"),
    "sharded": Form(residual="sharded", out="sharded"),
    "to_sharded": Form(out="sharded", bias=True),
    "from_sharded": Form(residual="sharded", out="replicated"),
    "last_norm": Form(residual="sharded", out="none", weight="plain"),
    "gemma": Form(weight="offset", out="sharded"),
    "no_weight": Form(weight="none", out="none", bias=True),
    "fp16": Form(torch.float16, bias=True),
    "fp32": Form(torch.float32, residual="sharded", out="sharded", weight="plain"),
    "fp8": Form(residual="sharded", out="sharded", weight="plain", hidden_scale=0.02),
    "fp8_replicated": Form(hidden_scale=0.02),
    "fp32_residual": Form(weight="plain", weight_dtype=torch.float32, residual_dtype=torch.float32, bias=True),
}
for _name, _form in FORMS.items():
    CHECKS[f"form_{_name}"] = partial(accuracy_of_form, transport="p2p", form=_form, hidden_sizes=(2880, 4096))
for _name in (
    "first_norm",
    "sharded",
    "from_sharded",
    "last_norm",
    "no_weight",
    "fp16",
    "fp32",
    "fp8",
    "fp32_residual",
):
    CHECKS[f"nccl_{_name}"] = partial(accuracy_of_form, transport="nccl", form=FORMS[_name], hidden_sizes=(4096,))
CHECKS["nccl_replicated"] = partial(accuracy_of_form, transport="nccl", form=Form(), hidden_sizes=(2880, 4096))

for _hidden_size in (2880, 4096):
    CHECKS[f"emulated_multicast_{_hidden_size}"] = partial(
        accuracy_of_hidden_size, hidden_size=_hidden_size, transport="emulated_multicast"
    )
for _name in ("sharded", "from_sharded", "last_norm", "no_weight", "fp16", "fp32", "fp8", "fp32_residual"):
    CHECKS[f"emulated_multicast_{_name}"] = partial(
        accuracy_of_form, transport="emulated_multicast", form=FORMS[_name], hidden_sizes=(2880, 4096)
    )


def _group_state(ctx: Context) -> GroupState:
    transport = get_transport("p2p")
    assert isinstance(transport, P2PTransport)
    return transport._states[ctx.group_name, ctx.device]


@check
def p2p_is_used(ctx: Context) -> None:
    """The other checks did not silently run on NCCL."""
    call(get_transport("p2p"), make_problem(ctx, 4, 1024, Form()).request(ctx))
    state = _group_state(ctx)
    ctx.expect(state.obstacle is None, f"fell back to NCCL: {state.obstacle}")
    ctx.expect(0 in state.slots, "slot 0 was never made")


@check
def emulated_multicast_is_used(ctx: Context) -> None:
    transport = emulated_multicast()
    call(transport, make_problem(ctx, 4, 1024, Form()).request(ctx))
    assert isinstance(transport, P2PTransport)
    obstacle = transport._states[ctx.group_name, ctx.device].obstacle
    ctx.expect(obstacle is None, f"fell back to NCCL: {obstacle}")


@check
def through_the_operators(ctx: Context) -> None:
    problem = make_problem(ctx, 63, 4096, Form())
    want = call(get_transport("p2p"), problem.request(ctx))
    keep = [problem.x, problem.residual, problem.weight]
    hidden, residual = ops.start(
        *(problem.x, problem.residual, None, problem.weight),
        *(EPS, 0.0, BF16, BF16, BF16, False, "replicated", ctx.group_name, "p2p", 0),
    )
    ops.wait_(hidden, residual, keep, ctx.group_name, 0)
    ctx.expect(torch.equal(hidden, want[0]) and torch.equal(residual, want[1]), "operators differ from the transport")


@check
def empty_message(ctx: Context) -> None:
    outs: tuple[ResidualOut, ...] = ("none", "sharded", "replicated")
    for out in outs:
        hidden, residual = call(get_transport("p2p"), make_problem(ctx, 0, 4096, Form(out=out)).request(ctx))
        ctx.expect(hidden.shape == (0, 4096) and residual.shape == (0, 4096), f"{out}: {hidden.shape}")


@check
def unsupported_messages_are_refused(ctx: Context) -> None:
    for hidden_size, dtype in ((4096, torch.float64), (4097, BF16), (40000, BF16)):
        request = make_problem(ctx, 4, hidden_size, Form(dtype)).request(ctx)
        try:
            get_transport("p2p").start(request)
            ctx.expect(False, f"{hidden_size} x {dtype} was accepted")
        except RuntimeError as error:
            ctx.expect("supported" in str(error), f"{hidden_size} x {dtype}: {error}")


def expected_results(
    ctx: Context, problems: list[Problem], transport: Transport | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Results of separate calls with a host wait after each: what overlapping or repeated calls must reproduce."""
    results = []
    for problem in problems:
        results.append(call(transport or get_transport("p2p"), problem.request(ctx)))
        torch.cuda.synchronize()
    return results


def count_differences(counter: torch.Tensor, got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    """Add the number of different elements to ``counter`` on the device; no host wait."""
    for left, right in zip(got, want, strict=True):
        counter.add_((left != right).sum())


@check
def ten_thousand_calls(ctx: Context) -> None:
    """Grids of all sizes, no host wait, a device-side count of wrong elements."""
    problems = [make_problem(ctx, tokens, 1024, Form(), tokens) for tokens in (1, 200, 5, 33, 2, 64, 3, 130)]
    want = expected_results(ctx, problems)
    requests = [problem.request(ctx) for problem in problems]
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    transport = get_transport("p2p")
    for iteration in range(10_000):
        index = iteration * 5 % len(requests)
        started = transport.start(requests[index])
        count_differences(wrong, (started.hidden, started.residual), want[index])
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")


@check
def random_skew(ctx: Context) -> None:
    """Ranks arrive at every call at random times, up to about a millisecond apart."""
    problems = [make_problem(ctx, tokens, 4096, Form(), 1) for tokens in (5, 64, 1000)]
    want = expected_results(ctx, problems)
    requests = [problem.request(ctx) for problem in problems]
    delays = torch.Generator().manual_seed(ctx.rank)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for iteration in range(120):
        torch.cuda._sleep(int(torch.randint(0, 2_000_000, (), generator=delays)))
        index = iteration % len(requests)
        count_differences(wrong, call(get_transport("p2p"), requests[index]), want[index])
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")


def expect_right_on_streams(ctx: Context, jobs: list[tuple[Request, tuple[torch.Tensor, torch.Tensor]]]) -> None:
    """Each job repeats on a stream of its own, with delays that differ by rank and stream."""
    streams = [torch.cuda.Stream() for _ in jobs]
    wrong = [torch.zeros((), dtype=torch.int64, device=ctx.device) for _ in jobs]
    torch.cuda.synchronize()
    for iteration in range(60):
        for index, (request, want) in enumerate(jobs):
            with torch.cuda.stream(streams[index]):
                if (iteration + ctx.rank + index) % 3 == 0:
                    torch.cuda._sleep(100_000 * (1 + ctx.rank))
                started = get_transport("p2p").start(request)
                count_differences(wrong[index], (started.hidden, started.residual), want)
    torch.cuda.synchronize()
    counts = [int(count) for count in wrong]
    ctx.expect(not any(counts), f"wrong elements by stream: {counts}")


@check
def non_default_stream(ctx: Context) -> None:
    problem = make_problem(ctx, 1000, 4096, Form())
    expect_right_on_streams(ctx, [(problem.request(ctx), expected_results(ctx, [problem])[0])])


@check
def two_slots_on_two_streams(ctx: Context) -> None:
    problems = [make_problem(ctx, tokens, 4096, Form(), 2) for tokens in (1000, 63)]
    want = expected_results(ctx, problems)
    requests = [problem.request(ctx, slot=slot) for slot, problem in enumerate(problems)]
    call(get_transport("p2p"), requests[1])  # makes the slot
    expect_right_on_streams(ctx, list(zip(requests, want, strict=True)))


@check
def two_groups_at_once(ctx: Context) -> None:
    """Every rank works in the whole group and, on another stream, in one of half the ranks (or a second whole one)."""
    half = max(ctx.world_size // 2, 2)
    groups = [dist.new_group(range(begin, begin + half)) for begin in range(0, ctx.world_size, half)]
    name = compat.group_name(groups[ctx.rank // half])
    problems = [make_problem(ctx, tokens, 4096, Form(), 3) for tokens in (1000, 64)]
    want = expected_results(ctx, problems[:1])
    requests = [problems[0].request(ctx), problems[1].request(ctx, group_name=name)]
    want.append(call(get_transport("p2p"), requests[1]))
    total = problems[1].x.double()
    dist.all_reduce(total, group=groups[ctx.rank // half])
    h = total + problems[1].residual.double()
    ctx.expect(torch.allclose(want[1][1].double(), h, rtol=1e-2, atol=1e-2), "the half group's sum is wrong")
    expect_right_on_streams(ctx, list(zip(requests, want, strict=True)))


def expect_replays_equal_eager_calls(ctx: Context, transport: Transport) -> None:
    """Replays, with other inputs and eager calls of other sizes between them, equal eager calls bit by bit."""
    problems = [make_problem(ctx, 65, 4096, Form(), seed) for seed in range(4)]
    other = make_problem(ctx, 7, 4096, Form(), 9)
    want = expected_results(ctx, problems, transport)
    want_other = expected_results(ctx, [other], transport)[0]
    static = make_problem(ctx, 65, 4096, Form(), 5)
    request = static.request(ctx)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = [call(transport, request) for _ in range(3)]
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for iteration in range(40):
        problem = problems[iteration % len(problems)]
        static.x.copy_(problem.x)
        static.residual.copy_(problem.residual)
        static.weight.copy_(problem.weight)
        graph.replay()
        for result in results:
            count_differences(wrong, result, want[iteration % len(problems)])
        if iteration % 3 == 0:
            count_differences(wrong, call(transport, other.request(ctx)), want_other)
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")


@check
def captured_and_replayed(ctx: Context) -> None:
    expect_replays_equal_eager_calls(ctx, get_transport("p2p"))


@check
def emulated_multicast_captured_and_replayed(ctx: Context) -> None:
    expect_replays_equal_eager_calls(ctx, emulated_multicast())


@check
def growth_keeps_captured_graphs_alive(ctx: Context) -> None:
    """A slot grows for a larger message; a graph captured before still works, with the buffers it was captured with."""
    small, large = make_problem(ctx, 5, 4096, Form()), make_problem(ctx, 5000, 4096, Form())
    slot = 5
    want = call(get_transport("p2p"), small.request(ctx, slot=slot))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = call(get_transport("p2p"), small.request(ctx, slot=slot))
    grown = call(get_transport("p2p"), large.request(ctx, slot=slot))
    retired = _group_state(ctx).slots[slot].retired
    ctx.expect(len(retired) == 3, f"{len(retired)} buffers were replaced, expected x, hidden and residual")
    expect_within_budget(ctx, "grown", grown[0], unfused(ctx, large)[0], exact(ctx, large)[0])
    for _ in range(5):
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        again = call(get_transport("p2p"), small.request(ctx, slot=slot))
        for got in (captured, again):
            ctx.expect(torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), "differs after growth")


@check
def capture_without_room_uses_nccl(ctx: Context) -> None:
    problem = make_problem(ctx, 64, 4096, Form())
    request = problem.request(ctx, slot=6)  # never used before: it has no buffers
    call(get_transport("nccl"), request)
    call(get_transport("p2p"), problem.request(ctx))  # the group itself has been used
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = call(get_transport("p2p"), request)
    graph.replay()
    expect_within_budget(ctx, "captured", captured[0], unfused(ctx, problem)[0], exact(ctx, problem)[0])


@check
def first_use_in_capture_is_refused(ctx: Context) -> None:
    group = dist.new_group(range(ctx.world_size))
    request = make_problem(ctx, 64, 4096, Form()).request(ctx, group_name=compat.group_name(group))
    message = "accepted"
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=ctx.device)  # an empty graph would warn
        try:
            get_transport("p2p").start(request)
        except RuntimeError as error:
            message = str(error)
    ctx.expect("warm-up" in message, message)


@check
def lost_peer_is_reported(ctx: Context) -> None:
    """With TW_COMPILE_SPIN_LIMIT, a rank that does not launch is named by the others instead of hanging them."""
    from tw_compile.kernels.all_reduce_rms_norm.p2p import P2PTransport

    os.environ["TW_COMPILE_SPIN_LIMIT"] = "20000"
    try:
        transport = P2PTransport()
    finally:
        del os.environ["TW_COMPILE_SPIN_LIMIT"]
    request = make_problem(ctx, 64, 1024, Form()).request(ctx)
    # Launches skewed by the compilation may time out as well; only a launch after a meeting of all ranks counts.
    transport._spin_limit, limit = 0, transport._spin_limit
    call(transport, request)
    torch.cuda.synchronize()
    transport._spin_limit = limit
    transport.check()
    dist.barrier()
    message = "nothing was reported"
    if ctx.rank != 0:
        transport.start(request)
        try:
            transport.check()
        except RuntimeError as error:
            message = str(error)
        ctx.expect("waiting for rank 0" in message and f"rank {ctx.rank}, CTA 0" in message, message)
    dist.barrier()  # no rank frees its buffers while another still writes to them


def run_rank(rank: int, world_size: int, folder: str, names: list[str]) -> None:
    """One rank: every check in order, a line of JSON when one starts and one when it ends."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, device_id=device)
    assert dist.group.WORLD is not None
    group_name = compat.group_name(dist.group.WORLD)
    with open(f"{folder}/rank{rank}.jsonl", "w", buffering=1) as report:
        for name in names:
            report.write(json.dumps({"check": name, "outcome": "started and did not end"}) + "\n")
            ctx = Context(rank, world_size, device, group_name)
            begin = time.perf_counter()
            failed = False
            try:
                CHECKS[name](ctx)
                torch.cuda.synchronize()
            except Exception:
                ctx.failures.append(traceback.format_exc())
                failed = True
            outcome = "\n".join(ctx.failures) or "ok"
            seconds = round(time.perf_counter() - begin, 2)
            report.write(json.dumps({"check": name, "outcome": outcome, "seconds": seconds}) + "\n")
            if failed:
                # Peers may be inside a collective of this check: no common state to go on from.
                os._exit(1)
            dist.barrier()
    dist.destroy_process_group()


def run_checks(world_size: int, names: list[str], timeout: float) -> dict[str, dict[str, Any]]:
    """Run ``names`` on ``world_size`` GPUs: check -> outcome ("ok" or what failed, by rank) and seconds (longest rank)."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        workers = [
            context.Process(target=run_rank, args=(rank, world_size, folder, names)) for rank in range(world_size)
        ]
        for worker in workers:
            worker.start()
        deadline = time.monotonic() + timeout
        while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
            if any(worker.exitcode not in (None, 0) for worker in workers):
                deadline = min(deadline, time.monotonic() + 5)
            time.sleep(0.1)
        for worker in workers:
            if worker.is_alive():
                worker.kill()
            worker.join()
        reports = [_read_report(Path(folder) / f"rank{rank}.jsonl") for rank in range(world_size)]
    results = {}
    for name in names:
        lines = [report.get(name, {"outcome": "did not start"}) for report in reports]
        bad = [f"rank {rank}: {line['outcome']}" for rank, line in enumerate(lines) if line["outcome"] != "ok"]
        seconds = max(float(line.get("seconds", 0)) for line in lines)
        results[name] = {"outcome": "\n".join(bad) or "ok", "seconds": seconds}
    return results


def _read_report(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["check"]: line for line in map(json.loads, lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--only", default="", help="run the checks whose name contains this")
    parser.add_argument("--timeout", type=float, default=240, help="seconds until workers are killed")
    arguments = parser.parse_args()
    names = [name for name in CHECKS if arguments.only in name]
    results = run_checks(arguments.world_size, names, arguments.timeout)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    for name, result in results.items():
        print(f"{result['seconds']:7.2f} s  {name}: {result['outcome']}")
    return int(any(result["outcome"] != "ok" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
