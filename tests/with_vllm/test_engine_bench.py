"""What ``tw-compile bench vllm`` takes for granted of vLLM: arguments, times of requests, the worker's parts."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import engine_config, llama

from tw_compile.benchmark.vllm.run import write_model
from tw_compile.benchmark.vllm.spec import VARIANTS, VllmSpec, engines

SPEC = VllmSpec("tiny-llama", 2, "bfloat16", (128,), (1, 4), prompts=2, prompt_tokens=20, requests=3, decode_tokens=6)


@pytest.mark.parametrize("variant", [one.label for one in VARIANTS])
def test_vllm_takes_the_arguments_and_has_the_passes_where_it_should(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from tw_compile.vllm.inductor_pass import VllmPass

    write_model(SPEC, tmp_path)
    engine = next(one for one in engines(SPEC, str(tmp_path)) if one.variant.label == variant)
    if engine.variant.kind == "ours":  # TW_COMPILE=0 would keep the plugin out of this process for good
        for name, value in engine.variant.environment.items():
            monkeypatch.setenv(name, value)
    config = EngineArgs(**engine.arguments, distributed_executor_backend="external_launcher").create_engine_config()
    assert config.scheduler_config.max_num_batched_tokens == 128
    assert config.parallel_config.disable_custom_all_reduce == variant.startswith("off-")
    inside = config.compilation_config.inductor_compile_config.get("post_grad_custom_post_pass")
    assert isinstance(inside, VllmPass) == (engine.variant.kind == "ours")
    if engine.variant.kind == "ours":
        assert inside.config.split == {"fuse": "off", "fuse+split": "auto"}[variant]


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


def test_the_worker_has_what_the_extension_reads_and_nothing_of_its_names(folder: Path) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from tw_compile.benchmark.vllm.worker import WorkerExtension

    assert callable(Worker.get_model)
    own = {name for name in dir(WorkerExtension) if not name.startswith("__")}
    assert own == {"tw_compile_randomise", "tw_compile_facts"} and not own & set(dir(Worker))


@pytest.mark.usefixtures("groups")
def test_random_weights_differ_between_ranks_and_norms_do_not(folder: Path) -> None:
    from tw_compile.benchmark.vllm.worker import STD, randomise

    found: list[dict[str, torch.Tensor]] = []
    with llama(engine_config(folder)) as run:
        model = _model_of(run)
        for rank, seed in ((0, 0), (1, 0), (0, 0), (0, 1)):
            randomise(model, rank, seed)
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


def test_a_layer_that_all_ranks_hold_whole_gets_the_same_weights_on_all(folder: Path, groups: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear

    from tw_compile.benchmark.vllm.worker import randomise

    with set_current_vllm_config(engine_config(folder)):
        router = ReplicatedLinear(8, 4, bias=True)
    randomise(router, 0, 0)
    expected = router.weight.clone()
    randomise(router, 1, 0)
    assert torch.equal(router.weight, expected) and not router.bias.any()


def _model_of(run: Any) -> torch.nn.Module:
    """The model that ``llama`` closes over."""
    return inspect.getclosurevars(run).nonlocals["model"]
