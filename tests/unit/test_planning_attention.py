"""The planner's attention: pairs of queries and keys, spans of sequences, kernels and their suffixes."""

from __future__ import annotations

from typing import Any

import pytest

from tw_compile.planning import Attention, load_profile
from tw_compile.planning import layer as layer_module
from tw_compile.planning import suffix as own_kernel
from tw_compile.planning.layer import attention_us

H200 = load_profile("H200")


def test_halves_of_attention_add_up_to_the_whole() -> None:
    attention = Attention(64, 8, 128, kernel="flash")
    for sequences in ((4096,), (1000, 3096), (1024,) * 4):
        whole, first, second = (
            attention_us(H200, attention, sequences, rows, 132) - H200.attention["flash"].latency_us
            for rows in (range(4096), range(1500), range(1500, 4096))
        )
        assert first + second == pytest.approx(whole)
        assert first < second or len(sequences) > 1


def test_a_sliding_window_and_whole_sequences_cost_less() -> None:
    def us(windows: tuple[int | None, ...], sequences: tuple[int, ...]) -> float:
        return attention_us(H200, Attention(16, 2, 128, windows), sequences, range(8192), 132)

    full, slides = us((None,), (8192,)), us((128,), (8192,))
    assert slides < us((4096,), (8192,)) < full
    assert us((None, 128), (8192,)) == pytest.approx((full + slides) / 2)
    assert us((None,), (4096, 4096)) < full
    assert us((9000,), (8192,)) == full


def test_a_kernel_that_is_given_a_mask_works_on_all_keys_that_it_is_given() -> None:
    def us(rows: range, masked: bool) -> float:
        attention = Attention(64, 8, 128, kernel="flash", masked=masked)
        return attention_us(H200, attention, (4096, 4096), rows, 132) - H200.attention["flash"].latency_us

    whole = us(range(8192), True)
    assert whole == pytest.approx(2 * us(range(8192), False), rel=1e-3)
    assert us(range(1024), True) == pytest.approx(whole / 2 * (1024 * 1024) / 4096**2)
    assert us(range(1024, 4096), True) == pytest.approx(whole / 2 * (3072 * 4096) / 4096**2)


@pytest.fixture
def no_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with halves of too many tokens for it."""
    monkeypatch.setattr(own_kernel, "MOST_KEYS", 0)


def test_parts_of_a_cut_sequence_are_calls_of_our_own_kernel_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    def us(rows: range, sequences: tuple[int, ...] = (1024,), **options: Any) -> float:
        return attention_us(H200, Attention(16, 2, 128, **options), sequences, rows, 132)

    own, flops = H200.attention["suffix"], 4.0 * 128 * 132 / (H200.attention["suffix"].tflops * 1e6)
    assert us(range(512)) == pytest.approx(own.latency_us + flops * 512 * own.block_rows)
    assert us(range(512, 1024)) == pytest.approx(own.latency_us + flops * 1024 * own.block_rows)
    assert us(range(2048), (4096,)) == pytest.approx(own.latency_us + flops * 16 * 2048 * 2049 / 2 / 132)
    whole = us(range(1024))
    assert whole == pytest.approx(us(range(1024), (1024,), kernel="cudnn")) and whole != us(range(1024), (4096,))
    assert us(range(1536), (1024, 1024)) == pytest.approx(whole + us(range(512))), "whole sequences are cuDNN's"
    elsewhere: list[dict[str, Any]] = [
        {"windows": (128,)},
        {"kernel": "flash"},
        {"kernel": "cudnn_masked", "masked": True},
    ]
    others = [us(range(512), **options) for options in elsewhere]
    parts = us(range(512)), us(range(512, 1024))
    monkeypatch.setattr(own_kernel, "MOST_KEYS", 1023)
    assert us(range(512)) == parts[0] and us(range(512, 1024)) > parts[1], "cuDNN twice and a merge"
    monkeypatch.setattr(own_kernel, "MOST_KEYS", 0)
    assert us(range(512)) > parts[0] and others == [us(range(512), **options) for options in elsewhere]


@pytest.mark.usefixtures("no_own_kernel")
def test_a_suffix_is_a_call_of_its_own_where_the_kernel_has_no_bottom_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def us(kernel: str, rows: range) -> float:
        return attention_us(H200, Attention(16, 4, 128, kernel=kernel), (4096, 4096), rows, 132)

    cudnn = H200.attention["cudnn"]
    assert us("cudnn", range(2048)) < us("flash", range(2048))
    monkeypatch.setattr(layer_module, "SUFFIX", {"cudnn": "flash"})
    assert us("cudnn", range(2048, 4096)) == us("flash", range(2048, 4096))
    whole = us("cudnn", range(4096, 8192))
    assert us("cudnn", range(2048, 8192)) == pytest.approx(us("flash", range(2048, 4096)) + whole)
    monkeypatch.setattr(layer_module, "SUFFIX", {"cudnn": layer_module.MERGED})
    full = cudnn.latency_us + 4.0 * 128 * 16 * 2048 * 2048 / (cudnn.full_tflops * 1e6)
    merge = H200.launch_us + 3 * 2048 * 16 * 128 * 2 / (H200.memory_gb_per_s * 1e3)
    assert us("cudnn", range(2048, 4096)) == pytest.approx(us("cudnn", range(2048)) + full + merge)


def test_one_head_cannot_use_all_sms() -> None:
    few = attention_us(H200, Attention(1, 1, 128), (128,), range(128), 132)
    assert few == attention_us(H200, Attention(1, 1, 128), (128,), range(128), 16)
