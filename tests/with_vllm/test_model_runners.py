"""Steps that the start times run in both of vLLM's model runners, as its own warm-up runs them: with attention."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tw_compile.hosts.vllm import ways


def worker_of(runner: Any, longest: int = 4096) -> Any:
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=longest))
    return SimpleNamespace(model_runner=runner, vllm_config=config)


@pytest.mark.parametrize("longest", [256, 4096])
def test_the_first_runner_knows_the_options(longest: int) -> None:
    """A row of a block table has room for the pages of ``longest`` keys, and attention reads as many as it is told."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner: Any = object.__new__(GPUModelRunner)
    with mock.patch.object(GPUModelRunner, "_dummy_run", autospec=True) as dummy_run:
        ways.steps_of(worker_of(runner, longest))(700)
    ((given, tokens), options) = dummy_run.call_args
    assert (given, tokens) == (runner, 700)
    assert options["force_attention"] and options["skip_eplb"] and options["cudagraph_runtime_mode"].name == "NONE"
    assert options["profile_seq_lens"] == min(700, longest)


def test_the_first_runner_runs_a_step_as_it_is_served() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner: Any = object.__new__(GPUModelRunner)
    with mock.patch.object(GPUModelRunner, "_dummy_run", autospec=True) as dummy_run:
        ways.steps_of(worker_of(runner), as_served=True)(64)
    ((_, tokens), options) = dummy_run.call_args
    assert tokens == 64 and options["force_attention"] and options["cudagraph_runtime_mode"] is None


@pytest.mark.parametrize("tokens", [700, 701, 256, 65, 64, 1])
def test_the_second_runner_runs_all_tokens_with_attention(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import get_uniform_token_count
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner: Any = object.__new__(GPUModelRunner)
    steps: list[tuple[int, dict[str, Any]]] = []
    for name, value in {
        "max_num_reqs": 256,
        "kv_connector": SimpleNamespace(set_disabled=lambda disabled: None),
        "is_first_pp_rank": True,
        "is_last_pp_rank": False,
        "lora_config": None,
    }.items():
        setattr(runner, name, value)

    def execute_model(self: Any, scheduled: Any, **options: Any) -> None:
        of_requests = [*scheduled.num_scheduled_tokens.values()]
        assert sum(of_requests) == scheduled.total_num_scheduled_tokens
        if tokens > 1:  # else vLLM runs a graph of a whole step
            assert get_uniform_token_count(len(of_requests), tokens, max(of_requests)) != 1
        steps.append((scheduled.total_num_scheduled_tokens, options))

    monkeypatch.setattr(GPUModelRunner, "execute_model", execute_model)
    ways.steps_of(worker_of(runner))(tokens)
    ((ran, options),) = steps
    assert ran == tokens and runner.max_num_reqs == 256
    assert options["dummy_run"] and not options["skip_attn_for_dummy_run"] and not options["is_profile"]
    assert "cudagraph_runtime_mode" not in inspect.signature(GPUModelRunner._dummy_run).parameters
