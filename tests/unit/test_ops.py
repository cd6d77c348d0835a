"""The operators' contracts: schema, fake kernels, errors."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.seam import arrive_
from tw_compile.kernels.collective.spec import MAX_OVERLAP_SMS, NormSpec, Request, rows_per_rank
from tw_compile.kernels.collective.transport import Started, Transport, get_transport, instances
from tw_compile.kernels.runtime import operator
from tw_compile.testing import fake_process_group

T, H, RANKS = 5, 8, 2
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    ops.in_flight.clear()
    ops.completed_early.clear()
    with fake_process_group(RANKS):
        yield
    ops.in_flight.clear()


def start_args(dtype: torch.dtype = torch.float32, **changed: Any) -> tuple[Any, ...]:
    args: dict[str, Any] = {
        "x": torch.randn(T, H).to(dtype),
        "residual": torch.randn(T, H).to(dtype),
        "bias": None,
        "weight": torch.randn(H).to(dtype),
        "eps": 1e-5,
        "weight_offset": 0.0,
        "cast_before_weight": None,
        "hidden_dtype": dtype,
        "residual_dtype": dtype,
        "residual_sharded": False,
        "residual_out": "replicated",
        "group_name": "0",
        "transport": "gloo",
        "slot": 0,
        "scale": 1.0,
        "hidden_scale": None,
        "eps_tensor": None,
        "overlap_sms": 0,
    }
    assert set(changed) <= set(args)
    return tuple((args | changed).values())


def mm_start_args(a: torch.Tensor, b: torch.Tensor, **changed: Any) -> tuple[Any, ...]:
    return a, b, *start_args(**changed)[1:]


def factors(dtype: torch.dtype = torch.float32, k: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """``a [T, k]`` and ``b [k, H]``, a transposed weight."""
    return torch.randn(T, k).to(dtype), torch.randn(H, k).to(dtype).t()


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "first norm": {"residual": None},
    "bias": {"bias": torch.randn(H)},
    "no weight": {"weight": None},
    "gemma": {"weight_offset": 1.0},
    "hf bf16": {"cast_before_weight": torch.bfloat16, "dtype": torch.bfloat16},
    "fp32 residual": {"residual_dtype": torch.float32, "dtype": torch.bfloat16},
    "residual dropped": {"residual_out": "none"},
    "residual given out sharded": {"residual_out": "sharded"},
    "residual taken in sharded": {"residual": torch.randn(3, H), "residual_sharded": True, "residual_out": "sharded"},
    "fp8": {"hidden_dtype": FP8, "hidden_scale": torch.tensor([0.02]), "dtype": torch.bfloat16},
    "fp8 sharded": {"hidden_dtype": FP8, "hidden_scale": torch.tensor([0.02]), "residual_out": "sharded"},
    "beside other work": {"overlap_sms": 8},
    "eps is an input": {"eps_tensor": torch.tensor(0.5, dtype=torch.float64)},
    "not contiguous": {"x": torch.randn(H, T).t(), "residual": torch.randn(H, T).t()},
}


@pytest.fixture
def finished_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For opcheck: it compares two runs on equal inputs, and outputs hold nothing before wait_."""
    transport = get_transport("gloo")
    begin = type(transport).start

    def finished(self: Any, request: Any) -> Started:
        started = begin(self, request)
        assert started.finish is not None
        started.finish()
        return Started(started.hidden, started.residual)

    monkeypatch.setattr(type(transport), "start", finished)


@pytest.mark.parametrize("form", FORMS)
def test_opcheck_of_start(form: str, finished_at_once: None) -> None:
    torch.library.opcheck(ops.start, start_args(**FORMS[form]))


def test_opcheck_with_weights_to_prefetch(finished_at_once: None) -> None:
    weights = [torch.randn(16, H), torch.randn(16, H).t()]
    a, b = factors(torch.float32)
    torch.library.opcheck(ops.start, start_args(), {"prefetch": weights, "prefetch_bytes": 100})
    torch.library.opcheck(ops.mm_start, mm_start_args(a, b), {"prefetch": weights, "prefetch_bytes": 100})


MM_FORMS = [form for form in FORMS if "x" not in FORMS[form]]


