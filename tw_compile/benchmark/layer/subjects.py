"""The subjects that are timed, by the name that a benchmark has for them."""

from __future__ import annotations

import torch

from tw_compile.benchmark.layer.sites import GemmSites
from tw_compile.benchmark.layer.spec import LayerSpec, Scope
from tw_compile.benchmark.layer.subject import Model, Subject
from tw_compile.runner.model import build_model

SUBJECTS: dict[Scope, type[Subject]] = {"layer": Subject, "gemm-site": GemmSites, "model": Model}


def build_subject(spec: LayerSpec, device: torch.device) -> Subject:
    """Build the subject of ``spec`` with random weights.

    Raises:
        UsageError: The model can't be built as asked.
    """
    return SUBJECTS[spec.scope](build_model(spec, device, seed=spec.seed))
