"""What ``tw-compile doctor --vllm`` shows: whether vLLM would use the passes here, and what they would do. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from tw_compile.config import Config
from tw_compile.environment import ENABLE, PEER_ACCESS
from tw_compile.gating.gate import Gate
from tw_compile.hosts.vllm import dispatch, plan
from tw_compile.hosts.vllm.flashinfer import JOINED, Peers, Share, flashinfer_share
from tw_compile.hosts.vllm.known import known_before
from tw_compile.hosts.vllm.options import asked_options, host_of, switched_off, vllm_config
from tw_compile.kernels.collective.transports import NO_PEER_ACCESS, NO_PEER_ATOMICS
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
    peers: Peers = JOINED,
    peers_used: bool = True,
) -> Report:
    """The effective configuration for devices of ``capability``, which are joined as ``peers`` says.

    ``peers_used``: whether tw_compile uses peer access. For FlashInfer vLLM's defaults hold, as nothing tells what users set.

    Raises:
        ValueError: A variable or a thresholds file is wrong.
    """
    version = installed_version()
    asked = asked_options(None, environment)
    config = vllm_config(asked or {}, version or _TESTED, disable_custom_all_reduce=False)
    choices = plan.gates(config, capability, peers.reach is not False, peers.atomics, peers_used)
    engines = [plan.Engine(size, HIDDEN_SIZE, "bfloat16", MAX_TOKENS) for size in WORLD_SIZES]
    settings = plan.settings_of(choices[0])
    fuses = settings.flashinfer_installed or version is None  # where vLLM is not here, FlashInfer would come along

    def share(engine: plan.Engine) -> Share:
        of_vllm = dispatch.flashinfer_limit(settings, capability, engine.tensor_parallel_size) if fuses else None
        return flashinfer_share(engine, config, choices, of_vllm, peers, user_set=False)

    return {
        "installed": version,
        "dispatch": host_of(version or _TESTED),
        "plugin": _plugin(environment),
        "enabled": _enabled(environment, asked is not None),
        "peer_access": peers.reach is not False,
        "peer_atomics": peers.atomics,
        "peer_access_used": peers_used,
        "settings": asdict(choices[0].settings),
        "groups": [_group(engine, config, choices, device_name, share(engine)) for engine in engines],
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
    elif not report["peer_access_used"]:
        vllm["fused"] = f"through host memory: {PEER_ACCESS}=0"
    elif not report["peer_atomics"]:
        vllm["fused"] = f"through host memory: {NO_PEER_ATOMICS}"
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
    if group["flashinfer_fusion"]:
        lines.append(group["flashinfer_fusion"])
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
    engine: plan.Engine, config: Config, choices: tuple[Gate, ...], device_name: str | None, share: Share
) -> Report:
    world_size = engine.tensor_parallel_size
    ends = plan.range_endpoints(engine, config, choices)
    groups = _groups_of_layers(engine, config, share.limit)
    inside = "from_tokens" in groups
    first = groups["from_tokens"] if inside else 1 + (share.limit or 0) // plan.row_bytes_of(engine)
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
        "flashinfer_fusion": share.line,
        "flashinfer_fusion_reason": share.reason,
        "flashinfer_fusion_bytes": share.limit,
        "flashinfer_fusion_bytes_of_vllm": share.of_vllm,
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
