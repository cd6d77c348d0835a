"""``bench layer --kernels``: variants all of whose calls one kernel serves."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tw_compile import collect_reports, compat
from tw_compile.benchmark.layer import worker
from tw_compile.benchmark.layer.forced import Forced
from tw_compile.benchmark.layer.results import LayerRow
from tw_compile.benchmark.layer.spec import LayerSpec
from tw_compile.benchmark.layer.subjects import build_subject
from tw_compile.benchmark.layer.table import LayerTable
from tw_compile.benchmark.layer.variants import PLANNED, variants, with_kernels
from tw_compile.benchmark.layer.worker import gemms_leaving_sms
from tw_compile.cli.app import app
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.algorithms.push.entries import FED
from tw_compile.kernels.collective import transport as registry
from tw_compile.kernels.collective.transport import get_transport
from tw_compile.kernels.transports.selection import Insist
from tw_compile.report import Overlap, OverlapWindow, Split
from tw_compile.testing import fake_process_group

SPEC = LayerSpec("layer", "llama-3.3-70b", 4, "cuda", "bfloat16", (1024, 4096))


def test_each_kernel_has_a_fused_and_a_split_layer_beside_those_that_users_get() -> None:
    spec = replace(SPEC, kernels=("host_one_shot", "host_two_shot"))
    added = [one for one in variants(spec, 1024) if one.kernel]
    assert [one.label for one in added] == [
        "fused-by-host_one_shot", "fused+split-by-host_one_shot", "fused-by-host_two_shot", "fused+split-by-host_two_shot",
    ]  # fmt: skip
    assert replace(added[3], label=PLANNED.label, kernel=None, config={}) == PLANNED
    assert added[3].config == {"feed_mm": "never", "transport": "host"}
    assert [one.label for one in with_kernels(("push_one_shot", "host_words"))] == [
        "fused-by-push_one_shot", "fused-by-host_words",
    ]  # fmt: skip
    plain = {one.label for one in variants(SPEC, 1024)}
    assert {one.label for one in variants(spec, 1024)} - {one.label for one in added} == plain
    (alone,) = variants(replace(spec, only=("fused+split-by-host_two_shot",)), 1024)
    assert alone.kernel == "host_two_shot"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kernels", "host_three_shot"], "--kernels: expected different ones of push_one_shot, "),
        (["--kernels", "host_words,host_words"], "got 'host_words,host_words'"),
        (["--kernels", FED.name], f"got {FED.name!r}"),
        (["--kernels", "host_words", "--device", "cpu"], "--kernels: expected --device cuda, as kernels run on GPUs"),
    ],
)
def test_what_is_no_kernel_is_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "layer", "--tp", "2", *arguments])
    assert result.exit_code == 2 and said in " ".join(result.output.split())


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The process's transports, which are as they were at the end of the test."""
    monkeypatch.setattr(registry, "instances", {})
    return registry.instances


def test_calls_find_the_kernel_s_transport_within_the_block_alone(others: dict[str, Any]) -> None:
    usual = get_transport("host")
    forced = Forced("host_one_shot")
    served = set()
    for _ in range(2):  # once per number of tokens
        with forced.serving():
            served.add(get_transport("host"))
            assert get_transport("host") is not usual and others.keys() == {"host"}
        assert get_transport("host") is usual
    assert len(served) == 1
    with pytest.raises(RuntimeError), Forced("push_two_shot").serving():
        assert others.keys() == {"host", "p2p"}
        raise RuntimeError
    assert others == {"host": usual}


def test_a_layer_whose_calls_another_kernel_served_gets_no_time(others: dict[str, Any]) -> None:
    forced = Forced("host_one_shot")
    assert forced.deviation() == "no call goes over the transport host, which host_one_shot belongs to"
    with forced.serving():
        transport: Any = get_transport("host")
    selector = Insist(transport.algorithm, "host")
    state = SimpleNamespace(obstacle=None, selector=selector)
    transport.states["group", "device"] = state
    assert forced.deviation() is None
    selector.refusals |= {"it needs all rows of the residual", "b"}
    assert forced.deviation() == "host_one_shot could not serve all calls: b; it needs all rows of the residual"
    with forced.serving():
        assert forced.deviation() is None  # of another number of tokens
        selector.refusals.add("c")
    assert forced.deviation() == "host_one_shot could not serve all calls: c"
    state.obstacle = "no shared memory"
    assert forced.deviation() == "no shared memory"


@pytest.mark.full
def test_variants_with_equal_options_are_compiled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second one would run what the first one has compiled, whose calls another kernel serves."""
    spec = LayerSpec("layer", "tiny-llama", 2, "cpu", "float32", (8,), layers=1)
    both = [replace(one, config={"split": "off"}) for one in with_kernels(("host_one_shot", "host_two_shot"))]
    with fake_process_group(2), torch.no_grad(), compat.cold_compile(None):
        subject = build_subject(spec, torch.device("cpu"))
        inputs = torch.randn(1, 8, subject.hidden_size)
        for variant in (both[0], both[2]):
            with collect_reports() as reports:
                worker.compile_variant(variant, subject, inputs)
            assert sum(len(report.sites) for report in reports) == 2


def test_a_chooser_that_insists_notes_what_its_kernel_refused() -> None:
    class Never:
        def obstacle(self, request: object, state: object) -> str | None:
            return None if request.norm.fits else "too wide"  # type: ignore[attr-defined]

    never: Any = Never()
    chooser = Insist(never, "host")
    fits, wide = (
        SimpleNamespace(wire="exact", norm=SimpleNamespace(fits=fits, scale_columns=0), x=SimpleNamespace(shape=(1, 8)))
        for fits in (True, False)
    )
    chooser._candidates = (never, SimpleNamespace(obstacle=lambda request, state: None))  # type: ignore[assignment]
    state: Any = None
    assert chooser.choose(fits, state) is never and not chooser.refusals  # type: ignore[arg-type]
    assert chooser.choose(wide, state) is not never and chooser.refusals == {"too wide"}  # type: ignore[arg-type]
    assert {entry.name for entry in ALGORITHMS} >= {"host_one_shot"}


def test_a_row_says_how_many_sms_gemms_leave() -> None:
    def window(kind: str, half: int, *left: tuple[str, int]) -> OverlapWindow:
        return OverlapWindow(kind, half, (), 3, gemms_leaving_sms=left)

    layer = (window("attention", 1, ("qkv", 8), ("o_proj", 12)), window("mlp", 2, ("gate_up", 8), ("gate_up", 12)))
    split = Split("auto", "split", sizes=(512, 512), unit="token", overlap=Overlap(4, layer + layer))
    found = gemms_leaving_sms([split])
    assert found == "attention 1: qkv 8, o_proj 12; mlp 2: gate_up 8 + 12"
    other = replace(split, overlap=Overlap(4, (window("mlp", 2, ("gate_up", 8)), window("epilogue", 1))))
    assert gemms_leaving_sms([split, other]) == f"{found} or gate_up 8"
    assert gemms_leaving_sms([Split("auto", "off", "not_faster")]) is None
    row = LayerRow("fused+split", "ours", 1024, 2**23, "timed", split="512 + 512 tokens", gemms=found)
    report: dict[str, Any] = {"rows": [], "tokens": [1024]}
    assert LayerTable(report, []).note(row) == f"512 + 512 tokens; SMs that GEMMs leave: {found}"
    assert LayerTable(report, []).note(replace(row, gemms=None)) == "512 + 512 tokens"
