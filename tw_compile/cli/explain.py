"""``tw-compile explain``: which messages would be fused, by which transport, and which table says so.

With a model it also says how the tokens would be split.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tw_compile.calibration import LAYER, Calibration, all_stored, default_folder
from tw_compile.cli import common
from tw_compile.cli.common import JsonOption, WireOption
from tw_compile.cli.plan import layer_of_model, named_profile, node_link
from tw_compile.config import Config
from tw_compile.gating.facts import BACKENDS, DTYPE_BYTES, HostFacts, Node, Settings
from tw_compile.gating.gate import Gate
from tw_compile.gating.hosts import DEFAULT_HOST, host_names
from tw_compile.gating.layers import Layer, tables_of, threshold_layers
from tw_compile.gating.table import size
from tw_compile.gating.wire_accuracy import load_accuracy
from tw_compile.harness.requests import UsageError
from tw_compile.hosts import host_named
from tw_compile.kernels.collective.planned_wires import planned_wires
from tw_compile.kernels.collective.transports import GroupFacts, prefer_transport
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.kernels.registry import load
from tw_compile.planning import ALL_EXACT, DeviceProfile, LayerShape, Link, Mode, plan_layer, profile_of_device
from tw_compile.sources import source_digest
from tw_compile.torch_files import torch_version

HIDDEN_SIZE = 8192
PLANNED_DEVICES = {"sm90": "NVIDIA H200", "sm90-multicast": "NVIDIA H200", "sm100": "NVIDIA B200"}
"""For each device class, the device whose profile plans are made for. ``--device-profile`` names other devices of the class."""
UNKNOWN = "unknown"
WITHOUT_MODEL = "Whether tokens are split depends on the layer. Ask with --model NAME, or with tw-compile plan."


@common.one_line_errors
def explain(
    device: Annotated[
        str, typer.Option(metavar="sm90|sm100|sm103|generic", help="The GPU, which need not be here.")
    ] = "sm90",
    multicast: Annotated[bool, typer.Option(help="Whether it has NVLink multicast.")] = False,
    tp: Annotated[int, typer.Option(metavar="N", help="Ranks.")] = 8,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|config.json|DIR", help="Also say how the tokens of this model would be split."),
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(metavar="N", help="Hidden size.", show_default=f"the model's, else {HIDDEN_SIZE}")
    ] = None,
    tokens: Annotated[str, typer.Option(metavar="N,N,...", help="Token counts.")] = "1,16,64,256,1024,4096",
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPE_BYTES))] = "bfloat16",
    host: Annotated[
        str,
        typer.Option(
            metavar="|".join(host_names()),
            help="The program whose all_reduce would run; its environment variables count.",
        ),
    ] = DEFAULT_HOST,
    backend: Annotated[
        str, typer.Option(metavar="auto|" + "|".join(BACKENDS), help="What an unfused all_reduce uses.")
    ] = "auto",
    disable_custom_all_reduce: Annotated[
        bool,
        typer.Option(
            "--disable-custom-all-reduce", help="As if the host were given its option of this name, as vLLM has."
        ),
    ] = False,
    thresholds: Annotated[
        str, typer.Option(metavar="auto|off|FILE", help="As the option tw_compile.thresholds.")
    ] = "auto",
    device_profile: Annotated[
        str,
        typer.Option(
            metavar="auto|NAME|FILE.toml",
            help="With --model: what splits are planned for; auto: H200 for sm90, B200 for sm100.",
        ),
    ] = "auto",
    wire: WireOption = EXACT,
    wire_min_bytes: Annotated[
        int | None,
        typer.Option(metavar="N", help="As the option tw_compile.wire_min_bytes.", show_default="the tables decide"),
    ] = None,
    wire_accuracy: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="As the option tw_compile.wire_accuracy.", show_default="nothing was measured"
        ),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Say for each message what an unfused all_reduce would use, whether it is fused, and why. Needs no GPU.

    With --model it also says how the planner would split one sequence of each token count, or why not. With --wire it says
    which messages would travel in codes, and why others would not.
    """
    common.wires(wire, "all", wire_min_bytes)
    common.one_of("--dtype", dtype, tuple(DTYPE_BYTES))
    common.one_of("--host", host, host_names())
    common.one_of("--backend", backend, ("auto", *BACKENDS))
    common.positive("--hidden", hidden)
    counts = common.numbers("--tokens", tokens)
    common.ranks("--tp", tp, least=2)
    try:
        node = Node.parse(device, multicast)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    try:
        facts = HostFacts(backend, disable_custom_all_reduce=disable_custom_all_reduce)
        settings = Settings.from_environment(host, os.environ, facts)
        calibration = _calibration(node, tp)
        layer_of_ranks = None
        if calibration is not None:
            layer_of_ranks = Layer(LAYER, calibration.measured_on.file_name, calibration.table)
        layers = threshold_layers(thresholds, node.device_class, calibrated=layer_of_ranks)
        accuracy = None if wire_accuracy is None else load_accuracy(wire_accuracy)
        gate = Gate(node, settings, tables_of(layers, node.device_class), accuracy)
    except ValueError as error:
        raise UsageError(str(error)) from error
    console = common.make_console(json_file)  # refuses a file that cannot be written before the model is read
    profile = _profile(device_profile, node.device_class, None if calibration is None else calibration.profile)
    link = node_link()
    layer = None if model is None else layer_of_model(model, tp)[0]
    if layer is not None and hidden not in (None, layer.hidden_size):
        raise UsageError(f"--hidden: expected {layer.hidden_size}, that of --model {model}, or none, got {hidden}")
    hidden = hidden or (HIDDEN_SIZE if layer is None else layer.hidden_size)
    messages = []
    config = Config(wire=wire, wire_min_bytes=wire_min_bytes, wire_accuracy=wire_accuracy)
    for count in counts:
        message = {"tokens": count, **_decision(gate, count, tp, hidden, dtype)}
        message["wire"] = None if wire == EXACT else _wire(config, gate, tp, hidden, dtype, message)
        named = device_profile != "auto"
        travels = EXACT if message["wire"] is None else message["wire"]["wire"]
        split = None if layer is None else _split(layer, profile, named, dtype, host, message, link, travels)
        messages.append(message | {"split": split})
    _print(console, messages)
    own_fusion = host_named(host).own_fusion
    of_host = Config(
        host=host,
        thresholds=thresholds,
        all_reduce_backend=backend,
        disable_custom_all_reduce=disable_custom_all_reduce,
    )
    host_fusion = load(own_fusion)(of_host, node.capability, tp, hidden, dtype) if own_fusion else ""
    if host_fusion:
        console.print(f"{host}: {host_fusion}", style="dim", markup=False)
    if layer is None:
        console.print(WITHOUT_MODEL, style="dim", markup=False)
    elif profile is not None:
        console.print(f"splits are planned for {profile.name}", style="dim", markup=False)
    report = {
        "schema_version": 2,
        "command": "explain",
        "model": model,
        "device": device,
        "device_class": node.device_class,
        "multicast": multicast,
        "world_size": tp,
        "hidden_size": hidden,
        "dtype": dtype,
        "wire": wire,
        "host": host,
        "device_profile": None if layer is None or profile is None else profile.name,
        "host_fusion": host_fusion or None,
        "thresholds_digest": gate.digest(),
        "messages": messages,
    }
    common.write_json(report, json_file)


