"""What ``tw-compile bench vllm`` takes for granted of vLLM: arguments, times of requests, the worker's parts."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
import torch
from fake_vllm import MAX_TOKENS, engine_config, llama

from tw_compile.benchmark.vllm.run import write_model
from tw_compile.benchmark.vllm.spec import VARIANTS, VllmSpec, engines, job
from tw_compile.benchmark.vllm.traces import accuracy_trace

SPEC = VllmSpec("tiny-llama", 2, "bfloat16", (128,), (1, 4), prompts=2, prompt_tokens=20, requests=3, decode_tokens=6)


@pytest.mark.parametrize("variant", [one.label for one in VARIANTS])
def test_vllm_takes_the_arguments_and_has_the_passes_where_it_should(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from tw_compile.hosts.vllm.inductor_pass import VllmPass

    write_model(SPEC, tmp_path)
    (engine,) = engines(replace(SPEC, only=(variant,)), str(tmp_path))
    if engine.variant.kind == "ours":  # TW_COMPILE=0 would keep the plugin out of this process for good
        for name, value in engine.variant.environment.items():
            monkeypatch.setenv(name, value)
    config = EngineArgs(**engine.arguments, distributed_executor_backend="external_launcher").create_engine_config()
    assert config.scheduler_config.max_num_batched_tokens == 128
    assert config.parallel_config.disable_custom_all_reduce == variant.startswith("off-nccl")
    fuses = config.compilation_config.pass_config.fuse_allreduce_rms  # by FlashInfer, which is installed here
    assert fuses == (engine.variant.kind != "control")
    inside = config.compilation_config.inductor_compile_config.get("post_grad_custom_post_pass")
    assert isinstance(inside, VllmPass) == (engine.variant.kind == "ours")
    if engine.variant.kind == "ours":
        assert inside.config.split == ("auto" if "split" in variant else "off")
        assert inside.config.vllm_layer_groups == (0 if "pieces" in variant else 1)


def test_the_reference_computes_in_ieee_float32(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.ops import triton_unified_attention

    write_model(SPEC, tmp_path)
    spec = replace(SPEC, engine={"compilation_config": {"cudagraph_capture_sizes": [1, 8]}})
    engine = next(one for one in engines(spec, str(tmp_path)) if one.variant.kind == "reference")
    for name, value in engine.variant.environment.items():
        monkeypatch.setenv(name, value)
    config = EngineArgs(**engine.arguments, distributed_executor_backend="external_launcher").create_engine_config()
    assert config.model_config.dtype == torch.float32 and config.model_config.enforce_eager
    assert config.attention_config.backend == AttentionBackendEnum.TRITON_ATTN
    assert torch.float32 in AttentionBackendEnum.TRITON_ATTN.get_class().supported_dtypes
    assert config.kernel_config.ir_op_priority.fused_add_rms_norm[0] == "native"
    assert "none" in config.compilation_config.custom_ops and not config.compilation_config.cudagraph_capture_sizes
    assert envs.VLLM_FLOAT32_MATMUL_PRECISION == "highest" and triton.knobs.language.fp32_default == "ieee"
    dots = inspect.getsource(triton_unified_attention)
    assert "tl.dot(" in dots and "input_precision" not in dots and "allow_tf32" not in dots


def test_log_probabilities_of_a_prompt_are_where_they_are_read(folder: Path) -> None:
    from types import SimpleNamespace

    from vllm import SamplingParams
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsTensors

    from tw_compile.benchmark.vllm.engine import logprobs

    given = LogprobsTensors(
        torch.tensor([[7], [5]]), torch.tensor([[-0.5], [-2.0]]), selected_token_ranks=torch.tensor([1, 9])
    )
    request: Any = SimpleNamespace(sampling_params=SamplingParams(prompt_logprobs=0, detokenize=False))
    processor = LogprobsProcessor.from_new_request(None, request)
    processor._update_prompt_logprobs(given)
    output = SimpleNamespace(prompt_logprobs=processor.prompt_logprobs)
    assert logprobs([output], [[3, 7, 5]]) == [-0.5, -2.0]


def test_prompts_of_accuracy_are_one_step_of_vllms_scheduler(folder: Path) -> None:
    from vllm import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    trace = accuracy_trace(700)
    config = engine_config(folder, max_num_batched_tokens=700, max_model_len=trace.longest, enable_prefix_caching=False)
    config.cache_config.num_gpu_blocks = 100
    heads = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], heads)])
    scheduler = Scheduler(config, cache, StructuredOutputManager(config), block_size=16)
    for number, length in enumerate(trace.prompts):
        asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        scheduler.add_request(Request(str(number), [1] * length, asked, None))
    step = scheduler.schedule()
    assert list(step.num_scheduled_tokens.values()) == list(trace.prompts) and step.total_num_scheduled_tokens == 700


def test_requests_have_the_times_that_are_read(folder: Path) -> None:
    from vllm import LLM
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import RequestStateStats

    assert {"first_token_ts", "last_token_ts", "num_generation_tokens"} <= {
        one.name for one in fields(RequestStateStats)
    }
    assert "time.monotonic()" in inspect.getsource(EngineCoreOutputs)  # the clock that the benchmark reads, too
    for name in ("sleep", "enqueue", "wake_up", "wait_for_completion", "collective_rpc"):
        assert callable(getattr(LLM, name))


def test_a_worker_without_all_reduces_goes_on_with_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of vLLM's layers sum by this function."""
    from vllm.distributed import communication_op, parallel_state, tensor_model_parallel_all_reduce

    from tw_compile.benchmark.vllm.spec import EXTENSION_WITHOUT_ALL_REDUCES
    from tw_compile.benchmark.vllm.worker import WorkerExtension

    def rows(count: int) -> torch.Tensor:
        return tensor_model_parallel_all_reduce(torch.ones(count, 4) + 1)

    coordinator = parallel_state.GroupCoordinator
    group = object.__new__(coordinator)
    group.world_size, group.use_custom_op_call = 2, False
    monkeypatch.setattr(communication_op, "get_tp_group", lambda: group)
    monkeypatch.setattr(coordinator, "_all_reduce_out_place", lambda self, x: x * 10)
    monkeypatch.setattr(coordinator, "all_reduce", coordinator.all_reduce)  # is what it was at the end of the test
    assert torch.equal(rows(3), torch.full((3, 4), 20.0))
    module, name = EXTENSION_WITHOUT_ALL_REDUCES.rsplit(".", 1)
    monkeypatch.delitem(sys.modules, module, raising=False)
    extension = getattr(importlib.import_module(module), name)
    assert issubclass(extension, WorkerExtension)
    assert torch.equal(torch.compile(rows, backend="eager", fullgraph=True)(3), torch.full((3, 4), 2.0))


