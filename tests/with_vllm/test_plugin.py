"""What the plugin does to an engine's configuration, and what vLLM does with the pass in it."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.fx as fx
from calibrations import FOUND
from fake_vllm import HIDDEN, MAX_TOKENS, dispatch, engine_config
from graph_builder import GraphBuilder

import tw_compile
from tw_compile import calibration, current
from tw_compile.gating.facts import Node
from tw_compile.hosts.vllm import ways
from tw_compile.models.config import load_config, tensor_parallel_plan
from tw_compile.planning import DeviceProfile, layer_shape, load_profile, plan_layer

SLOT = "post_grad_custom_post_pass"
ROW_BYTES = 2 * HIDDEN


def slot_of(config: Any) -> Any:
    return config.compilation_config.inductor_compile_config.get(SLOT)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TW_COMPILE", "1")


@pytest.fixture
def vllm_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> pytest.LogCaptureFixture:
    import vllm.logger  # noqa: F401, configures the logger, which then keeps its records to itself

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm.tw_compile")
    return caplog


def users_pass() -> Any:
    from vllm.compilation.passes.inductor_pass import InductorPass

    class Users(InductorPass):
        def __call__(self, graph: Any) -> None:
            raise AssertionError

    return Users()


def test_without_being_asked_nothing_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine_config(folder)
    monkeypatch.setenv("TW_COMPILE", "0")
    switched_off = engine_config(folder, additional_config={"tw_compile": {}})
    assert slot_of(plain) is None and slot_of(switched_off) is None
    assert plain.compilation_config.compile_ranges_endpoints == [MAX_TOKENS]
    assert plain.compilation_config.compute_hash() == switched_off.compilation_config.compute_hash()


@pytest.mark.parametrize("options", [None, {}, True])
def test_variable_or_additional_config_switch_it_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: object
) -> None:
    if options is None:
        monkeypatch.setenv("TW_COMPILE", "1")
    config = engine_config(folder, additional_config={} if options is None else {"tw_compile": options})
    assert slot_of(config).config.host == dispatch()


def test_options_reach_the_pass_its_uuid_and_both_hashes(folder: Path, on: None) -> None:
    one, same, other = (
        engine_config(folder, additional_config={"tw_compile": {"absorb_mm": value}})
        for value in ("auto", "auto", "never")
    )
    assert slot_of(other).config.absorb_mm == "never"
    assert slot_of(one).uuid() == slot_of(same).uuid() != slot_of(other).uuid()
    hashes = [config.compilation_config.compute_hash() for config in (one, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]
    assert one.compute_hash() == same.compute_hash() != other.compute_hash()


def test_the_aot_key_changes_with_options(folder: Path, on: None) -> None:
    from vllm.compilation.caching import aot_compile_hash_factors

    one, other = (
        engine_config(folder, additional_config={"tw_compile": {"absorb_mm": value}}) for value in ("auto", "never")
    )
    assert aot_compile_hash_factors(one) != aot_compile_hash_factors(other)


def test_an_unknown_option_stops_the_start_and_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown option tw_compile\.transprot.*did you mean tw_compile\.transport"):
        engine_config(folder, additional_config={"tw_compile": {"transprot": "p2p"}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_profile": "A100"}, r"tw_compile\.device_profile: .*expected one of .*got 'A100'"),
        (
            {"disable_passes": ["join_gemm"]},
            r"tw_compile\.disable_passes: .*got 'join_gemm'; did you mean join_gemms\?",
        ),
    ],
)
def test_a_wrong_name_stops_the_start(folder: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_config(folder, additional_config={"tw_compile": options})


def test_ranges_end_where_the_decision_changes(folder: Path) -> None:
    options = {"fuse_min_bytes": 8 * ROW_BYTES, "fuse_max_bytes": 64 * ROW_BYTES}
    config = engine_config(
        folder, compilation={"compile_ranges_endpoints": [32]}, additional_config={"tw_compile": options}
    )
    assert config.compilation_config.compile_ranges_endpoints == [7, 32, 64, MAX_TOKENS]


def test_the_pass_survives_copies_and_pickles(folder: Path, on: None) -> None:
    found = slot_of(engine_config(folder))
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert type(other) is type(found) and other.uuid() == found.uuid()


def test_the_pass_can_be_named_in_inductor_passes_without_the_plugin(folder: Path) -> None:
    from vllm.compilation.passes.inductor_pass import InductorPass
    from vllm.config import CompilationConfig

    config = CompilationConfig(inductor_passes={SLOT: "tw_compile.vllm_pass"}, compile_ranges_endpoints=[16])
    found = config.inductor_compile_config[SLOT]
    assert found is tw_compile.vllm_pass and isinstance(found, InductorPass)
    assert config.compute_hash() != CompilationConfig(compile_ranges_endpoints=[16]).compute_hash()
    real = copy.deepcopy(config.inductor_compile_config)[SLOT]
    assert type(real).__name__ == "VllmPass" and pickle.loads(pickle.dumps(found)).uuid() == real.uuid() == found.uuid()


def test_the_plugin_configures_the_pass_that_was_named(folder: Path) -> None:
    config = engine_config(
        folder,
        compilation={"inductor_passes": {SLOT: "tw_compile.vllm_pass"}},
        additional_config={"tw_compile": {"absorb_mm": "never"}},
    )
    assert slot_of(config).config.absorb_mm == "never" and slot_of(config).before is None


def test_a_users_pass_is_chained_and_part_of_the_uuid(folder: Path, on: None) -> None:
    users = users_pass()
    chained = slot_of(engine_config(folder, compilation={"inductor_compile_config": {SLOT: users}}))
    assert type(chained.before) is type(users) and chained.uuid() != slot_of(engine_config(folder)).uuid()


def test_what_is_no_pass_keeps_the_slot_and_the_start_says_so(
    folder: Path, on: None, vllm_log: pytest.LogCaptureFixture
) -> None:
    taken = print
    config = engine_config(folder, compilation={"inductor_compile_config": {SLOT: taken}})
    assert slot_of(config) is taken and "off, slot_taken" in vllm_log.text


@pytest.mark.parametrize(
    ("reason", "arguments", "variables"),
    [
        ("tensor_parallel_size_1", {"tensor_parallel_size": 1}, {}),
        ("not_compiled", {"enforce_eager": True}, {}),
        ("not_compiled", {"compilation": {"backend": "eager"}}, {}),
        ("batch_invariant", {}, {"VLLM_BATCH_INVARIANT": "1"}),
    ],
)
def test_refusals_leave_the_configuration_alone(
    folder: Path,
    on: None,
    monkeypatch: pytest.MonkeyPatch,
    vllm_log: pytest.LogCaptureFixture,
    reason: str,
    arguments: dict[str, Any],
    variables: dict[str, str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = engine_config(folder, **arguments)
    assert slot_of(config) is None and f"off, {reason}" in vllm_log.text


def test_the_start_says_in_one_line_what_is_on(folder: Path, on: None, vllm_log: pytest.LogCaptureFixture) -> None:
    engine_config(folder, compilation={"pass_config": {"fuse_allreduce_rms": False}})
    (line,) = [record.message for record in vllm_log.records if record.name == "vllm.tw_compile"]
    assert (
        line.startswith(f"tw_compile: on, 2 ranks, {dispatch()}; fusing")
        and f"token ranges end at {MAX_TOKENS}" in line
    )


def slow_node() -> DeviceProfile:
    """A profile as a calibration makes it. Nobody has measured these numbers."""
    h200 = load_profile("H200")
    return replace(
        h200,
        name="NVIDIA L40S, estimated",
        device_names=("NVIDIA L40S",),
        all_reduce={"nccl": replace(h200.all_reduce["nccl"], link_gb_per_s=60.0)},
        fused={"push": replace(h200.fused["push"], link_gb_per_s=60.0)},
        kernel="push",
        estimated=True,
    )


@pytest.fixture
def unknown_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The GPU has no shipped profile, and nobody has measured the node. The model's layers are those of Llama-3.1-8B."""
    from vllm.platforms import current_platform

    name = classmethod(lambda cls, device_id=0: "NVIDIA L40S")
    monkeypatch.setattr(type(current_platform), "get_device_name", name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    model = load_config("llama-3.1-8b")
    layer = layer_shape(model, tensor_parallel_plan(model), 2, merged=True)
    monkeypatch.setattr("tw_compile.hosts.vllm.engine.layer_of", lambda engine: layer)


def long_steps(folder: Path, overrides: dict[str, Any] | None = None, **options: Any) -> Any:
    """An engine whose steps have up to 8192 tokens, and no fusion by FlashInfer. ``overrides``: of the model."""
    compilation = {"pass_config": {"fuse_allreduce_rms": False}}
    return engine_config(
        folder,
        compilation=compilation,
        additional_config={"tw_compile": options},
        max_num_batched_tokens=8192,
        max_model_len=8192,
        hf_overrides={"max_position_embeddings": 8192, **(overrides or {})},
    )


def keep_calibration() -> None:
    """As the ranks of the first start do."""
    here = current.measured_on("NVIDIA L40S", 2, Node((9, 0), False), True)
    calibration.store(calibration.default_folder(), replace(FOUND, measured_on=here, profile=slow_node()))


@pytest.mark.usefixtures("groups", "unknown_device")
def test_ranks_cut_ranges_by_what_they_measure_from_the_first_start_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, vllm_log: pytest.LogCaptureFixture
) -> None:
    """The second start has the same keys, so that it finds in vLLM's caches what the first one has compiled."""
    from tw_compile.hosts.vllm import inductor_pass

    first = long_steps(folder)
    assert "split auto: planned by the ranks, by what they measure of this node" in vllm_log.text
    keep_calibration()
    second = long_steps(folder)
    assert slot_of(second).uuid() == slot_of(first).uuid()
    assert second.compilation_config.compute_hash() == first.compilation_config.compute_hash()
    seen: list[Any] = []
    monkeypatch.setattr(inductor_pass, "add_long_steps", lambda *given: seen.append(given[4:]))
    backend = SimpleNamespace(is_encoder=False)
    vllm_log.clear()
    for profile in (None, slow_node()):
        monkeypatch.setattr(inductor_pass, "current_profile", lambda config, profile=profile: profile)
        slot_of(first).behind_split(backend, fx.GraphModule({}, fx.Graph()), [], None)
    (unplanned, _, none, *_), (ranges, _, tried, *_) = seen
    assert unplanned == ((513, 8192),) and none == ()
    assert ranges[0][0] == 513 and ranges[-1][1] == tried[-1][1] == 8192 and set(tried) <= set(ranges)
    said = [message for message in vllm_log.messages if "planned for" in message]
    assert "planned for no device profile: split auto: none, no_device_profile" in said[0]
    steps = f"steps of {tried[0][0]} to 8192 tokens where the start measures that this is faster"
    assert f"planned for NVIDIA L40S, estimated: split auto: {steps}" in said[1]


