"""``tw-compile bench vllm`` says in which engines FlashInfer's fusion was on. In ``off`` it is as vLLM has it."""

from __future__ import annotations

import csv
import dataclasses
import io
from typing import Any

import pytest
from test_bench_vllm import SMALL, SPEC, printed, ran, vllm  # noqa: F401

from tw_compile.benchmark.vllm.results import as_csv, rows_of
from tw_compile.benchmark.vllm.spec import VllmSpec, engines, variants
from tw_compile.harness.requests import UsageError


@pytest.mark.usefixtures("vllm")
def test_flashinfers_fusion_is_vllms_default_but_in_variants_that_say_so() -> None:
    def fuses(spec: VllmSpec) -> dict[str, Any]:
        return {
            one.variant.label: one.arguments.get("compilation_config", {})
            .get("pass_config", {})
            .get("fuse_allreduce_rms")
            for one in engines(spec, "folder")
        }

    by_default = fuses(SPEC)
    assert by_default.pop("off-nccl") is by_default.pop("off-nccl-tree") is False and set(by_default.values()) == {None}
    only = ("off", "off-no-flashinfer", "fuse+split", "fuse+split-flashinfer")
    spec = dataclasses.replace(SMALL, only=only, engine={})
    asked = {"off": None, "off-no-flashinfer": False, "fuse+split": None, "fuse+split-flashinfer": True}
    assert fuses(spec) == asked
    with pytest.raises(UsageError, match="--only: expected some of off, "):
        variants(dataclasses.replace(spec, peer_access=False))
    report = ran(spec)
    found = {row.label: row.flashinfer_fusion_bytes for row in rows_of(report)}
    assert found == {"off": 2**26, "off-no-flashinfer": 0, "fuse+split": 0, "fuse+split-flashinfer": 2**26}
    assert {engine["variant"]: engine["flashinfer_fusion_bytes"] for engine in report["engines"]} == found
    lines = list(csv.DictReader(io.StringIO(as_csv(report))))
    assert {line["label"]: line["flashinfer_fusion_bytes"] for line in lines} == {one: str(found[one]) for one in found}
    assert {line["flashinfer_importable"] for line in lines} == {"True"} and "flashinfer" in lines[0]
    text = printed(report)
    assert text.count("up to 64 MiB") == text.count("  off\n") == 2 and "FlashInfer's fusion" in text
    for engine in report["engines"]:
        engine["flashinfer_importable"], engine["flashinfer_fusion_bytes"] = False, 0
    assert printed(report).count("not installed") == 4
