"""Steps are not padded, and so not captured, if something makes one scale of all their tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.fx as fx

from tw_compile.config import Config
from tw_compile.hosts.vllm.one_scale import scale_of_all_tokens
from tw_compile.hosts.vllm.plan import Engine

ENGINE = Engine(2, 4096, "bfloat16", 8192, captured_tokens=512)


def graph_of(how: str) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    if how == "largest":
        graph.call_method("max", (graph.call_method("abs", (x,)),))
    else:
        graph.call_method("amax", (x, -1))
    graph.output(x)
    return graph


@pytest.mark.parametrize(("how", "found"), [("largest", "max"), ("of each token", "")])
def test_a_largest_value_of_all_tokens_is_found(how: str, found: str) -> None:
    assert scale_of_all_tokens(graph_of(how)) == found


def test_the_operator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tw_compile.hosts.vllm.one_scale.called_operator", lambda node: "_C::dynamic_scaled_fp8_quant")
    assert scale_of_all_tokens(graph_of("of each token")) == "_C::dynamic_scaled_fp8_quant"


@pytest.mark.parametrize(("how", "expected"), [("largest", (None, False)), ("of each token", ((33, 512), True))])
def test_such_a_model_has_no_graphs_of_ours(
    how: str, expected: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tw_compile.hosts.vllm import inductor_pass

    given: list[Any] = []
    monkeypatch.setattr(inductor_pass, "add_long_steps", lambda *args: given.append(args[-2:]))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    inside = inductor_pass.VllmPass(Config(), engine=ENGINE, long_ranges=((513, 8192),))
    with caplog.at_level(logging.INFO, logger="vllm.tw_compile"):
        inside.behind_split(SimpleNamespace(is_encoder=False), fx.GraphModule({}, graph_of(how)), [], None)
    assert given == [expected]
    assert ("no steps as CUDA graphs: max makes one scale of all tokens" in caplog.text) is (how == "largest")
