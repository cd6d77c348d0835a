"""Fixtures that every test may use. No test leaves a process group or compiled code behind."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from bytecode import keep_bytecode

keep_bytecode()  # before torch is imported, as workers import it too

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from collector import collect_rarely  # noqa: E402
from fork_servers import children_are_forked  # noqa: E402
from torch._functorch import config as functorch_config  # noqa: E402
from torch._inductor import config as inductor_config  # noqa: E402

from tw_compile import peer_routes  # noqa: E402
from tw_compile.planning import joint_tiles, plan  # noqa: E402
from tw_compile.testing import GlooRanks, fake_process_group  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all tests, not the quick ones alone")


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C interrupt the tests. A shell that starts them in the background has them ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --full tests are left out that are marked ``full``, and most cases of those marked ``few``.

    All run that are named, as ``file.py::test``.
    """
    if config.getoption("--full") or any("::" in argument for argument in config.args):
        return
    quick = {item for item in items if not item.get_closest_marker("full")}
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item in quick and item.get_closest_marker("few"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        quick -= set(of_test) - set(spread(of_test))
    config.hook.pytest_deselected(items=[item for item in items if item not in quick])
    items[:] = [item for item in items if item in quick]


def spread(cases: list[pytest.Item]) -> list[pytest.Item]:
    """As many of a test's cases as its mark ``few`` says, from the first to the last at equal distances."""
    mark = cases[0].get_closest_marker("few")
    assert mark is not None
    count = min(mark.args[0], len(cases))
    return [cases[number * (len(cases) - 1) // max(count - 1, 1)] for number in range(count)]


def pytest_collection_finish() -> None:
    """The modules of all tests are imported by now."""
    collect_rarely()


@pytest.fixture(scope="session", autouse=True)
def own_code_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give this run and its child processes empty caches and an empty configuration folder.

    A cache of another run would change what is compiled here, and a user's thresholds would change what is fused. Inductor
    writes C++ without vector instructions, which compiles faster (:func:`tw_compile.compat.write_plain_cpp`).
    """
    with pytest.MonkeyPatch.context() as patch, inductor_config.patch({"cpp.vec_isa_ok": False}):
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
        # Otherwise Inductor starts one more process for Triton, which imports torch. Without a GPU nothing needs it.
        patch.setenv("TORCH_WARM_POOL", "0")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("TW_COMPILE_CACHE_DIR", str(tmp_path_factory.mktemp("cubins")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.delenv("TW_COMPILE_THRESHOLDS", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_children(own_code_cache: None) -> Iterator[None]:
    with children_are_forked():
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread_for_each_of_several_workers() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """Compile every graph anew, so that the passes see it. Afterwards leave no compiled code and no process group."""
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()
    peer_routes.forget()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A fake process group of two ranks; collectives move no data."""
    with fake_process_group(2):
        yield


@pytest.fixture
def cudnn_on_cpu() -> Iterator[None]:
    """An implementation of cuDNN's attention for CPU tensors, by its documentation.

    It computes in float32, lays the result out as the query, and returns natural log-sum-exps only if they are asked for.
    """
    aten = torch.ops.aten

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_bias: torch.Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        assert attn_bias is None and dropout_p == 0.0 and not return_debug_mask
        groups = query.shape[1] // key.shape[1]
        keys, values = (one.float().repeat_interleave(groups, 1) for one in (key, value))
        scores = query.float() @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        most = scores.amax(3, keepdim=True)
        weights = (scores - most).exp()
        total = weights.sum(3, keepdim=True)
        out = torch.empty_like(query).copy_(weights.to(query.dtype).float() @ values / total)
        sums = most + total.log() if compute_log_sumexp else torch.full_like(most, torch.nan)
        none = torch.empty(0)
        return out, sums, none, none, query.shape[2], key.shape[2], none, none, none

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(aten._scaled_dot_product_cudnn_attention.default, attention, "CPU")
        yield


@pytest.fixture(scope="session")
def gloo_ranks() -> Iterator[GlooRanks]:
    """Two worker processes, started at first use."""
    with GlooRanks(2, timeout=280.0) as ranks:
        yield ranks


@pytest.fixture
def tw_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Records of the ``tw_compile`` logger from DEBUG up."""
    caplog.set_level(logging.DEBUG, logger="tw_compile")
    return caplog


@pytest.fixture
def tiled_as_then(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Joint GEMMs are tiled as they were until 28 November 2026: no tile has columns of two matrices, or 160 columns.

    A test uses this where it compares times that were measured then with the planner's.
    """
    every = joint_tiles.of_width
    preferred = 1e-6  # of several that are as fast the widest was chosen
    for name, value in {"WIDTHS": (256, 224, 192), "_FIRST": math.inf, "_NARROW": 0.6, "_LOW": 0.65}.items():
        monkeypatch.setattr(joint_tiles, name, value)
    monkeypatch.setattr(
        joint_tiles.Tiling, "time", property(lambda one: one.pairs * (one.width + 16) - preferred * one.width)
    )
    monkeypatch.setattr(
        joint_tiles, "of_width", lambda *shape: [tiles for tiles in every(*shape) if tiles.multiple == tiles.width]
    )
    caches = joint_tiles.tiling, plan._evidence
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
