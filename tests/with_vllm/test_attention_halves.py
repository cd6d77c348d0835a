"""The metadata of a half of a step: both halves' attention is the step's."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import paged
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tw_compile import compat

pytestmark = pytest.mark.usefixtures("groups")

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int]:
    """Contexts and queries of requests, rows of padding, and where half 2 begins."""
    one = st.tuples(st.integers(0, 9), st.integers(1, 9) | st.just(1))
    requests = draw(st.lists(one, min_size=1, max_size=6))
    padding = draw(st.integers(0, 3))
    rows = sum(query for _, query in requests) + padding
    return requests, padding, draw(st.integers(1, max(rows - 1, 1)))


@settings(max_examples=200, deadline=None)
@given(steps(), st.sampled_from([None, 2]))
def test_halves_attend_as_the_step_does(step: tuple[list[tuple[int, int]], int, int], window: int | None) -> None:
    from tw_compile.hosts.vllm.attention import half_of

    pairs, padding, first = step
    metadata = paged.metadata_of([paged.Request(*pair) for pair in pairs], padding)
    rows = metadata.num_actual_tokens + padding
    generator = torch.Generator().manual_seed(3)
    query = torch.randn((rows, HEADS, HEAD_DIM), generator=generator, dtype=torch.float64)
    key, value = torch.randn((2, rows, KV_HEADS, HEAD_DIM), generator=generator, dtype=torch.float64).unbind(0)
    whole_cache = paged.cache_of(metadata, KV_HEADS, HEAD_DIM, torch.float64)
    paged.update(None, None, key, value, whole_cache, metadata.slot_mapping)
    expected = paged.attend(query, whole_cache, metadata, 0.5, window)

    cache, made = paged.cache_of(metadata, KV_HEADS, HEAD_DIM, torch.float64), []
    for begin, end in ((0, first), (first, rows)):
        half = half_of(metadata, begin, end - begin)
        assert half.query_start_loc.dtype == half.seq_lens.dtype == torch.int32
        assert half.scheduler_metadata is None and not getattr(half, "use_cascade", False)
        paged.update(None, None, key[begin:end], value[begin:end], cache, metadata.slot_mapping[begin:end])
        part = query[begin:end]
        made.append(paged.attend(part, cache, half, 0.5, window) if half.num_actual_tokens else torch.zeros_like(part))
    torch.testing.assert_close(torch.cat(made), expected, rtol=1e-12, atol=1e-12)
    assert not expected.isnan().any()


def test_every_field_of_the_metadata_is_accounted_for() -> None:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    from tw_compile.hosts.vllm.attention import known_fields

    assert {one.name for one in fields(FlashAttentionMetadata)} <= known_fields()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"causal": False}, "causal"),
        ({"max_dcp_context_kv_len": 8}, "max_dcp_context_kv_len"),
    ],
)
def test_a_step_that_halves_would_compute_wrongly_is_an_error(change: dict[str, Any], named: str) -> None:
    from tw_compile.hosts.vllm.attention import half_of

    metadata = replace(paged.metadata_of([paged.Request(0, 4)]), **change)
    with pytest.raises(RuntimeError, match=named):
        half_of(metadata, 0, 2)


def test_half_of_a_step_of_fast_prefill(groups: Any) -> None:
    """Layers that share keys, with --kv-sharing-fast-prefill, have metadata of a class whose constructor takes no fields."""
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.attention.backends import utils

    from tw_compile.hosts.vllm.attention import half_of

    made = paged.metadata_of([paged.Request(3, 1), paged.Request(2, 3)])

    class Builder:
        def build(self, *args: Any) -> Any:
            return made

    class Backend(AttentionBackend):
        get_builder_cls = staticmethod(lambda: Builder)
        get_name = get_impl_cls = get_kv_cache_shape = staticmethod(lambda *args: None)

    common = SimpleNamespace(max_query_len=1, logits_indices_padded=None, num_logits_indices=None)
    metadata = utils.create_fast_prefill_custom_backend("Fast", Backend).get_builder_cls()().build(0, common)
    half, expected = half_of(metadata, 1, 2), half_of(made, 1, 2)
    assert half.query_start_loc.tolist() == expected.query_start_loc.tolist() == [0, 0, 2]
    assert half.seq_lens.tolist() == expected.seq_lens.tolist() and metadata.num_actual_tokens == 4


def test_a_mode_sees_the_operator_and_nothing_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the first call of compiled code. FlashAttention's operators do not work under a mode."""
    from tw_compile.hosts.vllm import attention

    watched: list[bool] = []
    metadata = paged.metadata_of([paged.Request(0, 4)])
    cache = paged.cache_of(metadata, KV_HEADS, HEAD_DIM, torch.float32)

    def forward(*arguments: Any, output: torch.Tensor) -> torch.Tensor:
        watched.append(compat.operators_are_watched())
        return output.fill_(3.0)

    def update(*arguments: torch.Tensor) -> None:
        paged.update(None, *arguments)

    layer = SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=update, forward=forward))
    monkeypatch.setattr(
        attention, "get_attention_context", lambda name: (metadata, layer, cache, metadata.slot_mapping)
    )
    monkeypatch.setattr(attention._step, "half", attention.half_of)
    query, (key, value) = torch.ones(2, HEADS, HEAD_DIM), torch.ones(2, 2, KV_HEADS, HEAD_DIM).unbind(0)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    half = torch.ops.tw_compile.vllm_attention_half.default
    arguments = (query, key, value, "layers.0", 0, HEAD_DIM, torch.float32, True, [])
    seen: list[str] = []
    with torch.library._scoped_library("tw_compile", "FRAGMENT") as library:
        library.impl("vllm_attention_half", attention.attend_half, "CPU")
        with Watch():
            under_a_mode, _ = half.direct(*arguments)
        assert seen == ["tw_compile::vllm_attention_half"]
        alone, _ = half.direct(*arguments)
    assert watched == [False, False]
    torch.testing.assert_close(under_a_mode, alone)


@pytest.mark.parametrize("padded", [False, True])
def test_rows_that_no_kernel_writes_are_zero_in_padded_steps(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from tw_compile.hosts.vllm import attention

    metadata = paged.metadata_of([paged.Request(0, 4)])
    cache = paged.cache_of(metadata, KV_HEADS, HEAD_DIM, torch.float32)
    layer = SimpleNamespace(
        impl=SimpleNamespace(do_kv_cache_update=lambda *given: None, forward=lambda *given, output: None)
    )
    if padded:
        metadata.padded = True
    monkeypatch.setattr(
        attention, "get_attention_context", lambda name: (metadata, layer, cache, metadata.slot_mapping)
    )
    monkeypatch.setattr(attention._step, "half", attention.half_of)

    def nan(self: torch.Tensor, size: Any, **named: Any) -> torch.Tensor:
        return self.new_full((size,) if isinstance(size, int) else size, torch.nan, **named)

    monkeypatch.setattr(torch.Tensor, "new_empty", nan)
    query, (key, value) = torch.ones(2, HEADS, HEAD_DIM), torch.ones(2, 2, KV_HEADS, HEAD_DIM).unbind(0)
    output, _ = attention.attend_half(query, key, value, "layers.0", 0, HEAD_DIM, torch.float32, True, [])
    assert output.isnan().all() if not padded else not output.any()
