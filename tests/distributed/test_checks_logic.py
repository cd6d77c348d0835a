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
from gpu.checks import accuracy, layer_norm, overlap, prefetch, producer, run, stress
from gpu.checks.transports import Factors, Subject, Work, finished

from tw_compile import compat
from tw_compile.harness.problems import Context, Form, Problem, Results, make_problem
from tw_compile.kernels.algorithms.push.sharing_push import SharingPush
from tw_compile.kernels.algorithms.stream.stream import Stream
from tw_compile.kernels.algorithms.two_shot.two_shot import TwoShot
from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.slot import GroupState, Slot, SymmetricBuffer
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transport import Started, get_transport
from tw_compile.kernels.runtime import launch
from tw_compile.kernels.transports.p2p import P2PTransport
from tw_compile.kernels.transports.selection import Selector
from tw_compile.testing import GlooRanks

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
PRODUCER: dict[str, dict[str, Any]] = {
    "mm_gives_the_same_bits": {},
    "mm_shapes_in_turn": {},
    "mm_random_skew": {},
    "mm_captured_and_replayed": {},
}
OVERLAP: dict[str, dict[str, Any]] = {check.__name__: {} for check in run.OF_OVERLAPPED}
LAYER_NORM: dict[str, dict[str, Any]] = {
    "layer_norm_accuracy": {"form": "starcoder2"},
    "layer_norm_of_rows_whose_mean_is_large": {},
    "layer_norm_by_the_operators": {},
    "layer_norm_of_a_product": {},
}
PREFETCH: dict[str, dict[str, Any]] = {check.__name__: {} for check in prefetch.OF_EVERY_KERNEL}
MODULES = {
    accuracy: ACCURACY,
    layer_norm: LAYER_NORM,
    stress: STRESS,
    producer: PRODUCER,
    overlap: OVERLAP,
    prefetch: PREFETCH,
    run: {"sanitizer_small": {}},
}


class OnGloo(Subject):
    """The gloo transport; ``fault`` spoils results in one way from the call number ``begin`` on.

    "product" spoils those of calls that multiply, "overlap" those of calls beside other work, "plain" the others,
    and "gemms" what is multiplied beside calls.
    """

    def __init__(self, fault: str | None, begin: int) -> None:
        super().__init__("gloo")
        self._fault, self._begin, self._calls = fault, begin, 0
        self._last: dict[torch.Size, torch.Tensor] = {}
        self.gemms: Any = None

    @property
    def algorithm(self) -> Any:
        return SimpleNamespace(launches=self._calls)

    def start(
        self, ctx: Context, request: Request, factors: Factors | None = None, beside: Work | None = None
    ) -> Results:
        self._calls += 1
        hidden, residual = super().start(ctx, request, factors, beside)
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
            elif self._fault == "product" and factors is not None:
                hidden[0] = 0
            elif self._fault == "gemms" and self.gemms is not None:
                self.gemms.b.zero_()
            elif self._fault == ("overlap" if request.overlap_sms else "plain"):
                hidden[-1] = 0
            elif self._fault == "stale":
                hidden.copy_(stale)
        return hidden, residual


def make_problem_of(hidden_size: int) -> Callable[..., Problem]:
    return lambda ctx, tokens, _, form, seed=0: make_problem(ctx, tokens, hidden_size, form, seed)


