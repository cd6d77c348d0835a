"""CPU tensors that stand for ones of a GPU, and launches that are only written down: for what a host module decides."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tw_compile import compat

STREAM = 4711
HOPPER = (9, 0)


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]
    device = torch.device("cuda", 0)  # type: ignore[assignment]


def off_by(elements: int, like: torch.Tensor) -> torch.Tensor:
    """As ``like``, from so many elements behind a multiple of 16 bytes on."""
    storage = torch.zeros(like.numel() + elements, dtype=like.dtype).as_subclass(OnGpu)
    assert storage.data_ptr() % 16 == 0
    return storage.as_strided(like.shape, like.stride(), elements)


@contextmanager
def hopper_for(module: ModuleType) -> Iterator[list[tuple[int, int]]]:
    """The device's capability as ``module`` sees it, which a test may change before its first question."""
    capability = [HOPPER]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
        module.has_instructions.cache_clear()
        yield capability
        module.has_instructions.cache_clear()


def record_launches(
    patch: pytest.MonkeyPatch, module: ModuleType
) -> tuple[list[dict[str, Any]], Callable[..., SimpleNamespace]]:
    """What is launched by the kernel that the second result makes, with all that it is made for.

    A tensor map is ``(pointer, rows, depth, box_rows)``, in its words.
    """
    found: list[dict[str, Any]] = []

    def kernel(**made_for: Any) -> SimpleNamespace:
        def launch(params: ctypes.Structure, **options: Any) -> None:
            found.append({"params": type(params).from_buffer_copy(params), **options, **made_for})

        return SimpleNamespace(launch=launch)

    patch.setattr(module, "tensor_map", module.TensorMap)
    patch.setattr(compat, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    return found, kernel
