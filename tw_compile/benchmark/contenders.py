"""The implementations that a benchmark compares: tw_compile's, those of other libraries, and the work without communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tw_compile.benchmark import labels
from tw_compile.benchmark.contender import Contender
from tw_compile.benchmark.copy_engines import CopyEngines
from tw_compile.benchmark.flashinfer_peers import FlashInfer
from tw_compile.benchmark.gated import Gated
from tw_compile.benchmark.host_copies import HostCopies
from tw_compile.benchmark.ours import Operator
from tw_compile.benchmark.peers import NoCommunication, SymmetricMemory, UnfusedAllReduce
from tw_compile.benchmark.quantised_after import QuantisedAfter
from tw_compile.benchmark.scattered import CollectiveAlone, ReduceScatterNormAllGather
from tw_compile.benchmark.spec import BenchSpec
from tw_compile.benchmark.variants import Variant, check, taking_part
from tw_compile.harness.spec import with_labels

OTHERS: dict[str, Callable[[str, BenchSpec], Contender]] = {
    labels.NCCL: lambda label, spec: UnfusedAllReduce(label),
    labels.GLOO: lambda label, spec: UnfusedAllReduce(label),
    labels.SYMM_ONE_SHOT: lambda label, spec: SymmetricMemory(label, one_shot=True),
    labels.SYMM_TWO_SHOT: lambda label, spec: SymmetricMemory(label, one_shot=False),
    labels.FLASHINFER_ONE_SHOT: lambda label, spec: FlashInfer(label, one_shot=True, most_tokens=max(spec.tokens)),
    labels.FLASHINFER_TWO_SHOT: lambda label, spec: FlashInfer(label, one_shot=False, most_tokens=max(spec.tokens)),
    labels.COPY_ENGINES: lambda label, spec: CopyEngines(),
    labels.HOST_COPIES: lambda label, spec: HostCopies(),
    labels.NO_COMMUNICATION: lambda label, spec: NoCommunication(),
    labels.SCATTERED: lambda label, spec: ReduceScatterNormAllGather(),
    labels.ALL_REDUCE_ALONE: lambda label, spec: CollectiveAlone(label),
    labels.REDUCE_SCATTER_ALONE: lambda label, spec: CollectiveAlone(label),
    labels.ALL_GATHER_ALONE: lambda label, spec: CollectiveAlone(label),
    **{label: lambda label, spec: QuantisedAfter(label) for label in labels.QUANTISED_AFTER},
}
"""Makes the contender of each label that is not ours."""


def contenders(spec: BenchSpec) -> list[Contender]:
    """The contenders that take part, in the order of the report.

    Raises:
        UsageError: See :func:`tw_compile.benchmark.variants.check`.
    """
    check(spec)
    others = [OTHERS[label](label, spec) for label in labels.others(spec)]
    return [*select(spec, taking_part(spec)), *with_labels(others, spec.only), *([Gated()] if spec.gated else [])]


def select(spec: BenchSpec, ours: Sequence[Variant]) -> list[Operator]:
    """The variants that ``spec`` asks for. One that takes a number of SMs comes once for each of ``spec.sms``."""
    return [
        Operator(variant, sms)
        for variant in with_labels(ours, spec.only)
        for sms in (spec.sms if spec.sms and variant.sms is not None else (None,))
        if sms is None or sms <= variant.most_sms
    ]