@pytest.mark.parametrize("form", MM_FORMS)
def test_opcheck_of_mm_start(form: str, finished_at_once: None) -> None:
    a, b = factors(FORMS[form].get("dtype", torch.float32))
    torch.library.opcheck(ops.mm_start, mm_start_args(a, b, **FORMS[form]))


def test_opcheck_of_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class AlwaysInFlight(dict[tuple[str, int], Started]):
        """opcheck runs the operator on copies of its arguments: whatever is waited for is in flight."""

        def get(self, key: tuple[str, int], default: Any = None) -> Any:
            return Started(waited[-1], waited[-1], lambda: waited[-1].add_(1))

        def __delitem__(self, key: tuple[str, int]) -> None:
            pass

    waited: list[torch.Tensor] = []
    implementation = ops.wait_here

    def recording(hidden: torch.Tensor, *rest: Any) -> None:
        waited.append(hidden)
        implementation(hidden, *rest)

    monkeypatch.setattr(ops, "in_flight", AlwaysInFlight())
    with torch.library._scoped_library(operator.NAMESPACE, "IMPL") as library:
        library.impl("all_reduce_rms_norm_wait_", recording, "CPU", allow_override=True)
        args = (torch.randn(T, H), torch.randn(T, H), [torch.randn(T, H)], "0", 0)
        torch.library.opcheck(ops.wait_, args)


def test_wait_declares_what_it_writes() -> None:
    arguments = {argument.name: argument.is_write for argument in ops.wait_._schema.arguments}
    results = {"hidden": True, "residual_out": True, "scales": True}
    assert arguments == {"keep": False, "group_name": False, "slot": False} | results
    assert ops.wait_._schema.is_mutable
    assert not ops.start._schema.is_mutable and not ops.mm_start._schema.is_mutable


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("out", ["none", "sharded", "replicated"])
def test_fake_shapes_with_symbolic_tokens(out: str, absorbed: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.randn(T, H, dtype=torch.bfloat16), symbolic_context=context)
    tokens = x.shape[0]
    with mode:
        args = start_args(
            torch.bfloat16, x=x, residual=None, weight=None, residual_dtype=torch.float32, residual_out=out
        )
        square = torch.empty(H, H, dtype=torch.bfloat16)
        hidden, residual = ops.mm_start(x, square, *args[1:]) if absorbed else ops.start(*args)
    assert isinstance(tokens, torch.SymInt) and hidden.shape[0] == tokens
    assert (hidden.dtype, residual.dtype) == (torch.bfloat16, torch.float32)
    expected = {"none": 0, "sharded": rows_per_rank(tokens, RANKS), "replicated": tokens}[out]
    assert str(residual.shape[0]) == str(expected)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "not contiguous"])
