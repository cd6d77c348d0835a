"""The benchmark of kernels over host memory on one GPU, as far as it goes without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tw_compile.benchmark import host_memory
from tw_compile.kernels.collective.host_memory import HostMemory


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
