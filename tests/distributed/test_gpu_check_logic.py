"""The GPU checks' own logic, on gloo ranks with CUDA's streams and graphs replaced: right results pass, wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.kernels.all_reduce_rms_norm.spec import Request
from tw_compile.testing import GlooRanks, gpu_accuracy, gpu_checks, gpu_stress
from tw_compile.testing.gpu_problems import Context, Form, Problem, Results, make_problem
from tw_compile.testing.gpu_transports import Subject

ACCURACY: dict[str, dict[str, Any]] = {
    "accuracy_of_hidden_size": {"hidden_size": 328, "tokens": (1, 5)},
    "chain_of_sharded_residuals": {"hidden_size": 256},
    "values_that_are_not_finite": {},
}
STRESS: dict[str, dict[str, Any]] = {
    "shapes_in_turn": {},
    "random_skew": {},
    "two_slots_on_two_streams": {},
    "two_groups_at_once": {},
    "captured_and_replayed": {},
    "million_launches": {"launches": 120},
}


class OnGloo(Subject):
    """The gloo transport; ``fault`` spoils results in one way from the call number ``begin`` on."""

    def __init__(self, fault: str | None, begin: int) -> None:
        super().__init__("gloo")
        self._fault, self._begin, self._calls = fault, begin, 0
        self._last: dict[torch.Size, torch.Tensor] = {}

    @property
    def algorithm(self) -> Any:
        return SimpleNamespace(launches=self._calls)

    def start(self, ctx: Context, request: Request) -> Results:
        self._calls += 1
        hidden, residual = super().start(ctx, request)
        stale = self._last.get(hidden.shape, hidden)
        self._last[hidden.shape] = hidden.clone()
        if self._calls >= self._begin:
            if self._fault == "element":
                hidden[-1, -1] += 1
            elif self._fault == "rank":
                hidden[-1, -1] *= 1 + 2**-7 * ctx.rank
            elif self._fault == "unwritten":
                hidden[-1] = float("nan")
            elif self._fault == "no_nan":
                hidden.copy_(hidden.float().nan_to_num())
            elif self._fault == "residual" and len(residual):
                residual[0] += 1
            elif self._fault == "stale":
                hidden.copy_(stale)
        return hidden, residual


def run_check(rank: int, name: str, options: dict[str, Any], fault: str | None, begin: int) -> Context:
    assert dist.group.WORLD is not None
    ctx = Context(rank, dist.get_world_size(), torch.device("cpu"), compat.group_name(dist.group.WORLD))
    subject = OnGloo(fault, begin)
    counters: list[torch.Tensor] = []

    def new_counter(ctx: Context) -> torch.Tensor:
        counters.append(torch.zeros((), dtype=torch.int64))
        return counters[-1]

    def capture(function: Callable[[], list[Results]]) -> tuple[Any, list[Results]]:
        before = [counter.clone() for counter in counters]
        results = function()
        for counter, value in zip(counters, before, strict=True):
            counter.copy_(value)

        def replay() -> None:
            for old, new in zip(results, function(), strict=True):
                old[0].copy_(new[0])
                old[1].copy_(new[1])

        return SimpleNamespace(replay=replay), results

    def small_problem(ctx: Context, tokens: int, hidden_size: int, form: Form, seed: int = 0) -> Problem:
        return make_problem(ctx, min(tokens, 70), max(hidden_size // 32, 128), form, seed)

    with ExitStack() as stack:
        for module in (gpu_accuracy, gpu_stress):
            stack.enter_context(mock.patch.object(module, "subject", lambda _: subject))
        stack.enter_context(mock.patch.object(gpu_stress, "make_problem", small_problem))
        stack.enter_context(mock.patch.object(gpu_stress, "new_counter", new_counter))
        stack.enter_context(mock.patch.object(gpu_stress, "capture", capture))
        stack.enter_context(mock.patch.object(gpu_stress, "_CALLS_PER_REPLAY", 20))
        stack.enter_context(mock.patch.object(compat, "delay_stream"))
        for what in ("synchronize", "Stream"):
            stack.enter_context(mock.patch.object(torch.cuda, what))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", lambda _: nullcontext()))
        module = gpu_accuracy if name in ACCURACY else gpu_stress
        getattr(gpu_checks if name == "sanitizer_small" else module, name)(ctx, transport="gloo", **options)
    return ctx


@pytest.mark.parametrize("name", [*ACCURACY, *STRESS, "sanitizer_small"])
def test_right_results_pass(gloo_ranks: GlooRanks, name: str) -> None:
    options = (ACCURACY | STRESS).get(name, {})
    contexts = gloo_ranks.run(run_check, name, options, None, 0)
    assert [ctx.failures for ctx in contexts] == [[], []]
    if name == "million_launches":
        assert [ctx.counts for ctx in contexts] == [{"launches": 120, "verified": 120}] * 2


@pytest.mark.parametrize("form", ["first_norm", "from_sharded", "last_norm", "no_weight", "fp16", "fp8"])
def test_right_results_of_a_form_pass(gloo_ranks: GlooRanks, form: str) -> None:
    options = {"hidden_size": 328, "tokens": (1, 5), "form": gpu_accuracy.FORMS[form]}
    contexts = gloo_ranks.run(run_check, "accuracy_of_hidden_size", options, None, 0)
    assert [ctx.failures for ctx in contexts] == [[], []]


@pytest.mark.parametrize(
    ("name", "fault", "begin", "message"),
    [
        ("accuracy_of_hidden_size", "element", 0, "max error"),
        ("accuracy_of_hidden_size", "rank", 0, "differs from rank 0"),
        ("accuracy_of_hidden_size", "unwritten", 0, "not finite"),
        ("accuracy_of_hidden_size", "residual", 0, "residual [1, 328]"),
        ("accuracy_of_hidden_size", "element", 2, "second run differs"),
        ("chain_of_sharded_residuals", "residual", 2, "residual [1, 256] of site 1"),
        ("values_that_are_not_finite", "no_nan", 0, "a NaN is not in all of its row"),
        ("values_that_are_not_finite", "unwritten", 0, "NaNs are not where they must be"),
        ("shapes_in_turn", "stale", 20, "wrong elements"),
        ("random_skew", "element", 50, "wrong elements"),
        ("two_slots_on_two_streams", "residual", 50, "wrong elements by stream"),
        ("two_groups_at_once", "element", 50, "wrong elements by stream"),
        ("captured_and_replayed", "stale", 20, "wrong elements"),
        ("million_launches", "element", 150, "replays had wrong results"),
        ("million_launches", "unwritten", 150, "replays had wrong results"),
    ],
)
def test_wrong_results_fail(gloo_ranks: GlooRanks, name: str, fault: str, begin: int, message: str) -> None:
    contexts = gloo_ranks.run(run_check, name, (ACCURACY | STRESS)[name], fault, begin)
    assert any(message in failure for ctx in contexts for failure in ctx.failures), contexts
    if name == "million_launches":
        assert all(0 < ctx.counts["verified"] < ctx.counts["launches"] == 120 for ctx in contexts)
