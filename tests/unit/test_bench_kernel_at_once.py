"""``bench kernel --at-once``: calls that are on their way at a time, each on a stream and a slot of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tw_compile.benchmark import worker
from tw_compile.benchmark.host_copies import HostCopies
from tw_compile.benchmark.ours import Operator
from tw_compile.benchmark.peers import UnfusedAllReduce
from tw_compile.benchmark.spec import BenchSpec, MessageSize, input_sets
from tw_compile.benchmark.variants import variants
from tw_compile.cli.app import app
from tw_compile.harness import measure

SPEC = BenchSpec(2, "cuda", "bfloat16", (4096,), (512,), at_once=2)
SIZE = MessageSize(512, 4096, "bfloat16")


def operator(label: str, sms: int | None = None) -> Operator:
    return Operator(next(one for one in variants("cuda") if one.label == label), sms)


@pytest.mark.parametrize(("nbytes", "sets"), [(1024, (1, 2, 3)), (2**24, (3, 4, 3)), (2**22, (9, 10, 9))])
def test_each_call_on_its_way_has_inputs_of_its_own(nbytes: int, sets: tuple[int, int, int]) -> None:
    found = tuple(input_sets(nbytes, 60 * 2**20, 20, 2**20, at_once) for at_once in (1, 2, 3))
    assert found == sets


def test_only_what_has_slots_and_fits_beside_itself_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    said = {
        "host": worker._together(SPEC, operator("tw-host-two-shot"), SIZE),
        "copies": worker._together(SPEC, HostCopies(), SIZE),
        "push": worker._together(SPEC, operator("tw-push-two-shot"), SIZE),
        "push on 64": worker._together(SPEC, operator("tw-push-two-shot", 64), SIZE),
        "by the table": worker._together(SPEC, operator("tw-p2p"), SIZE),
        "nccl": worker._together(SPEC, operator("tw-nccl"), SIZE),
    }
    assert [name for name, why in said.items() if why is None] == ["host", "copies", "push on 64"]
    assert said["push"] == "2 calls at a time need 128 SMs each, of 132: see --sms"
    assert said["by the table"] == "2 calls at a time need unknown SMs each, of 132: see --sms"
    assert said["nccl"] == "2 calls at a time were asked for, and its calls follow each other"
    assert not UnfusedAllReduce.several
    one = BenchSpec(2, "cuda", "bfloat16", (4096,), (512,))
    assert worker._together(one, operator("tw-nccl"), SIZE) is None


def test_calls_of_a_contender_take_its_lanes_in_turn() -> None:
    class Seen:
        lane = 7

        def prepare(self, ranks: Any, problem: str) -> tuple[int, str]:
            return self.lane, problem

    seen: Any = Seen()
    problems: Any = list("abcd")
    assert worker._prepared(SPEC, None, seen, problems) == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]  # type: ignore[arg-type]


class Stream:
    """A stream that is told of, and waited for."""

    current: Stream

    def __init__(self, name: str = "") -> None:
        self.name = name or f"side {len(order)}"
        order.append(self.name)

    def wait_stream(self, other: Stream) -> None:
        order.append(f"{self.name} waits for {other.name}")


order: list[str] = []


@pytest.mark.parametrize("at_once", [1, 2])
def test_calls_are_captured_on_as_many_streams(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    order.clear()
    main = Stream("main")

    @contextlib.contextmanager
    def graph(made: object, capture_error_mode: str) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        Stream.current = stream
        yield
        Stream.current = main

    Stream.current = main
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "CUDAGraph", object)
    monkeypatch.setattr(cuda, "graph", graph)
    monkeypatch.setattr(cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda, "Stream", Stream)
    monkeypatch.setattr(cuda, "stream", on)
    monkeypatch.setattr(cuda, "current_stream", lambda: Stream.current)
    calls = [lambda name=name: order.append(f"{name} on {Stream.current.name}") for name in "ab"]
    measure.capture(calls, 4, at_once)
    if at_once == 1:
        assert order == ["main", "a on main", "b on main", "a on main", "b on main"]
        return
    first, second = order[1:3]
    assert order[3:] == [
        f"{first} waits for main", f"{second} waits for main",
        f"a on {first}", f"b on {second}", f"a on {first}", f"b on {second}",
        f"main waits for {first}", f"main waits for {second}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--at-once", "0"], "--at-once: expected 1 to 4, got 0"),
        (["--at-once", "5"], "--at-once: expected 1 to 4, got 5"),
        (["--at-once", "2", "--device", "cpu"], "--at-once: expected 1 with --device cpu"),
        (["--at-once", "2", "--gated"], "--at-once: expected 1 with --device cpu, --gated and --table"),
        (["--at-once", "2", "--table", "kernels.toml"], "--at-once: expected 1 with --device cpu, --gated and --table"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "kernel", "--tp", "2", *arguments])
    assert result.exit_code == 2 and said in " ".join(result.output.split())
