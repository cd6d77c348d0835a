"""Two-shot by copy engines: what streams write and wait for, and what it is tried for; no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tw_compile.benchmark import copy_engines
from tw_compile.benchmark.copy_engines import CopyEngines, Signals
from tw_compile.benchmark.spec import MessageSize


class FakeDriver:
    """Notes the operations of each batch as ``(operation, address, value)``."""

    CUstreamBatchMemOpType = SimpleNamespace(
        CU_STREAM_MEM_OP_WRITE_VALUE_32="write", CU_STREAM_MEM_OP_WAIT_VALUE_32="wait"
    )

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, int, int]]] = []

    def CUstreamBatchMemOpParams(self) -> Any:
        return SimpleNamespace(writeValue=SimpleNamespace(), waitValue=SimpleNamespace())

    def cuStreamBatchMemOp(self, stream: int, count: int, operations: list[Any], flags: int) -> tuple[int]:
        parts = [one.writeValue if one.operation == "write" else one.waitValue for one in operations]
        assert count == len(parts) and all(
            part.operation == one.operation for part, one in zip(parts, operations, strict=True)
        )
        self.batches.append([(part.operation, part.address, part.value) for part in parts])
        return (0,)


def test_every_word_is_written_by_one_peer_awaited_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(copy_engines.bindings, "load", lambda module: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    addresses = [1000, 2000, 3000]
    for kind in (0, 1):
        driver.batches.clear()
        for rank in range(3):
            Signals(addresses, rank, [peer for peer in range(3) if peer != rank]).exchange(kind)
        told = {
            address
            for batch in driver.batches
            for operation, address, value in batch
            if (operation, value) == ("write", 1)
        }
        assert len(told) == 6
        for rank, batch in enumerate(driver.batches):
            own = [address for operation, address, _ in batch if operation == "wait"]
            assert set(own) < told and all(addresses[rank] <= address < addresses[rank] + 24 for address in own)
            assert [operation for operation, *_ in batch] == ["write"] * 2 + ["wait"] * 2 + ["write"] * 2
            assert [(address, value) for _, address, value in batch[4:]] == [(address, 0) for address in own]


@pytest.mark.parametrize(("tokens", "word"), [(1023, "multiples of 2 tokens"), (2, "from 1 MiB"), (1024, None)])
def test_sizes_that_it_is_not_tried_for_have_a_reason(tokens: int, word: str | None) -> None:
    obstacle = CopyEngines().obstacle(MessageSize(tokens, 8192, "bfloat16"), 2)
    assert obstacle is None if word is None else word in str(obstacle)
