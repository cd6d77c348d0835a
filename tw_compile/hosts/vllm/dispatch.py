"""What vLLM does with an all_reduce that is not fused: its order of backends, and the sizes that each backend declines.

The facts are those of vLLM 0.20, 0.24 and 0.33: ``distributed/device_communicators/{cuda_communicator, all_reduce_utils,
custom_all_reduce, symm_mem, flashinfer_all_reduce}.py`` and ``compilation/passes/fusion/allreduce_rms_fusion.py``. 0.20 and
0.24 agree; 0.33 asks FlashInfer first and has it on by default. Only tensor-parallel groups on NVIDIA GPUs are meant.
"""

from __future__ import annotations

from tw_compile.gating.facts import Active, Backend, Node
from tw_compile.hosts.vllm.settings import NEWEST, VllmSettings

_KIB, _MIB = 2**10, 2**20

Capability = tuple[int, int]

CUSTOM_LIMIT = 8 * _MIB
CUSTOM_WORLD_SIZES = (2, 4, 6, 8)
# Below these sizes the custom kernels go first. The limits hold only where torch's symmetric memory would take larger messages.
CUSTOM_LIMITS: dict[Capability, dict[int, int]] = {
    (9, 0): {2: 64 * _MIB, 4: 32 * _MIB, 6: 512 * _KIB, 8: 256 * _KIB},
    (10, 0): {2: 2 * _MIB, 4: 2 * _MIB, 6: _MIB, 8: _MIB},
    (10, 3): {2: 4 * _MIB, 4: 4 * _MIB, 6: 8 * _MIB, 8: 4 * _MIB},
}
SYMM_MEM_LIMITS: dict[Capability, dict[int, int]] = {
    (9, 0): {2: 64 * _MIB, 4: 32 * _MIB, 6: 64 * _MIB, 8: 64 * _MIB},
    (10, 0): {2: 8 * _MIB, 4: 32 * _MIB, 6: 128 * _MIB, 8: 128 * _MIB},
    (10, 3): {2: 4 * _MIB, 4: 32 * _MIB, 6: 32 * _MIB, 8: 64 * _MIB},
}
MULTIMEM_WORLD_SIZES: dict[Capability, tuple[int, ...]] = {(9, 0): (4, 6, 8), (10, 0): (6, 8), (10, 3): (6, 8)}
NCCL_SYMMETRIC_MIN_WORLD_SIZE = 4
NCCL_SYMMETRIC_ALWAYS_ABOVE_WORLD_SIZE = 8
# For sizes strictly between these two, NCCL's symmetric kernels leave the message to the custom kernels.
NCCL_SYMMETRIC_SKIPS = {4: (16 * _KIB, 512 * _KIB), 8: (16 * _KIB, 128 * _KIB)}
FLASHINFER_LIMITS: dict[Capability, dict[int, int]] = {
    (9, 0): {2: 64 * _MIB, 4: 2 * _MIB, 8: 512 * _KIB},
    (10, 0): {2: 64 * _MIB, 4: 32 * _MIB, 8: _MIB},
    (10, 3): {2: 64 * _MIB, 4: 64 * _MIB, 8: 2 * _MIB},
}
FLASHINFER_LIMITS_033: dict[Capability, dict[int, int]] = {
    (9, 0): FLASHINFER_LIMITS[9, 0],
    (10, 0): FLASHINFER_LIMITS[10, 0] | {16: 64 * _MIB},
    (10, 3): FLASHINFER_LIMITS[10, 3] | {8: 4 * _MIB, 16: 64 * _MIB},
    (10, 7): {2: 64 * _MIB, 4: 64 * _MIB, 8: 2 * _MIB},
}
# 0.33, FlashInfer's multicast kernels: by capability, world size and number of hosts.
MNNVL_LIMITS_033: dict[tuple[Capability, int, int], int] = {
    ((10, 0), 8, 1): 128 * _MIB,
    ((10, 0), 8, 2): 128 * _MIB,
    ((10, 3), 4, 1): 80 * _MIB,
    ((10, 3), 8, 1): 128 * _MIB,
    ((10, 3), 8, 2): 128 * _MIB,
    ((10, 3), 16, 4): 8 * _MIB,
}


def active_backend(node: Node, settings: VllmSettings, world_size: int, dtype: str, nbytes: int, hosts: int) -> Active:
    """See :class:`tw_compile.gating.hosts.Dispatch`.

    All the faster backends need peer access: without it vLLM switches its custom all_reduce off, the others can't be set up,
    and NCCL has no symmetric kernels.
    """
    if not node.peer_access:
        return Active(Backend.NCCL, f"{settings.host}: no peer access between the GPUs, which its faster backends need")
    flashinfer = _flashinfer(node, settings, world_size, nbytes, hosts)
    nccl_symmetric = _nccl_symmetric(settings, world_size, nbytes)
    first = (flashinfer, nccl_symmetric) if settings.host == NEWEST else (nccl_symmetric, flashinfer)
    rest = (
        _custom(node, settings, world_size, nbytes, hosts),
        _symm_mem(node, settings, world_size, dtype, nbytes, hosts),
    )
    taken = next((active for active in (*first, *rest) if active is not None), None)
    return taken or Active(Backend.NCCL, f"{settings.host}: no faster backend takes it")


