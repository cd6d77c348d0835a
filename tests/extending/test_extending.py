"""Transports, algorithms and epilogues are added by new files and an entry: no file of the project knows the toys here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy_algorithm
import toy_epilogue
import toy_store
from emulator.kernels import ALGORITHMS as SOURCES
from emulator.kernels import Form, MultimemMachine, PushMachine, StreamMachine
from on_ranks import FP32, HIDDEN, RANKS, TOKENS, block, calls_of_the_toy, layer_norm, message

from tw_compile import Config
from tw_compile.benchmark.variants import variants
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.algorithms.multimem import multimem
from tw_compile.kernels.algorithms.push.push import Push
from tw_compile.kernels.algorithms.stream.stream import Shape
from tw_compile.kernels.algorithms.two_shot.two_shot import TwoShot
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.transport import get_transport, registered
from tw_compile.kernels.collective.transports import TRANSPORTS, GroupFacts, choose_transport, names_for
from tw_compile.kernels.epilogues import EPILOGUES
from tw_compile.kernels.transports.selection import Selector, Step, steps_of, table_text
from tw_compile.testing import GlooRanks, compare_on_gloo, fake_process_group

HEADERS = Path(toy_epilogue.__file__).parents[2] / "kernels" / "runtime"


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    """Processes of this file's own: what is registered there stays."""
    with GlooRanks(RANKS, timeout=300) as processes:
        yield processes


# --- a transport -----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_compiled_model_runs_on_the_transport(ranks: GlooRanks) -> None:
    options = {"tw_compile.strict": True, "tw_compile.transport": toy_store.ENTRY.name}
    comparison = compare_on_gloo(block, message, calls=2, ranks=ranks, options=options)
    assert comparison.counts["fused"] == 1 and comparison.passed, comparison
    assert all(count >= 2 for count in ranks.run(calls_of_the_toy))


def test_names_choice_and_benchmark_come_from_the_entry() -> None:
    name = toy_store.ENTRY.name
    with pytest.raises(ValueError, match="toy_store"):
        Config(transport=name)
    with registered(toy_store.ENTRY):
        assert Config(transport=name).transport == name
        assert name in names_for("cpu") and name not in names_for("cuda")
        cpu, cuda = (GroupFacts(device, RANKS, 1) for device in ("cpu", "cuda"))
        assert choose_transport(cpu, HIDDEN, FP32.itemsize, name).name == name
        assert choose_transport(cpu, HIDDEN, FP32.itemsize).name == "gloo", "auto does not ask it"
        assert choose_transport(cpu, 5000, FP32.itemsize, name).limited_by == "hidden_size"
        assert choose_transport(cuda, HIDDEN, FP32.itemsize, name).limited_by == "device"
        assert [variant.label for variant in variants("cpu")] == ["tw-gloo", "tw-toy-store"]
        assert isinstance(get_transport(name), toy_store.ToyStore)
        with pytest.raises(ValueError, match="transport: expected a name that is not taken, got 'toy_store'"):
            TRANSPORTS.register(toy_store.ENTRY)
    with pytest.raises(ValueError, match="transport: expected one of gloo, host, multimem, nccl, p2p, got 'toy_store'"):
        get_transport(name)


# --- an algorithm ----------------------------------------------------------------------------------------------------


def of(tokens: int) -> Any:
    """A message of as many bytes as tokens."""
    x = SimpleNamespace(shape=(tokens, HIDDEN), nbytes=tokens)
    norm = SimpleNamespace(scale_columns=0)
    return SimpleNamespace(x=x, norm=norm, residual_out="sharded", overlap_sms=0, wire="exact", feed_from=0)


