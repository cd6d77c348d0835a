"""What one graph leaves to the next: in which forms it can be entered, and what is no such thing."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tw_compile.kernels.collective import seam
from tw_compile.kernels.collective.seam import enter_layers, leave_halves, leave_layers, leave_off
from tw_compile.kernels.collective.spec import whole_residual
from tw_compile.testing import fake_process_group

T, H, GROUP = 5, 8, "0"
HIDDEN = torch.arange(T * H, dtype=torch.bfloat16).view(T, H)
RESIDUAL = HIDDEN + 100


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(2):
        yield
        seam.left_now = None


def test_what_is_left_whole_is_entered_as_it_is_without_a_copy() -> None:
    left = leave_layers(HIDDEN, RESIDUAL, GROUP)
    assert left.shape == HIDDEN.shape and left.dtype == HIDDEN.dtype
    hidden, residual = enter_layers(left, GROUP)
    assert hidden.data_ptr() == HIDDEN.data_ptr() and residual.data_ptr() == RESIDUAL.data_ptr()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_halves_enter_with_their_rows_of_what_is_whole(dtype: torch.dtype | None) -> None:
    left = leave_layers(HIDDEN, RESIDUAL, GROUP)
    for rows in (slice(0, 4), slice(4, T)):
        hidden, residual = enter_layers(left[rows], GROUP, dtype)
        assert torch.equal(hidden, HIDDEN[rows])
        expected = RESIDUAL[rows] if dtype is None else RESIDUAL[rows][: -(-len(hidden) // 2)].to(dtype)
        assert residual.dtype == expected.dtype and torch.equal(residual, expected)
        # Nobody else's memory. Of a sharded residual all rows are there, because two ranks may go on by one-shot.
        for one, times in ((hidden, 1), (residual, 1 if dtype is None else 2)):
            assert one.is_contiguous() and one.untyped_storage().nbytes() == times * one.nbytes
    assert seam.left_now is None  # all of it is taken


def test_what_is_left_is_entered_row_by_row_however_it_lay() -> None:
    turned = HIDDEN.t().contiguous().t()
    for found, expected in zip(enter_layers(leave_layers(turned, turned + 1, GROUP), GROUP), (0, 1), strict=True):
        assert found.is_contiguous() and torch.equal(found, HIDDEN + expected)


@pytest.mark.parametrize("sharded", [False, True])
def test_halves_enter_as_they_were_left(sharded: bool) -> None:
    halves = [(HIDDEN[:4].clone(), RESIDUAL[:2].clone()), (HIDDEN[4:].clone(), RESIDUAL[:1].clone())]
    left = leave_halves(*halves[1], [], GROUP, 1, *halves[0], sharded, T)
    assert left.shape == HIDDEN.shape
    for rows, (hidden, residual) in zip((slice(0, 4), slice(4, T)), halves, strict=True):
        found = enter_layers(left[rows], GROUP, torch.bfloat16 if sharded else None)
        assert found[0] is hidden or found[0].data_ptr() == hidden.data_ptr()
        assert found[1].data_ptr() == residual.data_ptr()


def test_the_last_one_gets_all_hidden_states() -> None:
    assert torch.equal(leave_off(leave_layers(HIDDEN, RESIDUAL[:3], GROUP, True)), HIDDEN)
    with pytest.raises(RuntimeError, match="left: expected what leave_layers or leave_halves has returned last"):
        leave_off(HIDDEN)


def test_another_form_than_was_left_is_an_error() -> None:
    left = leave_layers(HIDDEN, RESIDUAL[:3], GROUP, True)
    with pytest.raises(RuntimeError, match="rows_dtype: expected one only for sharded residuals, got None"):
        enter_layers(left, GROUP)
    with pytest.raises(RuntimeError, match="left: expected rows of one of 1 halves, got 2 others"):
        enter_layers(left[:2], GROUP, torch.bfloat16)
    with pytest.raises(RuntimeError, match="left: expected what leave_layers or leave_halves has returned last"):
        enter_layers(HIDDEN, GROUP)


def test_a_step_that_was_given_up_leaves_nothing_behind() -> None:
    first = leave_layers(HIDDEN, RESIDUAL, GROUP)
    second = leave_layers(HIDDEN + 1, RESIDUAL, GROUP)
    with pytest.raises(RuntimeError, match="left: expected what"):
        enter_layers(first, GROUP)
    assert torch.equal(enter_layers(second, GROUP)[0], HIDDEN + 1)
    assert seam.left_now is None  # all of it is taken


def test_a_compiler_is_told_the_shapes() -> None:
    mode = FakeTensorMode()
    hidden, rows = mode.from_tensor(HIDDEN), mode.from_tensor(RESIDUAL[:3].clone())
    with mode:
        left = leave_layers(hidden, rows, GROUP, True)
        assert left.shape == (T, H) and left.dtype == torch.bfloat16
        assert [tuple(one.shape) for one in enter_layers(left, GROUP)] == [(T, H), (T, H)]
        entered = enter_layers(left, GROUP, torch.float32)
        assert [(tuple(one.shape), one.dtype) for one in entered] == [((T, H), torch.bfloat16), ((3, H), torch.float32)]
        halves = leave_halves(hidden[4:], rows[:1], [], GROUP, 1, hidden[:4], rows[:2], True, T)
        assert halves.shape == (T, H)


@pytest.mark.parametrize(("world_size", "tokens"), [(2, 5), (2, 6), (4, 5)])
def test_own_rows_of_two_ranks_are_a_slice_of_all_rows(
    monkeypatch: pytest.MonkeyPatch, world_size: int, tokens: int
) -> None:
    """Two ranks may use one-shot, which computes all rows, for the calls of the graph that is entered."""
    residual = torch.arange(tokens * 8, dtype=torch.float32).view(tokens, 8)
    for rank in range(world_size):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: world_size)
        monkeypatch.setattr(seam.compat, "resolve_process_group", lambda name, group=group: group)
        rows = seam.own_rows(residual, "g", torch.bfloat16)
        own = residual[rank * rows.shape[0] : (rank + 1) * rows.shape[0]]
        assert rows.dtype == torch.bfloat16 and torch.equal(rows[: len(own)].float(), own)
        whole = whole_residual(rows, tokens, world_size, rank)
        assert (whole is not None) is (world_size == 2)
        assert whole is None or torch.equal(whole.float(), residual)
