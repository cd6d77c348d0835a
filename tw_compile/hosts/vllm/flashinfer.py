"""Which sizes vLLM's own fusion, by FlashInfer, is left. It runs before ours, so what it serves is not ours to fuse.

FlashInfer keeps the sizes at which ours is not measured to be faster. The tables of thresholds have entries for FlashInfer that
compare its fused kernels with our operator. This is decided where an engine is configured. Imports no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from tw_compile.config import Config
from tw_compile.gating.facts import Backend
from tw_compile.gating.gate import Gate
from tw_compile.gating.table import Entry, size
from tw_compile.hosts.vllm import dispatch
from tw_compile.hosts.vllm.dispatch import Capability
from tw_compile.hosts.vllm.plan import Engine, gates, is_fused, row_bytes_of, settings_of
from tw_compile.hosts.vllm.reasons import FlashInferShare
from tw_compile.hosts.vllm.settings import NEWEST, VllmSettings
from tw_compile.kernels.collective.transports import AUTO
from tw_compile.passes.fusion import FUSE

OPTIONS = ("fuse_allreduce_rms", "fi_allreduce_fusion_max_size_mb")
"""Fields of vLLM's ``pass_config`` by which users say what FlashInfer is to fuse."""
_LEAST_TOKENS = 2
"""FlashInfer keeps at least so many tokens, or nothing: vLLM tunes the GEMMs of a range of one size when it starts."""
_NAMED = "p2p"
"""The transport that the entries for FlashInfer were measured with. The option may insist on it."""


@dataclass(frozen=True)
class Peers:
    """What the driver's library says about the GPUs of an engine.

    Attributes:
        reach: Whether they can work on each other's memory; None if it does not say. TW_COMPILE_PEER_ACCESS does not count.
        nvlink: Whether it says that NVLink joins every two of them.
        atomics: Whether their links have native atomics, which our kernels over peer memory need; True if it does not say.
    """

    reach: bool | None
    nvlink: bool
    atomics: bool = True


JOINED = Peers(reach=True, nvlink=True)


@dataclass(frozen=True)
class Share:
    """The sizes that FlashInfer fuses in an engine, and why.

    Attributes:
        limit: Up to how many bytes FlashInfer fuses; None: nothing.
        of_vllm: The same, as vLLM has it.
        kept: Whether vLLM's configuration stays as it is, because the user said so.
    """

    limit: int | None = None
    of_vllm: int | None = None
    reason: FlashInferShare | None = None
    detail: str = ""
    kept: bool = False

    @property
    def changes(self) -> bool:
        """Whether vLLM's configuration must be changed for it."""
        return self.limit != self.of_vllm and not self.kept

    @property
    def line(self) -> str:
        """What the start and ``doctor`` say; empty where vLLM does not fuse by FlashInfer."""
        if self.of_vllm is None:
            return ""
        vllm = "as in vLLM" if self.limit == self.of_vllm else f"vLLM has it {_up_to(self.of_vllm)}"
        return f"FlashInfer's fusion is {_up_to(self.limit)} ({vllm}), {self.reason}: {self.detail}"


def flashinfer_share(
    engine: Engine,
    config: Config,
    choices: tuple[Gate, ...],
    of_vllm: int | None,
    peers: Peers,
    user_set: bool,
    alone: str | None = None,
) -> Share:
    """What FlashInfer is left of messages of up to ``of_vllm`` bytes, which vLLM gives it; None: it gives it none.

    ``choices``: see :func:`tw_compile.hosts.vllm.plan.gates`. ``user_set``: whether the user has set one of :data:`OPTIONS`.
    ``alone``: which norms of the model only FlashInfer fuses, in words; None if there are none.
    """
    if of_vllm is None:
        return Share()
    if peers.reach is False:
        detail = "without peer access between the GPUs FlashInfer's kernels can't run"
        return Share(None, of_vllm, FlashInferShare.NO_PEER_ACCESS, detail, kept=user_set)
    found = _by_tables(engine, config, choices, of_vllm, _obstacle(config, choices, peers) or alone)
    if found.changes and user_set:
        otherwise = f"without {' and '.join(OPTIONS)} in pass_config it would be {_up_to(found.limit)}, {found.reason}"
        return Share(of_vllm, of_vllm, FlashInferShare.SET_BY_USER, f"{otherwise}: {found.detail}", kept=True)
    return found


