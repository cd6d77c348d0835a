"""Checks of calls that follow, overlap or replay each other: shapes in turn, skewed ranks, streams, groups, CUDA graphs.

They look for results of other calls and for results that came too early, so what was compared is overwritten with NaN before
its memory is used again.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
import torch.distributed as dist
from triton import knobs

from gpu.checks.transports import ALGORITHMS, TRANSPORT_OF, Counting, Subject, finished, subject
from tw_compile import compat
from tw_compile.environment import SPIN_LIMIT
from tw_compile.harness.problems import Context, Form, Problem, Results, expect_right, make_problem
from tw_compile.kernels.algorithms.push.sharing_push import SharingPush
from tw_compile.kernels.algorithms.stream.stream import Stream
from tw_compile.kernels.algorithms.two_shot.two_shot import TwoShot
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.runtime import launch
from tw_compile.kernels.transports.p2p import P2PTransport
from tw_compile.kernels.transports.selection import Selector, Step

FIRST_SITE = Form(residual="none", out="sharded", residual_dtype=torch.float32)
"""A form that leaves a shard of the residual and that every algorithm serves."""

LAUNCHES = 1_000_000
CALLS_PER_REPLAY = 100
_REPORTS = 10
_DECODE_SIZES = ((1, 4096), (2, 4096), (7, 4096), (16, 4096), (33, 4096), (64, 4096), (5, 1024), (300, 1024))


def expected_results(ctx: Context, used: Subject, problems: list[Problem]) -> list[Results]:
    """Results of separate calls with a host wait after each, held against float64: what any other order must reproduce."""
    results = []
    for problem in problems:
        result = used.call(ctx, problem.request(ctx))
        torch.cuda.synchronize()
        expect_right(ctx, problem, result, f"{list(problem.x.shape)}")
        results.append((result[0], problem.written(ctx, result[1])))
    return results


def new_counter(ctx: Context) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=ctx.device)


def count_differences(counter: torch.Tensor, got: Results, want: Results) -> None:
    """Add the number of different elements to ``counter`` on the device, without a host wait, and make ``got`` NaN.

    Only the rows that ``want`` has of the residual are compared.
    """
    for left, right in zip(got, want, strict=True):
        counter.add_((left[: len(right)] != right).sum())
        left.view(torch.uint8).fill_(0xFF)


def shapes_in_turn(ctx: Context, transport: str) -> None:
    """Small and large messages of two forms and hidden sizes on one slot, back to back, in an order without a pattern.

    A push that did not clear its inbox would take what an earlier message of another shape left there.
    """
    used = subject(transport)
    problems = [
        make_problem(ctx, tokens, hidden_size, form, seed)
        for seed in (0, 1)
        for tokens in (1, 7, 300)
        for hidden_size, form in ((4096, Form()), (1024, FIRST_SITE))
    ]
    want = expected_results(ctx, used, problems)
    requests = [problem.request(ctx) for problem in problems]
    order, skew = random.Random(0), random.Random(ctx.rank)
    wrong = new_counter(ctx)
    for _ in range(100):
        burst = order.choices(range(len(problems)), k=6)
        if skew.random() < 0.3:
            compat.delay_stream(skew.randrange(200_000))
        results = [used.start(ctx, requests[index]) for index in burst]
        for index, result in zip(burst, results, strict=True):
            count_differences(wrong, result, want[index])
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")


def ten_thousand_calls(ctx: Context, transport: str) -> None:
    """Grids of all sizes, eight calls at a time back to back, no host wait, a device-side count of wrong elements.

    Fewer where ranks share GPUs.
    """
    used = subject(transport)
    problems = [make_problem(ctx, tokens, 1024, Form(), tokens) for tokens in (1, 200, 5, 33, 2, 64, 3, 130)]
    want = expected_results(ctx, used, problems)
    requests = [problem.request(ctx) for problem in problems]
    wrong = new_counter(ctx)
    for _ in range(ctx.calls(10_000) // len(requests)):
        results = [used.start(ctx, request) for request in requests]
        for got, expected in zip(results, want, strict=True):
            count_differences(wrong, got, expected)
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")


def random_skew(ctx: Context, transport: str) -> None:
    """Ranks arrive at every call at random times, up to about a millisecond apart."""
    used = subject(transport)
    problems = [make_problem(ctx, tokens, 4096, Form(), 1) for tokens in (5, 64, 1000)]
    want = expected_results(ctx, used, problems)
    requests = [problem.request(ctx) for problem in problems]
    skew = random.Random(ctx.rank)
    wrong = new_counter(ctx)
    for iteration in range(120):
        compat.delay_stream(skew.randrange(2_000_000))
        index = iteration % len(requests)
        count_differences(wrong, used.call(ctx, requests[index]), want[index])
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")


def expect_right_on_streams(ctx: Context, used: Subject, jobs: list[tuple[Request, Results]]) -> None:
    """Each job repeats on a stream of its own, with delays that differ by rank and stream."""
    streams = [torch.cuda.Stream() for _ in jobs]
    wrong = [new_counter(ctx) for _ in jobs]
    torch.cuda.synchronize()
    for iteration in range(60):
        for index, (request, want) in enumerate(jobs):
            with torch.cuda.stream(streams[index]):
                if (iteration + ctx.rank + index) % 3 == 0:
                    compat.delay_stream(100_000 * (1 + ctx.rank))
                count_differences(wrong[index], used.start(ctx, request), want)
    torch.cuda.synchronize()
    counts = [int(count) for count in wrong]
    ctx.expect(not any(counts), f"wrong elements by stream: {counts}")


def non_default_stream(ctx: Context, transport: str) -> None:
    used = subject(transport)
    problem = make_problem(ctx, 1000, 4096, Form())
    expect_right_on_streams(ctx, used, [(problem.request(ctx), expected_results(ctx, used, [problem])[0])])


def two_slots_on_two_streams(ctx: Context, transport: str) -> None:
    used = subject(transport)
    problems = [make_problem(ctx, tokens, 4096, Form(), 2) for tokens in (1000, 63)]
    want = expected_results(ctx, used, problems)
    requests = [problem.request(ctx, slot=slot) for slot, problem in enumerate(problems)]
    used.call(ctx, requests[1])  # makes the slot
    expect_right_on_streams(ctx, used, list(zip(requests, want, strict=True)))


@cache
def _half_group(rank: int, world_size: int) -> dist.ProcessGroup:
    """This rank's group of half the ranks; of two ranks, or of an odd number, a second group of all. Collective when made."""
    half = world_size // 2 if world_size >= 4 and world_size % 2 == 0 else world_size
    groups = [dist.new_group(range(begin, begin + half)) for begin in range(0, world_size, half)]
    return groups[rank // half]


def is_sum(found: torch.Tensor, total: torch.Tensor, residual: torch.Tensor) -> bool:
    """Whether ``found``, in bfloat16, is ``total + residual``, if the total was rounded to bfloat16, too.

    Each of the two roundings may be off by 2^-9 of what it rounds, and what the two cancel out is no smaller for that. Twice
    as much is allowed, because the total that ranks add up may have been rounded more than once.
    """
    h = total.double() + residual.double()
    return bool(((found.double() - h).abs() <= (total.double().abs() + h.abs()) * 2.0**-8).all())


def two_groups_at_once(ctx: Context, transport: str) -> None:
    """Every rank works in the whole group and, on another stream, in one of half the ranks (or a second whole one)."""
    used = subject(transport)
    group = _half_group(ctx.rank, ctx.world_size)
    problems = [make_problem(ctx, tokens, 4096, Form(), 3) for tokens in (1000, 64)]
    want = expected_results(ctx, used, problems[:1])
    requests = [problems[0].request(ctx), problems[1].request(ctx, group_name=compat.group_name(group))]
    want.append(used.call(ctx, requests[1]))
    total = problems[1].x.double()
    dist.all_reduce(total, group=group)
    ctx.expect(is_sum(want[1][1], total, problems[1].residual), "the half group's sum is wrong")
    expect_right_on_streams(ctx, used, list(zip(requests, want, strict=True)))


def capture(function: Callable[[], list[Results]]) -> tuple[torch.cuda.CUDAGraph, list[Results]]:
    """What ``function`` enqueues, as a CUDA graph, and what it returned, which replays write."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = function()
    return graph, results


def replay_with_other_inputs(
    wrong: torch.Tensor,
    enqueue: Callable[[], list[Results]],
    inputs: Sequence[torch.Tensor],
    values: Sequence[Sequence[torch.Tensor]],
    want: list[Results],
    between: Callable[[int], None],
) -> None:
    """Capture ``enqueue`` and replay it, with each of ``values`` in ``inputs`` in turn; ``want`` has the results of each.

    ``between`` gets the number of every replay after it.
    """
    enqueue()  # what it needs is made before the capture
    graph, results = capture(enqueue)
    for iteration in range(40):
        index = iteration % len(values)
        for tensor, value in zip(inputs, values[index], strict=True):
            tensor.copy_(value)
        graph.replay()
        for result in results:
            count_differences(wrong, result, want[index])
        between(iteration)


def captured_and_replayed(ctx: Context, transport: str) -> None:
    """Replays, with other inputs and eager calls of other sizes between them, equal eager calls bit by bit."""
    used = subject(transport)
    problems = [make_problem(ctx, 65, 4096, Form(), seed) for seed in range(4)]
    other = make_problem(ctx, 7, 4096, Form(), 9)
    want = expected_results(ctx, used, problems)
    want_other = expected_results(ctx, used, [other])[0]
    static = make_problem(ctx, 65, 4096, Form(), 5)
    request = static.request(ctx)
    wrong = new_counter(ctx)

    def between(iteration: int) -> None:
        if iteration % 3 == 0:
            count_differences(wrong, used.call(ctx, other.request(ctx)), want_other)

    inputs, *values = [(problem.x, problem.residual, problem.weight) for problem in (static, *problems)]
    replay_with_other_inputs(wrong, lambda: [used.start(ctx, request) for _ in range(3)], inputs, values, want, between)
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")


def growth_keeps_captured_graphs_alive(ctx: Context, transport: str) -> None:
    """A slot grows for a larger message; a graph captured before still works, with the buffers it was captured with."""
    used = subject(transport)
    small, large = make_problem(ctx, 5, 4096, Form()), make_problem(ctx, 5000, 4096, Form())
    slot = 5
    request = small.request(ctx, slot=slot)
    want = used.call(ctx, request)
    expect_right(ctx, small, want, "before growth")
    graph, captured = capture(lambda: [used.start(ctx, request)])
    lacking = used.state(request).slots[slot].lacks(used.algorithm.needs(large.request(ctx), ctx.world_size))
    grown = used.call(ctx, large.request(ctx, slot=slot))
    retired = used.state(request).slots[slot].retired
    ctx.expect(len(retired) == len(lacking), f"{len(retired)} buffers were replaced, expected {', '.join(lacking)}")
    expect_right(ctx, large, grown, "grown")
    wrong = new_counter(ctx)
    for _ in range(5):
        graph.replay()
        again = used.call(ctx, request)
        for got in (*captured, again):
            count_differences(wrong, got, want)
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements after growth")


def capture_without_room_uses_nccl(ctx: Context) -> None:
    used = subject("p2p")
    problem = make_problem(ctx, 64, 4096, Form())
    request = problem.request(ctx, slot=6)  # never used before: it has no buffers
    subject("nccl").call(ctx, request)
    used.call(ctx, problem.request(ctx))  # the group itself has been used
    launches = used.algorithm.launches
    graph, (captured,) = capture(lambda: [finished(used.transport.start(request))])
    ctx.expect(used.algorithm.launches == launches, "launched without room")
    graph.replay()
    expect_right(ctx, problem, captured, "captured")


def first_use_in_capture_is_refused(ctx: Context) -> None:
    group = dist.new_group(range(ctx.world_size))
    request = make_problem(ctx, 64, 4096, Form()).request(ctx, group_name=compat.group_name(group))
    message = "accepted"
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=ctx.device)  # an empty graph would warn
        try:
            subject("p2p").transport.start(request)
        except RuntimeError as error:
            message = str(error)
    ctx.expect("warm-up" in message, message)


def other_steps_are_loaded_before_capture(ctx: Context) -> None:
    """Sizes that are new in capture, each served by another kernel of a table: the first message like them loaded them all."""
    transport, row_bytes = P2PTransport(), 1536 * 2  # of no other check, so nothing for it is loaded yet
    sizes = {"push_one_shot": 4, "push_two_shot": 40, "stream": 300, "two_shot": 1000}
    sms = {"push_one_shot": 128, "push_two_shot": 128}  # clusters share the rows of short messages then
    steps = [Step(ctx.world_size, tokens * row_bytes, name, sms.get(name, 8)) for name, tokens in sizes.items()]
    state = transport.group_state(ctx.group_name, ctx.device)
    state.selector = Selector(steps)
    for tokens in sizes.values():
        # Rows of another size that end in the same steps: the slot has room for all.
        finished(transport.start(make_problem(ctx, tokens * row_bytes // 4096, 2048, Form()).request(ctx)))
    first, *problems = [make_problem(ctx, tokens, 1536, Form()) for tokens in sizes.values()]
    expect_right(ctx, first, finished(transport.start(first.request(ctx))), "before capture")
    requests = [problem.request(ctx) for problem in problems]
    chosen = [type(state.selector.choose(request, state)) for request in requests]
    ctx.expect(chosen == [SharingPush, Stream, TwoShot], f"served by {chosen}")

    def start_in_slot(request: Request) -> Results:
        buffer = transport.message_buffer(request)
        assert buffer is not None
        return finished(transport.start(replace(request, x=buffer.copy_(request.x))))

    loaded: list[str] = []
    known, hook = len(launch.loaded), partial(_note_triton_kernel, loaded)
    knobs.runtime.kernel_load_start_hook.add(hook)
    try:
        graph, results = capture(
            lambda: [
                *(finished(transport.start(request)) for request in requests),
                *(start_in_slot(request) for request in requests[1:]),
            ]
        )
    finally:
        knobs.runtime.kernel_load_start_hook.remove(hook)
    new = len(launch.loaded) - known
    ctx.expect(new == 0 and not loaded, f"loaded in capture: {new} CUDA kernels, Triton kernels {loaded}")
    graph.replay()
    for problem, result in zip((*problems, *problems[1:]), results, strict=True):
        expect_right(ctx, problem, result, f"captured [{len(problem.x)}, 1536]")
    torch.cuda.synchronize()
    dist.barrier()  # no rank frees its buffers while another still writes to them


def _note_triton_kernel(names: list[str], module: object, function: object, name: str, *rest: object) -> None:
    names.append(name)


def lost_peer_is_reported(ctx: Context, transport: str) -> None:
    """With TW_COMPILE_SPIN_LIMIT, a rank that does not launch is named by the others instead of hanging them."""
    algorithm = Counting(ALGORITHMS[transport]())
    os.environ[SPIN_LIMIT] = "200000"
    try:
        lost = TRANSPORTS[TRANSPORT_OF[transport]].make(algorithm)
    finally:
        del os.environ[SPIN_LIMIT]
    problem = make_problem(ctx, 64, 1024, Form())
    # Ranks compile for different times and may give up on each other: on a slot that is not used again.
    lost.start(problem.request(ctx, slot=1))
    torch.cuda.synchronize()
    dist.barrier()
    request = problem.request(ctx)
    expect_right(ctx, problem, finished(lost.start(request)), "with all ranks")
    state = lost.states[ctx.group_name, ctx.device]
    ctx.expect(algorithm.launches == 2, f"{transport} did not serve the calls, another did: {state.obstacle}")
    state.slots[1].status.zero_()
    lost.check()
    dist.barrier()
    if ctx.rank != 0:
        lost.start(request)
        for act in (lost.check, lambda: lost.start(request)):
            message = "nothing was reported"
            try:
                act()
            except RuntimeError as error:
                message = str(error)
            named = "waiting for rank 0" in message and f"rank {ctx.rank}, CTA 0" in message
            ctx.expect(named, message)
    dist.barrier()  # no rank frees its buffers while another still writes to them


def million_launches(ctx: Context, transport: str, launches: int = LAUNCHES) -> None:
    """Replays of graphs of many calls of decode sizes, back to back, with ranks that lag at random in and between them.

    Each replay compares all results with the expected bits on the device, and counts itself if all are right. Replays, not
    launches, are what a wrong result is counted by. Fewer launches where ranks share GPUs.
    """
    launches = ctx.calls(launches)
    used = subject(transport)
    forms = (Form(), FIRST_SITE)
    problems = [
        make_problem(ctx, *size, forms[index % len(forms)], seed)
        for seed in (0, 1)
        for index, size in enumerate(_DECODE_SIZES)
    ]
    want = expected_results(ctx, used, problems)
    requests = [problem.request(ctx) for problem in problems]
    order, skew = random.Random(0), random.Random(1 + ctx.rank)
    right = new_counter(ctx)
    begin = used.algorithm.launches
    graphs = []
    for _ in range(4):
        calls = order.choices(range(len(problems)), k=CALLS_PER_REPLAY)
        graphs.append(_capture_compared_calls(ctx, used, requests, want, calls, skew, right))
    captured = used.algorithm.launches - begin
    ctx.expect(captured == len(graphs) * CALLS_PER_REPLAY, f"{captured} launches in {len(graphs)} graphs")

    replays, start = launches // CALLS_PER_REPLAY, time.perf_counter()
    for replay in range(1, replays + 1):
        if skew.random() < 0.25:
            compat.delay_stream(skew.randrange(1_000_000))
        if skew.random() < 0.125:
            # The host runs far ahead otherwise, and how long it takes would not matter.
            torch.cuda.synchronize()
            time.sleep(skew.random() * 1e-3)
        order.choice(graphs)[0].replay()
        if replay % max(replays // _REPORTS, 1) == 0:
            made, verified = replay * CALLS_PER_REPLAY, int(right) * CALLS_PER_REPLAY
            if ctx.rank == 0:
                seconds = time.perf_counter() - start
                print(f"{transport}: {made} launches, {verified} verified, {seconds:.1f} s", flush=True)
    ctx.counts = {"launches": replays * CALLS_PER_REPLAY, "verified": int(right) * CALLS_PER_REPLAY}
    missing = replays - int(right)
    ctx.expect(missing == 0, f"{missing} of {replays} replays had wrong results")


def _capture_compared_calls(
    ctx: Context,
    used: Subject,
    requests: list[Request],
    want: list[Results],
    calls: list[int],
    skew: random.Random,
    right: torch.Tensor,
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of ``calls``, in three places with a delay of this rank's own, that adds 1 to ``right`` if all is right.

    With it the expected bits, which replays read.
    """
    delays = {skew.randrange(len(calls)): skew.randrange(100_000) for _ in range(3)}
    expected = torch.cat([_bits(tensor) for index in calls for tensor in want[index]])

    def enqueue() -> list[Results]:
        results = []
        for position, index in enumerate(calls):
            if position in delays:
                compat.delay_stream(delays[position])
            results.append(used.start(ctx, requests[index]))
        got = torch.cat(
            [
                _bits(tensor[: len(rows)])
                for index, result in zip(calls, results, strict=True)
                for tensor, rows in zip(result, want[index], strict=True)
            ]
        )
        right.add_((got == expected).all())
        for hidden, residual in results:
            hidden.fill_(float("nan"))
            residual.fill_(float("nan"))
        return results

    return capture(enqueue)[0], expected


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16).flatten()
