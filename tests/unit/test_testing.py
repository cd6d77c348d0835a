"""The public testing package: its example, its errors, and that its assertions can fail."""

from __future__ import annotations

import os
import re
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.fx as fx
from fork_servers import run_script
from graph_builder import GraphBuilder, aten

import tw_compile.testing
from tw_compile import compat
from tw_compile.testing import (
    GlooRanks,
    RankError,
    annotation,
    assert_annotation,
    assert_order,
    assert_within_budget,
    compare_on_gloo,
    count_ops,
    fake_process_group,
    find_ops,
    relative_error,
    rewrite,
)


@pytest.mark.parametrize("calls", [0, -1])
def test_a_comparison_of_no_calls_is_refused(calls: int) -> None:
    with pytest.raises(ValueError, match=f"calls: expected 1 or more, got {calls}"):
        compare_on_gloo(lambda rank: torch.nn.Identity(), lambda rank, call: (), calls=calls)


@pytest.mark.full
def test_the_example_runs_as_pasted(tmp_path: Path) -> None:
    assert tw_compile.testing.__doc__ is not None
    blocks = re.split(r"\n(?=\S)", tw_compile.testing.__doc__)
    example = next(textwrap.dedent(block[block.index("::") + 2 :]) for block in blocks if "import torch\n" in block)
    (tmp_path / "test_example.py").write_text(example)
    script = tmp_path / "script.py"  # guarded, as processes that the example spawns import it, too
    script.write_text("import pytest\nif __name__ == '__main__':\n    exit(pytest.main(['-q', 'test_example.py']))")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    output = run_script(tmp_path, script)
    assert "1 passed" in output, output


def small_graph() -> tuple[fx.GraphModule, fx.Node, fx.Node]:
    b = GraphBuilder()
    wait = b.all_reduce(b.input(3, 8))
    normed = b.rms_norm(wait, b.input(8))
    return b.output(normed), wait, normed


def test_operators_are_found_by_overload_packet_and_name() -> None:
    with fake_process_group(2):
        graph = small_graph()[0].graph
    for target in (aten.mul.Tensor, aten.mul, "mul", "aten.mul", "aten.mul.Tensor", "mul.Tensor"):
        assert count_ops(graph, target) == 2, target
    assert count_ops(graph, "all_reduce") == 1 and count_ops(graph, "reduce") == 0
    assert [node.target for node in find_ops(graph, "wait_tensor")] == [torch.ops._c10d_functional.wait_tensor.default]


def test_order_and_annotation_can_fail() -> None:
    with fake_process_group(2):
        graph = small_graph()[0].graph
    assert_order(graph, "all_reduce", "wait_tensor")
    with pytest.raises(AssertionError, match="comes after"):
        assert_order(graph, "wait_tensor", "all_reduce")
    with pytest.raises(AssertionError, match="no node calls relu"):
        assert_order(graph, "relu", "all_reduce")
    node = find_ops(graph, "rsqrt")[0]
    assert annotation(node) is None
    with pytest.raises(AssertionError, match="has no annotation"):
        assert_annotation(node, role="start")
    node.meta["tw_compile"] = {"role": "wait"}
    with pytest.raises(AssertionError, match="'wait', 'start'"):
        assert_annotation(node, role="start")


def test_rewriting_a_graph_module_works_on_a_copy() -> None:
    with fake_process_group(2):
        module = small_graph()[0]
        before = str(module.graph)
        result = rewrite(module, ())
        assert str(module.graph) == before == str(result.before.graph)
        assert count_ops(result.after.graph, "all_reduce_rms_norm_start") == 1


@pytest.mark.parametrize("tokens", [64, 48])
def test_a_dim_that_is_marked_dynamic_is_a_symbol_also_where_it_equals_another_size(tokens: int) -> None:
    x = torch.empty(tokens, 64, dtype=torch.bfloat16)
    torch._dynamo.mark_dynamic(x, 0, min=8, max=128)
    result = rewrite(torch.nn.Linear(64, 64, bias=False).bfloat16(), (x,), device="cuda")
    (size,) = (n.meta["val"] for n in result.after.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt))
    assert compat.size_bounds(size) == (8, 128)


def test_graph_module_without_metadata_is_run_on_fake_arguments() -> None:
    with fake_process_group(2):
        module = small_graph()[0]
        for node in module.graph.nodes:
            node.meta.clear()
        result = rewrite(module, (torch.ones(3, 8), torch.ones(8)))
        assert result.report.counts["fused"] == 1
        assert not any(node.meta for node in module.graph.nodes)


def test_budget_can_fail() -> None:
    reference = torch.linspace(1, 2, 64, dtype=torch.float64)
    unfused = reference.to(torch.bfloat16)
    assert_within_budget(unfused, unfused, reference)
    with pytest.raises(AssertionError, match="exceeds the budget"):
        assert_within_budget(unfused * 1.05, unfused, reference)
    with pytest.raises(AssertionError):
        assert_within_budget(unfused * float("nan"), unfused, reference)
    with pytest.raises(AssertionError, match="dtype"):
        assert_within_budget(reference, unfused, reference)
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(unfused[:1], reference)
    assert relative_error(torch.empty(0), torch.empty(0)) == 0.0


def add_ranks(rank: int, value: float) -> float:
    total = torch.tensor([value * (rank + 1)])
    torch.distributed.all_reduce(total)
    return float(total)


def pid(rank: int) -> int:
    return os.getpid()


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise LookupError("only here")
    torch.distributed.barrier()


def die(rank: int) -> None:
    os._exit(3)


def sleep_long(rank: int) -> None:
    time.sleep(60)


@pytest.mark.full
def test_ranks_stay_and_report_errors_and_recover() -> None:
    with GlooRanks(2, timeout=60.0) as ranks:
        assert ranks.run(add_ranks, 2.0) == [6.0, 6.0]
        first = ranks.run(pid)
        assert ranks.run(pid) == first and len(set(first)) == 2
        with pytest.raises(RankError, match=r"(?s)rank 1:.*in fail_on_one.*LookupError: only here"):
            ranks.run(fail_on_one)
        assert ranks.run(add_ranks, 1.0) == [3.0, 3.0]
        with pytest.raises(RankError, match="the process died"):
            ranks.run(die)
    ranks.close()


@pytest.mark.full
def test_ranks_that_do_not_answer_are_ended() -> None:
    with GlooRanks(1, timeout=60.0) as ranks:
        ranks.run(pid)
        ranks.timeout = 0.5
        begin = time.monotonic()
        with pytest.raises(RankError, match=r"ranks \[0\] did not answer within 0.5 seconds"):
            ranks.run(sleep_long)
        assert time.monotonic() - begin < 15


def test_world_size_is_checked() -> None:
    with pytest.raises(ValueError, match="world_size: expected at least 1, got 0"):
        GlooRanks(0)
