"""Options: what is accepted, what is refused in which words, and what identifies a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_compile import Config, TWCompilePass, make_backend
from tw_compile.gating import BACKENDS, host_names

SIZES = st.integers(0, 1 << 40)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    low, high = sorted((draw(SIZES), draw(SIZES)))
    return Config(
        fuse=draw(st.booleans()),
        transport=draw(st.sampled_from(["auto", "gloo", "multimem", "nccl", "p2p"])),
        fuse_min_bytes=low,
        fuse_max_bytes=draw(st.sampled_from([None, high])),
        absorb_mm=draw(st.sampled_from(["auto", "always", "never"])),
        thresholds=draw(st.sampled_from(["auto", "off", "mine.toml"])),
        host=draw(st.sampled_from(host_names())),
        all_reduce_backend=draw(st.sampled_from(["auto", *BACKENDS])),
        disable_custom_all_reduce=draw(st.booleans()),
        split=draw(st.sampled_from(["off", "auto", "1", "512"])),
        split_gemm_sms=draw(st.sampled_from(["auto", "off"])),
        device_profile=draw(st.sampled_from(["auto", "H200", "mine.toml"])),
        disable_passes=draw(st.sampled_from([(), ("lock_order",), ["reserve_sms", "schedule"], "schedule,mend_seams"])),
        strict=draw(st.booleans()),
    )


@given(configs(), st.dictionaries(st.sampled_from(["max_autotune", "epilogue_fusion"]), st.booleans()))
def test_options_round_trip(config: Config, inductor: dict[str, bool]) -> None:
    back, rest = Config.split_options(config.as_options() | inductor)
    assert (back, rest) == (config, inductor)


@given(configs(), configs())
def test_digest_changes_exactly_with_a_field(a: Config, b: Config) -> None:
    assert (a.digest() == b.digest()) == (a == b)


CHANGED: dict[str, Any] = {
    "fuse": False,
    "transport": "nccl",
    "fuse_min_bytes": 1,
    "fuse_max_bytes": 1,
    "absorb_mm": "never",
    "feed_mm": "never",
    "thresholds": "off",
    "calibrate": "off",
    "host": "vllm-0.24",
    "all_reduce_backend": "multimem",
    "disable_custom_all_reduce": True,
    "split": "512",
    "split_gemm_sms": "off",
    "vllm_layer_groups": 0,
    "vllm_step_graphs": "off",
    "vllm_sharded_residual": "off",
    "device_profile": "H200",
    "wire": "int8",
    "wire_sites": "mlp",
    "wire_min_bytes": 65536,
    "wire_accuracy": "wire-accuracy.toml",
    "prefetch": "8388608",
    "disable_passes": ("reserve_sms",),
    "strict": True,
}


def test_digest_changes_with_each_field() -> None:
    assert set(CHANGED) == {field.name for field in dataclasses.fields(Config)}
    split = Config(split="16")  # with which every field may have its other value
    digests = {dataclasses.replace(split, **{name: value}).digest() for name, value in CHANGED.items()}
    assert len(digests | {split.digest()}) == len(CHANGED) + 1


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (
            {"fuze": True},
            ValueError,
            r"unknown option tw_compile.fuze: expected one of .*did you mean tw_compile.fuse\?",
        ),
        ({"qqqq": 1}, ValueError, r"unknown option tw_compile.qqqq: expected one of fuse, "),
        ({"fuse": 1}, TypeError, "tw_compile.fuse: expected True or False, got 1"),
        ({"strict": "yes"}, TypeError, "tw_compile.strict: expected True or False, got 'yes'"),
        (
            {"transport": None},
            TypeError,
            "tw_compile.transport: expected one of auto, gloo, host, multimem, nccl, p2p, got None",
        ),
        (
            {"transport": "ucx"},
            ValueError,
            "tw_compile.transport: expected one of auto, gloo, host, multimem, nccl, p2p, got 'ucx'",
        ),
        ({"split_gemm_sms": "on"}, ValueError, "tw_compile.split_gemm_sms: expected one of auto, off, got 'on'"),
        ({"absorb_mm": True}, TypeError, "tw_compile.absorb_mm: expected one of auto, always, never, got True"),
        ({"absorb_mm": "yes"}, ValueError, "tw_compile.absorb_mm: expected one of auto, always, never, got 'yes'"),
        ({"host": "vllm"}, ValueError, "tw_compile.host: expected one of pytorch, vllm-0.20, .*, got 'vllm'"),
        (
            {"all_reduce_backend": "mpi"},
            ValueError,
            "tw_compile.all_reduce_backend: expected one of auto, .*, got 'mpi'",
        ),
        ({"thresholds": 5}, TypeError, "tw_compile.thresholds: expected auto, off or a file, got 5"),
        ({"split": 0}, ValueError, "tw_compile.split: expected off, auto or a number of tokens as '512', got '0'"),
        ({"split": True}, TypeError, "tw_compile.split: expected off, auto or a number of tokens as '512', got True"),
        ({"split": 1.5}, TypeError, "tw_compile.split: expected off, auto or a number of tokens as '512', got 1.5"),
        ({"split": "on"}, ValueError, "tw_compile.split: expected off, auto or a number of tokens as '512', got 'on'"),
        ({"split": "0"}, ValueError, "tw_compile.split: expected off, auto or .*, got '0'"),
        ({"vllm_layer_groups": -1}, ValueError, "tw_compile.vllm_layer_groups: expected 0 layers or more, got -1"),
        ({"vllm_layer_groups": True}, TypeError, "tw_compile.vllm_layer_groups: expected a number of layers, got True"),
        ({"split": "9" * 5000}, ValueError, "tw_compile.split: expected off, auto or .*, got '9999"),
        ({"split": "1" * 10}, ValueError, "tw_compile.split: expected off, auto or .*, got '1111111111'"),
        ({"split": "\u0665"}, ValueError, "tw_compile.split: expected off, auto or .*, got '\u0665'"),
        ({"split": "-16"}, ValueError, "tw_compile.split: expected off, auto or .*, got '-16'"),
        ({"device_profile": None}, TypeError, "tw_compile.device_profile: expected auto, the name of a .*, got None"),
        (
            {"wire": "int4"},
            ValueError,
            "tw_compile.wire: expected one of exact, int8, int6, auto, got 'int4', which gathers normalised rows in 4 bits and "
            "so breaks models; int6 is the narrowest",
        ),
        ({"wire": "fp8"}, ValueError, "tw_compile.wire: expected one of exact, int8, int6, auto, got 'fp8'"),
        ({"wire": None}, TypeError, "tw_compile.wire: expected one of exact, int8, int6, auto, got None"),
        (
            {"wire_sites": "o_proj"},
            ValueError,
            "tw_compile.wire_sites: expected one of all, attention, mlp, got 'o_proj'",
        ),
        ({"wire_min_bytes": -1}, ValueError, "tw_compile.wire_min_bytes: expected 0 bytes or more, got -1"),
        ({"wire_min_bytes": "1"}, TypeError, "tw_compile.wire_min_bytes: expected a number of bytes, got '1'"),
        ({"disable_passes": 3}, TypeError, "tw_compile.disable_passes: expected names of passes, as '.*', got 3"),
        ({"disable_passes": [3]}, TypeError, r"tw_compile.disable_passes: expected names of passes, .* got \[3\]"),
        ({"fuse_min_bytes": 1.5}, TypeError, "tw_compile.fuse_min_bytes: expected a number of bytes, got 1.5"),
        ({"fuse_min_bytes": True}, TypeError, "tw_compile.fuse_min_bytes: expected a number of bytes, got True"),
        ({"fuse_max_bytes": "1"}, TypeError, "tw_compile.fuse_max_bytes: expected a number of bytes, got '1'"),
        ({"fuse_min_bytes": -1}, ValueError, "tw_compile.fuse_min_bytes: expected 0 bytes or more, got -1"),
        ({"fuse_max_bytes": -1}, ValueError, "tw_compile.fuse_max_bytes: expected 0 bytes or more, got -1"),
        (
            {"fuse_min_bytes": 8, "fuse_max_bytes": 7},
            ValueError,
            r"tw_compile.fuse_max_bytes: expected at least fuse_min_bytes \(8\), got 7",
        ),
    ],
)
def test_bad_values_name_their_key(values: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Config.from_mapping(values)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            "reserve_sm",
            "tw_compile.disable_passes: expected passes, of fuse_all_reduce_rms_norm, .*; got 'reserve_sm'; did you mean "
            r"reserve_sms\?",
        ),
        (["zzz"], "tw_compile.disable_passes: expected passes, .*; got 'zzz'$"),
    ],
)
@pytest.mark.parametrize("use", [make_backend, TWCompilePass])
def test_a_name_that_no_pass_has_is_refused_before_anything_is_compiled(
    use: Callable[[Config], object], names: Any, message: str
) -> None:
    config = Config.from_mapping({"disable_passes": names})
    with pytest.raises(ValueError, match=message):
        use(config)


def test_the_first_half_may_have_a_number_of_nine_digits() -> None:
    assert Config(split="9" * 9).split_tokens == 999_999_999


def test_bounds_may_be_equal() -> None:
    assert Config(fuse_min_bytes=8, fuse_max_bytes=8).fuse_max_bytes == 8


@pytest.mark.parametrize(("options", "came"), [([1], r"a dictionary, got \[1\]"), ({1: 2}, "names as keys, got 1")])
def test_options_that_are_none(options: Any, came: str) -> None:
    with pytest.raises(TypeError, match=f"options: expected {came}"):
        Config.split_options(options)


def test_no_options() -> None:
    assert Config.split_options(None) == (Config(), {})


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().fuse = False  # type: ignore[misc]


@pytest.mark.parametrize(("value", "strict"), [("0", False), ("1", True)])
def test_strict_from_the_environment(value: str, strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TW_COMPILE_STRICT", value)
    assert Config().strict is strict
    assert Config(strict=not strict).strict is not strict


def test_bad_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TW_COMPILE_STRICT", "true")
    with pytest.raises(ValueError, match="TW_COMPILE_STRICT: expected '0' or '1', got 'true'"):
        Config()


def test_a_number_of_tokens_may_be_a_number() -> None:
    config = Config.from_mapping({"split": 512})
    assert config == Config(split="512") and config.split_tokens == 512
    assert config.digest() == Config(split="512").digest()


def test_a_keyword_that_is_no_option_is_named_with_the_nearest_one() -> None:
    with pytest.raises(
        TypeError, match=r"unknown option tw_compile.fuse_min_byte: .*did you mean tw_compile.fuse_min_bytes\?"
    ):
        Config(fuse_min_byte=1)  # type: ignore[call-arg]
