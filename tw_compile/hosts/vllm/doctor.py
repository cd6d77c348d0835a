"""What ``tw-compile doctor --vllm`` shows: whether vLLM would use the passes here, and what they would do. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from tw_compile.config import Config
from tw_compile.environment import ENABLE
from tw_compile.gating.gate import Gate
from tw_compile.hosts.vllm import dispatch, plan
from tw_compile.hosts.vllm.known import known_before
from tw_compile.hosts.vllm.options import asked_options, host_of, switched_off, vllm_config
from tw_compile.hosts.vllm.settings import NEWEST
from tw_compile.kernels.collective.transports import NO_PEER_ACCESS
from tw_compile.planning import LayerShape, layer_shape

Report = dict[str, Any]

PLUGIN = "tw_compile"
WORLD_SIZES = (2, 4, 8)
# The example for which ranges are shown: Llama-70B's sizes, and vLLM's default number of tokens.
MODEL, HIDDEN_SIZE, MAX_TOKENS = "llama-3.3-70b", 8192, 8192
_TESTED = "0.24.0"


def examine(
    environment: Mapping[str, str],
    capability: tuple[int, int] | None,
    device_name: str | None = None,
    peer_access: bool = True,
) -> Report:
    """The effective configuration for devices of ``capability``, which reach each other's memory or not.

    Raises:
        ValueError: A variable or a thresholds file is wrong.
    """
    version = installed_version()
    asked = asked_options(None, environment)
    config = vllm_config(asked or {}, version or _TESTED, disable_custom_all_reduce=False)
    choices = plan.gates(config, capability, peer_access)
    engines = [plan.Engine(size, HIDDEN_SIZE, "bfloat16", MAX_TOKENS) for size in WORLD_SIZES]
    return {
        "installed": version,
        "dispatch": host_of(version or _TESTED),
        "plugin": _plugin(environment),
        "enabled": _enabled(environment, asked is not None),
        "peer_access": peer_access,
        "settings": asdict(choices[0].settings),
        "groups": [_group(engine, config, choices, capability, device_name) for engine in engines],
    }


def sections(report: Report) -> list[tuple[str, str, dict[str, Any] | list[str]]]:
    """The report for people. Each section has a title, a text beside the title, and values by name or lines."""
    vllm = {
        "installed": report["installed"] or "no; this is what it would do if it were installed",
        "dispatch": report["dispatch"],
        "plugin": report["plugin"],
        "enabled": report["enabled"],
    }
    if not report["peer_access"]:
        vllm["all_reduces"] = f"NCCL alone: {NO_PEER_ACCESS}"
    first: list[tuple[str, str, dict[str, Any] | list[str]]] = [
        ("vLLM", "", vllm),
        ("its all_reduces, by environment", "", report["settings"]),
    ]
    groups = [
        (f"{group['world_size']} ranks", f", hidden {HIDDEN_SIZE}, bf16", _lines(group)) for group in report["groups"]
    ]
    return [*first, *groups]


def _lines(group: Report) -> list[str]:
    ends = ", ".join(map(str, group["ranges_end_at"])) or "none"
    layers = group["groups_of_layers"]
    first = (
        f"steps of {layers['from_tokens']} tokens and more" if "from_tokens" in layers else f"no, {layers['detail']}"
    )
    lines = [
        f"token ranges added, ending at: {ends}",
        f"by groups of layers, where no CUDA graphs are captured: {first}",
        group["split"],
    ]
    limit, default = group["flashinfer_fusion_bytes"], group["flashinfer_fusion_bytes_of_vllm"]
    if default is not None:
        of_vllm = "as in vLLM" if limit == default else f"vLLM has {default}"
        lines.append(f"FlashInfer's fusion, where it is installed: up to {limit} bytes ({of_vllm})")
    for device_class, stretches in group["thresholds"].items():
        for stretch in stretches:
            decided = f"{'fused' if stretch['fused'] else 'gated'}, unfused {stretch['backend']}"
            where = f"{device_class}: from {stretch['from_tokens']} tokens {decided}"
            lines.append(f"{where}: {stretch['entry']}; {stretch['source']}")
    return lines


def installed_version() -> str | None:
    """The installed version of vLLM, found without importing it; None where vLLM is not installed."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None


def _plugin(environment: Mapping[str, str]) -> str:
    plugins = {point.name for point in metadata.entry_points(group="vllm.general_plugins")}
    if PLUGIN not in plugins:
        return "not registered: tw_compile is not installed as a package in this environment"
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"not loaded: VLLM_PLUGINS={allowed} leaves out {PLUGIN}"
    return "registered"


def _enabled(environment: Mapping[str, str], asked: bool) -> str:
    if switched_off(environment):
        return f"no, {ENABLE}=0, whatever --additional-config says"
    if asked:
        return f"yes, {ENABLE}=1"
    return f"no; {ENABLE}=1 or --additional-config '{{\"tw_compile\": {{}}}}' switches it on"


def _group(
    engine: plan.Engine,
    config: Config,
    choices: tuple[Gate, ...],
    capability: tuple[int, int] | None,
    device_name: str | None,
) -> Report:
    world_size = engine.tensor_parallel_size
    settings = plan.settings_of(choices[0])
    limits = dispatch.FLASHINFER_LIMITS_033 if settings.host == NEWEST else dispatch.FLASHINFER_LIMITS
    reachable = choices[0].node.peer_access
    default = limits.get(capability, {}).get(world_size) if capability and reachable else None
    ends = plan.range_endpoints(engine, config, choices)
    limit = plan.flashinfer_fusion_limit(capability, world_size, settings, default)
    groups = _groups_of_layers(engine, config, limit)
    inside = "from_tokens" in groups
    first = groups["from_tokens"] if inside else 1 + (limit or 0) // plan.row_bytes_of(engine)
    split_for, forecast = plan.SplitFor(), ""
    if config.split == "auto":
        known = known_before(config, device_name, world_size, choices)
        waits = known.by_ranks and known.profile is None
        split_for = plan.SplitFor(known.profile, _layer(world_size), known.link, waits)
        if known.by_ranks and known.profile is not None:
            forecast = f" (forecast for {known.profile.name}; the ranks plan by what they measure)"
    ranges, split, *_ = plan.planned_ranges(engine, config, choices, first, ends, split_for, inside, groups=inside)
    return {
        "world_size": world_size,
        "ranges_end_at": sorted({*ends, *(end for _, end in ranges[:-1])}),
        "groups_of_layers": groups,
        "split": split + forecast,
        "flashinfer_fusion_bytes": limit,
        "flashinfer_fusion_bytes_of_vllm": default,
        "thresholds": {gate.node.device_class: plan.thresholds_of(engine, gate) for gate in choices},
    }


def _layer(world_size: int) -> LayerShape:
    from tw_compile.models.config import load_config, tensor_parallel_plan  # brings transformers along

    model = load_config(MODEL)
    return layer_shape(model, tensor_parallel_plan(model), world_size, merged=True)


def _groups_of_layers(engine: plan.Engine, config: Any, flashinfer_bytes: int | None) -> Report:
    """From which token count the example's engine, without CUDA graphs, runs steps by groups of layers; or why it does not.

    ``flashinfer_bytes``: up to how many bytes FlashInfer fuses; None: as if FlashInfer were not there.
    """
    first = engine.long_from(config, flashinfer_bytes)
    return {"from_tokens": first} if isinstance(first, int) else {"reason": first[0], "detail": first[1]}