def _calibration(node: Node, world_size: int) -> Calibration | None:
    """The calibration that ranks of such a node have measured with this torch and these kernels; None where there is none.

    The GPU and its driver need not be here.
    """
    made_with = (node.device_class, world_size, node.multicast, True, torch_version(), source_digest()[:12])
    for calibration in all_stored(default_folder()):
        here = calibration.measured_on
        theirs = (here.device_class, here.world_size, here.multicast, here.peer_access, here.torch, here.source)
        if theirs == made_with:
            return calibration
    return None


def _profile(device_profile: str, device_class: str, measured: DeviceProfile | None) -> DeviceProfile | None:
    """The profile that plans are made for.

    Where no profile is known for the device class, this is the profile that ranks have ``measured``, or None if they have not.
    """
    if device_profile != "auto":
        return named_profile(device_profile)
    device = PLANNED_DEVICES.get(device_class)
    try:
        return measured if device is None else profile_of_device(device)
    except ValueError as error:  # the user's own file is wrong
        raise UsageError(str(error)) from error


def _decision(gate: Gate, tokens: int, world_size: int, hidden_size: int, dtype: str) -> dict[str, Any]:
    """What the gate decides about one message, as JSON."""
    element_bytes = DTYPE_BYTES[dtype]
    verdict = gate.decide(tokens * hidden_size * element_bytes, world_size=world_size, dtype=dtype)
    transport = None
    if verdict.transport is not None:
        facts = GroupFacts("cuda", world_size, hosts=1)
        transport = prefer_transport(facts, hidden_size, element_bytes, verdict.transport).name
    return {
        "bytes": verdict.nbytes,
        "backend": str(verdict.backend),
        "backend_why": verdict.backend_why,
        "decision": "fused" if verdict.fused else "gated",
        "transport": transport,
        "entry": verdict.entry,
        "source": verdict.source,
    }


