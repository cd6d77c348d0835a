"""CTAs without rows that prefetch: what is compiled for them, what is launched, and what all other calls have of it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from machine_code import dump, resources
from test_cuda_kernels import BEFORE_HOPPER, BF16, HOPPER, MOST_STACK_BYTES, program_of, replace_fields, request
from test_host_kernels_code import program_of as host_program_of

from tw_compile.kernels.algorithms.host.host_words import HostWords
from tw_compile.kernels.algorithms.push.push import Push
from tw_compile.kernels.collective.call import Call
from tw_compile.kernels.collective.prefetch import (
    MOST_TENSORS,
    PIECE,
    check_prefetch,
    is_dense,
    prefetched,
    shares,
)
from tw_compile.kernels.collective.slot import Slot, SymmetricBuffer
from tw_compile.kernels.collective.spec import Request, operands_of
from tw_compile.kernels.runtime.program import Program

KINDS = ("one_shot", "two_shot", "words")
IN_CLUSTERS = ("one_shot_clusters", "one_shot_pairs", "two_shot_clusters", "two_shot_pairs")
MIB = 2**20


def asking(asked: Request) -> Request:
    return replace_fields(asked, prefetch=[torch.empty(4096, 4096, device="meta")], prefetch_bytes=8 * MIB)


def of(kind: str, asked: Request, patch: pytest.MonkeyPatch, capability: tuple[int, int] = HOPPER) -> Program:
    if kind == "words":
        return host_program_of(kind, replace_fields(asked, residual_sharded=False), 2, patch, capability)
    return program_of(kind, asked, 2, patch, capability=capability)


@pytest.mark.parametrize("kind", [*KINDS, *IN_CLUSTERS])
def test_ctas_that_prefetch_wait_for_nothing_and_rows_keep_their_registers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    asked = request(4096, cast=BF16, residual_out="replicated")
    plain, asks = of(kind, asked, monkeypatch), of(kind, asking(asked), monkeypatch)
    ptx = asks.ptx()
    targets = re.findall(r"bra(?:\.uni)?\s+(\$\w+);", ptx.partition("griddepcontrol.wait")[0])
    ways = [ptx.partition(f"{target}:")[2].partition("ret;")[0] for target in targets]
    (prefetches,) = (way for way in ways if "griddepcontrol" not in way)
    assert "cp.async.bulk.prefetch.L2.global" in prefetches
    assert not re.search(r"\bbar\w*\.(sync|cluster)|\batom|\bld\.(global|relaxed|acquire)|\bst\.", prefetches)
    assert "bulk.prefetch" not in plain.ptx()
    assert "UBLKPF" in dump(asks.cubin(), tmp_path, "-sass") and "UBLKPF" not in dump(plain.cubin(), tmp_path, "-sass")
    assert resources(asks.cubin(), tmp_path)["STACK"] <= MOST_STACK_BYTES, "rows are in memory"


@pytest.mark.few(6)
@pytest.mark.parametrize("capability", BEFORE_HOPPER)
@pytest.mark.parametrize("kind", KINDS)
def test_older_devices_ask_sector_by_sector(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, capability: tuple[int, int]
) -> None:
    asked = request(4096, cast=BF16, residual_out="replicated")
    plain, asks = (of(kind, one, monkeypatch, capability) for one in (asked, asking(asked)))
    assert "prefetch.global.L2" in asks.ptx() and "prefetch.global.L2" not in plain.ptx()
    assert "cp.async.bulk" not in asks.ptx() and "griddepcontrol" not in asks.ptx()
    assert resources(asks.cubin(), tmp_path)["STACK"] == 0


# --- what is launched ------------------------------------------------------------------------------------------------


def launches(kernel: Any, asked: Request, sms: int, patch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=sms))
    buffer = SymmetricBuffer(torch.zeros(2**20, dtype=torch.uint8), None, torch.zeros(3), 2**20, torch.zeros(5))
    slot = Slot(torch.zeros(1), torch.zeros(32), torch.zeros(4, 8), {"inbox": buffer, "words": buffer})
    state: Any = SimpleNamespace(world_size=2, device=torch.device("cuda", 0), rank=0)
    found: list[tuple[Any, int]] = kernel.launches(asked, state, slot)
    return found


@pytest.mark.parametrize(
    ("kernel", "rows", "ctas_an_sm", "cluster"),
    [
        (Push(True), 16, 2, 1),
        (Push(False), 8, 2, 1),
        (Push(True, cluster=4), 64, 2, 4),
        (Push(False, cluster=2), 16, 2, 2),
        (HostWords(), 16, 1, 1),
    ],
)
def test_a_grid_has_more_ctas_where_sms_are_free(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, rows: int, ctas_an_sm: int, cluster: int
) -> None:
    """``rows``: CTAs that have rows. All others are whole clusters."""
    asked = request(4096, cast=BF16, residual_out="replicated")
    ((params, grid),) = launches(kernel, asked, 132, monkeypatch)
    assert (grid, [*params.prefetch.bytes]) == (rows, [0] * MOST_TENSORS)
    ((params, grid),) = launches(kernel, asking(asked), 132, monkeypatch)
    assert (grid, params.prefetch.row_ctas) == (132 * ctas_an_sm, rows)
    assert [*params.prefetch.bytes] == [8 * MIB, 0, 0, 0]
    ((params, grid),) = launches(kernel, asking(asked), 131, monkeypatch)
    assert grid % cluster == 0 and 131 * ctas_an_sm - cluster < grid <= 131 * ctas_an_sm
    few = replace_fields(asking(asked), prefetch_bytes=4 * PIECE + 16)
    ((params, grid),) = launches(kernel, few, 132, monkeypatch)
    assert grid == rows + -(-5 // cluster) * cluster, "no more than there are pieces"
    ((params, grid),) = launches(kernel, asking(asked), rows // ctas_an_sm, monkeypatch)
    assert (grid, [*params.prefetch.bytes]) == (rows, [0] * MOST_TENSORS), "no SM is free"


def test_only_the_first_of_several_launches_prefetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tw_compile.kernels.algorithms.push.push.MOST_INBOX_BYTES", 3 * (5 * 4096 * 2 + 128))
    asked = asking(request(4096, cast=BF16, residual_out="replicated"))
    found = launches(Push(True), asked, 132, monkeypatch)
    assert [params.prefetch.bytes[0] for params, _ in found] == [8 * MIB, 0, 0, 0]
    assert [params.prefetch.row_ctas for params, _ in found] == [4, 4, 4, 4] and [grid for _, grid in found][1:] == [
        4
    ] * 3


def test_each_call_of_a_form_asks_for_its_own_weights() -> None:
    launched: list[list[int]] = []
    params, grid = prefetched([torch.empty(64), torch.empty(8)], 100, 2, 9)
    launch: Any = SimpleNamespace(launch=lambda given, **options: launched.append([*given.prefetch.begin]))
    from tw_compile.kernels.algorithms.push.push import PushParams

    asked = Request(torch.zeros(2, 8), None, None, None, request(8).norm, False, "none", "", 0)
    call = Call(launch, [(PushParams(prefetch=params), grid)], {}, lambda: asked.x, lambda: asked.x, prefetches=True)
    others = [[torch.empty(64), torch.empty(8)] for _ in range(2)]
    for weights in others:
        call.enqueue(operands_of(asked), None, 0, weights)
    assert launched == [[weights[0].data_ptr(), weights[1].data_ptr(), 0, 0] for weights in others]


def test_the_budget_is_shared_out_in_order_and_whole_lines() -> None:
    assert shares([1000, 50, 5000], 2000) == [992, 48, 960]
    assert shares([4096], 100) == [96] and shares([], 100) == [] and shares([64], 0) == [0]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_what_a_kernel_can_not_ask_for_is_refused() -> None:
    cpu, weight = torch.device("cpu"), torch.empty(64, 64)
    check_prefetch([weight, weight.t(), weight[0]], 100, cpu)
    check_prefetch(None, 0, cpu)
    assert is_dense(weight.t()) and not is_dense(weight[:, ::2]) and not is_dense(weight[0].expand(64, 64))
    with pytest.raises(ValueError, match=r"prefetch_bytes: expected 0 to .*, got -1"):
        check_prefetch([weight], -1, cpu)
    with pytest.raises(ValueError, match="prefetch: expected at most 4 tensors, got 5"):
        check_prefetch([weight] * 5, 100, cpu)
    with pytest.raises(ValueError, match=r"prefetch\[1\]: expected rows or columns one behind the other"):
        check_prefetch([weight, weight[:, ::2]], 100, cpu)
    with pytest.raises(ValueError, match=r"prefetch\[0\]: expected a tensor on cpu, as x is, got one on meta"):
        check_prefetch([weight.to("meta")], 100, cpu)
