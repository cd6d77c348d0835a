"""``tw-compile explain``: which messages would be fused, by what, and which table says so."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from tw_compile.cli import common
from tw_compile.cli.common import JsonOption
from tw_compile.gating.facts import BACKENDS, DTYPE_BYTES, HOSTS, Node, Settings
from tw_compile.gating.gate import Gate, Verdict
from tw_compile.gating.layers import tables_of, threshold_layers
from tw_compile.gating.table import size
from tw_compile.runner.spec import UsageError


@common.one_line_errors
def explain(
    device: Annotated[
        str, typer.Option(metavar="sm90|sm100|sm103|generic", help="The GPU, which need not be here.")
    ] = "sm90",
    multicast: Annotated[bool, typer.Option(help="Whether it has NVLink multicast.")] = False,
    tp: Annotated[int, typer.Option(metavar="N", help="Ranks.")] = 8,
    hidden: Annotated[int, typer.Option(metavar="N", help="Hidden size.")] = 8192,
    tokens: Annotated[str, typer.Option(metavar="N,N,...", help="Token counts.")] = "1,16,64,256,1024,4096",
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPE_BYTES))] = "bfloat16",
    host: Annotated[
        str, typer.Option(metavar="|".join(HOSTS), help="Whose all_reduce; its environment variables count.")
    ] = "pytorch",
    backend: Annotated[
        str, typer.Option(metavar="auto|" + "|".join(BACKENDS), help="What an unfused all_reduce uses.")
    ] = "auto",
    disable_custom_all_reduce: Annotated[
        bool, typer.Option("--disable-custom-all-reduce", help="vLLM's option of that name.")
    ] = False,
    thresholds: Annotated[
        str, typer.Option(metavar="auto|off|FILE", help="As the option tw_compile.thresholds.")
    ] = "auto",
    json_file: JsonOption = None,
) -> None:
    """Say for each message what an unfused all_reduce would use, whether it is fused, and why. Needs no GPU."""
    common.one_of("--dtype", dtype, tuple(DTYPE_BYTES))
    common.one_of("--host", host, HOSTS)
    common.one_of("--backend", backend, ("auto", *BACKENDS))
    common.positive("--hidden", hidden)
    counts = common.numbers("--tokens", tokens)
    if tp < 2:
        raise UsageError(f"--tp: expected 2 or more, got {tp}")
    try:
        node = Node.parse(device, multicast)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    try:
        settings = Settings.from_environment(
            host, os.environ, backend=backend, disable_custom_all_reduce=disable_custom_all_reduce
        )
        gate = Gate(node, settings, tables_of(threshold_layers(thresholds, node.device_class), node.device_class))
    except ValueError as error:
        raise UsageError(str(error)) from error
    messages = [_message(gate, count, tp, hidden, dtype) for count in counts]
    console = common.make_console(json_file)
    for message in messages:
        console.print(_line(message), markup=False, soft_wrap=True)
    report = {
        "schema_version": 1,
        "command": "explain",
        "device": device,
        "device_class": node.device_class,
        "multicast": multicast,
        "world_size": tp,
        "hidden_size": hidden,
        "dtype": dtype,
        "host": host,
        "thresholds_digest": gate.digest(),
        "messages": messages,
    }
    common.write_json(report, json_file)


def _message(gate: Gate, tokens: int, world_size: int, hidden_size: int, dtype: str) -> dict[str, Any]:
    """One message as JSON; ``halves`` are those of a message that pays to be split, decided each by its own bytes."""
    row_bytes = hidden_size * DTYPE_BYTES[dtype]
    verdict = gate.decide(tokens * row_bytes, world_size=world_size, dtype=dtype)
    halves = gate.decide_halves(tokens, row_bytes, world_size=world_size, dtype=dtype) or ()
    return {
        "tokens": tokens,
        **_decision(verdict, world_size, hidden_size, dtype),
        "split": bool(halves),
        "halves": [_decision(half, world_size, hidden_size, dtype) for half in halves],
    }


def _decision(verdict: Verdict, world_size: int, hidden_size: int, dtype: str) -> dict[str, Any]:
    import torch

    from tw_compile.kernels.all_reduce_rms_norm.transport import GroupFacts, prefer_transport

    transport = None
    if verdict.transport is not None:
        facts = GroupFacts("cuda", world_size, hosts=1)
        transport = prefer_transport(facts, hidden_size, getattr(torch, dtype), verdict.transport).name
    return {
        "bytes": verdict.nbytes,
        "backend": str(verdict.backend),
        "backend_why": verdict.backend_why,
        "decision": "fused" if verdict.fused else "left",
        "transport": transport,
        "entry": verdict.entry,
        "source": verdict.source,
    }


def _line(message: dict[str, Any]) -> str:
    decided = message["decision"] + (f" by {message['transport']}" if message["transport"] else "")
    split = "not split"
    if message["halves"]:
        split = "split, halves " + " and ".join(
            f"{half['decision']} ({size(half['bytes'])}, {half['backend']})" for half in message["halves"]
        )
    return (
        f"{message['tokens']} tokens, {size(message['bytes'])}: {decided}, {split}; unfused {message['backend']} "
        f"({message['backend_why']}); {message['entry']}; {message['source']}"
    )
