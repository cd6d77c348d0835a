"""Checks of the operator that multiplies matrices first, to where peers read the product, where the transport has such memory.

What it must give are the bits of a matmul followed by the plain operator, whose results are held against float64.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gpu.checks.stress import (
    FIRST_SITE,
    count_differences,
    expected_results,
    new_counter,
    replay_with_other_inputs,
)
from gpu.checks.transports import Factors, Subject, subject
from tw_compile import compat
from tw_compile.autotune.measured_reserve import Operand, measured_reserve
from tw_compile.harness.problems import Context, Form, Problem, Results, expect_within_budget, make_problem
from tw_compile.kernels.gemm.mm_leaving_sms import (
    gated_mm_leaving_sms,
    grouped_mm_leaving_sms,
    joint_mm_leaving_sms,
    mm_leaving_sms,
)

_K = 512
_FORMS = (Form(), FIRST_SITE, Form(torch.float16, bias=True), Form(out="none", hidden_scale=0.02))


@dataclass
class Product:
    """``problem.x`` is the matmul of ``factors``, both of which differ by rank."""

    factors: Factors
    problem: Problem


def make_product(ctx: Context, tokens: int, hidden_size: int, form: Form, seed: int = 0) -> Product:
    problem = make_problem(ctx, tokens, hidden_size, form, seed)
    own = ctx.generator(*problem.x.shape, seed, ctx.rank + 1, 1)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=own, device=ctx.device) * _K**-0.25).to(form.dtype)

    factors = normal(len(problem.x), _K), normal(_K, problem.x.shape[1]) * (0.5 + ctx.rank)
    return Product(factors, replace(problem, x=torch.mm(*factors)))


def mm_gives_the_same_bits(ctx: Context, transport: str) -> None:
    """In several forms, float8 among them; with more rows than CTAs and fewer than ranks."""
    used = subject(transport)
    for form in _FORMS:
        for tokens, hidden_size in ((1, 4096), (5, 2880), (63, 4096), (1025, 4096)):
            product = make_product(ctx, tokens, hidden_size, form)
            (want,) = expected_results(ctx, used, [product.problem])
            got = used.call(ctx, product.problem.request(ctx), product.factors)
            for name, left, right in zip(("hidden", "residual"), got, want, strict=True):
                equal = torch.equal(left[: len(right)].view(torch.uint8), right.view(torch.uint8))
                ctx.expect(
                    equal, f"{name} [{tokens}, {hidden_size}], {form.norm().hidden_dtype}: differs from plain start"
                )


def mm_leaving_sms_is_a_matmul(ctx: Context) -> None:
    """Plain and in a CUDA graph: as near to float64 as torch's matmul, and the process's settings are as before."""
    for tokens in (1, 63, 1024):
        factors = make_product(ctx, tokens, 4096, Form()).factors
        want, base = torch.mm(*(factor.double() for factor in factors)), torch.mm(*factors)
        for reserved_sms in (0, 16, 100):
            label = f"[{tokens}, {_K}] x [{_K}, 4096], {reserved_sms} SMs left"
            expect_within_budget(ctx, label, mm_leaving_sms(*factors, reserved_sms), base, want)
            captured = torch.full_like(base, float("nan"))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured.copy_(mm_leaving_sms(*factors, reserved_sms))
            graph.replay()
            expect_within_budget(ctx, f"{label}, captured", captured, base, want)
        ctx.expect(torch.equal(torch.mm(*factors), base), f"[{tokens}, {_K}]: torch.mm is another after it")


def grouped_mm_leaving_sms_gives_the_same_bits(ctx: Context) -> None:
    """Of groups without rows, with few and with many, each as near to float64 as a matmul of its rows."""
    _, a, weights, ends = _grouped_product(ctx)
    begin, whole = 0, grouped_mm_leaving_sms(a, weights, ends, 0)
    for group, end in enumerate(ends.tolist()):
        rows, weight = a[begin:end], weights[group]
        expect_within_budget(ctx, f"group {group}", whole[begin:end], rows @ weight, rows.double() @ weight.double())
        begin = end
    for reserved_sms in (4, 17, 100):
        left = grouped_mm_leaving_sms(a, weights, ends, reserved_sms)
        ctx.expect(torch.equal(left, whole), f"{reserved_sms} SMs left: other bits")


def joint_mm_leaving_sms_is_as_near_as_matmuls(ctx: Context) -> None:
    """Of one to three matrices, with and without biases, and the same bits whatever it leaves.

    On 132 SMs the ``shared`` ones have tiles of two matrices: of 192 columns, of 192 and 96, of 224, and of 160.
    """
    own = (1, (256,)), (300, (2048, 256, 256)), (1000, (7168, 7168)), (1152, (520, 8))
    shared = (1024, (2048, 512, 512)), (1536, (2048, 512, 512)), (1536, (1792, 256, 256)), (512, (4096, 512, 512))
    for rows, columns in (*own, *shared):
        a, matrices = joint_product(ctx, rows, columns)
        generator = ctx.generator(rows, ctx.rank + 1)
        vectors = [torch.randn(one, generator=generator, device=ctx.device).bfloat16() for one in columns]
        for biases in ([], vectors):
            of = f"{len(biases)} biases"
            whole = joint_mm_leaving_sms(a, matrices, biases, 0)
            for index, (one, matrix) in enumerate(zip(whole, matrices, strict=True)):
                added = biases[index] if biases else torch.zeros_like(vectors[index])
                exact = a.double() @ matrix.double() + added.double()
                what = f"[{rows}, {matrix.shape[1]}], {of}"
                expect_within_budget(ctx, what, one, torch.addmm(added, a, matrix), exact)
            for reserved_sms in (6, 17, 100):
                left = joint_mm_leaving_sms(a, matrices, biases, reserved_sms)
                same = all(map(torch.equal, left, whole))
                ctx.expect(same, f"[{rows}, {columns}], {of}, {reserved_sms} SMs left: other bits")


def gated_mm_leaving_sms_is_silu_times_a_product(ctx: Context) -> None:
    """Nearer to float64 than what is rounded on the way, and the same bits whatever it leaves."""
    for rows, columns in ((1, 8), (300, 520), (1000, 7168)):
        a, (gate, up) = joint_product(ctx, rows, (columns, columns))
        rounded = F.silu(a @ gate) * (a @ up)
        exact = F.silu(a.double() @ gate.double()) * (a.double() @ up.double())
        whole = gated_mm_leaving_sms(a, gate, up, 0)
        expect_within_budget(ctx, f"[{rows}, {columns}]", whole, rounded, exact)
        for reserved_sms in (6, 100):
            left = gated_mm_leaving_sms(a, gate, up, reserved_sms)
            ctx.expect(torch.equal(left, whole), f"[{rows}, {columns}], {reserved_sms} SMs left: other bits")


def joint_product(
    ctx: Context, rows: int, columns: Sequence[int], depth: int = 1024
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    own = ctx.generator(rows, ctx.rank + 1)
    a = torch.randn(rows, depth, generator=own, device=ctx.device).bfloat16()
    matrices = [torch.randn(one, depth, generator=own, device=ctx.device).bfloat16().t() * 0.05 for one in columns]
    return a, matrices


def mm_reserve_is_measured(ctx: Context) -> None:
    """What a matmul should leave is a number that was tried, its time one of microseconds, and neither waits for peers.

    A grouped one always leaves some, where the other kernel is beside all of it. Ranks measure in turns: on one GPU the
    trials of two would not be repeatable.
    """
    for rank in range(ctx.world_size):
        if rank == ctx.rank:
            _expect_measured(ctx)
            torch.cuda.synchronize(ctx.device)  # stand-ins outlast the trials
        dist.barrier()


def _expect_measured(ctx: Context) -> None:
    product = mm_leaving_sms, *make_product(ctx, 1024, 4096, Form()).factors
    for (matmul, *factors), busy_us in ((product, 100.0), (_grouped_product(ctx), 10_000.0)):
        operands = tuple(Operand(tuple(factor.shape), factor.stride(), factor.dtype) for factor in factors)
        for ctas in (4, 16):
            found = measured_reserve(matmul, operands, ctx.device, ctas, busy_us)
            ctx.expect(found is not None, f"{matmul}, {ctas} CTAs: not measured")
            if found is not None:
                tried = 0 if found.sms == 0 and matmul is mm_leaving_sms else found.sms - ctas
                ctx.expect(tried in range(0, 13, 4) and 1 < found.us < 10_000, f"{matmul}, {ctas} CTAs: {found}")


def _grouped_product(ctx: Context) -> tuple[Callable[..., torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator and its factors: 2049 rows of eight groups, one of which has none and one a single row."""
    own = ctx.generator(2049, ctx.rank + 1)
    a = torch.randn(2049, 1024, generator=own, device=ctx.device).bfloat16()
    weights = torch.randn(8, 2048, 1024, generator=own, device=ctx.device).bfloat16().transpose(1, 2) * 0.05
    ends = torch.tensor([300, 300, 301, 900, 1200, 1456, 1700, 2049], dtype=torch.int32, device=ctx.device)
    return grouped_mm_leaving_sms, a, weights, ends


