"""Who takes part in ``bench kernel`` beside tw_compile's own variants, by label. Imports no torch.

So a label that nobody has is refused before torch is imported, which takes seconds. The contenders take their labels from here.
"""

from __future__ import annotations

from typing import Literal

from tw_compile.benchmark.spec import BenchSpec

NCCL, GLOO = "nccl+norm", "gloo+norm"
SYMM_ONE_SHOT, SYMM_TWO_SHOT = "symm-one-shot+norm", "symm-two-shot+norm"
FLASHINFER_ONE_SHOT, FLASHINFER_TWO_SHOT = "flashinfer-one-shot", "flashinfer-two-shot"
COPY_ENGINES = "copy-engines+norm"
HOST_COPIES = "host-copies"
NO_COMMUNICATION = "no-communication"
SCATTERED = "nccl-reduce-scatter+norm+all-gather"
ALL_REDUCE_ALONE = "nccl-all-reduce-alone"
REDUCE_SCATTER_ALONE = "nccl-reduce-scatter-alone"
ALL_GATHER_ALONE = "nccl-all-gather-alone"

ON_GPUS = (
    NCCL,
    SYMM_ONE_SHOT,
    SYMM_TWO_SHOT,
    FLASHINFER_ONE_SHOT,
    FLASHINFER_TWO_SHOT,
    COPY_ENGINES,
    HOST_COPIES,
    NO_COMMUNICATION,
)
_SCALED: tuple[Literal["token", "group"], ...] = ("token", "group")
QUANTISED_AFTER = {
    f"tw+{way}-{scales}": (way, scales) for way in ("quantise", "norm-quantise", "norm+quantise") for scales in _SCALED
}
"""What makes float8 behind a call of ours, and whether each token or each group of 128 columns has a scale.

See :mod:`tw_compile.benchmark.quantised_after`.
"""
IF_NAMED = (SCATTERED, ALL_REDUCE_ALONE, REDUCE_SCATTER_ALONE, ALL_GATHER_ALONE, *QUANTISED_AFTER)
"""They take part only where ``--only`` names them. Figures of papers are drawn from the first four."""


def others(spec: BenchSpec) -> tuple[str, ...]:
    """The labels beside ours from which ``--only`` of ``spec`` chooses, in the order of the report."""
    if spec.device == "cpu":
        return (GLOO,)
    return (*ON_GPUS, *(label for label in IF_NAMED if label in spec.only))
