"""What decides how an unfused all_reduce travels: the device, and the settings of the program that runs the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tw_compile.gating.hosts import DEFAULT_HOST, dispatch_of

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Backend(StrEnum):
    """How an unfused all_reduce travels."""

    CUSTOM = "custom"
    SYMM_MEM_ONE_SHOT = "symm_mem_one_shot"
    SYMM_MEM_TWO_SHOT = "symm_mem_two_shot"
    MULTIMEM = "multimem"
    NCCL = "nccl"
    NCCL_SYMMETRIC = "nccl_symmetric"
    FLASHINFER = "flashinfer"


BACKENDS = tuple(str(backend) for backend in Backend)


@dataclass(frozen=True)
class Node:
    """The hardware that all_reduces run on.

    Attributes:
        capability: The device's compute capability; None: not a known NVIDIA GPU.
        multicast: Whether NVLink multicast can be used.
        peer_access: Whether the GPUs can work on each other's memory. Hosts decide by what the hardware can do:
            TW_COMPILE_PEER_ACCESS is for tw_compile alone.
        peer_atomics: Whether their links have native atomics, too, that our kernels may use. Ours over peer memory need them;
            hosts' do not.
    """

    capability: tuple[int, int] | None
    multicast: bool
    peer_access: bool = True
    peer_atomics: bool = True

    @classmethod
    def parse(cls, device: str, multicast: bool) -> Node:
        """``"sm90"`` or ``"generic"``; ValueError for anything else."""
        match = re.fullmatch(r"sm([0-9]{1,3})([0-9])", device)
        if match is None and device != "generic":
            raise ValueError(f"device: expected sm90, sm100, sm103, another sm<number>, or generic, got {device!r}")
        return cls(None if match is None else (int(match[1]), int(match[2])), multicast)

    @property
    def peer_kernels(self) -> bool:
        """Whether our kernels over peer memory can run."""
        return self.peer_access and self.peer_atomics

    @property
    def device_class(self) -> str:
        """The name of the device class whose table is about this device."""
        known = {(9, 0): "sm90-multicast" if self.multicast else "sm90", (10, 0): "sm100", (10, 3): "sm103"}
        return known.get(self.capability, "generic") if self.capability else "generic"


@dataclass(frozen=True)
class HostFacts:
    """What the settings of a host depend on beside its environment variables.

    Attributes:
        backend: See :class:`Settings`.
        one_shot_max_bytes: See :class:`Settings`.
        disable_custom_all_reduce: Whether a host that has an all_reduce of its own is told not to use it.
        installed: Says whether the Python package of a name can be imported.
    """

    backend: str = "auto"
    one_shot_max_bytes: int = 0
    disable_custom_all_reduce: bool = False
    installed: Callable[[str], bool] = lambda package: True


@dataclass(frozen=True)
class Settings:
    """What the program that runs the model has been told about its all_reduces. Hosts that are told more derive a class.

    Attributes:
        host: The host whose dispatch applies, one of :func:`tw_compile.gating.hosts.host_names`.
        backend: ``auto`` follows the host's dispatch; otherwise the name of a backend that is taken for granted.
        one_shot_max_bytes: The largest message that Inductor gives to its one-shot kernel; 0 if it never does.

    Raises:
        ValueError: A name is unknown.
        TypeError: The settings of that host are of another class.
    """

    host: str = DEFAULT_HOST
    backend: str = "auto"
    one_shot_max_bytes: int = 0

    def __post_init__(self) -> None:
        expected = dispatch_of(self.host).settings
        if type(self) is not expected:
            raise TypeError(f"host: expected {expected.__name__} for {self.host}, got {type(self).__name__}")
        if self.backend not in ("auto", *BACKENDS):
            raise ValueError(f"backend: expected one of {', '.join(('auto', *BACKENDS))}, got {self.backend!r}")

    @classmethod
    def from_environment(cls, host: str, environment: Mapping[str, str], facts: HostFacts | None = None) -> Settings:
        """The settings of ``host`` as its environment variables have them; ValueError names the variable.

        Variables of other hosts are not read.
        """
        return dispatch_of(host).read(host, environment, facts or HostFacts())


@dataclass(frozen=True)
class Active:
    """The backend of an unfused all_reduce, and why it is that one."""

    backend: Backend
    why: str