def test_the_worker_has_what_the_extension_reads_and_nothing_of_its_names(folder: Path) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from tw_compile.benchmark.vllm.worker import WorkerExtension

    assert callable(Worker.get_model)
    own = {name for name in dir(WorkerExtension) if not name.startswith("__")}
    assert own == {"tw_compile_randomise", "tw_compile_facts", "tw_compile_measure"} and not own & set(dir(Worker))


@pytest.mark.parametrize(
    ("given", "workspace", "expected"),
    [({}, "made", 64 * 2**20), ({}, None, 0), ({"fuse_allreduce_rms": False}, "made", 0)],
    ids=["on", "not-set-up", "off"],
)
def test_a_worker_says_up_to_which_size_flashinfer_fuses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], workspace: Any, expected: int
) -> None:
    from tw_compile.benchmark.vllm.worker import communicator, flashinfer_fusion_bytes

    assert isinstance(communicator.fi_ar_available, bool)
    monkeypatch.setattr(communicator, "_fi_ar_workspace", workspace)
    assert flashinfer_fusion_bytes(engine_config(folder, compilation={"pass_config": given})) == expected


@pytest.mark.usefixtures("groups")
def test_random_weights_differ_between_ranks_and_norms_do_not(folder: Path) -> None:
    from tw_compile.benchmark.vllm.worker import STD, randomise

    found: list[dict[str, torch.Tensor]] = []
    with llama(engine_config(folder)) as run:
        model = _model_of(run)
        for rank, seed in ((0, 0), (1, 0), (0, 0), (0, 1)):
            randomise(model, rank, seed, torch.bfloat16)
            found.append({name: value.clone() for name, value in model.named_parameters()})
    first, other_rank, again, other_seed = found
    assert any("norm" in name for name in first) and any("down_proj" in name for name in first)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if "norm" in name:
            assert torch.equal(value, torch.ones_like(value)) and torch.equal(value, other_rank[name])
        else:
            assert abs(value.float().std().item() - STD) < 0.1 * STD
            assert not torch.equal(value, other_rank[name]) and not torch.equal(value, other_seed[name])