def test_fake_kernel_agrees_with_the_real_one(form: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    args = start_args(**FORMS[form])
    real = ops.start(*args)
    ops.wait_(*real, [], "0", 0)
    with FakeTensorMode() as mode:
        fake = ops.start(*(mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args))
    described = [[(one.shape, one.dtype, one.stride()) for one in outputs] for outputs in (real, fake)]
    assert described[0] == described[1]


@pytest.mark.parametrize("form", MM_FORMS)
def test_mm_start_is_start_of_the_product(form: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    a, b = factors(FORMS[form].get("dtype", torch.float32))
    args = mm_start_args(a, b, **FORMS[form])
    product = ops.mm_start(*args)
    ops.wait_(*product, [a, b], "0", 0)
    expected = ops.start(torch.mm(a, b), *args[2:])
    ops.wait_(*expected, [], "0", 0)
    for got, wanted in zip(product, expected, strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    with FakeTensorMode() as mode:
        fake = ops.mm_start(*(mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args))
    described = [[(one.shape, one.dtype, one.stride()) for one in outputs] for outputs in (product, fake)]
    assert described[0] == described[1]


class InPlace(Transport):
    """Gives out one buffer, as a transport over symmetric memory does, and notes what happens."""

    def __init__(self) -> None:
        self.memory = torch.full((T, H), float("nan"))
        self.events: list[str] = []
        self.messages: list[torch.Tensor] = []

    def message_buffer(self, request: Request) -> torch.Tensor:
        assert (request.x.shape, request.x.dtype) == (self.memory.shape, self.memory.dtype)
        assert request.x.untyped_storage().nbytes() <= 16, "a message that is not there yet takes memory"
        self.events.append("asked")
        return self.memory

    def start(self, request: Request) -> Started:
        self.messages.append(request.x)
        hidden, residual = request.allocate(RANKS)
        read_by_peers = request.x.clone()

        def finish() -> None:
            assert torch.equal(request.x, read_by_peers), "overwritten while peers may still read it"
            self.events.append("finished")

        return Started(hidden, residual, finish)


def test_product_is_written_to_the_transports_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    in_place = InPlace()
    monkeypatch.setitem(instances, "p2p", in_place)
    a, b = factors()
    ops.wait_(*ops.mm_start(*mm_start_args(a, b, transport="p2p")), [a, b], "0", 0)
    assert in_place.messages[0] is in_place.memory
    assert torch.equal(in_place.memory, torch.mm(a, b))


def test_product_is_written_when_the_earlier_call_on_the_slot_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    in_place = InPlace()
    monkeypatch.setitem(instances, "p2p", in_place)
    started = [ops.mm_start(*mm_start_args(*factors(), transport="p2p")) for _ in range(3)]
    for outputs in started:
        ops.wait_(*outputs, [], "0", 0)
    assert in_place.events == ["asked", "finished"] * 3
    assert not ops.in_flight and not ops.completed_early


@pytest.mark.parametrize("again", ["start", "wait"])
def test_a_call_that_cannot_be_completed_yet_stays_in_flight(monkeypatch: pytest.MonkeyPatch, again: str) -> None:
    in_place = InPlace()
    monkeypatch.setitem(instances, "p2p", in_place)
    hidden, residual = ops.mm_start(*mm_start_args(*factors(), transport="p2p"))
    with monkeypatch.context() as patch:
        patch.setattr(in_place, "events", None)  # so that finishing raises
        with pytest.raises(AttributeError):
            if again == "wait":
                ops.wait_(hidden, residual, [], "0", 0)
            else:
                ops.start(*start_args(residual=None))
    assert ops.is_in_flight(hidden, "0", 0) and list(ops.in_flight) == [("0", 0)]
    ops.wait_(hidden, residual, [], "0", 0)
    assert in_place.events == ["asked", "finished"] and not ops.in_flight


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.ones(T), torch.ones(3, H), r"a: expected \[tokens, k\], got \[5\]"),
        (torch.ones(1, T, 3), torch.ones(3, H), r"a: expected \[tokens, k\], got \[1, 5, 3\]"),
        (torch.ones(T, 3), torch.ones(4, H), r"b: expected \[k, hidden\] with the k of a \[5, 3\], got \[4, 8\]"),
        (torch.ones(T, 3), torch.ones(3), r"b: expected \[k, hidden\] .*, got \[3\]"),
        (torch.ones(T, 3), torch.ones(3, H).half(), r"b: expected the dtype of a, torch.float32, got torch.float16"),
    ],
)
@pytest.mark.parametrize("fake", [False, True])
def test_factors_that_cannot_be_multiplied(a: torch.Tensor, b: torch.Tensor, message: str, fake: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    args = mm_start_args(a, b)
    with pytest.raises(ValueError, match=message):
        if not fake:
            ops.mm_start(*args)
        with FakeTensorMode() as mode:
            ops.mm_start(*(mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args))
    assert not ops.in_flight


@pytest.mark.parametrize("start", [ops.start, ops.mm_start])
def test_graphs_without_the_newest_argument_mean_what_they_meant(start: Any) -> None:
    newest = {one.name: one.default_value for one in start._schema.arguments}
    assert newest["results_in_slot"] is False and newest.get("overlap_sms", newest.get("reserved_sms")) == 0
    assert newest["norm_bias"] is None
    a, b = torch.randn(T, H), torch.eye(H)
    message, rest = ((a, b) if start is ops.mm_start else (a,)), start_args(residual=None)[1:]
    older = start(*message, *rest[:-1])
    ops.wait_(*older, [], "0", 0)
    newer = start(*message, *rest[:-1], overlap_sms=4, results_in_slot=True)
    ops.wait_(*newer, [], "0", 0)
    assert all(torch.equal(one, other) for one, other in zip(older, newer, strict=True))


@pytest.mark.parametrize("start", [ops.start, ops.mm_start])
@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("overlap_sms", [-1, 33])
def test_numbers_of_sms_are_checked(start: Any, overlap_sms: int, fake: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    args = start_args(overlap_sms=overlap_sms)
    args = mm_start_args(*factors(), overlap_sms=overlap_sms) if start is ops.mm_start else args
    message = rf"overlap_sms: expected 0 \(not beside other work\) or 1 to 32 SMs, got {overlap_sms}"
    with pytest.raises(ValueError, match=message):
        if not fake:
            start(*args)
        with FakeTensorMode() as mode:
            start(*(mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args))
    assert not ops.in_flight


def test_sms_of_a_call_are_no_more_than_a_kernel_with_barriers_can_have() -> None:
    from tw_compile.kernels.runtime.barrier import MAX_CTAS

    assert MAX_OVERLAP_SMS <= MAX_CTAS


def test_calls_in_flight_beside_other_work_have_half_of_the_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 42 SMs of one device; those of a call are free again when it is waited for, or completed by the next on its slot."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=42 + device.index)
    )
    began: list[Request] = []

    class Beside(Transport):
        def start(self, request: Request) -> Started:
            began.append(request)
            return Started(*request.allocate(RANKS), lambda: None, overlap_sms=request.overlap_sms)

    with FakeTensorMode():

        def begin(slot: int, overlap_sms: int, index: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
            x = torch.empty(T, H, device=torch.device("cuda", index))
            norm = NormSpec(1e-5, 0.0, None, torch.float32, torch.float32)
            asked = Request(x, None, None, None, norm, False, "none", "0", slot, overlap_sms=overlap_sms)
            ops.complete_earlier(asked.group_name, asked.slot)
            return ops.begin(Beside(), asked)

        monkeypatch.setattr(torch._subclasses.FakeTensor, "data_ptr", torch.Tensor.__hash__, raising=False)
        begin(0, 11)
        (hidden, residual) = begin(1, 10)
        begin(2, 0)
        begin(3, 21, index=1)
        refused = (
            "at most 21 SMs, half of cuda:0, for all calls in flight together, got 1 and 21 of calls that have not"
        )
        with pytest.raises(ValueError, match=refused):
            begin(4, 1)
        ops.wait_here(hidden, residual, [], "0", 1)
        with pytest.raises(ValueError, match="got 11 and 11 of calls"):
            begin(4, 11)
        begin(4, 10)
        begin(0, 11)  # in the place of the slot's own
    assert [request.slot for request in began] == [0, 1, 2, 3, 4, 0]


def test_wait_without_start() -> None:
    with pytest.raises(RuntimeError, match=r"no call with this output is in flight on group '0', slot 3"):
        ops.wait_(torch.empty(T, H), torch.empty(T, H), [], "0", 3)


def test_wait_for_another_call() -> None:
    _, residual = ops.start(*start_args())
    with pytest.raises(RuntimeError, match="every wait_ needs its own start"):
        ops.wait_(torch.empty(T, H), residual, [], "0", 0)


def test_slots_are_independent() -> None:
    first, second = ops.start(*start_args()), ops.start(*start_args(slot=1))
    ops.wait_(*second, [], "0", 1)
    ops.wait_(*first, [], "0", 0)
    assert not ops.in_flight


def test_starts_that_were_moved_together_give_the_same_results() -> None:
    calls = [start_args(), start_args(), start_args()]
    expected = []
    for args in calls:
        outputs = ops.start(*args)
        ops.wait_(*outputs, [], "0", 0)
        expected.append([one.clone() for one in outputs])
    started = [ops.start(*args) for args in calls]
    for outputs, wanted in zip(reversed(started), reversed(expected), strict=True):
        ops.wait_(*outputs, [], "0", 0)
        assert all(torch.equal(got, want) for got, want in zip(outputs, wanted, strict=True))
    assert not ops.in_flight
    assert not ops.completed_early


def test_a_call_that_the_next_one_completed_is_in_flight_until_it_is_waited_for() -> None:
    """As what the next graph arrives at (``kernels/collective/seam.py``)."""
    first, second = (ops.start(*start_args()) for _ in range(2))
    for outputs in (first, second):
        assert ops.is_in_flight(outputs[0], "0", 0)
        assert not ops.is_in_flight(outputs[0], "0", 1)
        arrive_(*outputs, [], "0", 0)
        assert not ops.is_in_flight(outputs[0], "0", 0)
        arrive_(*outputs, [], "0", 0)
    assert not ops.in_flight and not ops.completed_early


def test_abandoned_call_is_completed_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[str] = []
    ops.in_flight[("0", 0)] = Started(torch.empty(1), torch.empty(1), lambda: finished.append("abandoned"))
    ops.wait_(*ops.start(*start_args()), [], "0", 0)
    assert finished == ["abandoned"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_dtype": FP8}, r"hidden_scale: expected a float32 tensor \[1\] .*e4m3fn, got None"),
        ({"hidden_scale": torch.ones(1)}, r"hidden_scale: expected None .* torch.float32 .*, got torch.float32 \[1\]"),
        ({"hidden_dtype": FP8, "hidden_scale": torch.ones(2)}, r"hidden_scale: .*, got torch.float32 \[2\]"),
        ({"hidden_dtype": FP8, "hidden_scale": torch.ones(1).double()}, r"hidden_scale: .*, got torch.float64 \[1\]"),
    ],
)
@pytest.mark.parametrize("fake", [False, True])
def test_a_scale_comes_with_fp8_and_only_with_it(changed: dict[str, Any], message: str, fake: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    args = start_args(**changed)
    with pytest.raises(ValueError, match=message):
        if not fake:
            ops.start(*args)
        with FakeTensorMode() as mode:
            ops.start(*(mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args))
    assert not ops.in_flight


@pytest.mark.parametrize("out", ["none", "sharded", "replicated"])
def test_fp8_result_is_the_reference(out: str) -> None:
    from tw_compile.kernels.collective.reference import add_rms_norm

    scale = torch.tensor([0.02])
    args = start_args(torch.bfloat16, hidden_dtype=FP8, hidden_scale=scale, residual_out=out)
    hidden, residual = ops.start(*args)
    ops.wait_(hidden, residual, [], "0", 0)
    norm = NormSpec(1e-5, 0.0, None, FP8, torch.bfloat16)
    expected, _ = add_rms_norm(args[0], args[1], None, args[3], norm, scale)
    rows = rows_per_rank(T, RANKS) if out == "sharded" else T  # the fake group gathers nothing from the other rank
    assert hidden.dtype == FP8
    assert torch.equal(hidden[:rows].view(torch.uint8), expected[:rows].view(torch.uint8))


def test_unknown_transport() -> None:
    with pytest.raises(
        ValueError, match="transport: expected one of gloo, host, multimem, nccl, p2p, got 'carrier pigeon'"
    ):
        ops.start(*start_args(transport="carrier pigeon"))


def test_result_is_the_reference_on_one_rank_of_a_fake_group() -> None:
    from tw_compile.kernels.collective.reference import add_rms_norm

    args = start_args()
    hidden, residual = ops.start(*args)
    ops.wait_(hidden, residual, [], "0", 0)
    norm = NormSpec(1e-5, 0.0, None, torch.float32, torch.float32)
    expected = add_rms_norm(args[0], args[1], None, args[3], norm)
    torch.testing.assert_close((hidden, residual), expected)


def test_eps_may_be_a_tensor_of_the_host() -> None:
    x = torch.randn(T, H)
    by_number = started_and_done(ops.start(*start_args(x=x, residual=None, weight=None, eps=0.5)))
    by_tensor = start_args(x=x, residual=None, weight=None, eps=0.0, eps_tensor=torch.tensor(0.5, dtype=torch.float64))
    assert torch.equal(started_and_done(ops.start(*by_tensor)), by_number)
    for wrong, got in ((torch.ones(2), r"\[2\] on cpu"), (torch.ones((), device="meta"), r"\[\] on meta")):
        with pytest.raises(ValueError, match=f"eps_tensor: expected a CPU tensor of one element, got {got}"):
            ops.start(*start_args(eps_tensor=wrong))


def started_and_done(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    ops.wait_(*outputs, [], "0", 0)
    return outputs[0]
