"""Which sizes vLLM's fusion by FlashInfer is left, and what the start says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tw_compile.config import Config
from tw_compile.hosts.vllm import plan
from tw_compile.hosts.vllm.flashinfer import JOINED, Peers, Share, flashinfer_share, fusion_limit
from tw_compile.hosts.vllm.reasons import FlashInferShare, GroupRefusal
from tw_compile.hosts.vllm.settings import VllmSettings
from tw_compile.passes.fusion import FUSE

KIB, MIB = 2**10, 2**20
ENGINE = plan.Engine(tensor_parallel_size=8, hidden_size=8192, dtype="bfloat16", max_tokens=8192)
LLAMA_8B = replace(ENGINE, tensor_parallel_size=2, hidden_size=4096, captured_tokens=512)
VLLM = Config(host="vllm-0.24")
OF_VLLM = {2: 64 * MIB, 4: 2 * MIB, 8: 512 * KIB}
SM90 = (9, 0)


def share(
    engine: plan.Engine,
    config: Config = VLLM,
    *,
    capability: tuple[int, int] | None = SM90,
    peers: Peers = JOINED,
    peer_access: bool = True,
    peers_used: bool = True,
    user_set: bool = False,
) -> Share:
    choices = plan.gates(config, capability, peer_access, peers_used=peers_used)
    return flashinfer_share(engine, config, choices, OF_VLLM[engine.tensor_parallel_size], peers, user_set)


def test_two_ranks_take_over_all_sizes_and_long_steps_follow() -> None:
    """What FlashInfer fused up to 64 MiB were all steps of up to 8192 tokens, so none was long."""
    found = share(LLAMA_8B)
    assert (found.limit, found.of_vllm, found.reason) == (None, 64 * MIB, FlashInferShare.MEASURED_FASTER)
    assert found.changes and LLAMA_8B.long_from(VLLM, found.limit) == 513
    refused = LLAMA_8B.long_from(VLLM, found.of_vllm)
    assert isinstance(refused, tuple) and refused[0] == GroupRefusal.NO_LONG_STEPS
    assert found.line.startswith("FlashInfer's fusion is off (vLLM has it on up to 64 MiB), measured_faster: ")
    assert "from 8 KiB on, by sm90.toml: measured on 2x NVIDIA H200" in found.line


@pytest.mark.parametrize(
    ("hidden_size", "limit"), [(8192, 32 * KIB), (4096, 24 * KIB), (2048, 28 * KIB), (16384, None)]
)
def test_four_ranks_leave_what_flashinfer_was_faster_at(hidden_size: int, limit: int | None) -> None:
    """16 KiB, measured; the table draws the border at 28,935 bytes. vLLM tunes ranges of one size, so one token is not left."""
    found = share(replace(ENGINE, tensor_parallel_size=4, hidden_size=hidden_size))
    assert found.limit == limit and found.reason == FlashInferShare.MEASURED_FASTER
    assert "4x NVIDIA H200" in found.detail


def test_sizes_below_what_was_measured_stay_flashinfers() -> None:
    """One token of 1024 is 2 KiB, and FlashInfer was timed from 4 KiB on."""
    assert share(replace(LLAMA_8B, hidden_size=1024)).limit == 4 * KIB
    assert share(replace(LLAMA_8B, hidden_size=2048)).limit is None


@pytest.mark.parametrize(
    ("engine", "config", "given", "detail"),
    [
        (LLAMA_8B, VLLM, {"capability": (10, 0)}, "no table says"),
        (LLAMA_8B, VLLM, {"capability": None}, "no table says"),
        (LLAMA_8B, VLLM, {"peers": Peers(None, False)}, "NVLink joins"),
        (LLAMA_8B, VLLM, {"peers": Peers(True, False)}, "NVLink joins"),
        (LLAMA_8B, VLLM, {"peers_used": False}, "without peer access"),  # by TW_COMPILE_PEER_ACCESS=0
        (LLAMA_8B, replace(VLLM, host="vllm-0.33"), {}, "multicast"),
        (LLAMA_8B, replace(VLLM, fuse=False), {}, "nothing is fused"),
        (LLAMA_8B, replace(VLLM, transport="nccl"), {}, "transport nccl"),
        (LLAMA_8B, replace(VLLM, thresholds="off"), {}, "no table says"),
        (LLAMA_8B, replace(VLLM, fuse_max_bytes=MIB), {}, "no table says"),
        (ENGINE, VLLM, {"peers": Peers(None, False)}, "NVLink joins"),
        (ENGINE, VLLM, {"peers": Peers(True, False)}, "NVLink joins"),
        (ENGINE, VLLM, {"peer_access": False}, "without peer access"),
        (ENGINE, replace(VLLM, host="vllm-0.33"), {}, "multicast"),
        (ENGINE, replace(VLLM, fuse=False), {}, "nothing is fused"),
        (ENGINE, replace(VLLM, disable_passes=(FUSE.name,)), {}, "nothing is fused"),
        (replace(ENGINE, dtype="float16"), VLLM, {}, "no table says"),  # multimem takes bfloat16 alone
    ],
    ids=str,
)
def test_what_was_not_measured_stays_flashinfers(
    engine: plan.Engine, config: Config, given: dict[str, Any], detail: str
) -> None:
    found = share(engine, config, **given)
    vllms = OF_VLLM[engine.tensor_parallel_size]
    assert (found.limit, found.reason) == (vllms, FlashInferShare.NOT_MEASURED) and not found.changes
    assert detail in found.detail and "(as in vLLM), not_measured: " in found.line


def test_flashinfers_kernels_for_multicast_were_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FLASHINFER_ALLREDUCE_BACKEND", "mnnvl")
    assert share(LLAMA_8B).reason == FlashInferShare.NOT_MEASURED


@pytest.mark.parametrize(
    ("ranks", "limit", "reason"),
    [
        (2, None, FlashInferShare.MEASURED_FASTER),
        (4, 2 * MIB, FlashInferShare.SHARED_BUFFERS),
        (8, 512 * KIB, FlashInferShare.NOT_MEASURED),
    ],
)
def test_the_limit_is_not_lowered_where_flashinfers_all_reduce_shares_the_buffers(
    monkeypatch: pytest.MonkeyPatch, ranks: int, limit: int | None, reason: FlashInferShare
) -> None:
    """vLLM has one workspace for both. Made for a small limit, it would be too small for what the all_reduce is given."""
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_FLASHINFER", "1")
    found = share(replace(ENGINE, tensor_parallel_size=ranks))
    assert (found.limit, found.reason) == (limit, reason)
    if reason == FlashInferShare.SHARED_BUFFERS:
        assert "shares the fusion's buffers" in found.detail and "tw_compile is faster from 48 KiB on" in found.detail


@pytest.mark.parametrize(("variable", "limit"), [(None, 240 * KIB), ("VLLM_USE_NCCL_SYMM_MEM", 112 * KIB)])
def test_eight_ranks_keep_whole_tokens_below_what_is_faster_unfused(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, limit: int
) -> None:
    """FlashInfer's limit is inclusive. Ours of 256 KiB is not: by the table the 16th token of hidden 8192 is multimem's."""
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    found = share(ENGINE)
    assert (found.limit, found.reason) == (limit, FlashInferShare.UNFUSED_FASTER)
    if variable is None:
        assert [limit // plan.row_bytes_of(ENGINE)] == plan.range_endpoints(ENGINE, VLLM, plan.gates(VLLM, SM90))[:1]


def test_sizes_that_an_option_leaves_unfused_stay_flashinfers() -> None:
    found = share(LLAMA_8B, replace(VLLM, fuse_min_bytes=MIB))
    assert (found.limit, found.reason) == (MIB - 8 * KIB, FlashInferShare.MEASURED_FASTER)
    assert share(LLAMA_8B, replace(VLLM, transport="p2p")).limit is None


@pytest.mark.parametrize(("kind", "limit"), [("measured", None), ("public", 64 * MIB)])
def test_a_users_table_counts_where_it_was_measured(tmp_path: Path, kind: str, limit: int | None) -> None:
    source = {
        "measured": 'machine = "2x GPU"\nversions = "torch"\ndate = "2026-11-27"\ncommand = "tw-compile tune"',
        "public": 'table = "somewhere"',
    }[kind]
    file = tmp_path / "thresholds.toml"
    file.write_text(
        f'schema_version = 1\ndevice_class = "sm100"\n[sources.own]\nkind = "{kind}"\n{source}\n'
        '[[entries]]\nworld_size = 2\nbackend = "flashinfer"\nfrom_bytes = 0\ndecision = "fused"\ntransport = "p2p"\n'
        'source = "own"\n'
    )
    found = share(LLAMA_8B, replace(VLLM, thresholds=str(file)), capability=(10, 0))
    assert found.limit == limit
    assert (str(file) in found.detail) == (kind == "measured")


def test_without_peer_access_flashinfer_cannot_run() -> None:
    found = share(LLAMA_8B, peers=Peers(False, False), peer_access=False)
    assert (found.limit, found.reason) == (None, FlashInferShare.NO_PEER_ACCESS) and found.changes
    assert LLAMA_8B.long_from(VLLM, found.limit) == 513
    users = share(LLAMA_8B, peers=Peers(False, False), peer_access=False, user_set=True)
    assert users.limit is None and not users.changes  # there is nothing to keep, and nothing to change


def test_what_the_user_has_set_is_kept_and_the_line_says_what_that_withholds() -> None:
    found = share(LLAMA_8B, user_set=True)
    assert found.limit == 64 * MIB and found.reason == FlashInferShare.SET_BY_USER and not found.changes
    assert "without fuse_allreduce_rms and fi_allreduce_fusion_max_size_mb in pass_config it would be off" in found.line
    assert "measured_faster" in found.line
    nothing_withheld = share(LLAMA_8B, user_set=True, capability=(10, 0))
    assert nothing_withheld.reason == FlashInferShare.NOT_MEASURED


def test_nothing_is_said_where_vllm_does_not_fuse() -> None:
    found = flashinfer_share(LLAMA_8B, VLLM, plan.gates(VLLM, SM90), None, JOINED, False)
    assert (found.limit, found.line, found.changes) == (None, "", False)


def test_the_band_of_issue_44079_is_left_to_multimem() -> None:
    """vLLM fuses up to 512 KiB; unfused it would be custom below 256 KiB and multimem, the faster one, from there."""
    settings = VllmSettings("vllm-0.24")
    limit = fusion_limit((9, 0), 8, settings, 512 * KIB)
    assert limit == 256 * KIB
    multicast = plan.gates(VLLM, (9, 0))[0]
    for kib in (256, 320, 384, 512):
        verdict = multicast.decide(kib * KIB, world_size=8, dtype="bfloat16")
        assert not verdict.fused and verdict.backend == "multimem"
    stretches = plan.thresholds_of(replace(ENGINE, hidden_size=2048), multicast)
    assert [(one["from_tokens"], one["fused"]) for one in stretches[:2]] == [(1, True), (64, False)]
    assert "44079" in stretches[1]["source"]


@pytest.mark.parametrize(
    ("capability", "world_size", "changes", "limit", "expected"),
    [
        ((9, 0), 8, {"use_symm_mem": False}, 512 * KIB, 512 * KIB),
        ((9, 0), 4, {}, 2 * MIB, 2 * MIB),
        ((9, 0), 2, {}, 64 * MIB, 64 * MIB),
        ((10, 0), 8, {}, MIB, MIB),
        ((9, 0), 8, {"use_nccl_symm_mem": True}, 512 * KIB, 128 * KIB),
        ((9, 0), 4, {"use_nccl_symm_mem": True}, 2 * MIB, 512 * KIB),
        ((10, 0), 16, {"use_nccl_symm_mem": True}, 64 * MIB, 0),
        (None, 8, {}, 512 * KIB, 512 * KIB),
    ],
)
def test_flashinfer_keeps_its_other_sizes(
    capability: tuple[int, int] | None,
    world_size: int,
    changes: dict[str, Any],
    limit: int,
    expected: int,
) -> None:
    settings = replace(VllmSettings("vllm-0.24"), **changes)
    assert fusion_limit(capability, world_size, settings, limit) == expected
