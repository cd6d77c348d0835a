"""The environment in which the ranks of a benchmark start."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from tw_compile.benchmark import run as bench_run
from tw_compile.benchmark.spec import BenchSpec
from tw_compile.harness import start

SPEC = BenchSpec(4, "cuda", "bfloat16", (8192,), (16, 64))


def test_ranks_start_with_multicast_off_unless_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    seen: dict[str, str] = {}

    def spawn(spec: BenchSpec, progress: Any, entry: Any) -> dict[str, Any]:
        seen.update(os.environ)
        return {"device_name": "d", "cache_bytes": 1, "rows": []}

    monkeypatch.setattr(start, "spawn_ranks", spawn)
    report = bench_run.run(replace(SPEC, device="cpu"), lambda what: None)
    assert report["environment"] == {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "2"}
    assert seen.items() >= report["environment"].items()
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST" not in os.environ
    assert len(report["versions"]["source"]) == 12 and report["schema_version"] == 1


@pytest.mark.parametrize(("user", "seen"), [(None, "1"), ("0", "0")])
def test_ranks_start_with_nccl_off_peers_where_they_are_switched_off(
    monkeypatch: pytest.MonkeyPatch, user: str | None, seen: str
) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    if user is not None:
        monkeypatch.setenv("NCCL_P2P_DISABLE", user)
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
    monkeypatch.setattr(
        start,
        "spawn_ranks",
        lambda *given: {"device_name": os.environ["NCCL_P2P_DISABLE"], "cache_bytes": 1, "rows": []},
    )
    report = bench_run.run(replace(SPEC, device="cpu"), lambda what: None)
    assert (report["device_name"], report["peer_access"]) == (seen, "off")
    assert report["environment"]["NCCL_P2P_DISABLE"] == seen
    assert os.environ.get("NCCL_P2P_DISABLE") == user
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "1")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert bench_run.run(replace(SPEC, device="cpu"), lambda what: None)["peer_access"] == "on"
