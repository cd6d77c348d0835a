"""The parts of the vLLM integration that need no vLLM."""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from tw_compile.config import Config
from tw_compile.gating.gate import Gate
from tw_compile.hosts.vllm import plan
from tw_compile.hosts.vllm.doctor import examine
from tw_compile.hosts.vllm.options import asked_options, host_of, switched_off, vllm_config
from tw_compile.hosts.vllm.reasons import GroupRefusal, HostRefusal, WholeAttention, WholeResidual
from tw_compile.hosts.vllm.settings import VllmSettings
from tw_compile.models.config import load_config, tensor_parallel_plan
from tw_compile.planning import DeviceProfile, LayerShape, Off, Plan, layer_shape, load_profile, plan_layer

KIB, MIB = 2**10, 2**20
ENGINE = plan.Engine(tensor_parallel_size=8, hidden_size=8192, dtype="bfloat16", max_tokens=8192)
VLLM = Config(host="vllm-0.24")


@pytest.mark.parametrize(
    ("additional", "variables", "expected"),
    [
        ({}, {}, None),
        ({}, {"TW_COMPILE": "1"}, {}),
        (None, {"TW_COMPILE": "1"}, {}),
        ({"tw_compile": True}, {}, {}),
        ({"tw_compile": False}, {"TW_COMPILE": "1"}, None),
        ({"tw_compile": {"fuse_min_bytes": 1}}, {}, {"fuse_min_bytes": 1}),
        ({"tw_compile": {"fuse_min_bytes": 1}}, {"TW_COMPILE": "0"}, None),
        ({"other": 1}, {}, None),
    ],
)
def test_who_asks_for_the_passes(additional: Any, variables: dict[str, str], expected: Any) -> None:
    assert asked_options(additional, variables) == expected


def test_bad_values_of_the_switches_are_named() -> None:
    with pytest.raises(ValueError, match="TW_COMPILE: expected '0' or '1', got 'yes'"):
        switched_off({"TW_COMPILE": "yes"})
    with pytest.raises(ValueError, match=r"additional_config\['tw_compile'\]: expected options, .* got 'on'"):
        asked_options({"tw_compile": "on"}, {})
    for name in ("tw-compile", "twcompile", "tw_complie", "TW_compile"):
        with pytest.raises(ValueError, match=f"additional_config: expected the key 'tw_compile', got '{name}'"):
            asked_options({name: {}, "other": 1}, {})


def test_options_are_those_of_config_and_what_vllm_says_is_not_theirs() -> None:
    config = vllm_config({"absorb_mm": "never"}, "0.24.0", disable_custom_all_reduce=True)
    assert config == Config(host="vllm-0.24", absorb_mm="never", disable_custom_all_reduce=True)
    with pytest.raises(ValueError, match=r"unknown option tw_compile\.fues: expected one of .*did you mean"):
        vllm_config({"fues": True}, "0.24.0", False)
    with pytest.raises(ValueError, match=r"expected no 'host', which follows vLLM, got 'pytorch'"):
        vllm_config({"host": "pytorch"}, "0.24.0", False)


@pytest.mark.parametrize(
    ("version", "host"),
    [
        ("0.19.1", "vllm-0.20"),
        ("0.20.0", "vllm-0.20"),
        ("0.23.4", "vllm-0.20"),
        ("0.24.0", "vllm-0.24"),
        ("0.32.9rc1", "vllm-0.24"),
        ("0.33.0", "vllm-0.33"),
        ("1.0.0", "vllm-0.33"),
        ("0.1.dev1916+gabc", "vllm-0.33"),
    ],
)
def test_the_dispatch_is_that_of_the_version(version: str, host: str) -> None:
    assert host_of(version) == host


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tensor_parallel_size": 1}, HostRefusal.TENSOR_PARALLEL_SIZE_1),
        ({"compiled": False}, HostRefusal.NOT_COMPILED),
        ({"batch_invariant": True}, HostRefusal.BATCH_INVARIANT),
        ({"dual_batch_overlap": True}, HostRefusal.DUAL_BATCH_OVERLAP),
    ],
)
def test_engines_that_are_refused(change: dict[str, Any], reason: HostRefusal) -> None:
    assert ENGINE.refusal() is None
    refused = replace(ENGINE, **change).refusal()
    assert refused is not None and refused[0] == reason and refused[1]