def mm_shapes_in_turn(ctx: Context, transport: str) -> None:
    """Small and large products and messages that are not, on one slot, back to back, in an order without a pattern."""
    used = subject(transport)
    products = [
        make_product(ctx, tokens, hidden_size, form)
        for tokens in (1, 7, 300)
        for hidden_size, form in ((4096, Form()), (1024, FIRST_SITE))
    ]
    want = expected_results(ctx, used, [product.problem for product in products])
    requests = [product.problem.request(ctx) for product in products]
    order = random.Random(0)
    wrong = new_counter(ctx)
    for _ in range(60):
        burst = [(index, order.random() < 0.6) for index in order.choices(range(len(products)), k=6)]
        results = [
            used.start(ctx, requests[index], products[index].factors if multiplied else None)
            for index, multiplied in burst
        ]
        for (index, _multiplied), result in zip(burst, results, strict=True):
            count_differences(wrong, result, want[index])
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")


def mm_random_skew(ctx: Context, transport: str) -> None:
    """A rank that is ahead must not multiply into memory from which a rank that lags has yet to read the call before."""
    used = subject(transport)
    products = [make_product(ctx, tokens, 4096, Form(), 1) for tokens in (5, 64, 1000)]
    want = expected_results(ctx, used, [product.problem for product in products])
    requests = [product.problem.request(ctx) for product in products]
    skew = random.Random(ctx.rank)
    wrong = new_counter(ctx)
    for iteration in range(120):
        compat.delay_stream(skew.randrange(2_000_000))
        index = iteration % len(requests)
        count_differences(wrong, used.call(ctx, requests[index], products[index].factors), want[index])
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")