@pytest.mark.usefixtures("groups")
def test_random_weights_are_the_same_in_float32(folder: Path) -> None:
    from tw_compile.benchmark.vllm.worker import randomise

    found: dict[str, dict[str, torch.Tensor]] = {}
    for dtype in ("bfloat16", "float32"):
        with llama(engine_config(folder, dtype=dtype)) as run:
            model = _model_of(run)
            randomise(model, 1, 0, torch.bfloat16)
            found[dtype] = {name: value.clone() for name, value in model.named_parameters()}
    assert {value.dtype for value in found["float32"].values()} == {torch.float32}
    assert list(found["float32"]) == list(found["bfloat16"])
    for name, value in found["bfloat16"].items():
        assert value.dtype == torch.bfloat16 and torch.equal(value.float(), found["float32"][name])


def test_a_layer_that_all_ranks_hold_whole_gets_the_same_weights_on_all(folder: Path, groups: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear

    from tw_compile.benchmark.vllm.worker import randomise

    with set_current_vllm_config(engine_config(folder)):
        router = ReplicatedLinear(8, 4, bias=True)
    randomise(router, 0, 0, torch.float32)
    expected = router.weight.clone()
    randomise(router, 1, 0, torch.float32)
    assert torch.equal(router.weight, expected) and not router.bias.any()


def test_float8_weights_have_the_deviation_of_others_and_differ_between_ranks(folder: Path) -> None:
    from tw_compile.benchmark.vllm.worker import STD, randomise

    layer = torch.nn.Module()
    for name, value in (
        ("weight", torch.zeros(256, 128).to(torch.float8_e4m3fn)),
        ("weight_scale_inv", torch.zeros(2, 1)),
        ("weight_scale", torch.zeros(256, 1)),
        ("input_scale", torch.zeros(1)),
        ("packed", torch.full((4, 4), 3, dtype=torch.int32)),
    ):
        layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    randomise(layer, 0, 0, torch.bfloat16)
    weight = layer.weight.float() * layer.weight_scale
    assert abs(weight.std().item() - STD) < 0.1 * STD and weight.isfinite().all()
    assert torch.equal(layer.weight_scale_inv, torch.full((2, 1), layer.weight_scale[0].item()))
    assert layer.input_scale.item() == 1.0 and torch.equal(layer.packed, torch.full((4, 4), 3, dtype=torch.int32))
    randomise(layer, 1, 0, torch.bfloat16)
    assert not torch.equal(layer.weight.float() * layer.weight_scale, weight)


PER_TOKEN = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
_CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
QUANTISED: dict[str, dict[str, Any]] = {
    "per token": PER_TOKEN,
    "by blocks": PER_TOKEN | {"weight_block_size": [128, 128]},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head", "model.layers.0.self_attn.qkv_proj"],
        "config_groups": {"all": {"targets": ["Linear"], "weights": _CHANNELS, "input_activations": _TOKENS}},
    },
}


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("quantisation", QUANTISED)
def test_the_reference_of_a_float8_checkpoint_has_its_weights_and_no_quantisation(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantisation: str
) -> None:
    """The hidden size is that of all heads, so the weights of ``o_proj`` and of ``down_proj`` are square on each rank."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    from tw_compile.benchmark.vllm.worker import randomise

    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")  # it needs a GPU
    sizes = {"hidden_size": 256, "head_dim": 128, "intermediate_size": 512, "max_position_embeddings": 4096}
    model = fake_vllm.MODEL | sizes | {"quantization_config": QUANTISED[quantisation]}
    (tmp_path / "given.json").write_text(json.dumps(model))
    spec = replace(SPEC, model=str(tmp_path / "given.json"), only=("off", "reference"), layers=1)
    written = write_model(spec, tmp_path / "model")
    found: list[dict[str, torch.Tensor]] = []
    for engine in engines(spec, str(tmp_path / "model")):
        config = EngineArgs(**engine.arguments, distributed_executor_backend="external_launcher").create_engine_config()
        assert (config.quant_config is None) == (engine.variant.kind == "reference")
        default = torch.get_default_dtype()
        torch.set_default_dtype(config.model_config.dtype)
        try:
            with set_current_vllm_config(config), torch.device("cpu"):
                loaded = initialize_model(config)
                process_weights_after_loading(loaded, config.model_config, torch.device("cpu"))
        finally:
            torch.set_default_dtype(default)
        randomise(loaded, 1, 0, getattr(torch, job(engine, spec, written)["dtype"]))
        found.append(dict(loaded.named_parameters()))
    off, reference = found
    assert {value.dtype for value in reference.values()} == {torch.float32}
    codes = {name for name, value in off.items() if value.dtype == torch.float8_e4m3fn}
    layers = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}
    layers -= {"self_attn.qkv_proj"} if quantisation == "compressed" else set()
    assert codes == {f"model.layers.0.{layer}.weight" for layer in layers}
    transposed = {name for name in codes if off[name].stride(0) == 1}
    assert transposed == (set() if quantisation == "by blocks" else codes)
    for name, value in reference.items():
        if name in codes:
            scale = off.get(f"{name}_scale", off.get(f"{name}_scale_inv")).unique()
            own = (off[name].t() if name in transposed else off[name]).float() * scale
            assert scale.numel() == 1 and own.std() > 0
        else:
            own = off[name].float()
        assert torch.equal(own, value), name


@pytest.mark.usefixtures("groups", "float8_kernels")
def test_a_float8_model_is_as_far_from_its_float32_reference_as_float8_rounds(folder: Path) -> None:
    from tw_compile.benchmark.vllm.worker import randomise

    found: list[torch.Tensor] = []
    for dtype, quantisation, seed in (("float32", None, 0), ("bfloat16", PER_TOKEN, 0), ("float32", None, 1)):
        overrides = {"hf_overrides": {"quantization_config": quantisation}, "enforce_eager": True}
        config = engine_config(folder, dtype=dtype, compilation={"custom_ops": ["none"]}, **overrides)
        with llama(config) as run:
            randomise(_model_of(run), 0, seed, torch.float8_e4m3fn)
            found.append(run(MAX_TOKENS).float())
    exact, quantised, other = found
    error, unrelated = ((value - exact).norm() / exact.norm() for value in (quantised, other))
    assert 0.01 < error < 0.1 and unrelated > 1.0, (error, unrelated)


def test_a_float8_weight_that_a_kernel_has_repacked_is_an_error_that_names_it(folder: Path, groups: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import RowParallelLinear

    from tw_compile.benchmark.vllm.worker import randomise

    with set_current_vllm_config(engine_config(folder)):
        layer = RowParallelLinear(64, 48, bias=False)  # 32 columns a rank
    model = torch.nn.ModuleDict({"down": layer})
    for wrong in (torch.zeros(16, 96), torch.zeros(48, 64), torch.zeros(48, 32, dtype=torch.int32)):
        layer.weight = torch.nn.Parameter(wrong, requires_grad=False)
        with pytest.raises(ValueError, match=r"down\.weight: expected a weight of \[48, 32\].* repacked"):
            randomise(model, 0, 0, torch.float8_e4m3fn)
    layer.weight = torch.nn.Parameter(torch.zeros(48, 32).to(torch.float8_e4m3fn).t(), requires_grad=False)
    randomise(model, 0, 0, torch.float8_e4m3fn)
    assert layer.weight.float().std() > 0


def _model_of(run: Any) -> torch.nn.Module:
    """The model that ``llama`` closes over."""
    return inspect.getclosurevars(run).nonlocals["model"]
