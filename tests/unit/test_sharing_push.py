"""When CTAs of push share rows: where a call has so few that each CTA of a cluster has an SM of its own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.algorithms.push.push import Push
from tw_compile.kernels.algorithms.push.sharing_push import SharingPush
from tw_compile.kernels.collective.spec import NormSpec, Request

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))


def request(tokens: int, hidden_size: int = 8192, **more: Any) -> Request:
    norm = NormSpec(
        eps=1e-5,
        weight_offset=0.0,
        cast_before_weight=None,
        scale=1.0,
        hidden_dtype=BF16,
        residual_dtype=BF16,
    )
    x = torch.zeros(tokens, hidden_size, dtype=BF16)
    made = Request(x, x.clone(), None, torch.zeros(hidden_size, dtype=BF16), norm, False, "replicated", "", 0)
    return replace(made, **more)


def state(world_size: int = 4) -> Any:
    return SimpleNamespace(world_size=world_size, device=torch.device("cuda", 0), rank=0)


@pytest.mark.parametrize(
    ("one_shot", "world_size", "hidden_size", "tokens", "cluster"),
    [
        (True, 4, 8192, 1, 4),
        (True, 4, 8192, 56, 4),
        (True, 4, 8192, 57, 2),  # 228 CTAs, 2 on an SM
        (True, 4, 8192, 128, 2),
        (True, 4, 8192, 129, 1),
        (False, 4, 8192, 224, 4),  # 56 rows on each rank
        (False, 4, 8192, 225, 2),
        (False, 4, 8192, 513, 1),
        (False, 2, 8192, 112, 4),
        (False, 2, 8192, 256, 2),
        (False, 2, 8192, 257, 1),
        (True, 2, 8192, 56, 4),
        (True, 2, 4096, 16, 4),  # rows of 8 KiB
        (True, 2, 4096, 17, 1),
        (False, 2, 4096, 17, 4),
        (False, 2, 4096, 256, 4),  # two rows for each cluster
        (False, 2, 4096, 257, 1),
        (True, 4, 4096, 56, 4),
        (True, 4, 4096, 57, 2),
        (False, 8, 8192, 8 * 56, 4),
        (False, 8, 8192, 8 * 64, 2),  # 512 threads, one CTA on an SM
        (False, 8, 8192, 8 * 64 + 1, 1),
    ],
)
def test_rows_are_shared_while_all_clusters_run_at_once(
    one_shot: bool, world_size: int, hidden_size: int, tokens: int, cluster: int
) -> None:
    algorithm = SharingPush(one_shot)
    assert algorithm.shares(request(tokens, hidden_size), state(world_size)) == cluster
    rows = tokens if one_shot else -(-tokens // world_size)
    assert algorithm.sms(tokens, world_size) == min(4 * rows, 128)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"overlap_sms": 16}, "other work has the other SMs"),
        ({"wire": "int8"}, "codes are made for groups of columns"),
    ],
)
def test_rows_are_not_shared(changed: dict[str, Any], why: str) -> None:
    algorithm = SharingPush(False)
    assert algorithm.shares(request(1), state()) == 4
    assert algorithm.shares(request(1, **changed), state()) == 1, why


def test_rows_are_shared_beside_ctas_that_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clusters' kernels with PREFETCH are loaded, and the grid has whole clusters."""
    asked = request(1, prefetch=[torch.zeros(2**20, dtype=torch.uint8)], prefetch_bytes=2**20)
    programs: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "tw_compile.kernels.algorithms.row_kernel.prepare",
        lambda program, index: programs.append(dict(program.defines)),
    )
    algorithm = SharingPush(True)
    assert algorithm.shares(asked, state()) == 4
    algorithm.prepare(asked, state(), 0)
    assert [(one["CLUSTER"], one["PREFETCH"]) for one in programs] == [(1, 1), (4, 1), (2, 1)]


def test_short_and_long_rows_and_few_sms_are_not_shared() -> None:
    assert SharingPush(True).shares(request(1, 8192), state()) == 4
    assert SharingPush(True).shares(request(1, 8200), state()) == 1
    assert SharingPush(True).shares(request(1, 1016), state()) == 1
    assert SharingPush(True).shares(request(1, 1024), state()) == 4
    assert SharingPush(True, 4).shares(request(5), state()) == 1
    assert SharingPush(True, 4).shares(request(2), state()) == 2
    assert SharingPush(True, 4).shares(request(1), state()) == 4


@pytest.mark.parametrize(
    ("one_shot", "hidden_size", "tokens", "cluster"),
    [
        (True, 8192, 1, 4),
        (False, 8192, 112, 4),
        (False, 8192, 113, 2),
        (True, 4096, 17, 1),
        (False, 4096, 128, 4),  # 64 rows on each rank, one for each cluster
        (False, 4096, 129, 2),
        (False, 4096, 257, 1),
    ],
)
def test_rows_with_scales_are_shared_while_each_cluster_has_one(
    one_shot: bool, hidden_size: int, tokens: int, cluster: int
) -> None:
    asked = request(tokens, hidden_size)
    scaled = replace(asked, norm=replace(asked.norm, hidden_dtype=torch.float8_e4m3fn, scale_columns=hidden_size))
    assert SharingPush(one_shot).shares(scaled, state(2)) == cluster


def test_small_devices_leave_rows_to_one_cta(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=16))
    assert SharingPush(True).shares(asked, state()) == 1


@pytest.mark.parametrize("one_shot", [True, False])
def test_devices_without_clusters_leave_rows_to_one_cta(monkeypatch: pytest.MonkeyPatch, one_shot: bool) -> None:
    """An A100 has SMs enough, but no clusters: nothing is loaded for them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=108))
    loaded: list[str] = []
    monkeypatch.setattr(Push, "_kernel", lambda self, *rest: loaded.append(self.name))
    algorithm = SharingPush(one_shot)
    assert algorithm.shares(request(1), state()) == 1
    algorithm.prepare(request(1), state(), 0)
    assert loaded == [algorithm.name]


@pytest.mark.parametrize("one_shot", [True, False])
def test_what_shares_is_launched_by_clusters_and_all_are_loaded(
    monkeypatch: pytest.MonkeyPatch, one_shot: bool
) -> None:
    """All sizes must be loaded before a capture, whichever size comes first."""
    launched: list[tuple[str, str]] = []
    monkeypatch.setattr(Push, "launch", lambda self, *rest: launched.append(("launch", self.name)))
    monkeypatch.setattr(Push, "prepare", lambda self, *rest: launched.append(("prepare", self.name)))
    algorithm, name = SharingPush(one_shot), "push_one_shot" if one_shot else "push_two_shot"
    algorithm.prepare(request(4096), state(), 0)
    for tokens in (8, 100 if one_shot else 400, 4096):
        algorithm.launch(request(tokens), state(), None, 0)  # type: ignore[arg-type]
    ways = [f"{name}_clusters", f"{name}_pairs"]
    assert launched == [("prepare", way) for way in [name, *ways]] + [("launch", way) for way in [*ways, name]]


def test_each_way_can_be_forced() -> None:
    for name in ("push_one_shot", "push_two_shot"):
        assert type(ALGORITHMS[name].make()) is SharingPush
        for way in ("ctas", "pairs", "clusters"):
            assert type(ALGORITHMS[f"{name}_{way}"].make()) is Push
