"""How kernels lay out their CTAs, which is worked out from a row's size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tw_compile.kernels.algorithms.multimem import multimem
from tw_compile.kernels.algorithms.push.push import threads_for
from tw_compile.kernels.algorithms.stream.stream import shape_for
from tw_compile.kernels.collective.cuda_variant import VECTOR
from tw_compile.kernels.runtime.program import FULL_SHARED_BYTES

hidden_sizes = st.integers(1, 4096).map(lambda vectors: vectors * VECTOR)


@given(hidden_sizes, st.sampled_from([(2, 1024), (4, 1024), (8, 512)]))
def test_threads_of_push_cover_a_row_with_as_few_vectors_each_as_can_be(
    hidden_size: int, most_threads: tuple[int, int]
) -> None:
    world_size, most = most_threads
    vectors, threads = hidden_size // VECTOR, threads_for(hidden_size, world_size)
    each = -(-vectors // threads)
    assert threads % 32 == 0 and 32 <= threads <= most
    assert each == -(-vectors // most)
    assert threads - 32 < -(-vectors // each), "a warp has nothing to do"


sizes_or_none = st.sampled_from([0, 2, 4])


@given(hidden_sizes, st.sampled_from([2, 4]), st.sampled_from([1, 2, 4]), sizes_or_none, sizes_or_none)
def test_shapes_of_stream_fit(
    hidden_size: int, x_itemsize: int, hidden_itemsize: int, kept: int, collected: int
) -> None:
    shape = shape_for(hidden_size, x_itemsize, hidden_itemsize, kept, collected)
    threads, groups, stages, results = shape.threads, shape.groups, shape.stages, shape.results
    each = -(-hidden_size // (threads * VECTOR))
    assert threads % 32 == 0 and each <= 4, "registers hold no more of a row"
    assert threads == 64 or threads - 32 < hidden_size / (each * VECTOR), "a warp has nothing to do"
    assert 1 <= groups <= 8 and shape.block == groups * threads + 64
    assert groups * results >= 2 or stages <= 8, "a row is computed while another is copied, unless rows are long"
    assert groups == 1 or (stages >= 2 and groups * threads <= 512)
    assert groups * stages <= 32

    def align(nbytes: int) -> int:
        return -(-nbytes // 128) * 128

    # `Shared` of stream.cu, as its static_assert counts.
    shared = 8 * 3 * groups * stages + 8 * 2 * groups * (results + 1) + 4 * 2 * groups * threads // 32 + 8 * 2 * 8
    stage = align(hidden_size * max(x_itemsize, collected))
    if stages > 0:
        piece = align(hidden_size * hidden_itemsize) + align(hidden_size * kept)
        assert align(shared) + groups * (results * piece + stages * stage) <= FULL_SHARED_BYTES


@given(hidden_sizes, st.sampled_from([2, 4]), sizes_or_none)
def test_shapes_of_multimem_fit(hidden_size: int, x_itemsize: int, residual_itemsize: int) -> None:
    shape = multimem.shape_for(hidden_size, x_itemsize, residual_itemsize)
    each = -(-hidden_size // (shape.threads * VECTOR))
    assert shape.threads % 32 == 0 and each <= (2 if hidden_size <= 8192 else 4)
    assert shape.threads == 32 or shape.threads - 32 < hidden_size / (each * VECTOR), "a warp has nothing to do"
    assert 1 <= shape.groups <= 8 and shape.block <= 1024
    assert shape.groups == 1 or shape.block <= 512
    ahead = each * VECTOR * (x_itemsize + residual_itemsize) // 4 * shape.depth
    assert 1 <= shape.depth <= 4 and (shape.depth == 1 or ahead <= 48), "registers hold no more"


def test_a_cta_of_multimem_has_32_kib_on_their_way_where_registers_hold_them() -> None:
    shapes = [multimem.shape_for(hidden_size, 2, 2) for hidden_size in (1024, 4096, 8192)]
    assert [2 * size * one.groups * one.depth for size, one in zip((1024, 4096, 8192), shapes, strict=True)] == [
        32 * 1024
    ] * 3
