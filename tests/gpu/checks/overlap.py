"""Checks of calls beside other work: what matmuls on the current stream and kernels on side streams do to each other.

Matmuls take new memory each time: they would write over what a call gave back while its kernel still used it. Their own results
are compared, too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from gpu.checks.producer import Product, make_product, replay_products
from gpu.checks.stress import FIRST_SITE, capture, count_differences, expected_results, new_counter
from gpu.checks.transports import finished, subject
from tw_compile import compat
from tw_compile.harness.problems import Context, Form, Results, expect_right, make_problem
from tw_compile.kernels.transports.p2p import P2PTransport

_FORMS = (Form(), FIRST_SITE, Form(torch.float16, bias=True), Form(out="none", hidden_scale=0.02))
GEMM = 2048
_TWO_AT_ONCE = 24
"""SMs of each of two calls at once: half of the SMs of a GPU that has at least 96."""


@dataclass
class Gemms:
    """A few matmuls on the current stream, whose wrong elements are counted in ``wrong`` on the device."""

    a: torch.Tensor
    b: torch.Tensor
    want: torch.Tensor
    wrong: torch.Tensor

    def __call__(self, count: int = 3) -> None:
        for _ in range(count):
            product = self.a @ self.b
            self.wrong.add_((product != self.want).sum())
            product.fill_(float("nan"))


def make_gemms(ctx: Context) -> Gemms:
    a, b = (torch.randn(GEMM, GEMM, generator=ctx.generator(seed), device=ctx.device).bfloat16() for seed in (1, 2))
    return Gemms(a, b, a @ b, new_counter(ctx))


def expect_none_wrong(ctx: Context, wrong: torch.Tensor, gemms: Gemms) -> None:
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")
    ctx.expect(int(gemms.wrong) == 0, f"{int(gemms.wrong)} wrong elements of matmuls beside calls")


def overlap_gives_the_same_bits(ctx: Context, transport: str) -> None:
    """In several forms and with different numbers of SMs, with a matmul of its own and without.

    Without, the message is not contiguous: nothing but the call in flight holds the copy that the kernel reads.
    """
    used, gemms = subject(transport), make_gemms(ctx)
    for form in _FORMS:
        for tokens, hidden_size in ((1, 4096), (63, 2880), (1025, 4096)):
            product = make_product(ctx, tokens, hidden_size, form)
            (want,) = expected_results(ctx, used, [product.problem])
            request = product.problem.request(ctx)
            request = replace(request, x=request.x.t().contiguous().t())
            for overlap_sms in (1, 8, 32):
                for factors in (None, product.factors):
                    got = used.call(ctx, replace(request, overlap_sms=overlap_sms), factors, gemms)
                    for name, left, right in zip(("hidden", "residual"), got, want, strict=True):
                        equal = torch.equal(left[: len(right)].view(torch.uint8), right.view(torch.uint8))
                        label = f"{name} [{tokens}, {hidden_size}], {form.norm().hidden_dtype}, {overlap_sms} SMs"
                        ctx.expect(equal, f"{label}: differs from a call that is not beside other work")
    ctx.expect(int(gemms.wrong) == 0, f"{int(gemms.wrong)} wrong elements of matmuls beside calls")


def overlap_random_skew(ctx: Context, transport: str) -> None:
    """Ranks arrive at every call, and at every wait for one, at random times."""
    used, gemms = subject(transport), make_gemms(ctx)
    products = [make_product(ctx, tokens, 4096, Form(), 1) for tokens in (5, 64, 1000)]
    want = expected_results(ctx, used, [product.problem for product in products])
    requests = [product.problem.request(ctx) for product in products]
    common, skew = random.Random(0), random.Random(ctx.rank)
    wrong = new_counter(ctx)

    def work() -> None:
        compat.delay_stream(skew.randrange(1_000_000))
        gemms(skew.randrange(3))

    for iteration in range(120):
        compat.delay_stream(skew.randrange(1_000_000))
        index = iteration % len(requests)
        request = replace(requests[index], overlap_sms=common.choice((1, 4, 16, 32)))
        factors = common.choice((None, products[index].factors))
        count_differences(wrong, used.call(ctx, request, factors, work), want[index])
    expect_none_wrong(ctx, wrong, gemms)


def overlap_captured_and_replayed(ctx: Context, transport: str) -> None:
    """Replays of calls beside matmuls and of one that is not, with other inputs and eager calls of both kinds between them."""
    used, gemms = subject(transport), make_gemms(ctx)

    def enqueue(product: Product) -> list[Results]:
        plain = product.problem.request(ctx)
        overlapped = replace(plain, overlap_sms=8)
        first = used.start(ctx, overlapped, product.factors, gemms)
        second = used.start(ctx, plain, product.factors)
        return [first, second, used.start(ctx, overlapped, product.factors, gemms)]

    def between(iteration: int, other: Product) -> Results | None:
        if iteration % 3 == 0:
            return None
        request = replace(other.problem.request(ctx), overlap_sms=4 if iteration % 3 == 1 else 0)
        return used.call(ctx, request, other.factors, gemms)

    expect_none_wrong(ctx, replay_products(ctx, used, enqueue, between), gemms)


def overlap_two_slots(ctx: Context, transport: str) -> None:
    """Calls on two slots at once, beside matmuls and a call on a third slot that is not beside other work; with skew."""
    used, gemms = subject(transport), make_gemms(ctx)
    products = [make_product(ctx, tokens, 4096, Form(), 2) for tokens in (1000, 63, 300)]
    want = expected_results(ctx, used, [product.problem for product in products])
    requests = [product.problem.request(ctx, slot=slot) for slot, product in enumerate(products)]
    for slot in range(2):
        requests[slot] = replace(requests[slot], overlap_sms=_TWO_AT_ONCE)
    for request, product in zip(requests, products, strict=True):
        used.call(ctx, request, product.factors)  # makes the slot
    skew = random.Random(ctx.rank)
    wrong = new_counter(ctx)

    def all_at_once() -> list[Results]:
        results: list[Results] = []

        def third() -> None:
            gemms()
            results.append(used.start(ctx, requests[2], products[2].factors))

        def second() -> None:
            gemms()
            results.append(used.start(ctx, requests[1], products[1].factors, third))

        results.append(used.start(ctx, requests[0], products[0].factors, second))
        return results[::-1]

    graph, captured = capture(all_at_once)
    for iteration in range(60):
        if (iteration + ctx.rank) % 3 == 0:
            compat.delay_stream(skew.randrange(1_000_000))
        replayed = iteration % 4 == 0
        if replayed:
            graph.replay()
        for result, expected in zip(captured if replayed else all_at_once(), want, strict=True):
            count_differences(wrong, result, expected)
    expect_none_wrong(ctx, wrong, gemms)


def overlap_mixed_on_one_slot(ctx: Context, transport: str) -> None:
    """Calls of both kinds in an order without a pattern, some begun while the one before has not been waited for."""
    used, gemms = subject(transport), make_gemms(ctx)
    products = [
        make_product(ctx, tokens, hidden_size, form)
        for tokens in (1, 7, 300)
        for hidden_size, form in ((4096, Form()), (1024, FIRST_SITE))
    ]
    want = expected_results(ctx, used, [product.problem for product in products])
    order, skew = random.Random(0), random.Random(ctx.rank)
    wrong = new_counter(ctx)

    def begin(results: list[tuple[int, Results]], more: int) -> None:
        """A call that is waited for when ``more`` others have been begun and waited for."""
        index, multiplied = order.randrange(len(products)), order.random() < 0.6
        request = replace(products[index].problem.request(ctx), overlap_sms=order.choice((0, 2, 16, 32)))

        def work() -> None:
            gemms(skew.randrange(3))
            if more:
                begin(results, more - 1)

        results.append((index, used.start(ctx, request, products[index].factors if multiplied else None, work)))

    for _ in range(80):
        if skew.random() < 0.3:
            compat.delay_stream(skew.randrange(200_000))
        results: list[tuple[int, Results]] = []
        begin(results, order.randrange(3))
        for index, result in results:
            count_differences(wrong, result, want[index])
    expect_none_wrong(ctx, wrong, gemms)


def overlap_by_default(ctx: Context) -> None:
    """The transport's own choice of a kernel, which is beside other work, and waited for."""
    transport = P2PTransport()
    problem = make_problem(ctx, 1025, 4096, Form())
    started = transport.start(replace(problem.request(ctx), overlap_sms=8))
    ctx.expect(started.finish is not None and started.overlap_sms == 8, "not beside other work")
    expect_right(ctx, problem, finished(started), "by default")
    torch.cuda.synchronize()
    dist.barrier()  # no rank frees its buffers while another still writes to them