@pytest.mark.usefixtures("groups", "unknown_device")
@pytest.mark.parametrize("peers", [True, False])
def test_ranks_plan_for_how_their_kernels_send_rows(folder: Path, monkeypatch: pytest.MonkeyPatch, peers: bool) -> None:
    """The GPUs reach each other, whether peer access is used or not."""
    from tw_compile.hosts.vllm import inductor_pass, plan
    from tw_compile.planning.links import shipped_link

    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", str(int(peers)))
    found = slot_of(long_steps(folder))
    monkeypatch.setattr(inductor_pass, "current_profile", lambda config: slow_node())
    seen: list[Any] = []
    monkeypatch.setattr(
        plan, "plan_layer", lambda *given, **options: seen.append(options) or plan_layer(*given, **options)
    )
    ranges, tried = found._ranges()
    expected = (None, None) if peers else ("host", shipped_link())
    assert seen and all((options["kernel"], options["link"]) == expected for options in seen)
    assert tried and set(tried) <= set(ranges)


@pytest.mark.usefixtures("unknown_device")
def test_without_groups_of_layers_a_second_start_plans_by_what_the_first_measured(
    folder: Path, vllm_log: pytest.LogCaptureFixture
) -> None:
    first = long_steps(folder, vllm_layer_groups=0)
    assert "once the ranks have measured this node, a start plans by that" in vllm_log.text
    keep_calibration()
    second = long_steps(folder, vllm_layer_groups=0)
    ends = [config.compilation_config.compile_ranges_endpoints for config in (first, second)]
    assert ends[0] == [8192] and len(ends[1]) > 1 and f"split auto: steps of {ends[1][-2] + 1} to 8192" in vllm_log.text


