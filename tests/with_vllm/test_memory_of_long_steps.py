"""While vLLM profiles its memory, the longest step of each range runs, each way it may run later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tw_compile.hosts.vllm import step_graphs, steps, ways
from tw_compile.hosts.vllm.long_steps import is_cuttable

Called = list[tuple[str, list[Any]]]
pytestmark = pytest.mark.usefixtures("groups")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """The ranges that ran, and their arguments: tensors by their shapes."""
    found: Called = []

    def compile_execution_fn(
        code: str, parts: dict[str, Callable[..., Any]], names: Sequence[str], constants: Sequence[Any]
    ) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            shapes = [list(one.shape) if isinstance(one, torch.Tensor) else one for one in arguments]
            found.append((str(*parts), shapes))
            return (torch.zeros(1),)

        return run

    monkeypatch.setattr("vllm.compilation.codegen.compile_execution_fn", compile_execution_fn)
    monkeypatch.setattr(ways, "tried_ranges", [])
    monkeypatch.setattr(steps, "tried_ranges", ways.tried_ranges)
    monkeypatch.setattr(step_graphs, "of_models", [])
    monkeypatch.setattr(steps, "of_models", step_graphs.of_models)
    monkeypatch.setattr(steps, "profiles_memory", lambda: True)
    return found


def dispatched(
    ranges: dict[tuple[int, int], str], whole: dict[tuple[int, int], str], cuttable: bool = True
) -> Callable[..., Any]:
    """Runs steps whose arguments are positions [3, tokens], the number of tokens, and rows [tokens, 8]."""
    how = steps.Steps(1, ((0, 1), (2, 0)), cuttable)
    parts = {ends: {name: lambda: None} for ends, name in ranges.items()}
    return steps.dispatch(how, parts, lambda *_: "pieces", {ends: {name: lambda: None} for ends, name in whole.items()})


def arguments(tokens: int) -> list[Any]:
    return [torch.zeros(3, tokens), tokens, torch.zeros(tokens, 8)]


def shapes(tokens: int) -> list[Any]:
    return [[3, tokens], tokens, [tokens, 8]]


def test_whole_steps_of_a_lower_range_run_once_beside_the_longest_step(called: Called) -> None:
    call = dispatched({(513, 1535): "whole", (1536, 2048): "halves"}, {})
    call(*arguments(2048))
    assert called == [("whole", shapes(1535)), ("halves", shapes(2048))]
    called.clear()
    for tokens in (2048, 600):
        call(*arguments(tokens))
    assert called == [("halves", shapes(2048)), ("whole", shapes(600))]


def test_ranges_that_are_compiled_both_ways_run_both_ways(called: Called) -> None:
    call = dispatched({(513, 1535): "halves", (1536, 2048): "more halves"}, {(513, 1535): "whole"})
    call(*arguments(2048))
    assert called == [("halves", shapes(1535)), ("whole", shapes(1535)), ("more halves", shapes(2048))]


def test_what_follows_and_ranges_of_longer_steps_do_not_run(called: Called) -> None:
    call = dispatched({(513, 1535): "halves", (1536, 2048): "more halves"}, {(513, 1535): "whole"})
    call(*arguments(1000))
    assert called == [("halves", shapes(1000)), ("whole", shapes(1000))]


def test_a_step_that_serves_prepares_nothing(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    call = dispatched({(513, 1535): "whole", (1536, 2048): "halves"}, {})
    monkeypatch.setattr(steps, "profiles_memory", lambda: False)
    call(*arguments(2048))
    assert called == [("halves", shapes(2048))] and call(*arguments(512)) == "pieces"


def test_of_steps_that_need_all_their_tokens_only_the_other_way_runs(called: Called) -> None:
    """Adapters sort the tokens of a whole step, and data-parallel ranks tell each other how many they have."""
    both = {(1536, 2048): "whole"}
    call = dispatched({(513, 1535): "short", (1536, 2048): "halves"}, both, cuttable=False)
    call(*arguments(2048))
    assert called == [("halves", shapes(2048)), ("whole", shapes(2048))]


@pytest.mark.parametrize(("lora", "data_parallel", "expected"), [(None, 1, True), (None, 2, False), ("some", 1, False)])
def test_which_steps_need_all_their_tokens(lora: str | None, data_parallel: int, expected: bool) -> None:
    parallel = SimpleNamespace(data_parallel_size=data_parallel)
    assert is_cuttable(SimpleNamespace(lora_config=lora, parallel_config=parallel)) is expected
