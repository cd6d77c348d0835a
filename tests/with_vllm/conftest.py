"""One fake node for the whole session. Run these tests by themselves: vLLM changes torch's global configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
import torch
import torch.fx as fx
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


@pytest.fixture(scope="session")
def float8_kernels(groups: Any) -> Iterator[Any]:
    yield fake_vllm.add_float8_cpu_kernels()


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM's caches are empty."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))


@pytest.fixture
def wide_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Residuals stay as the unsplit graph has them, so that results have the same bits."""
    monkeypatch.setattr("tw_compile.passes.split.steps.narrow_residuals", lambda graph: 0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """What the pass leaves of each graph, in order. It must not guard them: vLLM checks no guards."""
    from tw_compile.hosts.vllm.inductor_pass import VllmPass

    taken: list[fx.Graph] = []
    original: Callable[..., None] = VllmPass.__call__

    def call(self: VllmPass, graph: fx.Graph) -> None:
        sizes = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
        guards = next(size for size in sizes if isinstance(size, torch.SymInt)).node.shape_env.guards
        before = len(guards)
        original(self, graph)
        assert len(guards) == before, guards[before:]
        copied = fx.Graph()
        copied.output(copied.graph_copy(graph, {}))
        taken.append(copied)

    monkeypatch.setattr(VllmPass, "__call__", call)
    return taken
