"""A kernel that takes SMs and does nothing, to time what runs beside a kernel that needs other ranks."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from tw_compile.kernels.cuda.launch import Kernel, prepare
from tw_compile.kernels.cuda.program import Program, arch_of

_SHARED_BYTES = 227 * 1024  # all that a CTA can have on sm_90 and sm_100, so that nothing shares its SM


class HoldParams(ctypes.Structure):
    """``HoldParams`` of hold_sms.cu."""

    _fields_ = [("nanoseconds", ctypes.c_uint64)]


def hold_program(capability: tuple[int, int]) -> Program:
    """The kernel for a compute capability."""
    return Program(Path(__file__).with_name("hold_sms.cu"), HoldParams, arch_of(capability))


def hold_sms(stream: torch.cuda.Stream, ctas: int, microseconds: float, cluster: int = 1) -> None:
    """Enqueue ``ctas`` CTAs, in clusters of ``cluster``, that keep an SM each for ``microseconds``; the device is current."""
    kernel = _kernel(stream.device)
    kernel.launch(
        HoldParams(int(microseconds * 1e3)),
        stream=stream.cuda_stream,
        grid=ctas,
        block=32,
        shared_bytes=_SHARED_BYTES,
        cluster=cluster,
    )


@cache
def _kernel(device: torch.device) -> Kernel:
    return prepare(hold_program(torch.cuda.get_device_capability(device)), device.index)
