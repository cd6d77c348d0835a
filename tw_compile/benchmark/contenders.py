"""The implementations that a benchmark compares: tw_compile's, those of other libraries, and the work without communication."""

from __future__ import annotations

from collections.abc import Sequence

from tw_compile.benchmark.contender import Contender
from tw_compile.benchmark.copy_engines import CopyEngines
from tw_compile.benchmark.flashinfer_peers import FlashInfer
from tw_compile.benchmark.gated import Gated
from tw_compile.benchmark.ours import Operator
from tw_compile.benchmark.peers import NoCommunication, SymmetricMemory, UnfusedAllReduce
from tw_compile.benchmark.scattered import SCATTERED
from tw_compile.benchmark.spec import BenchSpec
from tw_compile.benchmark.variants import Variant, check_gemms, check_norms, check_wires, taking_part
from tw_compile.harness.requests import UsageError
from tw_compile.harness.spec import check_labels, with_labels


def contenders(spec: BenchSpec) -> list[Contender]:
    """The contenders that take part, in the order of the report.

    Raises:
        UsageError: ``--only`` names no contender, no contender can have ``--sms`` or ``--wire``, or there is no such norm.
    """
    check_wires(spec)
    check_norms(spec)
    check_gemms(spec)
    gated: list[Contender] = [Gated()] if spec.gated else []
    if spec.device == "cpu":
        return select(spec, taking_part(spec), [UnfusedAllReduce("gloo+norm")]) + gated
    others = [
        UnfusedAllReduce("nccl+norm"),
        SymmetricMemory("symm-one-shot+norm", one_shot=True),
        SymmetricMemory("symm-two-shot+norm", one_shot=False),
        FlashInfer("flashinfer-one-shot", one_shot=True, most_tokens=max(spec.tokens)),
        FlashInfer("flashinfer-two-shot", one_shot=False, most_tokens=max(spec.tokens)),
        CopyEngines(),
        NoCommunication(),
        *(contender for contender in SCATTERED if contender.label in spec.only),
    ]
    return select(spec, taking_part(spec), others) + gated


def select(spec: BenchSpec, ours: Sequence[Variant], others: Sequence[Contender]) -> list[Contender]:
    """The contenders that ``spec`` asks for. A variant that takes a number of SMs comes once for each of ``spec.sms``."""
    check_labels((*ours, *others), spec.only)
    variants = with_labels(ours, spec.only)
    takers = [variant.label for variant in variants if variant.sms is not None]
    if spec.sms and not takers:
        given = ",".join(map(str, spec.sms))
        raise UsageError(f"--sms: expected no value, as no contender here takes a number of SMs, got {given}")
    operators: list[Contender] = [
        Operator(variant, sms)
        for variant in variants
        for sms in (spec.sms if spec.sms and variant.sms is not None else (None,))
        if sms is None or sms <= variant.most_sms
    ]
    return operators + with_labels(others, spec.only)