def bounds(settings: VllmSettings) -> set[int]:
    """Every size at which an answer may change, in any version and with any settings."""
    tables = (CUSTOM_LIMITS, SYMM_MEM_LIMITS, FLASHINFER_LIMITS, FLASHINFER_LIMITS_033)
    limits = {limit for table in tables for row in table.values() for limit in row.values()}
    skips = {limit for span in NCCL_SYMMETRIC_SKIPS.values() for limit in span}
    return limits | skips | set(MNNVL_LIMITS_033.values()) | {CUSTOM_LIMIT}


def flashinfer_limit(settings: VllmSettings, capability: Capability | None, world_size: int) -> int | None:
    """Up to how many bytes vLLM fuses by FlashInfer, where FlashInfer is installed; None where it does not."""
    limits = FLASHINFER_LIMITS_033 if settings.host == NEWEST else FLASHINFER_LIMITS
    return limits.get(capability, {}).get(world_size) if capability else None


def _capability(node: Node, settings: VllmSettings) -> Capability | None:
    """The row of the size tables. From 0.33 on, sm107 uses the row of sm103."""
    return (10, 3) if node.capability == (10, 7) and settings.host == NEWEST else node.capability


def _symm_mem_limit(node: Node, settings: VllmSettings, world_size: int, hosts: int) -> int | None:
    """The size of torch's symmetric buffer, None where vLLM has none."""
    capability = _capability(node, settings)
    if not settings.use_symm_mem or not node.multicast or hosts > 1 or capability not in SYMM_MEM_LIMITS:
        return None
    return SYMM_MEM_LIMITS[capability].get(world_size)


def _symm_mem(
    node: Node, settings: VllmSettings, world_size: int, dtype: str, nbytes: int, hosts: int
) -> Active | None:
    limit = _symm_mem_limit(node, settings, world_size, hosts)
    if limit is None or dtype != "bfloat16" or nbytes % 4:
        return None
    if nbytes > limit or (nbytes == limit and settings.host != NEWEST):
        return None
    capability = _capability(node, settings)
    assert capability is not None
    multimem = world_size in MULTIMEM_WORLD_SIZES[capability]
    backend = Backend.MULTIMEM if multimem else Backend.SYMM_MEM_TWO_SHOT
    return Active(backend, f"{settings.host}: VLLM_ALLREDUCE_USE_SYMM_MEM, buffer of {limit} bytes")


def _custom(node: Node, settings: VllmSettings, world_size: int, nbytes: int, hosts: int) -> Active | None:
    if settings.disable_custom_all_reduce or hosts > 1 or world_size not in CUSTOM_WORLD_SIZES or nbytes % 16:
        return None
    limit = CUSTOM_LIMIT
    if _symm_mem_limit(node, settings, world_size, hosts) is not None:
        capability = _capability(node, settings)
        assert capability is not None
        limit = min(limit, CUSTOM_LIMITS[capability][world_size])
    return Active(Backend.CUSTOM, f"{settings.host}: below {limit} bytes") if nbytes < limit else None


def _nccl_symmetric(settings: VllmSettings, world_size: int, nbytes: int) -> Active | None:
    if not settings.use_nccl_symm_mem or world_size < NCCL_SYMMETRIC_MIN_WORLD_SIZE:
        return None
    skip = NCCL_SYMMETRIC_SKIPS.get(world_size)
    if skip is None:
        takes, rule = world_size > NCCL_SYMMETRIC_ALWAYS_ABOVE_WORLD_SIZE, "all sizes"
    else:
        takes, rule = not skip[0] < nbytes < skip[1], f"up to {skip[0]} and from {skip[1]} bytes"
    return Active(Backend.NCCL_SYMMETRIC, f"{settings.host}: VLLM_USE_NCCL_SYMM_MEM, {rule}") if takes else None


def _flashinfer(node: Node, settings: VllmSettings, world_size: int, nbytes: int, hosts: int) -> Active | None:
    if not settings.use_flashinfer or not settings.flashinfer_installed or node.capability is None:
        return None
    new = settings.host == NEWEST
    limit = flashinfer_limit(settings, node.capability, world_size)
    if limit is None:
        return None
    kernels = settings.flashinfer_backend
    if kernels == "auto":
        kernels = "mnnvl" if new or hosts > 1 else "trtllm"
    # From 0.33 on, "auto" falls back to the kernels without multicast on one host. The setting "mnnvl" does not fall back.
    falls_back = new and settings.flashinfer_backend == "auto" and hosts == 1
    if (kernels == "trtllm" and hosts > 1) or (kernels == "mnnvl" and not node.multicast and not falls_back):
        return None
    if new and kernels == "mnnvl":
        limit = MNNVL_LIMITS_033.get((node.capability, world_size, hosts), limit)
    why = f"{settings.host}: VLLM_ALLREDUCE_USE_FLASHINFER, up to {limit} bytes"
    return Active(Backend.FLASHINFER, why) if nbytes <= limit else None
