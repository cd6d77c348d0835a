"""A kernel that takes SMs and does nothing: a stand-in to time what runs beside a kernel that needs other ranks."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from tw_compile.kernels.runtime.launch import Kernel, prepare
from tw_compile.kernels.runtime.program import FULL_SHARED_BYTES, Program, arch_of


class HoldParams(ctypes.Structure):
    """``HoldParams`` of hold_sms.cu."""

    _fields_ = [("nanoseconds", ctypes.c_uint64)]


def hold_program(capability: tuple[int, int]) -> Program:
    """The kernel for a compute capability."""
    return Program(Path(__file__).with_name("hold_sms.cu"), HoldParams, arch_of(capability))


def hold_sms(stream: torch.cuda.Stream, ctas: int, microseconds: float, cluster: int = 1) -> None:
    """Enqueue ``ctas`` CTAs, in clusters of ``cluster``, that keep an SM each for ``microseconds``.

    The device must be current, and its major compute capability must be one of ``FULL_SHARED_MAJORS``.
    """
    kernel = _kernel(stream.device)
    kernel.launch(
        HoldParams(int(microseconds * 1e3)),
        stream=stream.cuda_stream,
        grid=ctas,
        block=32,
        shared_bytes=FULL_SHARED_BYTES,  # no other CTA fits on the SM
        cluster=cluster,
        beside=True,  # like the kernel that it stands in for
    )


@cache
def _kernel(device: torch.device) -> Kernel:
    return prepare(hold_program(torch.cuda.get_device_capability(device)), device.index)
