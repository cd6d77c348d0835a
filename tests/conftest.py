"""Fixtures that every test may use. No test leaves a process group or compiled code behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from tw_compile.testing import GlooRanks, fake_process_group


@pytest.fixture(scope="session", autouse=True)
def own_code_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Generated code of this run alone, child processes included: what another run left would decide what compiles.

    And no thresholds of the user's own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("TW_COMPILE_CACHE_DIR", str(tmp_path_factory.mktemp("cubins")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.delenv("TW_COMPILE_THRESHOLDS", raising=False)
        yield


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """Every graph is compiled, and so reported: one from a cache would not reach the passes."""
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A fake process group of two ranks; collectives move no data."""
    with fake_process_group(2):
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
