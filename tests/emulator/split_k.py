"""The split-K GEMM in the emulator, called as the host calls it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from emulator import joint
from emulator.grouped import TileDriver
from tw_compile import compat
from tw_compile.kernels.gemm import split_k_mm as module
from tw_compile.kernels.runtime import bindings
from tw_compile.planning.joint_tiles import BOX, tiles_beside
from tw_compile.planning.split_k_tiles import TILE_ROWS, SplitK

SOURCE = Path(module.__file__).with_name("split_k_mm.cu")


def multiply(
    a: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    seed: int,
    *,
    width: int,
    parts: int,
    resident: int = 8,
    biases: Sequence[torch.Tensor] = (),
    source: Path = SOURCE,
) -> list[torch.Tensor]:
    """In tiles of ``width`` columns on clusters of ``parts`` CTAs, at most ``resident`` of which run at a time."""
    columns = [matrix.shape[1] for matrix in matrices]
    tiles = SplitK(width, parts, -(-len(a) // TILE_ROWS) * tiles_beside(columns, width, BOX), 0.0)
    kernel = joint.emulated(source, a, matrices, biases, [(len(a), one) for one in columns], seed, resident)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bindings, "load", lambda name: TileDriver())
        patch.setattr(module, "tensor_map", module.tensor_map.__wrapped__)
        patch.setattr(module, "kernel_on", lambda device, width, biased: kernel(module.split_k_program(width, biased)))
        patch.setattr(compat, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
        return module.joint_mm(a, matrices, biases, tiles)


check = partial(joint.check, by=multiply)
"""Every element is what it must be, to the bit, and no operand was written to."""
