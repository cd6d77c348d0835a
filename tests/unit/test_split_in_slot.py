"""Results that stay in a slot's memory: only where every reader is done before the slot's next call, and not given away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.fx as fx
from families import FAMILIES
from split_graphs import WORLD_SIZE, family_graph, random_values, run_alone, split_graph

from tw_compile import Config, TWCompilePass, compat
from tw_compile.graph.copy import copy_of
from tw_compile.kernels.collective import ops
from tw_compile.models.config import config_from_dict
from tw_compile.models.decoder import build_decoder
from tw_compile.passes.split.peephole import in_slot
from tw_compile.passes.split.peephole.in_slot import leave_results_in_slots
from tw_compile.passes.split.rewrite.duplicate import split_tokens
from tw_compile.passes.split.schedule.dependences import argument, find_calls
from tw_compile.passes.split.schedule.windows import schedule
from tw_compile.planning import load_profile
from tw_compile.testing import fake_cuda, fake_process_group, find_ops

aten = torch.ops.aten
SMS = 4


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(WORLD_SIZE):
        yield


def halves(family: str = "llama") -> fx.Graph:
    """Two layers, of which every call is beside other work."""
    graph = family_graph(family, 1, 64)
    split_tokens(graph, 32)
    schedule(graph, lambda window: SMS)
    return graph


def left(graph: fx.Graph) -> list[bool]:
    calls = find_calls(graph)
    assert isinstance(calls, list)
    return [bool(argument(call.start, "results_in_slot")) for call in calls]


def hidden_and_reader(graph: fx.Graph, call: int) -> tuple[fx.Node, fx.Node]:
    """What a call's matmuls read, and the last of them."""
    calls = find_calls(graph)
    assert isinstance(calls, list)
    hidden: fx.Node = argument(calls[call].wait, "hidden")
    rows = next(user for user in hidden.users if user.target is not ops.wait_)
    matmuls = [user for user in rows.users if user.target is aten.mm.default]
    rows = rows if matmuls else next(iter(rows.users))
    return rows, max(user for user in rows.users if user.target is aten.mm.default)


def test_what_matmuls_alone_read_stays_in_the_slot() -> None:
    graph = halves()
    calls = len(left(graph))
    count = leave_results_in_slots(graph)
    beside = sum(bool(argument(node, "overlap_sms")) for node in find_ops(graph, "all_reduce_rms_norm_start"))
    assert 0 < count == sum(left(graph)) <= beside <= calls
    assert left(graph)[2:-2] == [True] * (calls - 4)
    assert left(graph)[-1] is False, "the graph returns what the last norm gives"
    (hold,) = graph.find_nodes(op="call_function", target=ops.hold_)
    assert hold.next is graph.output_node() and len(hold.args[0]) == count
    assert set(hold.args[1]) == set(graph.output_node().all_input_nodes)


@pytest.mark.parametrize(
    ("transport", "wire", "stay"),
    [
        ("p2p", "exact", True),
        ("multimem", "exact", True),
        ("p2p", "int8", False),
        ("host", "exact", False),
        ("nccl", "exact", False),
    ],
)
def test_only_what_can_stay_is_held_until_the_graph_ends(transport: str, wire: str, stay: bool) -> None:
    """Other results would take the memory of all layers at once, and gain nothing."""
    graph = halves()
    for node in find_ops(graph, "all_reduce_rms_norm_start"):
        node.args = tuple(transport if one == "gloo" else one for one in node.args)
        node.update_kwarg("wire", wire)
    assert (leave_results_in_slots(graph) > 0) == any(left(graph)) == stay
    assert len(graph.find_nodes(op="call_function", target=ops.hold_)) == stay


def test_overwriting_results_that_stay_changes_nothing() -> None:
    graph = halves()
    values = random_values(graph)
    want = run_alone(copy_of(graph), values)
    assert leave_results_in_slots(graph)
    for got, exact in zip(run_alone(graph, values), want, strict=True):
        assert torch.equal(got, exact)


def test_overwriting_results_that_are_read_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = halves()
    values = random_values(graph)
    _read_beside_the_next_call(graph, *hidden_and_reader(graph, 3))
    monkeypatch.setattr(in_slot, "is_read_before", lambda *given: True)
    leave_results_in_slots(graph)
    assert any(one.isnan().any() for one in run_alone(graph, values))


def test_what_experts_gather_is_copied_out_of_the_slot() -> None:
    graph = halves("mixtral")
    values = random_values(graph)
    want = run_alone(copy_of(graph), values)
    count = leave_results_in_slots(graph)
    assert 0 < count < len(left(graph)) - 2
    for node in find_ops(graph, "all_reduce_rms_norm_start"):
        if argument(node, "results_in_slot"):
            hidden = next(user for user in node.users if user.args[1] == 0)
            readers = in_slot.readers_of(hidden)
            assert readers and {reader.target for reader in readers} == {aten.mm.default, ops.hold_}
    for got, exact in zip(run_alone(graph, values), want, strict=True):
        assert torch.equal(got, exact)


