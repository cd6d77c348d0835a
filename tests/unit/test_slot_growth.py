"""What becomes of a slot that can't grow on one rank: all ranks agree on it, and none waits for another one."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tw_compile.kernels.collective import slot
from tw_compile.kernels.transports.selection import Selector


class Memory(slot.SlotMemory):
    def allocate(self, sizes: Mapping[str, int], device: torch.device) -> dict[str, torch.Tensor]:
        return {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}

    def share(self, tensors: Mapping[str, torch.Tensor], state: slot.GroupState) -> dict[str, slot.Shared]:
        return {name: slot.Shared(None, [0, 0]) for name in tensors}


@pytest.mark.parametrize("function", ["zeros", "tensor"])
def test_a_rank_without_memory_for_a_slots_words_takes_part_in_the_agreement(
    monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    said: list[str | None] = []

    def agree(group: Any, obstacle: str | None, fact: object = None) -> str | None:
        said.append(obstacle)
        return obstacle

    monkeypatch.setattr(slot, "common_obstacle", agree)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, function, out_of_memory)
    group: Any = SimpleNamespace()
    state = slot.GroupState("g", group, torch.device("cpu"), 0, 2, Selector(), memory=Memory())
    assert slot.grow(state, 0, {"x": 1}) is None
    first, second = said
    assert first is None and second is not None and "out of memory" in second and state.obstacle == second
