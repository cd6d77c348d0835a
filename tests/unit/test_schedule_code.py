"""What Inductor makes of a schedule: nothing else. Code for an H100, generated without one."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.fx as fx

from tw_compile import Config, TWCompilePass, compat
from tw_compile.models.config import load_config
from tw_compile.models.decoder import build_decoder
from tw_compile.passes.split import SplitChoice, SplitReport, choose_split, split_tokens
from tw_compile.passes.split.analysis.token_axis import Unit
from tw_compile.passes.split.schedule.budgets import Budgets, reserve_sms
from tw_compile.passes.split.schedule.lock import Lock, lock_order
from tw_compile.passes.split.schedule.windows import Schedule, schedule
from tw_compile.planning import load_profile
from tw_compile.planning import suffix as own_kernel
from tw_compile.planning.halves import FirstHalf
from tw_compile.testing import fake_cuda, fake_process_group, find_ops

aten = torch.ops.aten

START = re.compile(r"(\w+) = torch\.ops\.tw_compile\.\w*all_reduce_rms_norm_start\.default\.direct\((.*)\)")
WAIT = re.compile(r"all_reduce_rms_norm_wait_\.default\.direct\((\w+), (\w+), \[([^]]*)\]")
BUFFER = re.compile(r"\bbuf\d+\b")

FORMS: dict[str, dict[str, Any]] = {
    "attention joins": {"batch": 1, "first": 32, "join_attention": True},
    "prefix and suffix": {"batch": 1, "first": 48},
    "prefix and suffix, cudnn": {"batch": 1, "first": 48, "layers": 1, "cudnn": True},
    "prefix and suffix, cudnn merged": {"batch": 1, "first": 48, "layers": 1, "cudnn": True, "most_keys": 47},
    "computed halves, cudnn": {
        "batch": 1,
        "first": FirstHalf(32, 128, 1, 2, 16),
        "layers": 1,
        "dynamic": True,
        "cudnn": True,
    },
    "dynamic, cudnn": {"batch": 1, "first": 32, "layers": 1, "dynamic": True, "cudnn": True},
    "requests": {"batch": 2, "first": 1},
    "gemms stay": {"batch": 2, "first": 1, "layers": 1, "config": Config(strict=True, absorb_mm="never")},
    "dynamic": {"batch": 1, "first": 32, "layers": 1, "dynamic": True},
    "computed halves": {"batch": 1, "first": FirstHalf(32, 128, 1, 2, 16), "layers": 1, "dynamic": True},
    "budgets": {"batch": 1, "first": 32, "layers": 1, "profile": "H200"},
    "budgets, gemms stay": {
        "batch": 2,
        "first": 1,
        "layers": 1,
        "profile": "H200",
        "config": Config(strict=True, absorb_mm="never"),
    },
    "all_reduce": {"batch": 2, "first": 1, "layers": 1, "config": Config(strict=True, fuse=False)},
}
FUSED = [form for form in FORMS if form != "all_reduce"]
ONLY_FULL = ("dynamic, cudnn", "dynamic", "computed halves")  # code that no other test of the quick tier needs


@dataclass
class Generated:
    """``scheduled`` is the order of calls in the graph, before anything was locked."""

    lines: list[str]
    scheduled: list[str]
    schedule: Schedule | None = None
    locks: list[Lock] = field(default_factory=list)


@cache
def generated(form: str, lock: bool = True) -> Generated:
    """Two layers where not said otherwise, 64 tokens a request."""
    given = {"config": Config(strict=True), "layers": 2, "dynamic": False, "cudnn": False, "profile": None}
    given |= {"most_keys": own_kernel.MOST_KEYS}
    given |= FORMS[form]
    fuse = TWCompilePass(given["config"])
    found = Generated([], [])

    def passes(graph: fx.Graph) -> None:
        fuse(graph)
        if given["cudnn"]:
            choose_cudnn(graph)
        budgets = planned(graph, given["profile"], given["first"] * 64 if given["batch"] > 1 else given["first"])
        unit: Unit = "request" if given["batch"] > 1 else "token"
        with mock.patch.object(own_kernel, "MOST_KEYS", given["most_keys"]):
            report = split_tokens(graph, given["first"], unit=unit, join_attention=given.get("join_attention", False))
        assert isinstance(report, SplitReport)
        result = schedule(graph, budgets.overlap_sms, budgets.most_sms)
        assert isinstance(result, Schedule)
        reserve_sms(graph, result, budgets)
        found.schedule = result
        found.scheduled += [call for node in graph.nodes if (call := in_graph(node)) is not None]
        if lock:
            found.locks.append(lock_order(graph))
            graph.lint()

    with fake_process_group(4), fake_cuda():
        decoder = build_decoder(
            load_config("tiny-llama"), device="cuda", dtype=torch.bfloat16, num_layers=given["layers"]
        )
        ids = torch.zeros(given["batch"], 64, dtype=torch.long, device="cuda")
        if given["dynamic"]:
            torch._dynamo.mark_dynamic(ids, 1)
        code = compat.inductor_code(decoder, (ids,), passes, "cuda", None, {})
    body = code[code.index("def call(") :]
    found.lines = body[: body.index("return (")].splitlines()
    return found


def choose_cudnn(graph: fx.Graph) -> None:
    """What torch traces on an H100 instead of flash, where cuDNN is preferred."""
    for node in find_ops(graph, aten._scaled_dot_product_flash_attention.default):
        *operands, dropout, causal = node.args
        node.target = aten._scaled_dot_product_cudnn_attention.default
        node.args = (*operands, None, False, dropout, causal)
        with compat.tracing_fake_mode(compat.graph_fake_mode(graph)):
            node.meta["val"] = node.target(*fx.map_arg(node.args, lambda one: one.meta["val"]), **node.kwargs)


def planned(graph: fx.Graph, profile: str | None, tokens: int) -> Budgets:
    if profile is None:
        return Budgets()
    choice = choose_split(graph, Config(split=str(tokens), device_profile=profile), load_profile(profile))
    assert isinstance(choice, SplitChoice) and choice.plan is not None
    return Budgets(choice.plan, load_profile(profile))


def in_graph(node: fx.Node) -> str | None:
    """A call as text that the generated code has too: the operator, and its slot or its weight."""
    name = str(node.target)
    if "rms_norm_start" in name:
        absorbed = f"{weight(node.args[1])} {node.kwargs.get('reserved_sms', 0)}" if "mm_" in name else ""
        return f"start {node.args[-2]} {absorbed}".strip()
    if "rms_norm_wait_" in name:
        return f"wait {node.args[-1]}"
    if name == "aten.mm.default":
        return f"mm {weight(node.args[1])}"
    if name == "tw_compile.mm_leaving_sms.default":
        return f"mm {weight(node.args[1])} leaving {node.args[2]}"
    if name == "tw_compile.joint_mm_leaving_sms.default":
        return f"joint {' '.join(map(weight, (*node.args[1], *node.args[2])))} leaving {node.args[3]}"
    if name == "tw_compile.gated_mm_leaving_sms.default":
        return f"gated {weight(node.args[1])} {weight(node.args[2])} leaving {node.args[3]}"
    for known in ("all_reduce.default", "wait_tensor.default", "attention.default"):
        if name.endswith(known):
            return known.partition(".")[0]
    return None


def weight(node: Any) -> str:
    while node.op != "placeholder":
        (node,) = node.all_input_nodes
    return node.name


def slot_of(line: str) -> int:
    """The slot of a start; it follows the transport."""
    found = re.search(r"'(?:p2p|nccl)', (\d+)", line)
    assert found is not None, line
    return int(found.group(1))


def in_code(line: str) -> str | None:
    start, wait = START.search(line), WAIT.search(line)
    if start is not None:
        absorbed = re.search(r"\barg\w+", start.group(2)) if "mm_all_reduce" in line else None
        reserved = re.search(r"reserved_sms=(\d+)", line)
        leaving = f"{absorbed.group()} {reserved.group(1) if reserved else 0}" if absorbed else ""
        return f"start {slot_of(line)} {leaving}".strip()
    if wait is not None:
        return f"wait {line.rstrip(')').split(', ')[-1]}"
    budget = re.search(r"(?:(joint|gated)_)?mm_leaving_sms\.default\.direct\((.*), (\d+)\)", line)
    if budget is not None:
        return f"{budget.group(1) or 'mm'} {' '.join(re.findall(r'arg[0-9_]+', budget.group(2)))} leaving {budget.group(3)}"
    if "extern_kernels.mm(" in line:
        return f"mm {re.findall(r'arg[0-9_]+', line)[0]}"
    for known in ("all_reduce_.default(", "wait_tensor.default(", "attention.default("):
        if known in line:
            return known.rstrip("(").partition(".")[0].rstrip("_")
    return None


def calls(lines: list[str]) -> list[str]:
    lines = [line for line in lines if "assert_" not in line]
    return [call for line in lines if (call := in_code(line)) is not None]


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_calls_and_matmuls_keep_their_order(form: str) -> None:
    found = generated(form)
    order = calls(found.lines)
    assert [one for one in order if one != "attention"] == [one for one in found.scheduled if "attention" not in one]
    assert len(order) > 15


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["budgets", "budgets, gemms stay"])
def test_budgets_of_gemms_survive_and_cost_no_copy(form: str) -> None:
    found = generated(form)
    order = calls(found.lines)
    leaving = [one for one in order if "leaving" in one]
    ctas = load_profile("H200").fused["stream"].ctas  # sums of halves this small are latency, on any number of them
    assert {int(one.split()[-1]) for one in leaving} <= {*ctas}
    kinds = Counter(
        one.split()[0] for one in leaving
    )  # half 1's attention has a call beside it if the embedding is sharded
    assert kinds["gated"] == 2 and kinds["joint"] in (1, 2)
    reserved = {one.split()[-1] for one in order if one.startswith("start") and "arg" in one}
    assert len(reserved) > 1 if form == "budgets" else not reserved
    products = [line for line in found.lines if "mm_leaving_sms.default.direct(" in line]
    assert all("reinterpret_tensor(arg" in line for line in products), "weights are read where they are"


@pytest.mark.full
@pytest.mark.parametrize("form", ["requests", "all_reduce"])
def test_without_the_lock_inductor_undoes_the_schedule(form: str) -> None:
    found = generated(form, False)
    assert calls(found.lines) != found.scheduled


def flights(lines: list[str]) -> list[tuple[int, int, set[str]]]:
    """For each call the lines of its start and its wait, and the buffers of its inputs and outputs."""
    found = []
    for begin, line in enumerate(lines):
        start = START.search(line)
        if start is None:
            continue
        items = {
            item.group(1)
            for text in lines
            if (item := re.match(rf"\s*(\w+) = {start.group(1)}\[\d\]", text)) is not None
        }
        (end,) = (number for number, text in enumerate(lines) if (wait := WAIT.search(text)) and wait.group(1) in items)
        found.append((begin, end, items | set(BUFFER.findall(start.group(2)))))
    assert found
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.full) if form in ONLY_FULL else form for form in FUSED]
)
def test_memory_of_a_call_in_flight_is_neither_written_nor_given_away(form: str) -> None:
    lines = generated(form).lines
    for begin, end, buffers in flights(lines):
        wait = WAIT.search(lines[end])
        assert wait is not None and buffers <= set(BUFFER.findall(wait.group())), lines[end]
        for line in lines[begin + 1 : end]:
            for buffer in buffers & set(BUFFER.findall(line)):
                read = re.match(rf"\s*({buffer} = \w+\[\d\]|assert_\w+\({buffer}\b)", line)
                kept = WAIT.search(line)
                another = START.search(line)
                only_read = kept is not None and buffer not in kept.group(1, 2)
                assert read or only_read or another, line
                assert not re.search(rf"\bdel {buffer}\b", line), line


@pytest.mark.parametrize("form", ["requests", "gemms stay"])
def test_no_kernel_computes_for_both_halves_before_the_last_wait(form: str) -> None:
    lines = generated(form).lines
    tainted: dict[str, set[int]] = {}
    last = max(number for number, line in enumerate(lines) if WAIT.search(line))
    both = []
    for number, line in enumerate(lines):
        start = START.search(line)
        if start is not None:
            tainted[start.group(1)] = {slot_of(line)}
        elif (item := re.match(r"\s*(buf\d+) = (buf\d+)\[\d\]", line)) is not None:
            tainted[item.group(1)] = tainted.get(item.group(2), set())
        elif (renamed := re.match(r"\s*(buf\d+) = \w*\(?buf\d+.*# reuse", line)) is not None:
            tainted[renamed.group(1)] = set()
        elif ".run(" in line or "extern_kernels" in line or ".default(" in line or ".default.direct(" in line:
            if WAIT.search(line):
                continue
            named = BUFFER.findall(line)
            halves = set().union(*(tainted.get(one, set()) for one in named))
            both += [number] if len(halves) == 2 else []
            for one in named:
                tainted[one] = tainted.get(one, set()) | halves
    assert both and min(both) > last, "what puts the results together is found"


def test_what_is_loose_is_pointwise_and_reads_something_whole() -> None:
    """A limit: lookups of embeddings, and copies out of a joined value, may run before the start that they belong behind."""
    joined, requests = generated("attention joins").locks[0], generated("requests").locks[0]
    assert not [one for one in joined.loose if "mm" in one or "attention" in one]
    assert [one for one in joined.loose if one not in requests.loose] == ["clone_default_1", "clone_default_3"]
    assert joined.cloned == 4 and requests.cloned == 0
    assert requests.ordered <= 4


def test_each_half_has_one_flash_kernel_and_the_second_gets_the_keys_of_both() -> None:
    code = "\n".join(generated("prefix and suffix").lines)
    found = re.findall(r"_flash_attention\.default\((.*), 0\.0, True, scale=0\.125\)", code)
    sizes = re.findall(r"assert_\w+\(buf\d+, \(1, 2, (\d+), 64\), .*_flash_attention", code)
    assert len(found) == 4 and sizes == ["48", "16"] * 2
    joined = [re.fullmatch(r"buf\d+, (buf\d+), (buf\d+)", operands) for operands in found[1::2]]
    assert all(joined)
    for pair in joined:
        assert pair is not None
        for buffer in pair.groups():
            assert f"{buffer} = empty_strided_cuda((1, 1, 64, 64)" in code


@pytest.mark.parametrize("form", ["prefix and suffix, cudnn", "computed halves, cudnn"])
def test_our_own_attention_reads_what_projections_write_and_writes_what_the_start_reads(form: str) -> None:
    lines = generated(form).lines
    code = "\n".join(lines)
    found = re.findall(
        r"(buf\d+) = torch\.ops\.tw_compile\.attention_suffix\.default\.direct\((.*), scale=0\.125\)", code
    )
    (prefix, (own_result, suffix)) = found
    operands = [re.findall(r"(?:reinterpret_tensor\()?\b(buf\d+)", one) for one in (prefix[1], suffix)]
    assert [len(one) for one in operands] == [3, 5] and "cudnn" not in code
    assert operands[1][3:] == operands[0][1:], "the earlier keys and values where they are"
    values = [
        re.search(rf"out=({buffer}|reinterpret_tensor\({buffer})\b", code)
        for buffer in (operands[0][2], operands[1][2])
    ]
    assert all(values), "projections wrote the values, and nothing copied them"
    begin = next(number for number, line in enumerate(lines) if f"{own_result} = torch.ops" in line)
    start = next(number for number, line in enumerate(lines) if number > begin and START.search(line))
    assert not [line for line in lines[begin:start] if ".run(" in line], "no kernel between it and the projection"


def test_the_suffix_of_cudnn_is_two_calls_and_one_kernel_that_writes_what_the_start_reads() -> None:
    code = "\n".join(generated("prefix and suffix, cudnn merged").lines)
    found = re.findall(r"(buf\d+) = .*_cudnn_attention\.default\((buf\d+), .*, None, (.*), scale=0\.125\)", code)
    prefix, earlier, own = found
    assert [flags for *_, flags in found] == ["False, 0.0, True", "True, 0.0, False", "True, 0.0, True"]
    assert earlier[1] == own[1] != prefix[1], "the same queries"
    assert "(1, 1, 64, 64)" not in code, "no keys of both halves"
    results = {name for call in (earlier[0], own[0]) for name in re.findall(rf"(buf\d+) = {call}\[[01]\]", code)}
    kernels, start = code[code.index(f"del {own[0]}\n") :].split("_start.default.direct(", 1)
    (merge,) = re.findall(r"\.run\((.*)\)", kernels)
    (operand,) = re.findall(r"reinterpret_tensor\((buf\d+), \(16, 128\)", start.partition("\n")[0])
    buffers = set(BUFFER.findall(merge))
    buffers |= {old for new, old in re.findall(r"(buf\d+) = .*?(buf\d+).*# reuse", kernels) if new in buffers}
    assert len(results) == 4 and results <= buffers and operand in buffers