def test_ranges_end_where_multimem_takes_over() -> None:
    """Hopper, TP8: from 256 KiB, 16 tokens of hidden 8192. The front end doesn't know whether there is multicast."""
    both = plan.gates(VLLM, (9, 0))
    assert [gate.node.device_class for gate in both] == ["sm90-multicast", "sm90"]
    assert plan.range_endpoints(ENGINE, VLLM, both) == [15, 4095]  # NCCL from 64 MiB
    assert plan.range_endpoints(replace(ENGINE, hidden_size=2048), VLLM, both) == [63]
    assert plan.range_endpoints(replace(ENGINE, tensor_parallel_size=4), VLLM, both) == []
    for max_tokens in (15, 16):  # vLLM tunes the GEMMs of a range of one size
        assert plan.range_endpoints(replace(ENGINE, max_tokens=max_tokens), VLLM, both) == []


def test_without_peer_access_there_is_one_kind_of_node() -> None:
    (only,) = plan.gates(VLLM, (9, 0), peer_access=False)
    assert not only.node.peer_access and not only.node.multicast
    assert plan.range_endpoints(ENGINE, VLLM, (only,)) == []


def test_ranges_end_where_vllms_all_reduces_change_also_if_our_kernels_leave_peer_access_unused() -> None:
    both = plan.gates(VLLM, (9, 0), peers_used=False)
    assert [gate.node.multicast for gate in both] == [True, False]
    assert all(gate.node.peer_access and not gate.node.peer_kernels for gate in both)
    assert plan.range_endpoints(ENGINE, VLLM, both) == plan.range_endpoints(ENGINE, VLLM, plan.gates(VLLM, (9, 0)))


def test_over_a_link_without_atomics_hosts_use_peers_and_our_kernels_do_not() -> None:
    (only,) = plan.gates(VLLM, (9, 0), peer_atomics=False)
    assert only.node.peer_access and not only.node.peer_kernels and not only.node.multicast
    assert only.decide(2**20, world_size=2, dtype="bfloat16").backend == "custom"
    row_bytes = plan.row_bytes_of(ENGINE)
    ends = plan.range_endpoints(ENGINE, replace(VLLM, wire="int8"), (only,))
    assert 2**20 // row_bytes - 1 in ends, "where host memory has the wire"


def test_a_range_ends_where_a_wire_begins() -> None:
    both = plan.gates(VLLM, (9, 0))
    row_bytes = plan.row_bytes_of(ENGINE)
    exact = plan.range_endpoints(ENGINE, VLLM, both)
    assert plan.range_endpoints(ENGINE, replace(VLLM, wire="int8"), both) == exact  # for eight ranks no size has it
    asked = replace(VLLM, wire="int8", wire_min_bytes=100 * row_bytes)
    assert plan.range_endpoints(ENGINE, asked, both) == sorted({*exact, 99})
    four = replace(ENGINE, tensor_parallel_size=4)  # codes from 4 MiB on, and exact halves from 12 MiB on
    for split, last in (("auto", {255, 767}), ("off", {255})):
        ends = plan.range_endpoints(four, replace(VLLM, wire="int8", split=split), both)
        assert {*ends} - {*plan.range_endpoints(four, VLLM, both)} == last
    (only,) = plan.gates(VLLM, (9, 0), peer_access=False)
    assert plan.range_endpoints(ENGINE, replace(VLLM, wire="int8"), (only,)) == [2**20 // row_bytes - 1]


def test_ranges_follow_the_options() -> None:
    row_bytes = plan.row_bytes_of(ENGINE)
    config = Config(host="vllm-0.24", transport="p2p", fuse_min_bytes=8 * row_bytes, fuse_max_bytes=64 * row_bytes)
    assert plan.range_endpoints(ENGINE, config, plan.gates(config, (9, 0))) == [7, 64]


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        ({"tensor_parallel_size": 4}, {}, True),
        ({}, {}, False),  # eight H100 with multicast leave 256 KiB to 64 MiB to multimem
        ({"max_tokens": 8}, {}, True),
        ({}, {"transport": "p2p"}, True),
        ({"tensor_parallel_size": 4}, {"fuse_min_bytes": 2**14}, False),
        ({"tensor_parallel_size": 4}, {"fuse_max_bytes": 2**30}, False),
        ({"tensor_parallel_size": 4}, {"fuse": False}, False),
        ({"tensor_parallel_size": 4}, {"disable_passes": "fuse_all_reduce_rms_norm"}, False),
    ],
)
def test_whether_all_sums_are_fused(change: dict[str, Any], options: dict[str, Any], expected: bool) -> None:
    config = replace(VLLM, **options)
    assert plan.fuses_all(replace(ENGINE, **change), config, plan.gates(config, (9, 0))) is expected


