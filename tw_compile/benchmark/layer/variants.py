"""The ways to compile a stack of layers, or a model, that are compared, as data. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tw_compile.benchmark.labels import NO_COMMUNICATION
from tw_compile.benchmark.layer.spec import LayerSpec
from tw_compile.benchmark.spec import SYMM_MEM_ONE_SHOT_MAX_BYTES, ContenderKind
from tw_compile.harness.spec import check_labels, with_labels
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.collective.wires import EXACT

SYMM_MEM_DTYPES = ("bfloat16", "float32")
COUNT_SUMS, DROP_SUMS, ONE_SHOT, TWO_SHOT = (
    f"tw_compile.benchmark.layer.symmetric:{name}"
    for name in ("CountAllReduces", "DropAllReduces", "use_one_shot", "use_two_shot")
)
COUNT_SCATTERS = "tw_compile.benchmark.layer.sites:CountScatters"
HALF_MULTIPLE = 16
SWEEP_STEP, MOST_SWEPT = 128, 16


@dataclass(frozen=True)
class LayerVariant:
    """One way to compile the subject.

    Attributes:
        kind: See ``ContenderKind``. Peers are unfused.
        make_pass: What makes the pass that Inductor's graph goes through, for variants that are not ours. It and ``module`` are
            named as for :func:`tw_compile.kernels.registry.load`.
        config: Options of the passes, for variants of ours.
        halves: Whether its tokens are split in the middle, or between the two halves of the batch, without a plan.
        wire: How rows of its fused calls travel, whatever a message's size.
        kernel: What serves all of its fused calls, by the name in tables of ``configs/kernels``; None: what users get.
        symmetric: Whether it reduces over torch's symmetric memory.
        most_bytes: The largest message that it serves; None: no limit.
        module: What makes what is compiled in place of the subject. It computes the same, but each rank keeps only its own
            rows.
    """

    label: str
    kind: ContenderKind
    make_pass: str = COUNT_SUMS
    config: dict[str, Any] = field(default_factory=dict)
    halves: bool = False
    wire: str = EXACT
    kernel: str | None = None
    symmetric: bool = False
    most_bytes: int | None = None
    module: str | None = None

    @property
    def prefetches(self) -> bool:
        """Whether its calls are told how many bytes to prefetch."""
        return self.config.get("prefetch", "auto") not in ("auto", "off")

    @property
    def reduces(self) -> bool:
        return self.kind != "bound"

    def options(self, tokens: int, batch: int) -> dict[str, Any]:
        """``config`` for a prefill of ``tokens`` tokens in ``batch`` sequences."""
        if not self.halves:
            return self.config
        first = tokens // batch * (batch // 2) or max(tokens // 2 // HALF_MULTIPLE * HALF_MULTIPLE, 1)
        return self.config | {"split": str(first)}

    def obstacle(self, tokens: int, nbytes: int, dtype: str, world_size: int) -> str | None:
        """Why the variant does not serve messages of ``tokens`` rows and ``nbytes``; None when it does."""
        from tw_compile.kernels.collective.peer_access import peer_access_obstacle  # it imports torch

        if self.symmetric and (obstacle := peer_access_obstacle(range(world_size))):
            return obstacle
        if self.module is not None and tokens % world_size:
            return f"each rank has as many rows: {tokens} tokens are no multiple of {world_size} ranks"
        if self.most_bytes is not None and nbytes > self.most_bytes:
            return f"every rank would read all messages whole: tried up to {self.most_bytes // 2**20} MiB"
        if self.symmetric and dtype not in SYMM_MEM_DTYPES:
            return f"torch's kernels add up {' and '.join(SYMM_MEM_DTYPES)} only"
        return None


FUSED = LayerVariant("fused", "ours", config={"split": "off"})
"""What a user gets who switches the split off."""
PLANNED = LayerVariant("fused+split", "ours")
"""What a user gets by default."""
SPLIT = (LayerVariant("split", "ours", config={"fuse": False}, halves=True), PLANNED)
NOT_FED = LayerVariant("fused-not-fed", "ours", config=FUSED.config | {"feed_mm": "never"})
"""Except for long messages it is ``fused``."""
ALL_FED = LayerVariant("fused-all-fed", "ours", config=FUSED.config | {"feed_mm": "always"})
"""With any number of tokens and ranks, to see from where on that gains."""
ON_REQUEST = (NOT_FED, ALL_FED)
"""In benchmarks of layers and models they take part where ``--only`` names them."""
GEMMS_APART = LayerVariant("fused-gemms-apart", "ours", config=NOT_FED.config | {"disable_passes": "join_gemms"})
ALL_SMS = LayerVariant("fused+split-all-sms", "ours", config={"split_gemm_sms": "off"})
SWEPT = f"{PLANNED.label}@"
SYMMETRIC = (
    LayerVariant(
        "inductor+symm-one-shot",
        "peer",
        ONE_SHOT,
        symmetric=True,
        most_bytes=SYMM_MEM_ONE_SHOT_MAX_BYTES,
    ),
    LayerVariant("inductor+symm-two-shot", "peer", TWO_SHOT, symmetric=True),
)


SCATTERED = LayerVariant(
    "inductor+nccl-scattered", "peer", COUNT_SCATTERS, module="tw_compile.benchmark.layer.sites:scattered"
)
SCATTERED_ON_CPU = replace(SCATTERED, label="inductor+gloo-scattered")
ASYNC_TP = LayerVariant(
    "inductor+async-tp",
    "peer",
    COUNT_SCATTERS,
    symmetric=True,
    module="tw_compile.benchmark.layer.sites:async_tp",
)


def with_wires(wires: Iterable[str]) -> list[LayerVariant]:
    """``fused`` and ``fused+split`` with each wire. Messages of every size have the wire, over any transport."""
    return [
        replace(
            exact, label=f"{exact.label}-{wire}", wire=wire, config=exact.config | {"wire": wire, "wire_min_bytes": 0}
        )
        for wire in wires
        for exact in (FUSED, PLANNED)
    ]


def with_prefetch(values: Iterable[str]) -> list[LayerVariant]:
    """``fused`` and ``fused+split`` with each value of option ``prefetch``."""
    return [
        replace(plain, label=f"{plain.label}-prefetch-{value}", config=plain.config | {"prefetch": value})
        for value in values
        for plain in (FUSED, PLANNED)
    ]


def with_kernels(names: Iterable[str]) -> list[LayerVariant]:
    """``fused`` and ``fused+split`` with each of these kernels for all of their calls.

    Only kernels that run beside other work have the second. The transport is the kernel's, and no GEMM is fed.
    """
    return [
        replace(
            plain,
            label=f"{plain.label}-by-{name}",
            kernel=name,
            config=plain.config | {"feed_mm": "never", "transport": ALGORITHMS[name].transport},
        )
        for name in names
        for plain in (FUSED, PLANNED)
        if plain is FUSED or ALGORITHMS[name].beside is not None or ALGORITHMS[name].two_beside_bytes
    ]


def swept(tokens: int) -> list[LayerVariant]:
    """Fused and split at every multiple of 128 tokens, or of a larger step, for fewer than ``MOST_SWEPT`` variants."""
    step = SWEEP_STEP * -(-tokens // (SWEEP_STEP * MOST_SWEPT))
    return [_split_at(first) for first in range(step, tokens, step)]


def _split_at(first: int) -> LayerVariant:
    """Fused and split, with ``first`` tokens in half 1."""
    return LayerVariant(f"{SWEPT}{first}", "ours", config={"split": str(first)})


def _named_places(spec: LayerSpec) -> list[int]:
    """The places of the split that ``--only`` names, as in ``fused+split@768``."""
    named = [label.removeprefix(SWEPT) for label in spec.only if label.startswith(SWEPT)]
    return [int(place) for place in named if place.isdecimal() and 0 < int(place) < max(spec.tokens)]


def variants(spec: LayerSpec, tokens: int) -> list[LayerVariant]:
    """The variants that take part at ``tokens`` tokens, in the order of the report.

    ``--only`` may name splits at a place, as in ``fused+split@768``. They take part where there are more tokens than that.

    Raises:
        UsageError: ``--only`` names no variant.
    """
    sites = spec.scope == "gemm-site"
    known = [FUSED, *SPLIT, *([GEMMS_APART, ALL_SMS] if spec.scope == "layer" else [])]
    known += [GEMMS_APART, NOT_FED] if sites else []
    known += [*with_wires(spec.wires), *with_prefetch(spec.prefetch), *with_kernels(spec.kernels)]
    if spec.device == "cuda":
        known += [LayerVariant("inductor+nccl", "peer"), *SYMMETRIC, *([SCATTERED, ASYNC_TP] if sites else [])]
    else:
        known += [LayerVariant("inductor+gloo", "peer"), *([SCATTERED_ON_CPU] if sites else [])]
    known += [LayerVariant(NO_COMMUNICATION, "bound", DROP_SUMS)]
    known += [one for one in ON_REQUEST if one not in known and one.label in spec.only]
    places = _named_places(spec)
    check_labels([one.label for one in (*known, *map(_split_at, places))], spec.only)
    taken = with_labels(known, spec.only) + [_split_at(first) for first in places if first < tokens]
    return taken + [one for one in (swept(tokens) if spec.sweep_split else ()) if one not in taken]