def test_a_table_takes_the_algorithm_and_what_is_to_serve_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    served: dict[type, str | None] = {}
    monkeypatch.setattr(Push, "obstacle", lambda self, request, state: served.get(Push))
    text = table_text("GPU", [Step(2, 100, "toy_algorithm", 3)], "")
    with pytest.raises(ValueError, match=r"steps\[0\]: algorithm: expected one of"):
        steps_of(text, "t")
    with ALGORITHMS.registered(toy_algorithm.ENTRY):
        _, steps = steps_of(text, "t")
        with pytest.raises(ValueError, match="sms: max_sms: expected 1 to 4, got 5"):
            steps_of(text.replace("sms = 3", "sms = 5"), "t")
        state: Any = SimpleNamespace(world_size=2, rank=0)
        selector = Selector(steps)
        toy = selector.choose(of(toy_algorithm.MOST_TOKENS), state)
        assert isinstance(toy, toy_algorithm.ToyAlgorithm) and toy.sms(100, 2) == 3
        assert isinstance(selector.choose(of(toy_algorithm.MOST_TOKENS + 1), state), Push)
        served[Push] = "no"
        assert isinstance(selector.choose(of(toy_algorithm.MOST_TOKENS + 1), state), TwoShot)
        (line,) = [variant for variant in variants("cuda") if variant.label == "tw-toy-algorithm"]
        assert (line.algorithm, line.sms, line.most_sms) == ("toy_algorithm", 2, 4)


# --- an epilogue -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("residual_out", ["replicated", "sharded"])
def test_layer_norm_is_right_on_two_ranks(ranks: GlooRanks, residual_out: str, multiplies: bool) -> None:
    first, second = ranks.run(layer_norm, residual_out, multiplies)
    assert torch.equal(first[0], second[0]), "ranks hold other bits"
    assert max(first[2], second[2]) < 1e-5


def test_the_epilogue_is_part_of_a_calls_form_and_an_unknown_one_is_refused() -> None:
    arguments = ops.Arguments(None, None, None, 1e-5, 0.0, None, FP32, FP32, False, "none", "0", "gloo", 0)
    x = torch.randn(TOKENS, HIDDEN)
    forms = {ops.form_of_call("x", (x,), arguments._replace(epilogue=name)) for name in ("rms_norm", "toy_layer_norm")}
    assert len(forms) == 2
    with (
        fake_process_group(RANKS),
        pytest.raises(ValueError, match="epilogue: expected one of layer_norm, rms_norm, got 'softmax'"),
    ):
        ops.operators_of("softmax")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The project's CUDA sources and the toy's header side by side, as the compiler is given them."""
    for file in (*SOURCES.glob("*/*.cu"), *HEADERS.glob("*.cuh"), toy_epilogue.ENTRY.header):
        assert file is not None
        shutil.copy(file, tmp_path)
    return tmp_path


FORM = Form(FP32, residual_dtype=FP32, weight_dtype=FP32, bias=True, epilogue=toy_epilogue.ENTRY.name)


def run_push(sources: Path, seed: int) -> None:
    machine = PushMachine(2, 136, FORM, one_shot=False, most_tokens=5, seed=seed, threads=64, sources=sources)
    machine.call(5, 2)
    machine.run()


def run_stream(sources: Path, seed: int) -> None:
    shape = Shape(64, 2, 2)
    options: dict[str, Any] = {"staged": True, "private_output": True, "sources": sources}
    machine = StreamMachine(2, 136, FORM, most_tokens=5, seed=seed, shape=shape, **options)
    machine.call(5, 2)
    machine.run()


def run_multimem(sources: Path, seed: int) -> None:
    options: dict[str, Any] = {"staged": True, "private_output": True, "sources": sources}
    machine = MultimemMachine(2, 144, FORM, most_tokens=5, seed=seed, shape=multimem.Shape(64, 2, 2), **options)
    machine.call(5, 2)
    machine.run()


@pytest.mark.full
@pytest.mark.parametrize("run", [run_push, run_stream, run_multimem])
def test_cuda_kernels_take_the_row_code_of_the_epilogue(sources: Path, run: Any) -> None:
    with EPILOGUES.registered(toy_epilogue.ENTRY):
        run(sources, 1)
        broken = Path(shutil.copytree(sources, sources / "broken"))
        text = (broken / "toy_layer_norm_row.cuh").read_text()
        assert "h[i] - factor.mean" in text
        (broken / "toy_layer_norm_row.cuh").write_text(text.replace("h[i] - factor.mean", "h[i]"))
        with pytest.raises(AssertionError):
            run(broken, 1)