def test_a_named_first_half_has_a_range_from_where_the_second_is_half_as_long() -> None:
    def ends(split: str) -> list[int]:
        config = Config(host="vllm-0.24", split=split)
        return plan.range_endpoints(replace(ENGINE, tensor_parallel_size=4), config, plan.gates(config, (9, 0)))

    assert ends("off") == ends("auto") == []
    assert ends("512") == [767]
    assert ends(str(ENGINE.max_tokens // 2)) == [3 * ENGINE.max_tokens // 4 - 1]


H200 = load_profile("H200")


def layer_of(name: str, ranks: int) -> LayerShape:
    model = load_config(name)
    return layer_shape(model, tensor_parallel_plan(model), ranks, merged=True)


def planned(
    name: str = "llama-3.3-70b", ranks: int = 4, first: int = 513, inside: bool = True, **changes: Any
) -> tuple[tuple[tuple[int, int], ...], str]:
    """The ranges of an engine, and what its start says of the split; changes of the engine's, or of options."""
    layer = layer_of(name, ranks)
    groups = changes.pop("groups", False)
    options = {key: changes.pop(key) for key in [*changes] if key in Config.__dataclass_fields__}
    config = Config(**{"host": "vllm-0.24", "split": "auto", **options})
    engine = replace(ENGINE, tensor_parallel_size=ranks, hidden_size=layer.hidden_size, **changes)
    choices = plan.gates(config, (9, 0))
    ends = plan.range_endpoints(engine, config, choices)
    return plan.planned_ranges(engine, config, choices, first, ends, plan.SplitFor(H200, layer), inside, groups)[:2]


@pytest.mark.full
@pytest.mark.parametrize(("name", "ranks"), [("llama-3.1-8b", 2), ("llama-3.3-70b", 4), ("llama-3.3-70b", 2)])
def test_steps_are_split_from_where_that_is_faster_however_long_the_host_takes(name: str, ranks: int) -> None:
    ranges, line = planned(name, ranks)
    assert len(ranges) == 2 and ranges[0][0] == 513 and ranges[1][1] == 8192
    first = ranges[1][0]
    assert line == f"split auto: steps of {first} to 8192 tokens"
    layer = layer_of(name, ranks)
    layer = replace(layer, attention=replace(layer.attention, kernel="flash3"))
    before, after = (plan_layer(H200, layer, tokens, host_us=plan.SPLIT_HOST_US) for tokens in (first - 64, first))
    assert after.off is None and after.predicted.split_us is not None
    assert plan.SPLIT_HOST_US <= after.predicted.split_us < after.predicted.unsplit_us
    assert before.off in (Off.HOST_SLOWER, Off.NOT_FASTER)


@pytest.mark.parametrize("lacking", ["peer_access", "peer_atomics"])
def test_without_peers_steps_are_planned_for_the_link_that_they_have(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """Calls are slow there, so that a split pays although the host needs as long as the device."""
    monkeypatch.setattr(plan, "gates", functools.partial(plan.gates, **{lacking: False}))
    (*_, (first, last)), line = planned("llama-3.1-8b", 2)
    assert last == 8192 and line == f"split auto: steps of {first} to 8192 tokens"
    monkeypatch.undo()
    assert first < planned("llama-3.1-8b", 2)[0][-1][0]


def test_full_steps_that_the_host_launches_more_slowly_are_not_split() -> None:
    ranges, line = planned("llama-3.1-8b", 2, max_tokens=2048)
    assert ranges == ((513, 2048),)
    assert line.startswith("split auto: none of up to 2048 tokens pays, at 2048 split is predicted to take ")
    assert f" us, and the host {plan.SPLIT_HOST_US:.0f} us to launch it; unsplit it takes " in line


@pytest.mark.parametrize(("name", "ranks", "most"), [("llama-3.1-8b", 2, 2048), ("llama-3.3-70b", 4, 4096)])
def test_a_range_that_only_the_host_may_slow_down_is_compiled_both_ways(name: str, ranks: int, most: int) -> None:
    whole, _ = planned(name, ranks, max_tokens=most)
    layer, config = layer_of(name, ranks), Config(host="vllm-0.24", split="auto")
    engine = replace(ENGINE, tensor_parallel_size=ranks, hidden_size=layer.hidden_size, max_tokens=most)
    choices = plan.gates(config, (9, 0))
    found = plan.planned_ranges(engine, config, choices, 513, [], plan.SplitFor(H200, layer), True, groups=True)
    ((low, high),) = found.tried
    assert (low, high) in found.ranges and {end for _, end in whole} <= {end for _, end in found.ranges}
    assert f"steps of {low} to {high} tokens where the start measures" in found.text
    layer = replace(layer, attention=replace(layer.attention, kernel="flash3"))
    middle = (low + high) // 2
    by_host, by_device = (plan_layer(H200, layer, middle, host_us=us) for us in (plan.SPLIT_HOST_US, 0.0))
    assert by_host.off is Off.HOST_SLOWER and by_device.off is None


@pytest.mark.parametrize("profile", [H200, replace(H200, estimated=True)], ids=["measured", "estimated"])
@pytest.mark.parametrize("most", [2048, 8192])
def test_nothing_is_compiled_both_ways_that_the_start_does_not_time(profile: DeviceProfile, most: int) -> None:
    """As with pipeline or data parallelism. What surely gains is split, as without groups of layers."""
    layer, config = layer_of("llama-3.1-8b", 2), Config(host="vllm-0.24", split="auto")
    engine = replace(ENGINE, tensor_parallel_size=2, hidden_size=layer.hidden_size, max_tokens=most)
    choices, split_for = plan.gates(config, (9, 0)), plan.SplitFor(profile, layer)

    def found(engine: plan.Engine, groups: bool) -> plan.PlannedRanges:
        return plan.planned_ranges(engine, config, choices, 513, [], split_for, True, groups)

    assert found(engine, groups=True).tried
    alone = found(replace(engine, times_steps=False), groups=True)
    assert alone == found(engine, groups=False) and not alone.tried and "the start measures" not in alone.text


def test_captured_steps_need_no_time_of_the_host() -> None:
    ranges, line = planned(captured_tokens=8192, inside=False)
    assert len(ranges) <= 2 and line == f"split auto: steps of {ranges[-1][0]} to 8192 tokens"
    assert ranges[-1][0] < planned(inside=False)[0][-1][0]


def test_attention_that_stays_whole_is_planned_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    original = plan.plan_layer

    def noted(*given: Any, **options: Any) -> Plan:
        seen.add(str(options["attention"]))
        return original(*given, **options)

    monkeypatch.setattr(plan, "plan_layer", noted)
    for changes, expected in (({}, "auto"), ({"inside": False}, "join"), ({"context_parallel": True}, "join")):
        seen.clear()
        planned(**changes)  # type: ignore[arg-type]
        assert seen == {expected}


@pytest.mark.full
def test_ranges_that_are_not_fused_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    row_bytes = 2 * 8192
    assert planned(fuse=False) == (((513, 8192),), "split auto: none of up to 8192 tokens pays")
    ranges, line = planned(fuse_max_bytes=4096 * row_bytes, transport="p2p")
    assert ranges[-1] == (4097, 8192) and line == f"split auto: steps of {ranges[-2][0]} to 4096 tokens"
    assert planned(ranks=8)[1].endswith(" to 8192 tokens")  # fused from 4096 tokens on, whatever the node
    monkeypatch.setattr(plan, "SPLIT_HOST_US", 0.0)
    ranges, line = planned(ranks=8)  # with multicast vLLM's multimem is faster up to 4095 tokens
    assert (4096, 8192) in ranges and line.endswith("to 8192 tokens, where they are fused")


def test_steps_that_flashinfer_fuses_are_not_split() -> None:
    assert planned(first=8192) == ((), "split auto: none, vLLM fuses steps of up to 8191 tokens by FlashInfer")


def test_without_a_plan_the_start_says_so() -> None:
    engine, config = replace(ENGINE, tensor_parallel_size=4), Config(host="vllm-0.24", split="auto")

    def line(profile: Any, layer: Any, config: Config = config) -> Any:
        return plan.planned_ranges(
            engine, config, plan.gates(config, (9, 0)), 513, [], plan.SplitFor(profile, layer), True
        )[:2]

    whole = ((513, 8192),)
    assert line(None, None) == (whole, "split auto: none, no_device_profile: none says how long a layer takes")
    ranges, said = line(H200, None)
    assert ranges == ((513, 1024), (1025, 4096), (4097, 8192)) and "read off its graph" in said
    assert line(None, None, replace(config, split="off")) == (whole, "split off")
    assert line(None, None, replace(config, split="512")) == (whole, "split 512")


@pytest.mark.parametrize(
    ("change", "split", "expected"),
    [
        (
            {"quantised": True},
            "auto",
            "split auto: none, layer_not_recognised: quantised matmuls leave no SMs to a sum beside them",
        ),
        (
            {"experts": True},
            "auto",
            "split auto: no layer with experts, layer_not_recognised: kernels of experts leave no SMs to a sum beside them",
        ),
        ({"experts": True}, "512", "split 512"),
        ({"quantised": True}, "512", "split 512"),
        (
            {"returns_experts": True},
            "512",
            "split 512: none, a step's choices of experts are recorded by its tokens' numbers",
        ),
        ({"state_space": True}, "auto", "split auto: none, a state goes from each token to the next"),
        ({"state_space": True}, "512", "split 512: none, a state goes from each token to the next"),
    ],
    ids=str,
)
def test_the_start_says_what_is_not_split_for_its_operators(change: dict[str, Any], split: str, expected: str) -> None:
    layer = layer_of("llama-3.3-70b", 4)
    engine, config = replace(ENGINE, tensor_parallel_size=4, **change), Config(host="vllm-0.24", split=split)
    found = plan.planned_ranges(
        engine, config, plan.gates(config, (9, 0)), 513, [], plan.SplitFor(H200, layer), True, groups=True
    )
    assert found == (((513, 8192),), expected, (), False)


@pytest.mark.parametrize(
    ("change", "kernels"), [({"quantised": True}, "quantised matmuls"), ({"experts": True}, "kernels of experts")]
)
def test_without_peer_access_steps_that_nobody_can_plan_are_measured_both_ways(
    change: dict[str, Any], kernels: str
) -> None:
    """Also on a device without a profile. Without groups nothing could be measured, and with peers the gain would be less."""
    engine, config = replace(ENGINE, **change), Config(host="vllm-0.24", split="auto")
    without, peers = plan.gates(config, (8, 9), False), plan.gates(config, (8, 9))

    def found(choices: tuple[Gate, ...], groups: bool = True) -> plan.PlannedRanges:
        split_for = plan.SplitFor(None, layer_of("llama-3.1-8b", 2), None, by_ranks=True)
        return plan.planned_ranges(engine, config, choices, 513, [2047], split_for, True, groups)

    ranges = ((513, 2047), (2048, 8192))
    steps = "steps of 513 to 8192 tokens where the start measures that this is faster"
    assert found(without) == (ranges, f"split auto: {steps}, as nobody knows the times of {kernels}", ranges, False)
    others = [found(without, groups=False), found(peers)]
    engine = replace(engine, times_steps=False)
    for other in (*others, found(without)):
        assert other.tried == () and "layer_not_recognised" in other.text and not other.by_ranks


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"context_parallel": True}, WholeAttention.CONTEXT_PARALLEL),
        ({"kv_transfer": True}, WholeAttention.KV_TRANSFER),
        ({"prefix_lm": True}, WholeAttention.PREFIX_LM),
        ({"speculative": True}, WholeAttention.SPECULATIVE),
    ],
)
def test_engines_whose_attention_stays_whole(change: dict[str, Any], reason: WholeAttention) -> None:
    assert ENGINE.whole_attention() is None
    whole = replace(ENGINE, **change).whole_attention()
    assert whole is not None and whole[0] == reason and whole[1]