def make_small_weights(ctx: Context, seed: int) -> list[torch.Tensor]:
    generator = ctx.generator(seed, ctx.rank)
    weights = [torch.randn((count, 512), generator=generator).bfloat16() for count in (64, 32)]
    return [weights[0], weights[1].t()]


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

    def make_gemms(ctx: Context) -> Any:
        subject.gemms = real_gemms(ctx)
        return subject.gemms

    real_gemms = overlap.make_gemms

    def small_problem(ctx: Context, tokens: int, hidden_size: int, form: Form, seed: int = 0) -> Problem:
        return make_problem(ctx, min(tokens, 70), max(hidden_size // 32, 128), form, seed)

    with ExitStack() as stack:
        for module in (accuracy, layer_norm, stress, producer, overlap, prefetch):
            stack.enter_context(mock.patch.object(module, "subject", lambda _: subject))
        for module in (stress, producer, overlap):
            stack.enter_context(mock.patch.object(module, "make_problem", small_problem))
            stack.enter_context(mock.patch.object(module, "new_counter", new_counter))
        for module in (stress, overlap, prefetch):
            stack.enter_context(mock.patch.object(module, "capture", capture))
        stack.enter_context(mock.patch.object(prefetch, "make_problem", make_problem_of(512)))
        stack.enter_context(mock.patch.object(prefetch, "make_weights", make_small_weights))
        stack.enter_context(mock.patch.object(prefetch, "REPLAYS", 3))
        stack.enter_context(mock.patch.object(stress, "CALLS_PER_REPLAY", 20))
        stack.enter_context(mock.patch.object(overlap, "GEMM", 16))
        stack.enter_context(mock.patch.object(overlap, "make_gemms", make_gemms))
        stack.enter_context(mock.patch.object(compat, "delay_stream"))
        for what in ("synchronize", "Stream"):
            stack.enter_context(mock.patch.object(torch.cuda, what))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", lambda _: nullcontext()))
        (module,) = (module for module, names in MODULES.items() if name in names)
        getattr(module, name)(ctx, transport="gloo", **options)
    return ctx


@pytest.mark.full
@pytest.mark.parametrize("name", [name for names in MODULES.values() for name in names])
def test_right_results_pass(gloo_ranks: GlooRanks, name: str) -> None:
    options = (ACCURACY | STRESS | LAYER_NORM).get(name, {})
    contexts = gloo_ranks.run(run_check, name, options, None, 0)
    assert [ctx.failures for ctx in contexts] == [[], []]
    if name == "million_launches":
        assert [ctx.counts for ctx in contexts] == [{"launches": 120, "verified": 120}] * 2


@pytest.mark.full
@pytest.mark.parametrize("form", [form for form in layer_norm.FORMS if form != "starcoder2"])
def test_right_results_of_a_layer_norm_pass(gloo_ranks: GlooRanks, form: str) -> None:
    contexts = gloo_ranks.run(run_check, "layer_norm_accuracy", {"form": form}, None, 0)
    assert [ctx.failures for ctx in contexts] == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("fault", ["element", "rank", "unwritten"])
@pytest.mark.parametrize("name", ["layer_norm_by_the_operators", "layer_norm_of_rows_whose_mean_is_large"])
def test_wrong_results_of_a_layer_norm_fail(gloo_ranks: GlooRanks, name: str, fault: str) -> None:
    contexts = gloo_ranks.run(run_check, name, {}, fault, 0)
    assert all(ctx.failures for ctx in contexts if fault != "rank") and any(ctx.failures for ctx in contexts)


@pytest.mark.parametrize("form", ["first_norm", "from_sharded", "last_norm", "no_weight", "fp16", "fp8"])
def test_right_results_of_a_form_pass(gloo_ranks: GlooRanks, form: str) -> None:
    options = {"hidden_size": 328, "tokens": (1, 5), "form": accuracy.FORMS[form]}
    contexts = gloo_ranks.run(run_check, "accuracy_of_hidden_size", options, None, 0)
    assert [ctx.failures for ctx in contexts] == [[], []]


@pytest.mark.full
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
        ("prefetch_changes_no_bit", "element", 0, "max error"),
        ("prefetch_changes_no_bit", "element", 2, "other bits with 16 bytes prefetched"),
        ("prefetch_captured_and_replayed", "element", 9, "other bits of a replay"),
        ("prefetch_of_weights_that_are_given_back", "residual", 2, "other bits where weights were given back"),
        ("mm_gives_the_same_bits", "product", 0, "hidden [63, 4096], torch.bfloat16: differs from plain start"),
        ("mm_gives_the_same_bits", "product", 0, "hidden [5, 2880], torch.float16: differs from plain start"),
        ("mm_shapes_in_turn", "product", 100, "wrong elements"),
        ("mm_shapes_in_turn", "residual", 300, "wrong elements"),
        ("mm_random_skew", "product", 50, "wrong elements"),
        ("mm_captured_and_replayed", "stale", 20, "wrong elements"),
        ("mm_captured_and_replayed", "product", 20, "wrong elements"),
        ("overlap_gives_the_same_bits", "overlap", 0, "hidden [63, 2880], torch.float16, 8 SMs: differs"),
        ("overlap_random_skew", "overlap", 50, "wrong elements"),
        ("overlap_captured_and_replayed", "overlap", 20, "wrong elements"),
        ("overlap_captured_and_replayed", "plain", 20, "wrong elements"),
        ("overlap_two_slots", "overlap", 20, "wrong elements"),
        ("overlap_two_slots", "plain", 20, "wrong elements"),
        ("overlap_mixed_on_one_slot", "overlap", 20, "wrong elements"),
        ("overlap_mixed_on_one_slot", "plain", 20, "wrong elements"),
        *((name, "gemms", 20, "wrong elements of matmuls") for name in OVERLAP),
    ],
)
def test_wrong_results_fail(gloo_ranks: GlooRanks, name: str, fault: str, begin: int, message: str) -> None:
    contexts = gloo_ranks.run(run_check, name, (ACCURACY | STRESS | PRODUCER | OVERLAP | PREFETCH)[name], fault, begin)
    assert any(message in failure for ctx in contexts for failure in ctx.failures), contexts
    if name == "million_launches":
        assert all(0 < ctx.counts["verified"] < ctx.counts["launches"] == 120 for ctx in contexts)


