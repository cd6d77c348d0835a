"""The residual between vLLM's pieces: marked where it leaves one and where it enters another.

    before:  residual = fused_add_rms_norm(...)[1]  | attention |  fused_add_rms_norm(all_reduce(x), residual)
    after:   passed = pass_residual(residual)       | attention |  fused_add_rms_norm(all_reduce(x), take_residual(passed))

This is done to the graph that vLLM is about to split, which alone shows both sides. What comes of it is each piece's own affair
(``kernels/handed_residual.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from vllm.compilation.partition_rules import should_split

from tw_compile.gating.facts import DTYPE_BYTES
from tw_compile.gating.gate import Gate
from tw_compile.kernels.all_reduce_rms_norm.transport import choose_transport, group_facts
from tw_compile.kernels.handed_residual import pass_residual, take_residual
from tw_compile.vllm.plan import Engine

logger = logging.getLogger("vllm.tw_compile")

_ADD_NORM = "vllm_ir::fused_add_rms_norm"
_ALL_REDUCE = "vllm::all_reduce"


def hand_over(graph: fx.GraphModule, splitting_ops: Sequence[str], sharded_from: int, transport: str) -> None:
    """Mark every residual that goes from one piece to one norm in another.

    Not where sums are NCCL's, which has all rows on all ranks. ``transport``: the option of that name.
    """
    found = [one for one in _crossings(graph.graph, splitting_ops) if _shards(one[0], one[2], transport)]
    for residual, norm, group_name in found:
        passed = _insert(graph.graph, residual, residual.next, pass_residual, residual, group_name, sharded_from)
        taken = _insert(graph.graph, residual, norm, take_residual, passed, group_name, sharded_from)
        norm.replace_input_with(residual, taken)
    if found:
        graph.recompile()
        logger.info("tw_compile: %d residuals stay sharded between pieces from %d tokens on", len(found), sharded_from)


def fuses_all(gate: Gate, engine: Engine, ends: Sequence[int], sharded_from: int) -> bool:
    """Whether the gate has the sums fused in every range of token counts from ``sharded_from`` on."""
    row_bytes = engine.hidden_size * DTYPE_BYTES[engine.dtype]
    begin = sharded_from
    for end in sorted({*(end for end in ends if end >= sharded_from), engine.max_tokens}):
        verdict = gate.decide_range((begin, end), row_bytes, world_size=engine.tensor_parallel_size, dtype=engine.dtype)
        if not verdict.fused:
            return False
        begin = end + 1
    return True


def _crossings(graph: fx.Graph, splitting_ops: Sequence[str]) -> list[tuple[fx.Node, fx.Node, str]]:
    """Residual, the norm in a later piece that alone reads it there, and the group of the sum that is added to it."""
    piece, number = dict[fx.Node, int](), 0
    for node in graph.nodes:
        number += should_split(node, list(splitting_ops))
        piece[node] = number
    found = []
    for node in graph.nodes:
        if _name(node) != _ADD_NORM:
            continue
        message, residual = node.args[:2]
        if not isinstance(residual, fx.Node) or not isinstance(message, fx.Node) or _name(message) != _ALL_REDUCE:
            continue
        group_name = message.kwargs.get("group_name", message.args[1] if len(message.args) > 1 else None)
        elsewhere = [user for user in residual.users if piece[user] != piece[residual]]
        if residual.op != "placeholder" and elsewhere == [node] and isinstance(group_name, str):
            found.append((residual, node, group_name))
    return found


def _shards(residual: fx.Node, group_name: str, transport: str) -> bool:
    """Whether what serves the sums of such residuals leaves each rank its rows."""
    tensor = residual.meta.get("example_value")
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2 or not isinstance(tensor.shape[1], int):
        return False
    facts = group_facts(group_name, tensor.device.type)
    return choose_transport(facts, tensor.shape[1], tensor.dtype, transport).name not in (None, "nccl")


def _name(node: fx.Node) -> str:
    """``library::operator`` of a call, as Dynamo has it: of all overloads, or of one."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return target._qualified_op_name if isinstance(target, torch._ops.OpOverloadPacket) else ""


def _insert(graph: fx.Graph, like: fx.Node, before: fx.Node, target: Any, *args: Any) -> fx.Node:
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    node.meta = dict(like.meta)
    return node
