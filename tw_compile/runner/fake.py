"""Inspect a model without the machine it is for: one process acts as one rank of many, with fake CUDA tensors."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.fx as fx

from tw_compile.gating.facts import Node
from tw_compile.gating.gate import Gate
from tw_compile.harness.requests import UsageError
from tw_compile.harness.versions import versions
from tw_compile.models.alike import Alike, alike_layers
from tw_compile.models.config import check_activation, keep_layers, load_config, truncate_layers
from tw_compile.models.decoder import build_decoder
from tw_compile.own_gate import own_gate
from tw_compile.planning import DeviceProfile, load_profile
from tw_compile.report import SCHEMA_VERSION, GraphReport
from tw_compile.runner.spec import RunSpec
from tw_compile.testing import fake_cuda, fake_process_group, rewrite


@dataclass(frozen=True)
class Inspection:
    """The graphs from right before and right after the passes, and the seconds that building and compiling took.

    ``layers`` is the number of the model's layers. ``traced`` says which layers are in the graphs and stand for all layers;
    None where all layers are in the graphs.
    """

    before: fx.Graph
    after: fx.Graph
    result: GraphReport
    layers: int
    traced: Alike | None
    build_seconds: float
    compile_seconds: float


CAPABILITIES = {"H100": (9, 0), "H200": (9, 0), "B200": (10, 0)}
"""Maps a word of the device's name to the compute capability."""


def inspect_model(spec: RunSpec, *, all_layers: bool = True) -> Inspection:
    """Compile the model of ``spec`` at its first token count up to the passes; no weights, no kernels.

    If ``spec`` names a device profile, attention and thresholds are those of the profile's device. Without ``all_layers`` only
    layers that differ are compiled, see :func:`tw_compile.models.alike.alike_layers`.

    Raises:
        UsageError: The model can't be built as asked.
    """
    begin = time.perf_counter()
    profile = None if spec.device_profile == "auto" else load_profile(spec.device_profile)
    with fake_process_group(spec.world_size), fake_cuda(cudnn=profile is not None and "cudnn" in profile.attention):
        try:
            config = load_config(spec.model)
            check_activation(config)  # before layers are built to be compared
            config = config if spec.layers is None else truncate_layers(config, spec.layers)
            layers, traced = config.num_hidden_layers, None if all_layers else alike_layers(config)
            if traced is not None and len(traced.layers) == layers:
                traced = None
            kept = config if traced is None else keep_layers(config, traced.layers)
            decoder = build_decoder(kept, device="cuda", dtype=getattr(torch, spec.dtype))
        except ValueError as error:
            raise UsageError(f"--model {spec.model} --tp {spec.world_size}: {error}") from error
        ids = torch.zeros(1, spec.tokens[0], dtype=torch.long, device="cuda")
        built = time.perf_counter()
        gate = None if profile is None else _gate_of(profile, spec)
        seen = rewrite(decoder, (ids,), world_size=spec.world_size, config=spec.config, gate=gate)
    end = time.perf_counter()
    return Inspection(seen.before.graph, seen.after.graph, seen.report, layers, traced, built - begin, end - built)


def _gate_of(profile: DeviceProfile, spec: RunSpec) -> Gate | None:
    """The gate of a process on the profile's device; None where that device's compute capability is not known."""
    words = {word for name in profile.device_names for word in name.split()}
    capability = next((CAPABILITIES[word] for word in sorted(words & CAPABILITIES.keys())), None)
    return None if capability is None else own_gate(spec.config, Node(capability, profile.fused_kernel(None).multicast))


def as_report(spec: RunSpec, inspection: Inspection) -> dict[str, Any]:
    """A report with the keys of a run's report, without those that only a run can fill."""
    result = inspection.result
    sites, counts = _of_all_layers(inspection)
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "inspect",
        "model": spec.model,
        "layers": inspection.layers,
        "layers_traced": None if inspection.traced is None else list(inspection.traced.layers),
        "world_size": spec.world_size,
        "device": "cuda",
        "device_name": "fake",
        "dtype": spec.dtype,
        "tokens": list(spec.tokens),
        "warnings": [result.warning] if result.warning else [],
        "sites": sites,
        "counts": counts,
        "splits": [result.split.as_dict()] if result.split else [],
        "passes": [[asdict(done) for done in result.passes]],
        "seconds": {
            "build": inspection.build_seconds,
            "compile_to_passes": inspection.compile_seconds,
            "passes": result.seconds,
        },
        "versions": versions(),
    }


def _of_all_layers(inspection: Inspection) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The sites, with the layer numbers of the whole model, and the counts of the whole model.

    ``stands_for`` of a site lists the layers that have a site like this one, including its own layer. It is None where the site
    belongs to no layer, or where all layers were traced.
    """
    traced, result = inspection.traced, inspection.result
    if traced is None:
        return [asdict(site) | {"stands_for": None} for site in result.sites], result.counts
    sites = []
    for site in result.sites:
        values = asdict(site) | {"stands_for": None}
        if site.layer is not None:
            values |= {"layer": traced.layers[site.layer], "stands_for": list(traced.stand_for[site.layer])}
        sites.append(values)
    counts = dict.fromkeys(result.counts, 0)
    for values in sites:
        count = len(values["stands_for"] or (0,))
        counts["all_reduce"] += count
        counts[values["decision"]] += count
    return sites, counts
