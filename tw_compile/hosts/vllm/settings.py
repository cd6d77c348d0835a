"""What vLLM has been told about its all_reduces, by its options and environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tw_compile.gating.facts import HostFacts, Settings

NAMES = ("vllm-0.20", "vllm-0.24", "vllm-0.33")
"""The names of the host. Each name has the first vLLM version that dispatches all_reduces in its way; the oldest is first."""
OLDEST, NEWEST = NAMES[0], NAMES[-1]
FLASHINFER_BACKENDS = ("auto", "mnnvl", "trtllm")

_SYMM_MEM = "VLLM_ALLREDUCE_USE_SYMM_MEM"
_NCCL_SYMM_MEM = "VLLM_USE_NCCL_SYMM_MEM"
_FLASHINFER = "VLLM_ALLREDUCE_USE_FLASHINFER"
_FLASHINFER_BACKEND = "VLLM_FLASHINFER_ALLREDUCE_BACKEND"


@dataclass(frozen=True)
class VllmSettings(Settings):
    """vLLM's settings, besides those that all hosts have.

    Attributes:
        disable_custom_all_reduce, use_symm_mem, use_nccl_symm_mem, use_flashinfer, flashinfer_backend: vLLM's settings.
        flashinfer_installed: Whether FlashInfer can be imported.

    Raises:
        ValueError: A name is unknown.
    """

    host: str = OLDEST
    disable_custom_all_reduce: bool = False
    use_symm_mem: bool = True
    use_nccl_symm_mem: bool = False
    use_flashinfer: bool = False
    flashinfer_backend: str = "auto"
    flashinfer_installed: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flashinfer_backend not in FLASHINFER_BACKENDS:
            choices = ", ".join(FLASHINFER_BACKENDS)
            raise ValueError(f"flashinfer_backend: expected one of {choices}, got {self.flashinfer_backend!r}")


def read_settings(host: str, environment: Mapping[str, str], facts: HostFacts) -> VllmSettings:
    """The settings of the version ``host``; ValueError names the variable that is wrong."""
    flashinfer_backend = environment.get(_FLASHINFER_BACKEND, "auto")
    if flashinfer_backend not in FLASHINFER_BACKENDS:
        choices = ", ".join(FLASHINFER_BACKENDS)
        raise ValueError(f"{_FLASHINFER_BACKEND}: expected one of {choices}, got {flashinfer_backend!r}")
    return VllmSettings(
        host,
        facts.backend,
        disable_custom_all_reduce=facts.disable_custom_all_reduce,
        use_symm_mem=_switch(environment, _SYMM_MEM, True),
        use_nccl_symm_mem=_switch(environment, _NCCL_SYMM_MEM, False),
        use_flashinfer=_switch(environment, _FLASHINFER, host == NEWEST),
        flashinfer_backend=flashinfer_backend,
        flashinfer_installed=facts.installed("flashinfer"),
    )


def _switch(environment: Mapping[str, str], name: str, default: bool) -> bool:
    value = environment.get(name)
    if value is None:
        return default
    if value not in ("0", "1"):
        raise ValueError(f"{name}: expected '0' or '1', got {value!r}")
    return value == "1"