def test_an_engine_whose_layers_have_a_state_is_fused_in_the_same_ranges() -> None:
    with_state = replace(ENGINE, state_space=True)
    assert with_state.refusal() is None
    choices = plan.gates(VLLM, (9, 0))
    assert plan.range_endpoints(with_state, VLLM, choices) == plan.range_endpoints(ENGINE, VLLM, choices) == [15, 4095]
    engine, quiet = replace(ENGINE, tensor_parallel_size=4), (plan.gates(VLLM, (9, 0))[1],)
    assert plan.fuses_all(engine, VLLM, quiet) and not plan.fuses_all(replace(engine, state_space=True), VLLM, quiet)


def test_attention_of_steps_with_cuda_graphs_stays_whole() -> None:
    engine = replace(ENGINE, captured_tokens=512)
    assert engine.whole_attention() is None and engine.whole_attention(513) is None
    whole = engine.whole_attention(512)
    assert whole is not None and whole[0] == WholeAttention.CUDA_GRAPHS


@pytest.mark.parametrize(
    ("change", "options", "given", "reason"),
    [
        ({}, {"vllm_sharded_residual": "off"}, (False, False), WholeResidual.NOT_ASKED_FOR),
        ({"captures_prompts": False}, {}, (False, False), WholeResidual.NOT_CAPTURED),
        ({"one_graph": True}, {}, (False, False), WholeResidual.ONE_GRAPH),
        ({}, {}, (True, False), WholeResidual.SEQUENCE_PARALLEL),
        ({}, {}, (False, True), WholeResidual.ENCODER),
    ],
)
def test_engines_whose_pieces_hand_on_all_rows_of_the_residual(
    change: dict[str, Any], options: dict[str, Any], given: tuple[bool, bool], reason: WholeResidual
) -> None:
    engine = replace(ENGINE, captured_tokens=512, captures_prompts=True)
    assert engine.refuses_seams(Config(), False, False) is None
    refused = replace(engine, **change).refuses_seams(Config(**options), *given)
    assert refused is not None and refused[0] == reason and refused[1]