def _wire(
    config: Config, gate: Gate, world_size: int, hidden_size: int, dtype: str, message: dict[str, Any]
) -> dict[str, Any]:
    """How the rows of one message would travel (``passes/fusion/wire.py``), as JSON."""
    import torch

    from tw_compile.passes.fusion.wire import message_refusal, name_of_wire
    from tw_compile.passes.reasons import WireRefused

    if message["transport"] is None:
        return {"wire": EXACT, "reason": "", "detail": "only fused sums have a wire"}
    rows = (message["tokens"], message["tokens"])
    answer = message_refusal(config, gate, world_size, message["transport"], hidden_size, getattr(torch, dtype), rows)
    if isinstance(answer, WireRefused):
        return {"wire": EXACT, "reason": answer.reason, "detail": answer.detail}
    return {"wire": name_of_wire(config), "reason": "", "detail": answer.why}


def _split(
    layer: LayerShape,
    profile: DeviceProfile | None,
    named: bool,
    dtype: str,
    host: str,
    message: dict[str, Any],
    link: Link,
    wire: str,
) -> dict[str, Any]:
    """What the pass would plan for a graph of this layer and one sequence (``passes/split/analysis/choose.py``), as JSON.

    ``mode`` is the planner's mode, or ``unknown`` where the mode depends on what the pass reads off the graph.
    """
    from tw_compile.passes.reasons import SplitRefusal

    def not_planned(reason: str, detail: str, mode: str = Mode.OFF) -> dict[str, Any]:
        return {"mode": mode, "reason": reason, "detail": detail, "sizes": [], "gain": None, "plan": None}

    if host_named(host).compiles_ranges:
        return not_planned("", f"graphs of {host} are for ranges of token counts, not for one", UNKNOWN)
    if any(layer.attention.windows):
        detail = "sliding windows come as masks, whose kernel only the graph tells: tw-compile inspect --split auto"
        return not_planned("", detail, UNKNOWN)
    if profile is None:
        return not_planned(SplitRefusal.NO_DEVICE_PROFILE, "no device profile says how long a layer takes")
    if message["transport"] is None:
        return not_planned(SplitRefusal.LAYER_NOT_RECOGNISED, "the sums are not fused")
    if DTYPE_BYTES[dtype] != 2:
        return not_planned(SplitRefusal.LAYER_NOT_RECOGNISED, f"{dtype}: plans are for 16 bits")
    if layer.gathered_columns:
        return not_planned(
            SplitRefusal.LAYER_NOT_RECOGNISED, "a gather before attention is not in the planner's formulas"
        )
    transport, wires = message["transport"], planned_wires(layer.hidden_size, wire, wire)
    if link.serves(transport, peer_access=True):
        plan = plan_layer(profile, layer, message["tokens"], kernel=transport, link=link, wires=wires)
    else:
        kernel = profile.kernel_of_transport(transport, named)
        if kernel is None:
            detail = f"neither {profile.name}'s profile nor a link has rates of the transport {transport} here"
            return not_planned(SplitRefusal.TRANSPORT_NOT_PLANNED, detail)
        if wires != ALL_EXACT and profile.coded_kernel is None:
            detail = f"{profile.name}'s profile has no kernel whose rows travel in codes"
            return not_planned(SplitRefusal.TRANSPORT_NOT_PLANNED, detail)
        plan = plan_layer(profile, layer, message["tokens"], kernel=kernel, wires=wires)
    if plan.off is not None:
        return not_planned(plan.off, plan.reason) | {"plan": asdict(plan)}
    return {
        "mode": plan.mode,
        "reason": "",
        "detail": plan.reason,
        "sizes": list(plan.sizes),
        "gain": plan.gain,
        "plan": asdict(plan),
    }


