"""One fake node for the whole session. Run these tests by themselves: vLLM changes torch's global configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
import torch
from torch._inductor import config as inductor_config

_REASON = fake_vllm.obstacle()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if _REASON is not None and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=_REASON))


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Instead of the one for all tests: groups and vLLM's caches live as long as the session."""
    monkeypatch.delenv("TW_COMPILE", raising=False)
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the fake node, its model and vLLM's caches are."""
    found = tmp_path_factory.mktemp("node")
    fake_vllm.prepare(found)
    return found


@pytest.fixture(scope="session")
def groups(folder: Path) -> Iterator[Any]:
    """The groups of a tensor-parallel engine of two ranks, and kernels for them."""
    fake_vllm.make_groups(fake_vllm.engine_config(folder))
    with inductor_config.patch(fallback_by_default=True):  # no C++ to compile: what is computed is ATen's
        yield fake_vllm.add_cpu_kernels()