def mm_captured_and_replayed(ctx: Context, transport: str) -> None:
    """Replays of products, with other factors and eager calls of another size between them, equal eager plain calls."""
    used = subject(transport)

    def enqueue(product: Product) -> list[Results]:
        request = product.problem.request(ctx)
        return [used.start(ctx, request, product.factors) for _ in range(3)]

    def between(iteration: int, other: Product) -> Results | None:
        return None if iteration % 3 else used.call(ctx, other.problem.request(ctx), other.factors)

    wrong = replay_products(ctx, used, enqueue, between)
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")


def replay_products(
    ctx: Context,
    used: Subject,
    enqueue: Callable[[Product], list[Results]],
    between: Callable[[int, Product], Results | None],
) -> torch.Tensor:
    """How many elements are wrong in replays of ``enqueue``, and in the calls of another product between them, if any."""
    products = [make_product(ctx, 65, 4096, Form(), seed) for seed in range(4)]
    other = make_product(ctx, 7, 4096, Form(), 9)
    want = expected_results(ctx, used, [product.problem for product in products])
    (want_other,) = expected_results(ctx, used, [other.problem])
    static = make_product(ctx, 65, 4096, Form(), 5)
    wrong = new_counter(ctx)

    def call_other(iteration: int) -> None:
        results = between(iteration, other)
        if results is not None:
            count_differences(wrong, results, want_other)

    inputs, *values = [
        (*product.factors, product.problem.residual, product.problem.weight) for product in (static, *products)
    ]
    replay_with_other_inputs(wrong, lambda: enqueue(static), inputs, values, want, call_other)
    return wrong
