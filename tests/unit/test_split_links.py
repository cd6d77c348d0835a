"""The token split where GPUs have no peer access: what is planned over host memory, fused or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.fx as fx

from tw_compile import Config
from tw_compile.cli.render_split import split_lines
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.transport import registered
from tw_compile.kernels.collective.transports import TRANSPORTS, TransportEntry
from tw_compile.models.config import load_config
from tw_compile.models.decoder import build_decoder
from tw_compile.passes.reasons import SplitRefusal
from tw_compile.passes.split.analysis import layer
from tw_compile.passes.split.schedule.windows import schedule
from tw_compile.report import Split
from tw_compile.testing import fake_cuda, fake_process_group, find_ops, rewrite

WORLD_SIZE = 2


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(WORLD_SIZE):
        yield


@pytest.fixture
def no_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(device_type="cuda", world_size=WORLD_SIZE, hosts=1, peer_access=False)
    monkeypatch.setattr(layer, "group_facts", lambda group_name, device_type: facts)


@pytest.fixture
def toy_host() -> Iterator[None]:
    """The transport ``host``, or an entry of that name where there is none."""
    entry = TransportEntry(
        "host", ("cuda",), "tw_compile.kernels.transports.process_group:CollectiveTransport", "a toy"
    )
    with ExitStack() as stack:
        if entry.name not in TRANSPORTS:
            stack.enter_context(registered(entry))
        yield


def inspected(seq: int = 1024, **options: Any) -> tuple[Split, fx.Graph]:
    """What the passes make of one layer on fake GPUs."""
    with fake_cuda():
        decoder = build_decoder(load_config("llama-3.1-8b"), device="cuda", dtype=torch.bfloat16, num_layers=1)
        ids = torch.zeros(1, seq, dtype=torch.long, device="cuda")
        given = Config(**{"split": "auto", "device_profile": "H200", "strict": True, **options})
        seen = rewrite(decoder, (ids,), world_size=WORLD_SIZE, config=given)
    assert seen.report.split is not None
    return seen.report.split, seen.after.graph


@pytest.mark.few(1)
@pytest.mark.usefixtures("no_peer_access")
@pytest.mark.parametrize("options", [{"fuse": False}, {"fuse_max_bytes": 1024}, {"transport": "nccl"}], ids=str)
def test_sums_of_nccl_are_split_where_the_plan_pays_whether_they_are_fused_or_not(options: dict[str, Any]) -> None:
    split, graph = inspected(disable_passes="join_gemms", **options)  # what is fused would else have faster GEMMs, too
    assert (split.mode, split.sizes) == ("split", (512, 512)), split.detail
    assert split.plan is not None and split.plan.rates.startswith("nccl over host-memory")
    assert split.plan.predicted.unfused_us == pytest.approx(split.plan.predicted.fused_us)
    fused = any(node.target in (ops.start, ops.mm_start) for node in graph.nodes)
    assert fused is (options == {"transport": "nccl"})
    assert split.overlap is not None and split.overlap.calls == 6 and not split.overlap.refused
    assert len([window for window in split.overlap.windows if window.kind == "mlp" and window.beside]) == 2
    assert any("nccl over host-memory: ring 28 us" in line for line in split_lines(split.as_dict()))


@pytest.mark.usefixtures("no_peer_access")
def test_gemms_beside_a_collective_leave_it_the_sms_that_the_link_says() -> None:
    split, _ = inspected(fuse=False)
    assert split.overlap is not None
    beside = [window for window in split.overlap.windows if window.kind in ("attention", "mlp")]
    assert {window.overlap_sms for window in beside} == {4}
    assert all(window.gemms_leaving_sms for window in beside)
    asked, _ = inspected(fuse=False, split="512", split_gemm_sms="off")
    assert asked.overlap is not None and not any(window.gemms_leaving_sms for window in asked.overlap.windows)


def test_a_collective_of_which_nothing_is_planned_takes_no_sms_that_are_known() -> None:
    split, graph = inspected(fuse=False, split="512")
    assert (split.mode, split.plan) == ("split", None) and split.overlap is not None
    assert {window.overlap_sms for window in split.overlap.windows} == {0}
    woven = schedule(graph, collective_sms=lambda window: 3)
    assert not isinstance(woven, layer.SplitRefused) and set(woven.reserved) <= {0, 3} and 3 in woven.reserved


@pytest.mark.usefixtures("no_peer_access")
def test_few_tokens_are_left_whole_for_the_planners_reason() -> None:
    split, graph = inspected(seq=64, fuse=False)
    assert (split.mode, split.reason) == ("off", "not_faster") and split.plan is not None
    assert len(find_ops(graph, "all_reduce")) == 3


@pytest.mark.usefixtures("toy_host")
def test_host_is_planned_by_its_rates_with_peer_access_too() -> None:
    split, _ = inspected(transport="host")
    assert split.mode == "split" and split.plan is not None
    assert split.plan.rates.startswith("host over host-memory: words 5.6 us")


def test_unfused_sums_over_peer_memory_have_no_rates() -> None:
    split, _ = inspected(fuse=False)
    assert (split.mode, split.reason) == ("off", SplitRefusal.LAYER_NOT_RECOGNISED)
    assert split.detail == "the sums are not fused, and no rates are known of nccl here"


@pytest.mark.usefixtures("no_peer_access")
def test_a_transport_of_a_users_own_has_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tw_compile.passes.split.analysis.choose.DeviceProfile.kernel_of_transport", lambda *given, named: None
    )
    entry = TransportEntry(
        "mine", ("cuda",), "tw_compile.kernels.transports.process_group:CollectiveTransport", "a toy"
    )
    with registered(entry):
        split, _ = inspected(transport="mine")
    assert (split.mode, split.reason) == ("off", SplitRefusal.TRANSPORT_NOT_PLANNED)
    assert split.detail == "neither H200's profile nor a link has rates of the transport mine here"


@pytest.mark.usefixtures("no_peer_access")
def test_a_maximum_over_ranks_is_no_sum_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    read = layer.arguments_of
    monkeypatch.setattr(layer, "arguments_of", lambda node: {**read(node), "reduce_op": "max"})
    split, _ = inspected(fuse=False)
    assert split.reason == SplitRefusal.LAYER_NOT_RECOGNISED and split.detail.endswith("reduces by max")