def test_steps_above_graphs_one_shot_and_flashinfer_run_by_groups_of_layers() -> None:
    def first(flashinfer_bytes: int | None = None, **changes: Any) -> Any:
        return replace(ENGINE, **changes).long_from(Config(), flashinfer_bytes)

    assert first() == 513
    assert first(captured_tokens=1024) == 1025
    assert first(16 * MIB) == 1025 and first(2 * MIB) == 513
    assert first(max_tokens=515) == 513


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({"one_graph": True}, {}, GroupRefusal.ONE_GRAPH),
        ({"speculative": True}, {}, GroupRefusal.SPECULATIVE),
        ({"state_space": True}, {}, GroupRefusal.STATE_SPACE),
        ({"max_tokens": 513}, {}, GroupRefusal.NO_LONG_STEPS),
        ({}, {"vllm_layer_groups": 0}, GroupRefusal.NOT_ASKED_FOR),
        ({}, {"fuse": False}, GroupRefusal.NOT_ASKED_FOR),
    ],
)
def test_what_keeps_steps_from_running_by_groups_of_layers(
    change: dict[str, Any], options: dict[str, Any], reason: GroupRefusal
) -> None:
    found = replace(ENGINE, **change).long_from(Config(**options), None)
    assert isinstance(found, tuple) and found[0] == reason and found[1]


