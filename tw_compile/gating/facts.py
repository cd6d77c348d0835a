"""What decides how an unfused all_reduce travels: the device, and the settings of the program that runs the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

HOSTS = ("pytorch", "vllm-0.20", "vllm-0.24", "vllm-0.33")
FLASHINFER_BACKENDS = ("auto", "mnnvl", "trtllm")
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


BACKENDS = tuple(str(one) for one in Backend)


@dataclass(frozen=True)
class Node:
    """The device: its compute capability (None: not a known NVIDIA GPU), and whether NVLink multicast can be used."""

    capability: tuple[int, int] | None
    multicast: bool

    @classmethod
    def parse(cls, device: str, multicast: bool) -> Node:
        """``"sm90"`` or ``"generic"``; ValueError for anything else."""
        found = re.fullmatch(r"sm([0-9]{1,3})([0-9])", device)
        if found is None and device != "generic":
            raise ValueError(f"device: expected sm90, sm100, sm103, another sm<number>, or generic, got {device!r}")
        return cls(None if found is None else (int(found[1]), int(found[2])), multicast)

    @property
    def device_class(self) -> str:
        """The table that is about this device."""
        known = {(9, 0): "sm90-multicast" if self.multicast else "sm90", (10, 0): "sm100", (10, 3): "sm103"}
        return known.get(self.capability, "generic") if self.capability else "generic"


@dataclass(frozen=True)
class Settings:
    """What the program that runs the model has been told about its all_reduces.

    Attributes:
        host: Whose dispatch it is, one of ``HOSTS``.
        backend: ``auto`` follows that dispatch, else the name of a backend that is taken for granted.
        one_shot_max_bytes: PyTorch: the largest message that Inductor gives to its one-shot kernel; 0 if it never does.
        disable_custom_all_reduce, use_symm_mem, use_nccl_symm_mem, use_flashinfer, flashinfer_backend: vLLM's settings.
        flashinfer_installed: vLLM: whether FlashInfer can be imported.

    Raises:
        ValueError: A name is unknown.
    """

    host: str = "pytorch"
    backend: str = "auto"
    one_shot_max_bytes: int = 0
    disable_custom_all_reduce: bool = False
    use_symm_mem: bool = True
    use_nccl_symm_mem: bool = False
    use_flashinfer: bool = False
    flashinfer_backend: str = "auto"
    flashinfer_installed: bool = True

    def __post_init__(self) -> None:
        for name, choices in (
            ("host", HOSTS),
            ("backend", ("auto", *BACKENDS)),
            ("flashinfer_backend", FLASHINFER_BACKENDS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")

    @classmethod
    def from_environment(
        cls,
        host: str,
        environment: Mapping[str, str],
        *,
        backend: str = "auto",
        one_shot_max_bytes: int = 0,
        disable_custom_all_reduce: bool = False,
        flashinfer_installed: bool = True,
    ) -> Settings:
        """The settings of ``host`` as its environment variables have them; ValueError names the variable.

        What belongs to another host is not read.
        """
        if host == "pytorch":
            return cls(host, backend, one_shot_max_bytes)
        flashinfer_backend = environment.get("VLLM_FLASHINFER_ALLREDUCE_BACKEND", "auto")
        if flashinfer_backend not in FLASHINFER_BACKENDS:
            choices = ", ".join(FLASHINFER_BACKENDS)
            raise ValueError(
                f"VLLM_FLASHINFER_ALLREDUCE_BACKEND: expected one of {choices}, got {flashinfer_backend!r}"
            )
        return cls(
            host,
            backend,
            one_shot_max_bytes,
            disable_custom_all_reduce,
            _switch(environment, "VLLM_ALLREDUCE_USE_SYMM_MEM", True),
            _switch(environment, "VLLM_USE_NCCL_SYMM_MEM", False),
            _switch(environment, "VLLM_ALLREDUCE_USE_FLASHINFER", host == "vllm-0.33"),
            flashinfer_backend,
            flashinfer_installed,
        )


@dataclass(frozen=True)
class Active:
    """The backend of an unfused all_reduce, and why it is that one."""

    backend: Backend
    why: str


def _switch(environment: Mapping[str, str], name: str, default: bool) -> bool:
    value = environment.get(name)
    if value is None:
        return default
    if value not in ("0", "1"):
        raise ValueError(f"{name}: expected '0' or '1', got {value!r}")
    return value == "1"
