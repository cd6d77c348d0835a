"""What a trace says about hidden communication."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tw_compile.runner.timeline import (
    TracedKernel,
    hidden_communication,
    kernels,
    overlap,
    profile,
    trace_of_rank,
    union,
)


def kernel(name: str, stream: int, begin: float, end: float) -> TracedKernel:
    return TracedKernel(name, (0, stream), begin, end)


@pytest.mark.parametrize(
    ("ran", "communication", "hidden"),
    [
        ([("push", 1, 0, 10), ("nvjet_sm90", 2, 20, 30)], 10, 0),
        ([("push", 1, 0, 10), ("nvjet_sm90", 2, 0, 10)], 10, 10),
        ([("push", 1, 0, 10), ("nvjet_sm90", 2, 4, 30)], 10, 6),
        ([("push", 1, 0, 10), ("a", 2, 1, 3), ("b", 2, 2, 4), ("c", 3, 3, 5)], 10, 4),
        ([("push", 1, 0, 10), ("stream", 2, 0, 10)], 20, 0),
        ([("push", 1, 0, 10), ("stream", 2, 5, 15), ("a", 3, 8, 12)], 20, 6),
        ([("a", 1, 0, 5), ("push", 1, 5, 10), ("b", 1, 10, 12)], 5, 0),
        ([("a", 1, 0, 5)], 0, 0),
        ([], 0, 0),
    ],
)
def test_hidden_is_what_another_stream_computes_beside(
    ran: list[tuple[str, int, float, float]], communication: float, hidden: float
) -> None:
    found = hidden_communication([kernel(*one) for one in ran])
    assert (found.communication_us, found.hidden_us) == (communication, hidden)
    assert found.share == (hidden / communication if communication else None)
    assert found.span_us == (max(one[3] for one in ran) - min(one[2] for one in ran) if ran else 0)


KERNELS = st.lists(
    st.builds(
        lambda name, stream, begin, length: kernel(name, stream, begin, begin + length),
        st.sampled_from(["push", "ncclDevKernel_AllReduce", "gemm", "norm"]),
        st.integers(0, 3),
        st.integers(0, 50),
        st.integers(1, 20),
    )
)


@given(KERNELS)
def test_share_is_a_count_of_moments(ran: list[TracedKernel]) -> None:
    found = hidden_communication(ran)
    total = hidden = 0
    for moment in range(80):
        now = [one for one in ran if one.begin <= moment < one.end]
        for stream in {one.stream for one in now if one.communicates}:
            total += 1
            hidden += any(one.stream != stream and not one.communicates for one in now)
    assert (found.communication_us, found.hidden_us) == (total, hidden)
    assert found.share is None or 0 <= found.share <= 1


SPANS = st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e5)).map(lambda one: (one[0], one[0] + one[1])))


@given(SPANS, SPANS)
def test_overlap_is_symmetric_and_no_more_than_either(one: list[Any], other: list[Any]) -> None:
    first, second = union(one), union(other)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(first))
    both = overlap(first, second)
    assert both == overlap(second, first)
    assert 0 <= both <= min(overlap(first, first), overlap(second, second))


@pytest.mark.parametrize(
    ("name", "communicates"),
    [
        ("push", True),
        ("stream", True),
        ("multimem", True),
        ("all_reduce_rms_norm_kernel", True),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum", True),
        ("void c10d::symmetric_memory::two_shot_all_reduce_kernel_inplace<c10::BFloat16>(unsigned long*)", True),
        ("gloo:all_reduce", True),
        ("nvjet_sm90_tst_128x256_64x4_streamk", False),
        ("triton_red_fused_add_all_reduce_rms_norm_0", False),
        ("add_norm_kernel", False),
        ("void at::native::push_back<4>()", False),
    ],
)
def test_communication_is_known_by_its_name(name: str, communicates: bool) -> None:
    assert kernel(name, 0, 0, 1).communicates == communicates


def test_kernels_are_those_of_the_gpu_where_there_is_one() -> None:
    host = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0.0, "dur": 5.0}
    note = host | {"cat": "user_annotation", "name": "gloo:all_reduce", "tid": 2}
    gpu = host | {"cat": "kernel", "name": "push", "pid": 0, "tid": 7, "ts": 2.0}
    others = [{"ph": "M", "name": "process_name"}, host | {"dur": 0}, host | {"name": "tw_compile::start"}]
    assert kernels([host, note, gpu, *others]) == [TracedKernel("push", (0, 7), 2.0, 7.0)]
    assert [one.name for one in kernels([host, note, *others])] == ["aten::mm", "gloo:all_reduce"]


def test_profile_writes_a_trace_that_can_be_read(tmp_path: Path) -> None:
    file = trace_of_rank(str(tmp_path / "trace.json"), 3)
    assert file.name == "trace.rank3.json" and trace_of_rank("/a/b", 0) == Path("/a/b.rank0.json")
    x = torch.randn(64, 64)
    found = profile(lambda: x @ x, file, meet=lambda: None)
    assert found.share is None and found.span_us > 0
    assert "aten::mm" in {one.name for one in kernels(json.loads(file.read_text())["traceEvents"])}


def test_profile_drops_the_first_run_and_has_the_ranks_meet_before_the_second(tmp_path: Path) -> None:
    file, x = tmp_path / "trace.json", torch.randn(4)
    runs: list[str] = []

    def step() -> None:
        x.add(x) if runs else x.mul(x)
        runs.append("step")

    profile(step, file, meet=lambda: runs.append("meet"))
    assert runs == ["step", "meet", "step"]
    assert [one.name for one in kernels(json.loads(file.read_text())["traceEvents"])] == ["aten::add"]


def test_what_ran_on_the_host_before_the_forward_is_not_of_it() -> None:
    met = {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "pid": 1, "tid": 2, "ts": 1.0, "dur": 50.0}
    ran = met | {"ts": 60.0, "dur": 2.0}
    assert kernels([met, ran], since=55.0) == [TracedKernel("gloo:all_reduce", (1, 2), 60.0, 62.0)]
    # Clocks of GPUs are others, and nothing of the meeting is there.
    gpu = met | {"cat": "kernel"}
    assert len(kernels([met, ran, gpu], since=55.0)) == 1