@pytest.mark.parametrize("device", ["known", "unknown"])
def test_nothing_is_cut_or_tried_for_layers_with_experts(
    folder: Path, request: pytest.FixtureRequest, vllm_log: pytest.LogCaptureFixture, device: str
) -> None:
    if device == "unknown":
        request.getfixturevalue("unknown_device")
    experts = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    found = slot_of(long_steps(folder, experts))
    assert "split auto: no layer with experts, layer_not_recognised: kernels of experts leave no SMs" in vllm_log.text
    assert found.long_ranges == ((513, 8192),) and not found.tried and found.layer is None
    assert not slot_of(long_steps(folder)).engine.experts


def test_an_internal_error_leaves_the_configuration_and_warns_once(
    folder: Path, on: None, monkeypatch: pytest.MonkeyPatch, vllm_log: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr("tw_compile.hosts.vllm.plan.range_endpoints", broken)
    config = engine_config(folder)
    assert slot_of(config) is None and vllm_log.text.count("on purpose") == 1
    monkeypatch.setenv("TW_COMPILE_STRICT", "1")
    with pytest.raises(RuntimeError, match="on purpose"):
        engine_config(folder)


@pytest.fixture
def host_operators() -> Iterator[Any]:
    """Operators of vLLM's that are registered only beside libraries, or for devices, that are not here."""
    with torch.library._scoped_library("vllm", "FRAGMENT") as library:
        for name in ("gdn_attention_core_tw", "flashinfer_trtllm_fused_allreduce_norm"):
            if not hasattr(torch.ops.vllm, name):
                library.define(f"{name}(Tensor(a!) x) -> ()")
        yield torch.ops.vllm


def piece(operator: Any, *, functionalized: bool) -> fx.Graph:
    """An all_reduce that could be fused, and a call of ``operator``."""
    b = GraphBuilder()
    x, other, weight = b.input(6, 8), b.input(6, 8), b.input(8)
    stream = b.call(torch.ops.vllm.all_reduce.default, x, "tp:0")
    normed = b.call(torch.ops.vllm_ir.rms_norm.default, stream, weight, 1e-5)
    if functionalized:
        b.graph.call_function(torch.ops.higher_order.auto_functionalized, (operator,), {"x": other})
    else:
        b.graph.call_function(operator, (other,))
    return b.finish(normed, stream)


@pytest.mark.parametrize("functionalized", [False, True])
def test_a_graph_that_keeps_a_state_is_fused_and_not_split(
    groups: Any, host_operators: Any, functionalized: bool
) -> None:
    """Also where nothing says so but one of its operators, as in vLLM's one graph of a model."""
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.config.utils import Range

    graph = piece(host_operators.gdn_attention_core_tw.default, functionalized=functionalized)
    with pass_context(Range(1, 8)), tw_compile.collect_reports() as reports:
        tw_compile.vllm_pass(graph)
    (report,) = reports
    assert report.counts["fused"] == report.counts["all_reduce"] == 1 and report.tokens == (1, 8)
    assert report.split.reason == "state_space" and "vllm::gdn_attention_core_tw" in report.split.detail


def test_what_flashinfer_took_is_counted(groups: Any, host_operators: Any, vllm_log: pytest.LogCaptureFixture) -> None:
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.config.utils import Range

    taken = host_operators.flashinfer_trtllm_fused_allreduce_norm.default
    with pass_context(Range(1, 8)), tw_compile.collect_reports() as reports:
        tw_compile.vllm_pass(piece(taken, functionalized=True))
    assert reports[0].fused_by_host == 1 and reports[0].counts["fused"] == 1
    assert "a piece for 1-8 tokens, 1 of 1 all_reduces fused, 1 fused by FlashInfer" in vllm_log.text


def child(folder: Path, code: str) -> list[str]:
    """What a new Python prints, prepared as this one, without plugins but the fake platform."""
    (folder / "node").mkdir(parents=True)
    start = f"import fake_vllm, pathlib; fake_vllm.prepare(pathlib.Path({str(folder / 'node')!r}))\n"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "VLLM_PLUGINS": "tw_fake"}
    command = [sys.executable, "-c", start + code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    return result.stdout.splitlines()[-1].split()


def test_a_pass_named_before_vllm_is_imported_reaches_a_worker(tmp_path: Path) -> None:
    model = tmp_path / "front_end" / "node" / "model"
    front_end = f"""
import pickle, sys, tw_compile
assert "vllm" not in sys.modules
from vllm.engine.arg_utils import EngineArgs
slot = "post_grad_custom_post_pass"
args = EngineArgs(model={str(model)!r}, compilation_config={{"inductor_passes": {{slot: "tw_compile.vllm_pass"}}}})
found = args.compilation_config.inductor_compile_config[slot]
print(found.uuid(), pickle.dumps(found).hex())
"""
    uuid, pickled = child(tmp_path / "front_end", front_end)
    worker = f"""
import pickle, torch
found = pickle.loads(bytes.fromhex({pickled!r}))
print(found.uuid(), torch.ops.tw_compile.all_reduce_rms_norm_start.default)
"""
    assert child(tmp_path / "worker", worker) == [uuid, "tw_compile.all_reduce_rms_norm_start.default"]


def test_zero_switches_a_named_pass_off(groups: Any, host_operators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.config.utils import Range

    on = tw_compile.vllm_pass.uuid()
    monkeypatch.setenv("TW_COMPILE", "0")
    graph = piece(host_operators.flashinfer_trtllm_fused_allreduce_norm.default, functionalized=True)
    text = str(graph)
    with pass_context(Range(1, 8)), tw_compile.collect_reports() as reports:
        tw_compile.vllm_pass(graph)
    assert not reports and str(graph) == text
    assert tw_compile.vllm_pass.uuid() != on  # else vLLM's caches give code that the pass has rewritten


def wrapper_of(config: Any, log: list[str]) -> Any:
    """What executors call: a wrapper of a worker, without vLLM's start of one."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrapper = object.__new__(WorkerWrapperBase)
    wrapper.vllm_config = config
    wrapper.worker = SimpleNamespace(
        load_model=lambda *, load_dummy_weights=False: log.append(f"load {load_dummy_weights}"), shutdown=lambda: None
    )
    return wrapper


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("asked", [True, False])
def test_a_node_is_measured_when_the_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    from tw_compile.hosts.vllm import measuring

    log: list[str] = []
    ways.tried_ranges.append(ways.Tried(1, 2))
    monkeypatch.setattr(measuring, "load", lambda name: lambda config: log.append(f"{name} {config.calibrate}"))
    options = {"tw_compile": {"calibrate": "stored"}} if asked else {}
    wrapper_of(engine_config(folder, additional_config=options), log).load_model(load_dummy_weights=True)
    measured = "tw_compile.tuning.calibrate:measure_or_use_stored stored"
    assert log == ["load True", *([measured] if asked else [])]
    assert not ways.tried_ranges  # that was of another model


@pytest.mark.usefixtures("groups")
def test_both_ways_are_timed_when_the_worker_has_warmed_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = wrapper_of(engine_config(folder), [])
    wrapper.worker.compile_or_warm_up_model = lambda: "seconds"
    without_passes = SimpleNamespace(inductor_compile_config={})
    wrapper.worker.vllm_config = SimpleNamespace(compilation_config=without_passes)
    seen: list[Any] = []
    monkeypatch.setattr(ways, "choose_ways", seen.append)
    monkeypatch.setattr(ways, "of_models", [])
    assert wrapper.compile_or_warm_up_model() == "seconds" and seen == [wrapper.worker]


@pytest.mark.usefixtures("groups", "on")
def test_a_node_is_not_measured_where_others_have_ranks_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of pipeline or data parallelism need not load their models at the same time, or at all."""
    from tw_compile.hosts.vllm import measuring

    log: list[str] = []
    monkeypatch.setattr(measuring, "load", lambda name: lambda config: log.append(name))
    config = engine_config(folder)
    config.parallel_config.tensor_parallel_size = 1
    wrapper_of(config, log).load_model()
    assert log == ["load False"]


@pytest.mark.usefixtures("groups", "on")
def test_an_error_while_measuring_costs_one_line_but_a_dead_rank_ends_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, vllm_log: pytest.LogCaptureFixture
) -> None:
    from tw_compile.hosts.vllm import measuring

    def failing(error: Exception) -> Any:
        def measure(config: Any) -> None:
            raise error

        return lambda name: measure

    config = engine_config(folder)
    vllm_log.clear()
    monkeypatch.setattr(measuring, "load", failing(OSError("no space")))
    wrapper_of(config, []).load_model()
    assert vllm_log.messages == ["tw_compile: this node is not measured: OSError: no space"]
    monkeypatch.setattr(measuring, "load", failing(RuntimeError("rank 1 died")))
    with pytest.raises(RuntimeError, match="rank 1 died"):
        wrapper_of(config, []).load_model()


def test_steps_are_timed_where_all_ranks_are_of_one_group(folder: Path) -> None:
    from tw_compile.hosts.vllm.engine import engine_of

    config = engine_config(folder)
    assert engine_of(config).times_steps
    for more in ("data_parallel_size", "world_size"):
        parallel = copy.copy(config.parallel_config)
        setattr(parallel, more, 2 * getattr(parallel, more))
        assert not engine_of(SimpleNamespace(**{**vars(config), "parallel_config": parallel})).times_steps
