"""The ways to run the fused operator, as data: one for each line that the registries name. Imports no torch.

:class:`tw_compile.benchmark.ours.Operator` makes a contender of a variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tw_compile.benchmark.labels import others
from tw_compile.benchmark.spec import BenchSpec
from tw_compile.harness.requests import UsageError
from tw_compile.harness.spec import check_labels, with_labels
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.algorithms.entry import AlgorithmEntry
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.collective.wires import EXACT, WIRES
from tw_compile.kernels.registry import Benchmarked

if TYPE_CHECKING:
    from tw_compile.harness.problems import Scales
    from tw_compile.kernels.collective.transport import Transport

NORMS = ("rms_norm", "layer_norm")
"""The norms that can be behind the sum. Variants run with the first one unless others are asked for."""
FP8_SCALE = 0.02
"""With this scale few of the norm's results are clamped: normal inputs rarely give more than 448 times the scale."""


@dataclass(frozen=True)
class Variant:
    """One way to run the operator.

    Attributes:
        transport: Makes the transport for a number of CTAs.
        over: The name of that transport in the registry.
        sharded, narrow: The residual that is natural to it, see :attr:`Contender.residual_sharded`.
        sms: How many SMs it has unless ``--sms`` says otherwise; None for variants that choose the number themselves.
        most_sms: How many SMs it can have at most.
        algorithm: Its name in tables of ``configs/kernels``; None where no table can ask for it.
        hidden_scale, scales: See :attr:`Contender.hidden_scale`.
        in_slot: ``x`` lies in the slot's symmetric memory already, as if its producer had written it there, and the results
            stay there.
        wire: How rows travel.
        norm: See :attr:`Contender.norm`.
        gemm_columns, prefetch_bytes: See :attr:`Contender.gemm_columns`.
        needs_multicast: Whether it runs only with NVLink multicast.
        on_request: Whether it takes part only where ``--only`` names it.
    """

    label: str
    transport: Callable[[int | None], Transport]
    over: str
    sharded: bool
    sms: int | None = None
    most_sms: int = 0
    algorithm: str | None = None
    in_slot: bool = False
    hidden_scale: float | None = None
    scales: Scales = ""
    narrow: bool = False
    wire: str = EXACT
    norm: str = "rms_norm"
    gemm_columns: int = 0
    prefetch_bytes: int = 0
    needs_multicast: bool = False
    on_request: bool = False


def _named(name: str) -> Callable[[int | None], Transport]:
    def transport(sms: int | None) -> Transport:
        from tw_compile.kernels.collective.transport import get_transport

        return get_transport(name)

    return transport


def _only(entry: AlgorithmEntry) -> Callable[[int | None], Transport]:
    """The algorithm's transport, with that algorithm alone."""

    def transport(sms: int | None) -> Transport:
        alone: Transport = TRANSPORTS[entry.transport].make(entry.make(sms))
        return alone

    return transport


def variants(device_type: str) -> tuple[Variant, ...]:
    """The variants of all transports that move ``device_type`` tensors. A transport's own come before its algorithms'."""
    listed = []
    for transport in TRANSPORTS:
        if device_type in transport.device_types:
            listed += [_variant(line, transport.name, _named(transport.name)) for line in transport.benchmarked]
            listed += _of_algorithms(transport.name)
    return tuple(listed)


def alone_over(transport: str) -> list[Variant]:
    """The variants over ``transport`` that calibrations and tunings time.

    They are the kernels that tables can name, and the kernel that serves all other messages, which tables need not name.
    """
    listed = [variant for variant in variants("cuda") if variant.over == transport]
    named = [variant for variant in listed if variant.algorithm is not None]
    last = next((entry for entry in ALGORITHMS if entry.serves_all and entry.transport == transport), None)
    whole = next((variant for variant in listed if variant.algorithm is None), None)
    if last is None or last.benchmarked or whole is None:
        return named
    return [replace(whole, transport=lambda sms: TRANSPORTS[transport].make(last.make())), *named]


def _of_algorithms(transport: str) -> list[Variant]:
    """Variants with float8 results come last, as their times can't be compared with the others'."""
    pairs = [(entry, line) for entry in ALGORITHMS if entry.transport == transport for line in entry.benchmarked]
    pairs.sort(key=lambda pair: pair[1].quantises)
    return [
        replace(
            _variant(line, transport, _only(entry)),
            sms=entry.sms,
            most_sms=entry.most_sms,
            algorithm=entry.name if line.plain else None,
            needs_multicast=entry.needs_multicast,
        )
        for entry, line in pairs
    ]


def _variant(line: Benchmarked, over: str, transport: Callable[[int | None], Transport]) -> Variant:
    return Variant(
        line.label,
        transport,
        over,
        line.sharded,
        in_slot=line.in_slot,
        hidden_scale=FP8_SCALE if line.quantises and not line.scales else None,
        scales=line.scales,
        narrow=line.narrow,
        on_request=line.on_request,
    )


OURS = variants("cuda")
OURS_ON_CPU = variants("cpu")


def by_wires(exact: Sequence[Variant], wires: Iterable[str], world_size: int) -> tuple[Variant, ...]:
    """The variants for each wire: all of ``exact`` for exact rows, else those whose algorithm lets rows travel in codes.

    Rows in codes have the SMs that they get with so many ranks. Tables of kernels are not asked about rows in codes. So no
    table can ask for the variants with codes.
    """
    able = [each for each in exact if each.algorithm is not None and ALGORITHMS[each.algorithm].wires]
    listed: list[Variant] = []
    for wire in wires:
        if wire == EXACT:
            listed += exact
        else:
            listed += [_with_wire(each, wire, world_size) for each in able]
    return tuple(listed)


