"""Operators that run once for all calls of one form: what is a form, and that the results are those of a run of their own."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.fx as fx
from split_graphs import family_graph
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic

from tw_compile import Config, compat
from tw_compile.kernels.collective import ops
from tw_compile.passes.fake_results import FakeResults
from tw_compile.testing import fake_cuda, fake_process_group
from tw_compile.testing.graphs import find_ops

aten = torch.ops.aten
BF16 = torch.bfloat16
START = ops.operators_of("rms_norm")[0]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(4):
        yield


@pytest.fixture
def mode() -> Any:
    return compat.FakeTensorMode(shape_env=compat.ShapeEnv(), allow_non_fake_inputs=True)


class Runs(FakeResults):
    """Counts how often an operator is run."""

    count = 0

    def _run(self, target: Any, fakes: Any, named: Any) -> Any:
        self.count += 1
        return super()._run(target, fakes, named)


class Calls:
    """A graph's nodes for operands that are fake tensors."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.graph = fx.Graph()
        self.results = Runs(mode)

    def node(self, value: Any) -> fx.Node:
        node = self.graph.placeholder("x")
        node.meta["val"] = value
        return node

    def tensor(self, *shape: Any, dtype: torch.dtype = BF16, device: str = "cpu") -> fx.Node:
        with self.mode:
            return self.node(torch.empty(*shape, dtype=dtype, device=device))

    def runs(self, target: Any, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
        """What the operator returns, and whether it was run for that."""
        before = self.results.count
        return self.results.compute(target, args, kwargs), self.results.count > before


def group_name() -> str:
    ((name, *_),) = compat.process_group_facts()
    return name


def start(calls: Calls, tokens: Any = 6, out: str = "sharded", device: str = "cpu") -> tuple[Any, bool]:
    x, residual = (calls.tensor(tokens, 16, device=device) for _ in range(2))
    rest = 1e-5, 0.0, None, BF16, torch.float32, False, out, group_name(), "gloo", 0
    return calls.runs(START, x, residual, None, calls.tensor(16, device=device), *rest)


def all_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    sizes = compat.size_keys((*tensor.shape, *tensor.stride(), tensor.storage_offset()))
    memory = compat.size_keys((tensor.untyped_storage().nbytes(),))
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    flags = tensor.requires_grad, tensor.is_inference(), tensor.is_contiguous(), tensor._is_view()
    return type(tensor), tensor.fake_mode, tensor.dtype, tensor.device, sizes, memory, keys, flags  # type: ignore[attr-defined]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_calls_of_one_form_get_the_results_of_a_run_in_memory_of_their_own(symbolic: bool, device: str) -> None:
    with fake_cuda():  # another mode, which is on meanwhile
        mode = compat.FakeTensorMode(shape_env=compat.ShapeEnv())
        tokens: Any = 6
        if symbolic:
            source = ConstantSource("tokens")
            symbol = mode.shape_env.create_symbol(6, source, DimDynamic.DYNAMIC)
            tokens = mode.shape_env.create_symintnode(symbol, hint=6, source=source)
        calls = Calls(mode)
        guards = len(mode.shape_env.guards)
        first, ran = start(calls, tokens, device=device)
        again, ran_again = start(calls, tokens, device=device)
        assert len(mode.shape_env.guards) == guards
        assert ran and not ran_again and type(again) is type(first)
        assert list(map(all_of, again)) == list(map(all_of, first))
        assert len({compat.storage_key(tensor) for tensor in (*first, *again)}) == 4
        assert isinstance(first[0].shape[0], torch.SymInt) is symbolic


def test_views_are_in_the_memory_of_their_own_operand(mode: Any) -> None:
    calls = Calls(mode)
    made = []
    for _ in range(2):
        rows = calls.tensor(6, 16)
        view, ran = calls.runs(aten.slice.Tensor, rows, 0, 2, 5)
        made.append((view, ran, compat.storage_key(view) == compat.storage_key(rows.meta["val"])))
    (first, ran, inside), (again, ran_again, inside_again) = made
    assert (ran, ran_again) == (True, False) and inside and inside_again
    assert compat.storage_key(first) != compat.storage_key(again)
    assert all_of(again)[:-1] == all_of(first)[:-1] and again.storage_offset() == 32


def test_a_view_of_known_size_in_memory_of_unknown_size_assumes_nothing(mode: Any) -> None:
    """That there are as many rows is for who made the graph to say, and not for a copy of the view's metadata."""
    source = ConstantSource("tokens")
    symbol = mode.shape_env.create_symbol(20, source, DimDynamic.DYNAMIC)
    tokens = mode.shape_env.create_symintnode(symbol, hint=20, source=source)
    calls = Calls(mode)
    ran = []
    for _ in range(2):
        rows = calls.tensor(tokens, 16)
        before = len(mode.shape_env.guards), mode.shape_env.var_to_range[symbol]
        ran.append(calls.runs(aten.as_strided.default, rows, [16, 16], [16, 1], 0)[1])
    assert ran == [True, False]
    assert (len(mode.shape_env.guards), mode.shape_env.var_to_range[symbol]) == before


def test_a_result_is_taken_from_its_call_and_a_call_without_results_has_none(mode: Any) -> None:
    calls = Calls(mode)
    ran = []
    for _ in range(2):
        pair = calls.node(start(calls)[0])
        hidden, residual = (calls.node(calls.runs(operator.getitem, pair, place)[0]) for place in (0, 1))
        assert hidden.meta["val"] is pair.meta["val"][0] and residual.meta["val"] is pair.meta["val"][1]
        returned, waited = calls.runs(ops.wait_, hidden, residual, [calls.tensor(6, 16)], group_name(), 0)
        assert returned is None
        ran.append(waited)
    assert ran == [True, False]


def test_calls_of_other_forms_are_run(mode: Any) -> None:
    calls = Calls(mode)
    x = calls.tensor(6, 16)
    for args in [
        (x, 1),
        (x, 1.0),
        (x, True),
        (x, calls.tensor(16)),
        (x, calls.tensor(1, 16)),
        (x, calls.tensor(16, dtype=torch.float32)),
        (calls.tensor(7, 16), 1),
        (calls.node(x.meta["val"].t()), 1),
        (calls.node(x.meta["val"][:, 1:]), 1),
    ]:
        assert [calls.runs(aten.add.Tensor, *args)[1] for _ in range(2)] == [True, False], args
    assert calls.runs(aten.sub.Tensor, x, 1)[1] and calls.runs(aten.sub.Tensor, x, 1, alpha=2)[1]
    assert start(calls)[1] and start(calls, out="replicated")[1] and not start(calls)[1]


def test_results_that_do_not_follow_from_the_form_are_never_used_again(mode: Any) -> None:
    calls = Calls(mode)
    x = calls.tensor(6, 16)
    with mode:
        constant = calls.node(torch.tensor(3))
        gradient = calls.node(torch.empty(6, 16, requires_grad=True))
    assert constant.meta["val"].constant is not None
    flat = calls.node(x.meta["val"].view(-1))
    for target, *args in [
        (aten.add_.Tensor, x, 1),  # returns its operand
        (aten.split.Tensor, x, 3),  # several results in one memory
        (aten.nonzero.default, x),  # has a new size
        (aten.add.Tensor, constant, 1),
        (aten.add.Tensor, gradient, 1),
        (aten._unsafe_view.default, calls.node(torch.empty(6, 16)), [16, 6]),  # a tensor that is no fake one
        (operator.add, x, 1),  # no operator that torch knows
    ]:
        assert [calls.runs(target, *args)[1] for _ in range(2)] == [True, True], target
    # Which of the operands the view is of is not seen where they are in one memory.
    assert all(calls.runs(aten.view_as.default, x, flat)[1] for _ in range(2))


def test_tensors_of_a_graph_without_a_fake_mode_are_used_as_they_are() -> None:
    calls = Calls(None)
    x = calls.node(torch.ones(2, 3))
    for _ in range(2):
        result, ran = calls.runs(aten.add.Tensor, x, 1)
        assert ran and result.eq(2).all()


def test_operators_are_run_as_often_for_many_layers_as_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    original = FakeResults._run

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args)

    monkeypatch.setattr(FakeResults, "_run", counted)
    counts = []
    for layers in (3, 5):
        count = 0
        config = Config(strict=True, split="off")
        graph = family_graph("llama", 1, 64, config=config, dtype=BF16, num_hidden_layers=layers)
        counts.append(count)
        fused = find_ops(graph, "all_reduce_rms_norm_start") + find_ops(graph, "mm_all_reduce_rms_norm_start")
        assert len(fused) == 2 * layers + 1
    assert counts[0] == counts[1] > 0
