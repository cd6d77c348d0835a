"""The joint GEMM in the emulator, called as the host calls it: what reaches the driver runs here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from emulator import Emulator
from emulator.grouped import NOT_WRITTEN, STALL_LIMIT, TileDriver, bits_of, whole_numbers
from tw_compile import compat
from tw_compile.kernels.gemm import joint_mm as module
from tw_compile.kernels.runtime import bindings
from tw_compile.kernels.runtime.program import Program
from tw_compile.planning.joint_tiles import Tiling, tiles_beside

SOURCE = Path(module.__file__).with_name("joint_mm.cu")


def narrow_behind(whole: int, rows: int, columns: Sequence[int], width: int, multiple: int | None = None) -> Tiling:
    """With the first ``whole`` pairs of tiles, or all that there are, not narrow. ``multiple``: not ``width``."""
    multiple = multiple or width
    wide = tiles_beside(columns, width, multiple)
    high = (rows + 127) // 256
    whole = min(whole, high * wide)
    return Tiling(width, multiple, whole, 2 * (high * wide - whole), wide if rows > high * 256 else 0, 0.0)


def emulated(
    source: Path,
    a: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    outs: Sequence[tuple[int, int]],
    seed: int,
    resident: int,
) -> Callable[[Program], SimpleNamespace]:
    """The loaded kernel of a program whose source is ``source``: each launch runs in an emulator that has these tensors.

    ``outs``: shapes of the results. ``resident``: how many CTAs run at a time at most.
    """

    def loaded(program: Program) -> SimpleNamespace:
        defines: dict[str, int | str] = {name: int(value) for name, value in program.defines}

        def launch(params: Any, *, stream: int, grid: int, block: int, shared_bytes: int, **options: Any) -> None:
            emulator = Emulator(
                source, program.entry, 1, seed, resident=resident, stall_limit=STALL_LIMIT, defines=defines
            )
            emulator.alloc(0, a, name="a")
            for index, matrix in enumerate(matrices):
                emulator.alloc(0, matrix.t(), name=f"matrix {index}")
            for index, bias in enumerate(biases):
                emulator.alloc(0, bias, name=f"bias {index}")
            for index, (rows, columns) in enumerate(outs):
                out = bits_of(params.out[index], rows * columns)
                out.fill(NOT_WRITTEN)
                emulator.alloc(0, out, name=f"out {index}")
            emulator.launch(0, stream, grid, block, shared_bytes, params, **options)
            emulator.run()

        return SimpleNamespace(launch=launch)

    return loaded


def multiply(
    a: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    seed: int,
    *,
    tiles: Tiling | None = None,
    sms: int = 4,
    reserved_sms: int = 0,
    resident: int = 16,
    gated: bool = False,
    biases: Sequence[torch.Tensor] = (),
    source: Path = SOURCE,
) -> list[torch.Tensor]:
    """``joint_mm`` on a device of ``sms`` SMs, at most ``resident`` of which run a CTA at a time; ``tiles``: not its own.

    ``gated``: ``gated_mm``, else with ``biases`` if there are any.
    """

    outs = [(len(a), matrix.shape[1]) for matrix in matrices[: 1 if gated else None]]
    kernel = emulated(source, a, matrices, biases, outs, seed, resident)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bindings, "load", lambda name: TileDriver())
        patch.setattr(module, "tensor_map", module.tensor_map.__wrapped__)
        patch.setattr(module, "kernel_on", lambda device, width, form: kernel(module.joint_mm_program(width, form)))
        patch.setattr(module, "sms_of", lambda device: sms)
        patch.setattr(compat, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
        if tiles is not None:
            patch.setattr(module, "tiling", lambda rows, columns, clusters: tiles)
        if gated:
            return [module.gated_mm(a, *matrices, reserved_sms)]
        return module.joint_mm(a, matrices, biases, reserved_sms)


def check(
    rows: int,
    columns: Sequence[int],
    depth: int,
    seed: int,
    biased: bool = False,
    by: Callable[..., list[torch.Tensor]] = multiply,
    **options: Any,
) -> None:
    """Every element of the products ``by`` a kernel is what it must be, to the bit, and no operand was written to."""
    a = whole_numbers(rows, depth, seed=4 * seed)
    matrices = [whole_numbers(one, depth, seed=4 * seed + index).t() for index, one in enumerate(columns, 1)]
    biases = [256 * whole_numbers(one, seed=4 * seed + index) for index, one in enumerate(columns)] if biased else []
    given = [tensor.clone() for tensor in (a, *matrices, *biases)]
    found = by(a, matrices, seed, biases=biases, **options)
    for index, (product, matrix) in enumerate(zip(found, matrices, strict=True)):
        want = (a.float() @ matrix.float() + (biases[index].float() if biased else 0.0)).to(torch.bfloat16)
        wrong = product.view(torch.int16) != want.view(torch.int16)
        first = wrong.nonzero()[:1].tolist()
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} of {index} are wrong, first at {first}"
    assert all(torch.equal(now, before) for now, before in zip((a, *matrices, *biases), given, strict=True))


def check_gated(rows: int, columns: int, depth: int, seed: int, **options: Any) -> None:
    """As :func:`check`, within the error of a rounding."""
    generator = torch.Generator().manual_seed(seed)
    a, *matrices = (
        torch.randn(shape, depth, generator=generator).div(depth**0.25).to(torch.bfloat16)
        for shape in (rows, columns, columns)
    )
    gate, up = (matrix.t() for matrix in matrices)
    (found,) = multiply(a, (gate, up), seed, gated=True, **options)
    want = torch.nn.functional.silu(a.double() @ gate.double()) * (a.double() @ up.double())
    torch.testing.assert_close(found.double(), want, rtol=2**-8, atol=1e-4)
