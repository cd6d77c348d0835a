"""Fixtures that every test may use. No test leaves a process group or compiled code behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tw_compile.testing import GlooRanks, fake_process_group


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
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
