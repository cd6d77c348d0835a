"""The row layout that all transports share: every token row has exactly one owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_compile.kernels.collective.spec import row_range, rows_per_rank

TOKENS = st.integers(0, 1 << 20)
WORLD_SIZES = st.integers(1, 64)


@given(TOKENS, WORLD_SIZES)
def test_row_ranges_are_ordered_and_cover_every_row_once(tokens: int, world_size: int) -> None:
    end = 0
    for rank in range(world_size):
        begin, next_end = row_range(tokens, world_size, rank)
        assert begin == end
        assert next_end >= begin
        end = next_end
    assert end == tokens


@given(TOKENS, WORLD_SIZES)
def test_no_rank_owns_more_rows_than_a_shard_has(tokens: int, world_size: int) -> None:
    per_rank = rows_per_rank(tokens, world_size)
    lengths = [end - begin for begin, end in (row_range(tokens, world_size, rank) for rank in range(world_size))]
    assert max(lengths) == per_rank  # rank 0 is full: shards are not larger than needed
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.full
@given(st.integers(1, 1 << 20), st.integers(1, 64))
def test_rows_of_rank_r_start_at_r_times_rows_per_rank(tokens: int, world_size: int) -> None:
    """The kernels compute the owner of a row this way."""
    per_rank = rows_per_rank(tokens, world_size)
    for rank in range(world_size):
        begin, end = row_range(tokens, world_size, rank)
        if end > begin:
            assert begin == rank * per_rank


@pytest.mark.parametrize(
    ("tokens", "world_size", "expected"),
    [
        (1, 4, [(0, 1), (1, 1), (1, 1), (1, 1)]),
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
    ],
)
def test_examples(tokens: int, world_size: int, expected: list[tuple[int, int]]) -> None:
    assert [row_range(tokens, world_size, rank) for rank in range(world_size)] == expected