def test_calls_that_are_not_beside_other_work_keep_results_of_their_own() -> None:
    graph = family_graph("llama", 1, 64)
    assert leave_results_in_slots(graph) == 0
    assert not graph.find_nodes(op="call_function", target=ops.hold_)


def _add_pointwise(graph: fx.Graph, hidden: fx.Node, reader: fx.Node) -> None:
    with graph.inserting_before(reader):
        node = graph.call_function(aten.relu.default, (hidden,))
    node.meta["val"] = hidden.meta["val"]
    reader.replace_input_with(hidden, node)


def _return(graph: fx.Graph, hidden: fx.Node, reader: fx.Node) -> None:
    output = graph.output_node()
    output.args = ((*output.args[0], hidden),)  # type: ignore[misc]


def _read_beside_the_next_call(graph: fx.Graph, hidden: fx.Node, reader: fx.Node) -> None:
    with graph.inserting_before(graph.output_node()):
        node = graph.call_function(aten.mm.default, reader.args)
    node.meta["val"] = reader.meta["val"]
    output = graph.output_node()
    output.args = ((*output.args[0], node),)  # type: ignore[misc]


def _want_all_rows_of_the_residual(graph: fx.Graph, hidden: fx.Node, reader: fx.Node) -> None:
    start = hidden
    while "rms_norm_start" not in str(start.target):
        start = start.all_input_nodes[0]
    start.args = tuple("replicated" if one == "sharded" else one for one in start.args)


@pytest.mark.full
@pytest.mark.parametrize(
    "change", [_add_pointwise, _return, _read_beside_the_next_call, _want_all_rows_of_the_residual]
)
def test_what_is_not_proven_is_copied(change) -> None:  # type: ignore[no-untyped-def]
    graph = halves()
    change(graph, *hidden_and_reader(graph, 3))
    leave_results_in_slots(graph)
    assert [index for index, one in enumerate(left(graph)[2:-2], 2) if not one] == [3]


def test_the_report_counts_them() -> None:
    graph = family_graph("llama", 1, 64, dtype=torch.bfloat16)
    graph = fx.GraphModule(torch.nn.Module(), graph).graph
    split = split_graph(graph, Config(split="32", device_profile="H200"), load_profile("H200"))
    (hold,) = graph.find_nodes(op="call_function", target=ops.hold_)
    assert split.overlap is not None and split.overlap.in_slot == len(hold.args[0]) > 0


@pytest.mark.full
@pytest.mark.parametrize("held", [True, False])
def test_memory_of_what_stays_in_a_slot_is_given_to_nothing_else(monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    """Code for an H100. Without the operator that holds them Inductor does give it away: so this can fail."""
    if not held:
        monkeypatch.setattr(in_slot, "hold_results", lambda graph, results: None)
    fuse = TWCompilePass(Config(strict=True))

    def passes(graph: fx.Graph) -> None:
        fuse(graph)
        split_graph(graph, Config(split="32", device_profile="H200"), load_profile("H200"))

    with ExitStack() as stack:
        stack.enter_context(fake_cuda())
        # Queries are as large as hidden states, so that memory of one could be had for the other.
        config = config_from_dict(FAMILIES["llama"] | {"head_dim": 32, "num_key_value_heads": 2})
        decoder = build_decoder(config, device="cuda", dtype=torch.bfloat16, num_layers=2)
        code = compat.inductor_code(
            decoder, (torch.zeros(1, 64, dtype=torch.long, device="cuda"),), passes, "cuda", None, {}
        )
    lines = code[code.index("def call(") :].splitlines()
    kept, given_away = set(), set()
    for line in lines:
        start = re.search(r"(buf\d+) = .*rms_norm_start\.default\.direct\(.*results_in_slot=True", line)
        if start:
            kept.add(start[1])
    assert kept
    results = {
        found[1] for line in lines if (found := re.match(r"\s*(buf\d+) = (buf\d+)\[0\]", line)) and found[2] in kept
    }
    assert len(results) == len(kept)
    for line in lines:
        if "# reuse" in line:
            given_away |= results & set(re.findall(r"buf\d+", line.partition("=")[2]))
    holds = [number for number, line in enumerate(lines) if "rms_norm_hold_.default.direct(" in line]
    if not held:
        assert given_away and not holds
        return
    assert not given_away
    (hold,) = holds
    assert results <= set(re.findall(r"buf\d+", lines[hold]))
    for number, line in enumerate(lines):
        freed = results & set(re.findall(r"\bdel (buf\d+)", line))
        assert not freed or number > hold
        assert number <= hold or not re.search(r"empty_strided|\.run\(|extern_kernels", line), line
