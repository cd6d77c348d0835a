"""The benchmark of kernels over host memory on one GPU, as far as it goes without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tw_compile.benchmark import host_memory
from tw_compile.kernels.collective.host_memory import HostMemory
from tw_compile.kernels.collective.wires import WIRES


def test_without_a_gpu_it_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        host_memory.main(["--tokens", "1"])
    assert "expected a CUDA GPU, got none" in capsys.readouterr().err


def test_each_rank_has_an_outbox_that_both_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory = HostMemory(tmp_path, lambda address, nbytes: address, lambda address: None)
    monkeypatch.setattr(host_memory, "HostMemory", lambda: memory)
    first, second = host_memory.slots_for({"outbox": 1000}, torch.device("cpu"))
    tables = [slot.buffers["outbox"].table.tolist() for slot in (first, second)]
    assert tables[0] == tables[1] == [*(slot.buffers["outbox"].tensor.data_ptr() for slot in (first, second)), 0]
    assert list(tmp_path.iterdir()) == []


def test_wires_are_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        host_memory.main(["--wire", "exact,int5"])
    assert "expected some of exact, int8, int6, int4, got 'int5'" in capsys.readouterr().err


def test_rows_by_a_wire_are_near_the_exact_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second, residual = (torch.randn(5, 256, generator=generator).bfloat16() for _ in range(3))
    weight = torch.ones(256, dtype=torch.bfloat16)
    exact, int8, int4 = (
        host_memory.with_wire([first, second], residual, weight, WIRES[name]) for name in ("exact", "int8", "int4")
    )
    errors = [float((rows - exact).square().mean().sqrt()) for rows in (int8, int4)]
    assert 0 < errors[0] < 0.01 < errors[1] < 0.2
