"""Residuals that stay sharded between the pieces of a Llama of vLLM's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from fake_vllm import LAYERS, WORLD_SIZE, engine_config, llama, middle_pieces
from one_rank import OneRank, one_rank  # noqa: F401

from tw_compile.graph.predicates import operator_name
from tw_compile.kernels.all_reduce_rms_norm import transport

pytestmark = pytest.mark.usefixtures("groups", "one_rank", "cold")

COUNTS = (1024, 601, 513, 512, 3)
LONGER = {"max_num_batched_tokens": 1024, "max_model_len": 1024, "hf_overrides": {"max_position_embeddings": 1024}}
HANDED = ("take_residual", "own_rows", "spread_rows", "pass_residual")


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, int], list[int]]]:
    """For each piece that is compiled its range, and how often it has each of ``HANDED``."""
    from vllm.compilation.passes.inductor_pass import get_pass_context

    from tw_compile.vllm.inductor_pass import VllmPass

    taken: list[tuple[tuple[int, int], list[int]]] = []
    original: Callable[..., None] = VllmPass.__call__

    def call(self: VllmPass, graph: fx.Graph) -> None:
        original(self, graph)
        names = [operator_name(node) for node in graph.nodes]
        tokens = get_pass_context().compile_range
        taken.append(((tokens.start, tokens.end), [names.count(f"tw_compile::{one}") for one in HANDED]))

    monkeypatch.setattr(VllmPass, "__call__", call)
    return taken


def engine(folder: Path, flashinfer: bool = False, **options: Any) -> Any:
    compilation = {"pass_config": {"fuse_allreduce_rms": flashinfer}}
    additional = {"tw_compile": {"strict": True, **options}}
    return engine_config(folder, compilation=compilation, additional_config=additional, **LONGER)


def run(config: Any) -> list[torch.Tensor]:
    with llama(config) as model:
        return [model(count) for count in COUNTS]


@pytest.fixture(scope="module")
def whole(folder: Path, groups: Any) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(transport._instances, "gloo", OneRank())
        return run(engine(folder))


def assert_same(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Of large steps the rank's own rows: there are no other ranks to know theirs."""
    for count, one, other in zip(COUNTS, outputs, expected, strict=True):
        rows = -(-count // WORLD_SIZE) if count > 512 else count
        torch.testing.assert_close(one[:rows], other[:rows], rtol=0, atol=0)
        assert bool(one[rows:].isnan().all())


def test_residuals_stay_sharded_in_large_steps(
    folder: Path, whole: list[torch.Tensor], pieces: Any, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    config = engine(folder, vllm_sharded_residuals=True)
    assert config.compilation_config.compile_ranges_endpoints == [512, 1024]
    with caplog.at_level(logging.INFO, logger="vllm.tw_compile"):
        outputs = run(config)
    assert f"{LAYERS} residuals stay sharded between pieces from 513 tokens on" in caplog.text
    small = [counts for tokens, counts in pieces if tokens == (1, 512)]
    large = [counts for tokens, counts in pieces if tokens == (513, 1024)]
    assert small == [[0, 0, 0, 0]] * len(small) and len(small) == len(large)
    assert large == [[0, 0, 1, 0], *[[0, 1, 1, 0]] * middle_pieces(), [0, 1, 0, 0]]
    assert_same(outputs, whole)
    compiled = len(pieces)
    assert_same(run(engine(folder, vllm_sharded_residuals=True)), whole)
    assert len(pieces) == compiled  # a warm start


def test_a_piece_that_is_not_fused_gathers_what_the_others_keep(
    folder: Path, pieces: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last piece fails to be rewritten; its graph is left with what makes it right."""
    from tw_compile.passes.fusion.rewrite import Rewriter

    original = Rewriter.insert

    def insert(self: Rewriter, *arguments: Any) -> None:
        if any(one.op == "output" and len(one.all_input_nodes) == 1 for one in self.graph.nodes):
            raise RuntimeError("on purpose")
        original(self, *arguments)

    monkeypatch.setattr(Rewriter, "insert", insert)
    with llama(engine(folder, vllm_sharded_residuals=True, strict=False)) as model:
        model(1024)  # of a fake group, so what was gathered means nothing
    assert [1, 0, 0, 0] in [counts for tokens, counts in pieces if tokens == (513, 1024)]


@pytest.mark.parametrize(
    "options",
    [
        {"fuse": False},
        {"fuse_max_bytes": 1 << 20},
        {"split": "64"},
        {"vllm_sharded_residuals": False},
        {"flashinfer": True},
    ],
)
def test_whole_residuals_where_not_all_is_fused_or_tokens_are_split(folder: Path, options: dict[str, Any]) -> None:
    config = engine(folder, **{"vllm_sharded_residuals": True, **options})
    inside = config.compilation_config.inductor_compile_config["post_grad_custom_post_pass"]
    assert inside.sharded_from is None
