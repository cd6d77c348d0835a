"""The token rule of vLLM's attention, which finds a step's requests and the cache of keys and values by its layer's name.

    unsplit:  update = unified_kv_cache_update(k, v, layer); out = unified_attention_with_output(q, k, v, out, layer, update)
    half 1:   out1, written1 = vllm_attention_half(q1, k1, v1, layer, begin=0)
    half 2:   out2, written2 = vllm_attention_half(q2, k2, v2, layer, begin=first, after=[written1])

Each half writes its own keys and values, then attends to what is in the cache. Half 2 writes after half 1 has written;
``after`` says so. The operator is defined in ``attention.py``. It is used only if the host says that halves are possible.

Attention of latent keys and values runs once for all tokens.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from tw_compile.graph.predicates import is_call, operator_name
from tw_compile.hosts.vllm.operators import ATTENTION, LATENT_ATTENTION
from tw_compile.passes.fusion.forms import host_call
from tw_compile.passes.operators import AttentionOperator
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split.analysis.layout import HalfBuilder, Local, Rows, RowWise, Verdict
from tw_compile.passes.split.rules.registry import OperatorCall, token_rule

_UPDATE = "vllm::unified_kv_cache_update"
_UPDATED = "vllm_kv_cache"


@token_rule(_UPDATE)
def _update(call: OperatorCall) -> Verdict:
    """The update's result only tells the attention behind it that the update ran. Each half updates with its attention."""
    rows, values = (call.rows(operand) for operand in call.args[:2])
    if call.join_attention:
        return call.join(JoinReason.ATTENTION_PLANNED, "once for all tokens")
    if rows is None or values is None or not _by_token(rows) or not values.same_as(rows):
        return call.join(JoinReason.ATTENTION, "keys and values without a row for each token")
    return RowWise(Local(_UPDATED, call.node, rows))


@token_rule(ATTENTION.name)
def _attend(call: OperatorCall) -> Verdict:
    """Operands are ``[tokens, heads, head_dim]``; requests follow one another."""
    attention = host_call(call.node, AttentionOperator)
    assert attention is not None, "a rule of a declared operator"
    given = attention.arguments
    query, key, value = (given[name] for name in ("query", "key", "value"))
    rows = call.rows(query)
    if call.join_attention:
        return call.join(JoinReason.ATTENTION_PLANNED, "once for all tokens")
    if any(given.get(name) is not None for name in ("output_scale", "output_block_scale")):
        return call.join(JoinReason.ATTENTION_KERNEL, "its result is quantised")
    if rows is None or not _by_token(rows):
        return call.join(JoinReason.ATTENTION, "queries without a row for each token")
    layouts = [call.rows(operand) for operand in (key, value)]
    if any(layout is None or not layout.same_as(rows) for layout in layouts):
        return call.join(JoinReason.ATTENTION, "keys or values are not those of the queries' tokens")
    update = given.get("kv_cache_dummy_dep")
    if update is not None and not _updates(call, update, (key, value, given["layer_name"])):
        return call.join(JoinReason.ATTENTION, f"{update} is no update with these keys and values alone")
    results = call.node.meta["val"]
    place = next((index for index, result in enumerate(results) if isinstance(result, torch.Tensor)), None)
    if place is None or any(not is_call(user, operator.getitem) or user.args[1] != place for user in call.node.users):
        return call.join(JoinReason.ATTENTION, "more than the attention's output is read")
    output, written = results[place], list[fx.Node]()

    def build(builder: HalfBuilder, half: int) -> fx.Node:
        target = torch.ops.tw_compile.vllm_attention_half.default
        operands = [builder.rows(operand, half, rows) for operand in (query, key, value)]
        begin = 0 if half == 0 else builder.units[0]
        options = (begin, output.shape[-1], output.dtype, update is not None, list(written))
        made = builder.call(half, target, *operands, given["layer_name"], *options)
        written.append(builder.call(half, operator.getitem, made, 1))
        return builder.call(half, operator.getitem, made, 0)

    return RowWise(tuple(rows if index == place else None for index in range(len(results))), build=build)


@token_rule(LATENT_ATTENTION.name, "vllm::unified_mla_kv_cache_update")
def _attend_to_latents(call: OperatorCall) -> Verdict:
    for operand in call.node.all_input_nodes:
        call.layout(operand)
    return call.join(JoinReason.ATTENTION_KERNEL, "no kernel is known for half of the tokens")


def _by_token(rows: Rows) -> bool:
    return rows.dim == 0 and rows.outer is None and rows.order is None and rows.per_unit == 1


def _updates(call: OperatorCall, update: fx.Node, operands: tuple[fx.Node, ...]) -> bool:
    """Whether ``update`` writes these keys and values of this layer, and no other node reads its result."""
    layout = call.layout(update)
    known = isinstance(layout, Local) and layout.role == _UPDATED and operator_name(update) == _UPDATE
    return known and update.args[:3] == operands and list(update.users) == [call.node]