@pytest.mark.parametrize(
    ("change", "options", "long_ranges", "expected"),
    [
        ({}, {}, ((513, 4096), (4097, 8192)), (33, 512)),
        ({"captured_tokens": 2048}, {}, ((2049, 8192),), (33, 2048)),
        ({"max_tokens": 512}, {}, (), (33, 512)),
        ({"max_tokens": 33}, {}, (), None),
        ({}, {"vllm_layer_groups": 0}, (), (33, 8192)),
        ({}, {"vllm_step_graphs": "off"}, ((513, 8192),), None),
        ({"captured_tokens": 0}, {}, ((513, 8192),), None),  # vLLM captures nothing
        ({"lora": True}, {}, (), None),
        ({"state_space": True}, {}, (), None),
        ({"speculative": True}, {}, (), None),
        ({"one_graph": True}, {}, (), None),
        ({"pooling": True}, {}, ((513, 8192),), None),
        ({"captures_attention": True}, {}, ((513, 8192),), None),
    ],
)
def test_steps_below_groups_of_layers_may_be_graphs_with_attention(
    change: dict[str, Any], options: dict[str, Any], long_ranges: Any, expected: tuple[int, int] | None
) -> None:
    engine = replace(ENGINE, **{"captured_tokens": 512, "max_tokens": 8192} | change)
    assert engine.short_steps(Config(**options), long_ranges) == expected