def run_check_of_other_steps(rank: int, prepared: tuple[str, ...]) -> Context:
    """With kernels that gloo stands in for; only those named in ``prepared`` are loaded when that is asked for."""
    assert dist.group.WORLD is not None
    device = torch.device("cpu")
    ctx = Context(rank, 2, device, compat.group_name(dist.group.WORLD))
    state = GroupState(ctx.group_name, dist.group.WORLD, device, rank, 2, Selector())
    buffer = SymmetricBuffer(torch.zeros(2**23, dtype=torch.uint8), None, torch.zeros(3), 2**23)
    slot = Slot(buffer, torch.zeros(1), torch.zeros(1), {"x": buffer})
    capturing = False
    loaded: dict[tuple[str, int], None] = {}

    def load(self: Algorithm, request: Request) -> None:
        loaded[type(self).__name__, request.x.shape[1]] = None

    def prepare(self: Algorithm, request: Request, state: GroupState, spin_limit: int) -> None:
        if type(self).__name__ in prepared:
            load(self, request)

    def start(self: Algorithm, request: Request, *_: Any) -> Started:
        load(self, request)
        started = get_transport("gloo").start(request)
        return Started(*finished(started))

    def capture(function: Callable[[], list[Results]]) -> tuple[Any, list[Results]]:
        nonlocal capturing
        capturing = True
        results = function()
        capturing = False
        return SimpleNamespace(replay=lambda: None), results

    with ExitStack() as stack:
        for kind in (SharingPush, Stream, TwoShot):
            stack.enter_context(mock.patch.object(kind, "prepare", prepare))
            stack.enter_context(mock.patch.object(kind, "programs", lambda *_: []))
            stack.enter_context(mock.patch.object(kind, "launch", start))
        stack.enter_context(mock.patch.object(P2PTransport, "group_state", lambda *_: state))
        stack.enter_context(mock.patch.object(P2PTransport, "slot_for", lambda *_: slot))
        stack.enter_context(mock.patch.object(launch, "loaded", loaded))
        stack.enter_context(mock.patch.object(stress, "capture", capture))
        stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: capturing))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)))
        stack.enter_context(mock.patch.object(torch.cuda, "device", lambda device: nullcontext()))
        stack.enter_context(mock.patch.object(torch.cuda, "synchronize"))
        stress.other_steps_are_loaded_before_capture(ctx)
    return ctx


@pytest.mark.parametrize(
    ("prepared", "failures"),
    [
        (("SharingPush", "Stream", "TwoShot"), []),
        (("SharingPush", "TwoShot"), ["loaded in capture: 1 CUDA kernels, Triton kernels []"]),
    ],
)
def test_kernels_that_are_loaded_in_capture_are_a_failure(
    gloo_ranks: GlooRanks, prepared: tuple[str, ...], failures: list[str]
) -> None:
    contexts = gloo_ranks.run(run_check_of_other_steps, prepared)
    assert [ctx.failures for ctx in contexts] == [failures, failures]
