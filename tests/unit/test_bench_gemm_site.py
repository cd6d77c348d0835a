"""``bench gemm-site`` without its ranks: who takes part, what peers that keep their own rows compute, and refusals."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AutoConfig
from typer.testing import CliRunner

from tw_compile import Config
from tw_compile.benchmark.layer import sites
from tw_compile.benchmark.layer.sites import CountScatters, GemmSites, async_tp, scattered
from tw_compile.benchmark.layer.spec import WITHOUT_SITES, LayerSpec
from tw_compile.benchmark.layer.subjects import build_subject
from tw_compile.benchmark.layer.variants import variants
from tw_compile.cli.app import app
from tw_compile.harness.requests import UsageError
from tw_compile.models.config import config_from_dict
from tw_compile.models.decoder import build_decoder
from tw_compile.testing import fake_process_group
from tw_compile.testing.capture import fake_cuda

SPEC = LayerSpec("gemm-site", "tiny-llama", 2, "cuda", "float32", (8,), layers=2)
OURS = ["fused", "split", "fused+split", "fused-gemms-apart", "fused-not-fed"]
PEERS = [
    "inductor+nccl",
    "inductor+symm-one-shot",
    "inductor+symm-two-shot",
    "inductor+nccl-scattered",
    "inductor+async-tp",
]
CPU = torch.device("cpu")


def test_who_takes_part() -> None:
    assert [one.label for one in variants(SPEC, 8)] == [*OURS, *PEERS, "no-communication"]
    on_cpu = dataclasses.replace(SPEC, device="cpu")
    peers = ["inductor+gloo", "inductor+gloo-scattered"]
    assert [one.label for one in variants(on_cpu, 8)] == [*OURS, *peers, "no-communication"]
    for one in variants(SPEC, 8):
        Config(**one.config)


@pytest.mark.parametrize("family", FAMILIES)
def test_model_types_without_sites_are_known_before_they_are_built(family: str) -> None:
    with fake_process_group(1), fake_cuda():
        decoder = build_decoder(config_from_dict(FAMILIES[family]), device="cuda", dtype=torch.float32)
    if family in WITHOUT_SITES:
        with pytest.raises(UsageError, match=f"behind one norm, got {family}"):
            GemmSites(decoder)
    else:
        GemmSites(decoder)


def test_who_keeps_its_own_rows_needs_as_many_on_each_rank() -> None:
    by_label = {one.label: one for one in variants(SPEC, 8)}
    for label in ("inductor+nccl-scattered", "inductor+async-tp"):
        assert by_label[label].obstacle(8, 2**14, "bfloat16", 2) is None
        refusal = by_label[label].obstacle(7, 2**14, "bfloat16", 2)
        assert refusal == "each rank has as many rows: 7 tokens are no multiple of 2 ranks"
    assert by_label["inductor+nccl"].obstacle(7, 2**14, "bfloat16", 2) is None


def targets(graph: torch.fx.Graph) -> Counter[str]:
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function")


@pytest.mark.parametrize(
    ("make", "sums", "gathers"),
    [
        (
            scattered,
            "_c10d_functional.reduce_scatter_tensor.default",
            "_c10d_functional.all_gather_into_tensor.default",
        ),
        (async_tp, "symm_mem.fused_matmul_reduce_scatter.default", "symm_mem.fused_all_gather_matmul.default"),
    ],
)
def test_a_site_of_scattered_rows_has_one_sum_and_one_gather(make: Any, sums: str, gathers: str) -> None:
    with fake_process_group(2):
        module = make(build_subject(SPEC, CPU))
        graph = make_fx(module, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.randn(1, 8, 512)).graph
    counted = CountScatters()
    counted(graph)
    found = targets(graph)
    assert counted.seen == found[sums] == SPEC.layers
    of_results = 2
    assert (
        sum(found[name] for name in {gathers, "_c10d_functional.all_gather_into_tensor.default"})
        == SPEC.layers + of_results
    )
    assert found[gathers] >= SPEC.layers and not [name for name in found if "all_reduce" in name]


@pytest.mark.parametrize("rank", [0, 1])
def test_scattered_rows_are_those_of_the_whole(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with the same shards: a sum is twice a rank's own, and the other's rows are what this rank has of them."""
    with fake_process_group(2):
        whole = build_subject(SPEC, CPU)
        monkeypatch.setattr(sites.dist, "get_rank", lambda: rank)
        x = torch.randn(1, 8, 512)
        layers = whole.decoder.model.layers
        rows = x[0].chunk(2)[rank]
        for layer in layers:
            mlp = layer.mlp
            normed = layer.post_attention_layernorm(rows)
            rows = rows + 2 * (mlp.act_fn(normed @ mlp.gate_proj.weight.t()) * (normed @ mlp.up_proj.weight.t())) @ (
                mlp.down_proj.weight.t()
            )
        module = sites.ScatteredSites(
            whole,
            lambda own, weights, name: [own.repeat(2, 1) @ weight for weight in weights],
            lambda products, weight, name: 2 * (products @ weight).chunk(2)[rank],
        )
        monkeypatch.setattr(sites, "_gathered", lambda own, name: own.repeat(2, 1))
        hidden, residual = module(x)
    torch.testing.assert_close(residual[0].chunk(2)[rank], rows)
    torch.testing.assert_close(hidden[0].chunk(2)[rank], whole.decoder.norm(rows))


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "olmo2"])
def test_layers_without_a_gated_mlp_behind_one_norm_are_refused(family: str, tmp_path: Path) -> None:
    small = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    AutoConfig.for_model(family, **small, **heads).save_pretrained(tmp_path)
    words = f"--model: expected layers with gate_proj, up_proj and down_proj behind one norm, got {family}"
    with fake_process_group(2), pytest.raises(UsageError, match=words):
        build_subject(dataclasses.replace(SPEC, model=str(tmp_path), layers=1), CPU)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--tokens", "1,1"], "--tokens"),
        (["--layers", "0"], "--layers"),
        (["--only", "nobody"], "--only"),
        (["--model", "llama-9"], "--model"),
    ],
)
def test_bad_input_is_one_line(args: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["bench", "gemm-site", "--device", "cpu", *args])
    lines = result.output.strip().splitlines()
    assert result.exit_code == 2 and len(lines) == 1 and named in lines[0] and "expected" in lines[0]
