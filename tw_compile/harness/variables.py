"""The environment variables that ranks and engines get before they import anything. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from unittest import mock

from tw_compile.environment import peer_access

MULTICAST_OFF = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
PEERS_UNUSED = {"NCCL_P2P_DISABLE": "1"}


@contextlib.contextmanager
def for_measurements() -> Iterator[dict[str, str]]:
    """Switch NVLink multicast off, and NCCL's peer access as TW_COMPILE_PEER_ACCESS says, for processes started in the block.

    Variables that the environment already has are kept. Yields the variables with the values that these processes get.
    """
    with _unless_set(MULTICAST_OFF | _of_switch()) as variables:
        yield variables


@contextlib.contextmanager
def for_runs() -> Iterator[dict[str, str]]:
    """Have processes started in the ``with`` block use peer access as TW_COMPILE_PEER_ACCESS says.

    The same holds for this process if it has not used NCCL yet.
    """
    with _unless_set(_of_switch()) as variables:
        yield variables


def _of_switch() -> dict[str, str]:
    """The variables that NCCL must find when it starts, so that TW_COMPILE_PEER_ACCESS holds for NCCL, too."""
    return {} if peer_access() else PEERS_UNUSED


@contextlib.contextmanager
def _unless_set(variables: Mapping[str, str]) -> Iterator[dict[str, str]]:
    with mock.patch.dict(os.environ, {name: value for name, value in variables.items() if name not in os.environ}):
        yield {name: os.environ[name] for name in variables}