def explained(config: Config, capability: Capability | None, world_size: int, hidden_size: int, dtype: str) -> str:
    """What ``explain`` says: FlashInfer's share where it is installed, NVLink joins the GPUs, and the user has set nothing.

    As at the start of an engine, it is not known whether there is multicast.
    """
    choices = gates(config, capability)
    of_vllm = dispatch.flashinfer_limit(settings_of(choices[0]), capability, world_size)
    engine = Engine(world_size, hidden_size, dtype, max_tokens=of_vllm or 0)
    return flashinfer_share(engine, config, choices, of_vllm, JOINED, user_set=False).line


def _by_tables(engine: Engine, config: Config, choices: tuple[Gate, ...], of_vllm: int, obstacle: str | None) -> Share:
    if obstacle is not None:
        return Share(of_vllm, of_vllm, FlashInferShare.NOT_MEASURED, obstacle)
    row_bytes, world_size = row_bytes_of(engine), engine.tensor_parallel_size
    shares = settings_of(choices[0]).use_flashinfer
    unfused = of_vllm if shares else _unfused_from(engine, choices, of_vllm)
    most = min(unfused // row_bytes, engine.max_tokens)
    first = _ours_from(engine, config, choices, most)
    if first is not None:
        measured = _measured(engine, choices, most * row_bytes)
        assert measured is not None
        table, entry = measured
        limit = (first - 1) * row_bytes or None
        detail = f"tw_compile is faster from {size(first * row_bytes)} on, by {table}: {entry.source}"
        if shares and limit is not None:
            needs = "FlashInfer's all_reduce (VLLM_ALLREDUCE_USE_FLASHINFER) shares the fusion's buffers and needs their size"
            return Share(of_vllm, of_vllm, FlashInferShare.SHARED_BUFFERS, f"{needs}; {detail}")
        return Share(limit, of_vllm, FlashInferShare.MEASURED_FASTER, detail)
    if unfused != of_vllm:
        detail = "above that an all_reduce that is not fused is faster, by vLLM issue 44079"
        return Share(unfused or None, of_vllm, FlashInferShare.UNFUSED_FASTER, detail)
    none = f"no table says that tw_compile is faster than FlashInfer at these sizes with {world_size} ranks"
    return Share(of_vllm, of_vllm, FlashInferShare.NOT_MEASURED, none)


def _unfused_from(engine: Engine, choices: tuple[Gate, ...], of_vllm: int) -> int:
    """:func:`fusion_limit` where vLLM has the faster all_reduce for what is above, if there is multicast; else its own limit.

    The result is below the limit by the rows of whole tokens, so that vLLM's range ends where the table's does.
    """
    node, settings, world_size = choices[0].node, settings_of(choices[0]), engine.tensor_parallel_size
    limit = fusion_limit(node.capability, world_size, settings, of_vllm)
    then = dispatch.active_backend(node, settings, world_size, engine.dtype, of_vllm, hosts=1).backend
    if limit == of_vllm or then not in (Backend.MULTIMEM, Backend.NCCL_SYMMETRIC):
        return of_vllm
    row_bytes = row_bytes_of(engine)
    return max(limit - 1, 0) // row_bytes * row_bytes


def _obstacle(config: Config, choices: tuple[Gate, ...], peers: Peers) -> str | None:
    """Why the entries for FlashInfer say nothing about this engine, in words; None if they do."""
    settings = settings_of(choices[0])
    multicast = settings.flashinfer_backend == "mnnvl" or (
        settings.host == NEWEST and settings.flashinfer_backend == "auto"
    )
    reasons = (
        (not config.fuse, "nothing is fused"),
        (FUSE.name in config.disable_passes, f"nothing is fused, as disable_passes names {FUSE.name}"),
        (config.transport not in (AUTO, _NAMED), f"transport {config.transport} was not timed beside FlashInfer"),
        (not all(gate.node.peer_kernels for gate in choices), "no run without peer access had FlashInfer's kernels"),
        (multicast, "FlashInfer's kernels for multicast were not timed beside ours"),
        (not peers.nvlink, "the driver does not say that NVLink joins the GPUs, as it did where FlashInfer was timed"),
    )
    return next((detail for applies, detail in reasons if applies), None)


def _ours_from(engine: Engine, config: Config, choices: tuple[Gate, ...], most: int) -> int | None:
    """From how many tokens on, up to ``most``, ours is measured to be faster at all sizes; None: at none of them.

    FlashInfer's share has no holes, because vLLM has one limit for it.
    """
    row_bytes = row_bytes_of(engine)
    if most < 1:
        return None
    counts = {count for gate in choices for count in gate.token_counts((1, most), row_bytes)}
    for bound in (config.fuse_min_bytes, config.fuse_max_bytes):
        around = {(bound or 0) // row_bytes + step for step in (-1, 0, 1, 2)}
        counts |= {count for count in around if 1 <= count <= most}
    first = None
    for count in sorted(counts, reverse=True):
        fused = all(is_fused(engine, config, gate, count, count) for gate in choices)
        if not fused or _measured(engine, choices, count * row_bytes) is None:
            break
        first = count
    else:
        return first
    if first is None:
        return None
    first = max(first, _LEAST_TOKENS + 1)
    return first if first <= most else None


def _measured(engine: Engine, choices: tuple[Gate, ...], nbytes: int) -> tuple[str, Entry] | None:
    """The file and the entry by which ours was faster than FlashInfer's kernel at this size; None where none says so.

    Neither of the two kernels uses multicast. So on a node of which it is not known whether it has multicast, one table is
    enough, if no other one says that the message is better left.
    """
    found = [gate.entry_for(nbytes, engine.tensor_parallel_size, Backend.FLASHINFER) for gate in choices]
    if any(entry.decision != "fused" for _, entry in found):
        return None
    measured = [(table.file, entry) for table, entry in found if entry.source.kind == "measured"]
    named = [one for one in measured if one[1].backend == Backend.FLASHINFER]
    return named[-1] if named else None


def _up_to(limit: int | None) -> str:
    return "off" if limit is None else f"on up to {size(limit)}"


def fusion_limit(capability: tuple[int, int] | None, world_size: int, settings: VllmSettings, limit: int) -> int:
    """Up to how many bytes, at most vLLM's own ``limit``, FlashInfer's fusion is faster than an unfused all_reduce.

    Where the unfused all_reduce would use multimem or NCCL's symmetric kernels, these are faster. See vLLM issue 44079, and the
    rule of its pull request 44080.
    """
    if capability is None:
        return limit
    if settings.use_nccl_symm_mem and world_size >= dispatch.NCCL_SYMMETRIC_MIN_WORLD_SIZE:
        if world_size > dispatch.NCCL_SYMMETRIC_ALWAYS_ABOVE_WORLD_SIZE:
            return 0
        if world_size in dispatch.NCCL_SYMMETRIC_SKIPS:
            limit = min(limit, dispatch.NCCL_SYMMETRIC_SKIPS[world_size][1])
    if settings.use_symm_mem and world_size in dispatch.MULTIMEM_WORLD_SIZES.get(capability, ()):
        limit = min(limit, dispatch.CUSTOM_LIMITS[capability][world_size])
    return limit
