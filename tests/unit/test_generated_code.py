"""What Inductor makes of the operators: order, and how long buffers live. Code for an H100, generated without one."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tw_compile import Config, TWCompilePass, compat
from tw_compile.models.config import load_config
from tw_compile.models.decoder import build_decoder
from tw_compile.testing import calls_of, fake_cuda, fake_process_group, generated_code

START, WAIT = "all_reduce_rms_norm_start", "all_reduce_rms_norm_wait_"
MM_START = f"mm_{START}"  # what looks for START finds both
_WAIT_ARGS = re.compile(WAIT + r"\.default\.direct\((\w+), (\w+), \[([^]]*)\]")
_START_CALL = re.compile(r"(\w+) = torch\.ops\.tw_compile\.(?:mm_)?" + START + r"\.default\.direct\((.*)\)")


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


def independent(dynamic: bool = False, absorb_mm: str = "auto") -> str:
    x = torch.empty(5, 64, dtype=torch.bfloat16)
    tensors = tuple(torch.empty_like(x) for _ in range(4))
    config = Config(strict=True, absorb_mm=absorb_mm)
    return generated_code(
        Independent().bfloat16(), tensors, device="cuda", world_size=4, dynamic=dynamic, config=config
    )


def llama(dynamic: bool = False) -> str:
    """One layer; of a rank's rows attention has 128 elements, the MLP 352, the residual stream 512."""
    with fake_process_group(4), fake_cuda():
        decoder = build_decoder(load_config("tiny-llama"), device="cuda", dtype=torch.bfloat16, num_layers=1)
        ids = torch.zeros(1, 24, dtype=torch.long, device="cuda")
        if dynamic:
            torch._dynamo.mark_dynamic(ids, 1)
        return compat.inductor_code(decoder, (ids,), TWCompilePass(Config(strict=True)), "cuda", None, {})


FORMS: dict[str, Callable[[], str]] = {
    "static": independent,
    "dynamic": partial(independent, dynamic=True),
    "gemms stay": partial(independent, absorb_mm="never"),
    "llama": llama,
    "dynamic llama": partial(llama, dynamic=True),
}


@cache
def code_of(form: str) -> str:
    return FORMS[form]()


@pytest.fixture(params=FORMS)
def code(request: pytest.FixtureRequest) -> str:
    return code_of(request.param)


@pytest.mark.full
def test_every_site_starts_and_waits_in_turn(code: str) -> None:
    starts, waits = calls_of(code, START), calls_of(code, WAIT)
    assert len(starts) == len(waits) >= 2
    merged = sorted([(line, "start") for line in starts] + [(line, "wait") for line in waits])
    assert [kind for _, kind in merged] == ["start", "wait"] * len(starts)


@pytest.mark.few(2)
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


@pytest.mark.parametrize("form", ["static", "dynamic"])
def test_no_gemm_stays_before_a_sum(form: str) -> None:
    assert len(calls_of(code_of(form), MM_START)) == 4
    assert _gemms(code_of(form)) == []
    assert len(_gemms(code_of("gemms stay"))) == len(calls_of(code_of("gemms stay"), START)) == 4
    assert calls_of(code_of("gemms stay"), MM_START) == []


@pytest.mark.parametrize("form", ["llama", "dynamic llama"])
def test_gemms_of_a_llama_that_are_summed_are_absorbed(form: str) -> None:
    """What stays: q, k, v, gate and up. The first of three sums is of embeddings, which transformers shards from 5.23 on."""
    code = code_of(form)
    factor = r"reinterpret_tensor\(arg\w+, \((\d+), (\d+)\)"
    assert [re.findall(factor, line)[0] for line in _gemms(code)] == [
        ("512", width) for width in ("128", "64", "64", "352", "352")
    ]
    absorbed = calls_of(code, MM_START)
    assert calls_of(code, START)[-2:] == absorbed
    summed = [re.findall(factor, code.splitlines()[line])[0] for line in absorbed]
    assert summed == [("128", "512"), ("352", "512")]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "gemms stay"])
def test_factors_are_kept_until_the_wait(form: str) -> None:
    code = code_of(form)
    lines = code.splitlines()
    waits = _waits(code)
    for begin in calls_of(code, MM_START):
        call = _START_CALL.search(lines[begin])
        wait = _WAIT_ARGS.search(lines[min(number for number in waits if number > begin)])
        assert call is not None and wait is not None
        assert re.findall(r"\b(?:buf|arg)\w+", call.group(2))[:2] == re.findall(r"\b(?:buf|arg)\w+", wait.group(3))[:2]


def _gemms(code: str) -> list[str]:
    return [line for line in code.splitlines() if "extern_kernels.mm(" in line]


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


@pytest.mark.few(1)
@pytest.mark.parametrize("told", [True, False])
def test_what_operands_of_our_operators_are_computed_from_is_not_written_out(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its log Inductor does that where it has not been told how to lower one, in a graph of many layers for minutes."""
    from torch._inductor import exc, lowering

    written: list[str] = []
    for known in [op for op in lowering.lowerings if getattr(op, "namespace", None) == "tw_compile"]:
        monkeypatch.delitem(lowering.lowerings, known)
    monkeypatch.setattr(exc.OperatorIssue, "operator_str", lambda target, *_: written.append(target.name()) or "")
    if not told:
        monkeypatch.setattr(compat, "lower_as_calls", lambda operators: None)
    with fake_process_group(2), fake_cuda():
        decoder = build_decoder(load_config("tiny-llama"), device="cuda", dtype=torch.bfloat16, num_layers=1)
        ids = torch.zeros(1, 64, dtype=torch.long, device="cuda")
        code = compat.inductor_code(decoder, (ids,), TWCompilePass(Config(split="32")), "cuda", None, {})
    assert calls_of(code, START) or calls_of(code, MM_START)
    ours = [name for name in written if name.startswith("tw_compile::")]
    # By 2.14 Inductor has stopped doing that by itself.
    assert ours == [] if told else ours or tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11)


@pytest.mark.parametrize("in_cpp", [False, True])
def test_only_python_code_calls_our_operators_without_the_dispatcher(in_cpp: bool) -> None:
    tensors = tuple(torch.empty(5, 64) for _ in range(4))
    code = generated_code(Independent(), tensors, options={"cpp_wrapper": in_cpp})
    for name in (START, WAIT):
        directly = code.count(f"tw_compile.{name}.default.direct(")
        assert name in code and directly == (0 if in_cpp else 4)
    assert "tw_compile.all_reduce_rms_norm_wait_.default(" not in code


def test_an_operator_that_inductor_lowered_by_itself_before_is_called_directly_too() -> None:
    from torch._inductor.lowering import make_fallback

    make_fallback(torch.ops.tw_compile.all_reduce_rms_norm_start.default, warn=False)
    code = generated_code(Independent(), tuple(torch.empty(5, 64) for _ in range(4)))
    assert code.count(f"tw_compile.{START}.default.direct(") == 4