def _print(console: Console, messages: Sequence[dict[str, Any]]) -> None:
    """Print a row for each message. Reasons follow by number below the table, each reason once for all its messages."""
    reasons: list[str] = []
    table = Table(box=None, pad_edge=False, header_style="dim")
    with_splits, with_wires = (messages[0][key] is not None for key in ("split", "wire"))
    last = (*(("wire",) if with_wires else ()), *(("split",) if with_splits else ()))
    for name in ("tokens", "message", "decision", "unfused by", "why", *last):
        table.add_column(name, justify="right" if name in ("tokens", "message", "why") else "left")
    for message in messages:
        told = [
            f"{message['entry']}; {message['source']}",
            f"unfused by {message['backend']}: {message['backend_why']}",
        ]
        cells = [str(message["tokens"]), size(message["bytes"]), _decided(message), message["backend"]]
        if with_wires:
            told.append(_wire_reason(message["wire"]))
        if with_splits:
            told += [_split_reason(message["split"])] if _split_reason(message["split"]) else []
        reasons += [reason for reason in told if reason not in reasons]
        cells.append(",".join(str(reasons.index(reason) + 1) for reason in told))
        cells += [message["wire"]["wire"]] if with_wires else []
        cells += [_split_words(message["split"])] if with_splits else []
        table.add_row(*map(escape, cells))
    console.print(table)
    console.print()
    for number, reason in enumerate(reasons, 1):
        console.print(f"{number}: {reason}", style="dim", markup=False)


def _decided(message: dict[str, Any]) -> str:
    return f"{message['decision']} ({message['transport']})" if message["transport"] else str(message["decision"])


def _wire_reason(wire: dict[str, Any]) -> str:
    if wire["wire"] == EXACT:
        return f"exact{wire['reason'] and ', '}{wire['reason']}: {wire['detail']}"
    return f"{wire['wire']}: {wire['detail']}"


def _split_words(split: dict[str, Any]) -> str:
    if split["mode"] == UNKNOWN:
        return "unknown"
    if split["mode"] == Mode.OFF:
        return f"no, {split['reason']}"
    joined = " (join)" if split["mode"] == Mode.JOIN else ""
    return f"{' + '.join(map(str, split['sizes']))}{joined}, {split['gain']:.2f}x"


def _split_reason(split: dict[str, Any]) -> str:
    if split["mode"] == UNKNOWN:
        return f"split or not: {split['detail']}"
    if split["mode"] == Mode.OFF:
        return f"not split, {split['reason']}: {split['detail']}"
    attention = "attention of all tokens" if split["mode"] == Mode.JOIN else "attention of each half"
    rates = split["plan"]["rates"]
    return f"split, {attention}: predicted speed-up over the unfused layer{rates and f'; {rates}'}"
