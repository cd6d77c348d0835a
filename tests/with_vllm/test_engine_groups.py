"""Long steps of a Llama of vLLM's by groups of layers, each kind of which is compiled once; short steps as before."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.fx as fx
from fake_vllm import HIDDEN, LAYERS, MAX_TOKENS, engine_config, llama
from one_rank import one_rank  # noqa: F401

from tw_compile import collect_reports
from tw_compile.graph.predicates import operator_name
from tw_compile.hosts.vllm import groups as groups_of_layers
from tw_compile.kernels.collective.seam import enter_layers, leave_layers, leave_off

pytestmark = pytest.mark.usefixtures("groups", "one_rank", "cold", "wide_residuals")


COUNTS = (MAX_TOKENS, 24, 23, 3)


@pytest.fixture(autouse=True)
def short_steps_are_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tw_compile.hosts.vllm.plan.MOST_SHORT_TOKENS", 23)


def engine(folder: Path, compilation: dict[str, Any] | None = None, **options: Any) -> Any:
    settings = {"pass_config": {"fuse_allreduce_rms": False}, **(compilation or {})}
    return engine_config(folder, compilation=settings, additional_config={"tw_compile": {"strict": True, **options}})


def names(graph: fx.Graph) -> list[str]:
    return [operator_name(node) for node in graph.nodes]


@pytest.mark.parametrize("mega", ["0", "1"])  # 0.24 has it off, 0.33 on
@pytest.mark.parametrize("layers", [1, LAYERS])
def test_long_steps_run_in_groups_of_layers_that_are_compiled_once(
    folder: Path, graphs: list[fx.Graph], monkeypatch: pytest.MonkeyPatch, layers: int, mega: str
) -> None:
    monkeypatch.setenv("VLLM_USE_MEGA_AOT_ARTIFACT", mega)
    with llama(engine(folder, vllm_layer_groups=0)) as model:
        pieces = [model(count) for count in COUNTS]
    graphs.clear()
    with collect_reports() as reports, llama(engine(folder, vllm_layer_groups=layers)) as model:
        found = [model(count) for count in COUNTS]
    *pieces_compiled, head, group = [report.tokens for report in reports]
    assert set(pieces_compiled) == {(1, MAX_TOKENS)} and head == group == (24, MAX_TOKENS)
    assert [names(graph).count("vllm::unified_kv_cache_update") for graph in graphs[-2:]] == [0, layers]
    assert names(graphs[-1]).count("tw_compile::mm_all_reduce_rms_norm_start") == 0
    assert names(graphs[-1]).count("tw_compile::all_reduce_rms_norm_start") == 2 * layers

    by_groups = mock.Mock(side_effect=leave_off)
    monkeypatch.setattr("tw_compile.hosts.vllm.steps.leave_off", by_groups)
    with collect_reports() as again, llama(engine(folder, vllm_layer_groups=layers)) as model:
        assert all(torch.equal(model(count), one) for count, one in zip(COUNTS, found, strict=True))
    assert not again and by_groups.call_count == 2  # a warm start, of groups, too

    for count, one, other in zip(COUNTS, found, pieces, strict=True):
        close = {"rtol": 0.06, "atol": 0.06} if count >= 24 and layers > 1 else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(one, other, **close)


def test_groups_leave_each_other_the_rows_of_the_rank(folder: Path, graphs: list[fx.Graph]) -> None:
    with llama(engine(folder, vllm_layer_groups=1)) as model:
        model(MAX_TOKENS)
    (enter,) = graphs[-1].find_nodes(op="call_function", target=enter_layers)
    (leave,) = graphs[-1].find_nodes(op="call_function", target=leave_layers)
    assert enter.args[2] == torch.bfloat16 and leave.args[3] is True
    assert not any(one.op == "output" for one in leave.args[1].users)  # the residual is nobody else's


def test_groups_that_differ_return_tensors_as_usual(
    folder: Path, graphs: list[fx.Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_of_layers, "group_size", lambda layers, most: 2)  # of three layers
    with llama(engine(folder, vllm_layer_groups=2)) as model:
        found = [model(count) for count in COUNTS]
    assert [names(graph).count("vllm::unified_kv_cache_update") for graph in graphs[-3:]] == [0, 2, 1]
    assert not any("layers" in name for graph in graphs for name in names(graph) if name.startswith("tw_compile::"))
    with llama(engine(folder, vllm_layer_groups=0)) as model:
        for count, one in zip(COUNTS, found, strict=True):
            torch.testing.assert_close(one, model(count), rtol=0.06, atol=0.06)


def test_an_error_leaves_all_steps_to_vllms_pieces(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(groups_of_layers, "cut", broken)
    with llama(engine(folder, strict=False)) as model:
        found = [model(count) for count in COUNTS]
    assert "left vLLM's graph as it was: RuntimeError: on purpose" in caplog.text
    with llama(engine(folder, vllm_layer_groups=0)) as model:
        assert all(torch.equal(model(count), one) for count, one in zip(COUNTS, found, strict=True))
    with pytest.raises(RuntimeError, match="on purpose"), llama(engine(folder)) as model:
        model(MAX_TOKENS)


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        (False, f"from 24 tokens on by groups of layers in ranges that end at {MAX_TOKENS};"),
        (True, "no groups of layers, one_graph: use_inductor_graph_partition is on;"),
    ],
)
def test_the_start_says_from_where_on_steps_run_by_groups_or_why_not(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    partition: bool,
    expected: str,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="vllm.tw_compile"):
        engine(folder, {"use_inductor_graph_partition": partition})
    assert expected in caplog.text


@pytest.mark.parametrize("tokens", [HIDDEN, 2 * HIDDEN - 8])
def test_a_step_with_as_many_tokens_as_a_row_has_columns_is_like_any_other(
    folder: Path, graphs: list[fx.Graph], tokens: int
) -> None:
    """The first step that is traced has the most tokens. A size that happens to equal another one must not become it."""
    config = engine_config(
        folder,
        compilation={"pass_config": {"fuse_allreduce_rms": False}},
        additional_config={"tw_compile": {"strict": True}},
        max_num_batched_tokens=tokens,
        max_model_len=tokens,
    )
    with collect_reports() as reports, llama(config) as model:
        found = [model(count) for count in (tokens, tokens - 1, 30)]
    assert all(torch.isfinite(one).all() for one in found)
    assert {report.tokens for report in reports} >= {(24, tokens)}
    sizes = [node.meta["val"] for node in graphs[-1].find_nodes(op="placeholder")]
    assert any(isinstance(size, torch.SymInt) for size in sizes), "the groups are for one number of tokens"
