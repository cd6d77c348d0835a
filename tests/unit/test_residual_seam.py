"""What one graph leaves of a residual to a later graph: in which forms it can be entered, and what is no such thing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tw_compile.hosts.vllm.residual_seams import leave_last
from tw_compile.kernels.collective import residual_seam
from tw_compile.kernels.collective.residual_seam import enter_residual, leave_residual, leave_residual_halves
from tw_compile.kernels.collective.spec import slice_of_whole_residual, whole_residual
from tw_compile.testing import fake_process_group

T, H, GROUP = 5, 8, "0"
RESIDUAL = torch.arange(T * H, dtype=torch.bfloat16).view(T, H)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(4):
        yield
        residual_seam.left_now = None


def test_what_is_left_whole_is_entered_as_it_is_without_a_copy() -> None:
    left = leave_residual(RESIDUAL, T, GROUP, False, [])
    assert left.shape == RESIDUAL.shape and left.dtype == RESIDUAL.dtype and left.data_ptr() != RESIDUAL.data_ptr()
    assert enter_residual(left, GROUP).data_ptr() == RESIDUAL.data_ptr()
    assert residual_seam.left_now is None


def test_own_rows_are_entered_as_they_were_left_without_a_copy() -> None:
    rows = RESIDUAL[:2].clone()
    left = leave_residual(rows, T, GROUP, True, [RESIDUAL])
    assert left.shape == (T, H)
    assert enter_residual(left, GROUP, torch.bfloat16).data_ptr() == rows.data_ptr()
    assert residual_seam.left_now is None


def test_own_rows_of_what_is_whole_are_a_slice_of_it_where_its_storage_is_like_that() -> None:
    whole = torch.arange(8 * H, dtype=torch.bfloat16).view(8, H)
    entered = enter_residual(leave_residual(whole, 8, GROUP, False, []), GROUP, torch.bfloat16)
    assert entered.data_ptr() == whole.data_ptr() and entered.shape == (2, H)
    part = torch.cat([whole, whole])[:8]  # more rows than all ranks have
    entered = enter_residual(leave_residual(part, 8, GROUP, False, []), GROUP, torch.bfloat16)
    assert entered.data_ptr() != part.data_ptr() and torch.equal(whole_residual(entered, 8, 4, 0), whole)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_halves_enter_with_their_rows_of_what_is_whole(dtype: torch.dtype | None) -> None:
    left = leave_residual(RESIDUAL, T, GROUP, False, [])
    for rows in (slice(0, 4), slice(4, T)):
        residual = enter_residual(left[rows], GROUP, dtype)
        whole = RESIDUAL[rows]
        expected = whole if dtype is None else whole[: -(-len(whole) // 4)].to(dtype)
        assert residual.dtype == expected.dtype and torch.equal(residual, expected) and residual.is_contiguous()
        if dtype is not None:  # ranks may go on by one-shot, which needs all rows
            all_rows = whole_residual(residual, len(whole), 4, 0)
            assert all_rows is not None and torch.equal(all_rows, whole.to(dtype))
    assert residual_seam.left_now is None


@pytest.mark.parametrize("sharded", [False, True])
def test_halves_enter_as_they_were_left(sharded: bool) -> None:
    halves = (
        (RESIDUAL[:4].clone(), RESIDUAL[4:].clone()) if not sharded else (RESIDUAL[:1].clone(), RESIDUAL[4:].clone())
    )
    left = leave_residual_halves(*halves, 4, T, GROUP, sharded, [])
    assert left.shape == RESIDUAL.shape
    for rows, half in zip((slice(0, 4), slice(4, T)), halves, strict=True):
        assert enter_residual(left[rows], GROUP, torch.bfloat16 if sharded else None).data_ptr() == half.data_ptr()


def test_whole_halves_are_entered_as_one() -> None:
    left = leave_residual_halves(RESIDUAL[:4].clone(), RESIDUAL[4:].clone(), 4, T, GROUP, False, [])
    assert torch.equal(enter_residual(left, GROUP), RESIDUAL)


def test_a_slice_of_all_rows_is_entered_whole_without_an_exchange() -> None:
    whole = torch.cat([RESIDUAL, RESIDUAL.new_full((3, H), torch.nan)])
    left = leave_residual(slice_of_whole_residual(whole, 4, 0), T, GROUP, True, [])
    assert torch.equal(enter_residual(left, GROUP), RESIDUAL)


def test_a_tensor_that_was_not_left_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="left: expected what leave_residual has returned last"):
        enter_residual(RESIDUAL, GROUP)
    first = leave_residual(RESIDUAL, T, GROUP, False, [])
    second = leave_residual(RESIDUAL + 1, T, GROUP, False, [])  # the step of the first one was given up
    with pytest.raises(RuntimeError, match="left: expected what leave_residual has returned last"):
        enter_residual(first, GROUP)
    assert torch.equal(enter_residual(second, GROUP), RESIDUAL + 1)


@pytest.mark.parametrize("early", [False, True])
def test_nothing_gets_the_memory_of_what_is_left(monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    """Inductor gives a result's memory to another value when its last reader has run; on a CPU, if it counts as aligned.

    ``early``: whether the residual is left where its piece has it, as vLLM's graph has it. Then something else is there.
    """

    def piece(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left = leave_residual(torch.mm(x, weight), T, GROUP, False, [])
        return left, torch.mm(x + 1, weight)

    def last(graph: fx.Graph) -> None:
        if not early:
            leave_last(graph)

    monkeypatch.setattr("torch._inductor.graph.should_assume_input_aligned", lambda one: True)
    torch._dynamo.reset()
    run = torch.compile(piece, options={"post_grad_custom_post_pass": last, "fx_graph_cache": False})
    x, weight = torch.randn(T, T), torch.randn(T, T)
    with torch.no_grad():
        left, other = run(x, weight)
    assert torch.allclose(other, (x + 1) @ weight)
    assert torch.allclose(enter_residual(left, GROUP), x @ weight) is not early


def test_a_compiler_is_told_the_shapes() -> None:
    mode = FakeTensorMode()
    rows = mode.from_tensor(RESIDUAL[:2].clone())
    with mode:
        left = leave_residual(rows, T, GROUP, True, [])
        assert left.shape == (T, H) and left.dtype == torch.bfloat16
        assert leave_residual_halves(rows[:1], rows[1:], 4, T, GROUP, True, []).shape == (T, H)
        assert enter_residual(left, GROUP).shape == (T, H)
        entered = enter_residual(left, GROUP, torch.float32)
        assert entered.shape == (2, H) and entered.dtype == torch.float32
