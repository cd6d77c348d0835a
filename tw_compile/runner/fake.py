"""One process that plays one rank of many on CUDA tensors that don't exist: look at a model without its machine."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.fx as fx

from tw_compile.harness.versions import versions
from tw_compile.report import SCHEMA_VERSION, GraphReport
from tw_compile.runner.model import build_model
from tw_compile.runner.spec import RunSpec
from tw_compile.testing import fake_cuda, fake_process_group, rewrite


@dataclass(frozen=True)
class Inspection:
    """The graphs from right before and after the passes, and the seconds of everything up to there."""

    before: fx.Graph
    after: fx.Graph
    result: GraphReport
    layers: int
    build_seconds: float
    compile_seconds: float


def inspect_model(spec: RunSpec) -> Inspection:
    """Compile the model of ``spec`` at its first token count up to the passes; no weights, no kernels.

    Raises:
        UsageError: The model can't be built as asked.
    """
    begin = time.perf_counter()
    with fake_process_group(spec.world_size), fake_cuda():
        decoder = build_model(spec, "cuda")
        ids = torch.zeros(1, spec.tokens[0], dtype=torch.long, device="cuda")
        built = time.perf_counter()
        seen = rewrite(decoder, (ids,), world_size=spec.world_size, config=spec.config)
    end = time.perf_counter()
    layers = decoder.config.num_hidden_layers
    return Inspection(seen.before.graph, seen.after.graph, seen.report, layers, built - begin, end - built)


def as_report(spec: RunSpec, inspection: Inspection) -> dict[str, Any]:
    """The same report as a run's, without what only a run can know."""
    result = inspection.result
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "inspect",
        "model": spec.model,
        "layers": inspection.layers,
        "world_size": spec.world_size,
        "device": "cuda",
        "device_name": "fake",
        "dtype": spec.dtype,
        "tokens": list(spec.tokens),
        "warnings": [result.warning] if result.warning else [],
        "sites": [asdict(site) for site in result.sites],
        "counts": result.counts,
        "splits": [result.split.as_dict()] if result.split else [],
        "passes": [[asdict(done) for done in result.passes]],
        "seconds": {
            "build": inspection.build_seconds,
            "compile_to_passes": inspection.compile_seconds,
            "passes": result.seconds,
        },
        "versions": versions(),
    }
