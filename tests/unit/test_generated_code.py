"""What Inductor makes of the operators: order, and how long buffers live. Code for an H100, generated without one."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tw_compile.testing import calls_of, generated_code

START, WAIT = "all_reduce_rms_norm_start", "all_reduce_rms_norm_wait_"
_WAIT_ARGS = re.compile(WAIT + r"\.default\((\w+), (\w+), \[([^]]*)\]")
_START_CALL = re.compile(r"(\w+) = torch\.ops\.tw_compile\." + START + r"\.default\((.*)\)")


class Independent(nn.Module):
    """Two sites in a chain and two that depend on nothing before them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(4))

    def reduced(self, index: int, x: torch.Tensor) -> torch.Tensor:
        partial = self.linears[index](x)
        dist.all_reduce(partial)
        return partial

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, y: torch.Tensor, z: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        early = self.reduced(2, y)
        stream = stream + self.reduced(0, x)
        hidden = self.norms[0](stream)
        aside = self.norms[3](self.reduced(3, z)).relu()
        stream = self.reduced(1, hidden) + stream
        return self.norms[1](stream), self.norms[2](early) * 2, aside, stream


@pytest.fixture(scope="module", params=["static", "dynamic"])
def code(request: pytest.FixtureRequest) -> str:
    module = Independent().bfloat16()
    x = torch.empty(5, 64, dtype=torch.bfloat16)
    tensors = tuple(torch.empty_like(x) for _ in range(4))
    return generated_code(module, tensors, device="cuda", world_size=4, dynamic=request.param == "dynamic")


def test_every_site_starts_and_waits_in_turn(code: str) -> None:
    starts, waits = calls_of(code, START), calls_of(code, WAIT)
    assert len(starts) == len(waits) == 4
    merged = sorted([(line, "start") for line in starts] + [(line, "wait") for line in waits])
    assert [kind for _, kind in merged] == ["start", "wait"] * 4


def test_outputs_are_read_after_their_wait(code: str) -> None:
    lines = code.splitlines()
    for number, (_, outputs, _) in _waits(code).items():
        for output in outputs:
            reads = [
                line
                for line, text in enumerate(lines)
                if re.search(rf"\b{output}\b", text) and not _bookkeeping(text, output)
            ]
            assert min(reads) == number, lines[min(reads)]


def test_kept_buffers_live_until_the_wait(code: str) -> None:
    lines = code.splitlines()
    starts = calls_of(code, START)
    for number, (_, _, keep) in _waits(code).items():
        begin = max(line for line in starts if line < number)
        assert keep
        for text in lines[begin + 1 : number]:
            for buffer in keep:
                assert not re.search(rf"\b(del|=) {buffer}\b", text), text


def test_kept_buffers_are_the_inputs_of_the_start(code: str) -> None:
    lines = code.splitlines()
    for number, (_, _, keep) in _waits(code).items():
        begin = max(line for line in calls_of(code, START) if line < number)
        call = _START_CALL.search(lines[begin])
        assert call is not None
        for buffer in keep:
            assert re.search(rf"\b{buffer}\b", call.group(2)), (buffer, call.group(2))


def _waits(code: str) -> dict[int, tuple[int, tuple[str, str], list[str]]]:
    found = {}
    for number, line in enumerate(code.splitlines()):
        match = _WAIT_ARGS.search(line)
        if match is not None:
            keep = re.findall(r"\b(?:buf|arg)\w+", match.group(3))
            found[number] = (number, (match.group(1), match.group(2)), keep)
    assert found
    return found


def _bookkeeping(text: str, output: str) -> bool:
    """Lines that name a buffer without reading its values."""
    text = text.strip()
    return text.startswith(
        (f"{output} = ", "assert_size_stride", "assert_alignment", "assert_tensor_metadata", "#", "del ")
    )