def test_ranges_of_long_steps_cover_them_and_none_has_one_size() -> None:
    assert plan.ranges_from(513, [], 8192) == ((513, 8192),)
    assert plan.ranges_from(513, [1, 512, 513, 1024, 4096, 8191], 8192) == ((513, 1024), (1025, 4096), (4097, 8192))


def test_the_workers_settings_are_what_could_be_set_up() -> None:
    on, off = SimpleNamespace(disabled=False), SimpleNamespace(disabled=True)
    settings = VllmSettings("vllm-0.24", use_flashinfer=True)
    all_on = SimpleNamespace(ca_comm=on, symm_mem_comm=on, fi_ar_comm=on)
    assert plan.observed(settings, all_on) == settings
    none_on = plan.observed(settings, SimpleNamespace(ca_comm=None, symm_mem_comm=off, fi_ar_comm=None))
    assert (none_on.disable_custom_all_reduce, none_on.use_symm_mem, none_on.use_flashinfer) == (True, False, False)
    assert not plan.observed(VllmSettings("vllm-0.24"), all_on).use_flashinfer
    assert plan.observed(settings, SimpleNamespace()) == settings


def test_doctor_shows_what_vllm_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tw_compile.hosts.vllm.doctor.installed_version", lambda: None)
    point = metadata.EntryPoint("tw_compile", "tw_compile.hosts.vllm.plugin:register", "vllm.general_plugins")
    monkeypatch.setattr(metadata, "entry_points", lambda group: (point,))
    report = examine({"TW_COMPILE": "1", "VLLM_PLUGINS": "other"}, (9, 0))
    assert report["installed"] is None and report["dispatch"] == "vllm-0.24"
    assert report["enabled"].startswith("yes") and "leaves out tw_compile" in report["plugin"]
    last = report["groups"][-1]
    assert last["ranges_end_at"] == [15, 4095] and last["split"].startswith("split auto: none, no_device_profile")
    first = [group["groups_of_layers"]["from_tokens"] for group in report["groups"]]
    assert first == [513, 513, 513]  # at 2 ranks FlashInfer's up to 64 MiB are ours
    assert (last["flashinfer_fusion_bytes"], last["flashinfer_fusion_bytes_of_vllm"]) == (240 * KIB, 512 * KIB)
    off = examine({}, None)
    assert off["enabled"].startswith("no") and off["groups"][-1]["flashinfer_fusion_bytes"] is None


@pytest.mark.full
def test_doctor_says_which_steps_would_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tw_compile.hosts.vllm.doctor.vllm_config", lambda *given, **rest: replace(VLLM, split="auto"))
    of_four = examine({}, (9, 0), "NVIDIA H200")["groups"][1]
    ranges, line = planned(groups=True)
    assert of_four["split"] == line and of_four["ranges_end_at"] == [end for _, end in ranges[:-1]]
    assert "where the start measures that the host launches them in time" in line
    assert "planned by the ranks, by what they measure" in examine({}, (9, 0), "another")["groups"][1]["split"]