def _with_wire(exact: Variant, wire: str, world_size: int) -> Variant:
    assert exact.algorithm is not None, "only algorithms have wires"
    sms = ALGORITHMS[exact.algorithm].coded_sms(world_size) or exact.sms
    return replace(exact, label=f"{exact.label}-{wire}", algorithm=None, wire=wire, sms=sms)


def by_norms(of_rms_norm: Sequence[Variant], norms: Iterable[str]) -> tuple[Variant, ...]:
    """All of ``of_rms_norm`` with each of the norms. Tables of kernels are made from RMSNorm's times alone.

    The LayerNorm here has a bias, and no kernel makes scales of such results.
    """
    listed: list[Variant] = []
    for norm in norms:
        if norm == NORMS[0]:
            listed += of_rms_norm
        else:
            listed += [
                replace(each, label=f"{each.label}-{norm}", algorithm=None, norm=norm)
                for each in of_rms_norm
                if not each.scales
            ]
    return tuple(listed)


def before_gemms(exact: Sequence[Variant], columns: Iterable[int], prefetch: Sequence[str]) -> tuple[Variant, ...]:
    """The variants that can prefetch, with each matmul of ``columns`` behind the call and each value of option ``prefetch``."""
    able = [each for each in exact if each.algorithm is not None and ALGORITHMS[each.algorithm].prefetches]
    return tuple(
        replace(
            each,
            label=f"{each.label}-gemm-{count}-prefetch-{value}",
            algorithm=None,
            gemm_columns=count,
            prefetch_bytes=0 if value == "off" else int(value),
        )
        for count in columns
        for each in able
        for value in prefetch
    )


def taking_part(spec: BenchSpec) -> tuple[Variant, ...]:
    """The variants of ours for the wires, the norms and the matmuls of ``spec``."""
    ours = OURS if spec.device == "cuda" else OURS_ON_CPU
    listed = (
        *by_norms(by_wires(ours, spec.wires, spec.world_size), spec.norms),
        *before_gemms(ours, spec.gemms, spec.prefetch),
    )
    return tuple(variant for variant in listed if not variant.on_request or variant.label in spec.only)


def check(spec: BenchSpec) -> None:
    """Refuse a spec that names what there is not, or what no contender that takes part can have.

    Raises:
        UsageError: Its message names the option: ``--wire``, ``--norm``, ``--gemm``, ``--prefetch``, ``--only`` or ``--sms``.
    """
    check_wires(spec)
    check_norms(spec)
    check_gemms(spec)
    ours = taking_part(spec)
    check_labels((*(variant.label for variant in ours), *others(spec)), spec.only)
    _check_sms(spec, with_labels(ours, spec.only))


def _check_sms(spec: BenchSpec, ours: Sequence[Variant]) -> None:
    """Raise UsageError, which names ``--sms``, if none of ``ours`` can have any of these numbers."""
    if not spec.sms:
        return
    given = ",".join(map(str, spec.sms))
    takers = [variant.most_sms for variant in ours if variant.sms is not None]
    if not takers:
        raise UsageError(f"--sms: expected no value, as no contender here takes a number of SMs, got {given}")
    if min(spec.sms) > max(takers):
        raise UsageError(f"--sms: expected {max(takers)} or less, as no contender here can have more, got {given}")


def check_norms(spec: BenchSpec) -> None:
    """Raise UsageError, which names ``--norm``, for repeated or unknown norms, or for other norms than the first with codes."""
    if len(set(spec.norms)) < len(spec.norms) or not set(spec.norms) <= {*NORMS}:
        raise UsageError(f"--norm: expected different ones of {', '.join(NORMS)}, got {','.join(spec.norms)!r}")
    if spec.norms != NORMS[:1] and any(wire != EXACT for wire in spec.wires):
        raise UsageError(f"--norm: expected {NORMS[0]} with rows in codes, got {','.join(spec.norms)!r}")


def check_gemms(spec: BenchSpec) -> None:
    """Raise UsageError, which names the option, if ``--gemm`` or ``--prefetch`` is given alone, or no variant can prefetch."""
    if bool(spec.gemms) != bool(spec.prefetch):
        given, other = ("--gemm", "--prefetch") if spec.gemms else ("--prefetch", "--gemm")
        raise UsageError(f"{given}: expected {other} with it, as only the matmul's time shows what prefetching gives")
    ours = OURS if spec.device == "cuda" else OURS_ON_CPU
    if spec.gemms and not with_labels(before_gemms(ours, spec.gemms, spec.prefetch), spec.only):
        among = f"--only {','.join(spec.only)}" if spec.only else f"--device {spec.device}"
        raise UsageError(f"--gemm: expected no value, as no contender of {among} can prefetch, got {spec.gemms[0]}")


def check_wires(spec: BenchSpec) -> None:
    """Refuse wires that do not exist, that no variant that takes part can have, or that don't fit the hidden sizes.

    Raises:
        UsageError: Its message names ``--wire``.
    """
    if len(set(spec.wires)) < len(spec.wires) or not set(spec.wires) <= WIRES.keys():
        raise UsageError(f"--wire: expected different ones of {', '.join(WIRES)}, got {','.join(spec.wires)!r}")
    ours = OURS if spec.device == "cuda" else OURS_ON_CPU
    for wire in spec.wires:
        group = WIRES[wire].group
        if wire != EXACT and not with_labels(by_wires(ours, (wire,), spec.world_size), spec.only):
            among = f"--only {','.join(spec.only)}" if spec.only else f"--device {spec.device}"
            raise UsageError(f"--wire: expected {EXACT}, as no contender of {among} has rows in codes, got {wire!r}")
        odd = next((size for size in spec.hidden if size % group), None)
        if odd is not None:
            raise UsageError(f"--wire: expected hidden sizes that are multiples of {group} for {wire}, got {odd}")
