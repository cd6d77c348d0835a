"""Ranges of vLLM's steps are planned with the wires that their graphs get."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from test_vllm_plan import planned

from tw_compile.hosts.vllm import plan
from tw_compile.kernels.collective.planned_wires import planned_wires
from tw_compile.planning import Plan, Wires, load_profile

BIG = 2048 * 2 * 4096
"""Bytes of a message of 2048 tokens of Llama-3.1-8B."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, Wires]:
    """The wires that a number of tokens was planned with last."""
    by_tokens: dict[int, Wires] = {}
    original = plan.plan_layer

    def noted(profile: Any, layer: Any, tokens: int, **options: Any) -> Plan:
        by_tokens[tokens] = options["wires"]
        return original(profile, layer, tokens, **options)

    monkeypatch.setattr(plan, "plan_layer", noted)
    return by_tokens


@pytest.mark.parametrize(
    ("options", "wires"),
    [
        ({"wire": "int8"}, planned_wires(4096, "int8", "int8")),
        ({"wire": "int6", "wire_sites": "mlp"}, planned_wires(4096, mlp="int6")),
        ({"wire": "auto"}, Wires()),  # nothing says what it costs this checkpoint
    ],
)
def test_a_range_has_the_wire_of_its_smallest_message(
    options: dict[str, str], wires: Wires, seen: dict[int, Wires]
) -> None:
    ranges, _ = planned("llama-3.1-8b", 2, wire_min_bytes=BIG, **options)
    assert 2047 in {last for _, last in ranges}
    assert {each for tokens, each in seen.items() if tokens < 2048} == {Wires()}
    assert {each for tokens, each in seen.items() if tokens >= 2048} == {wires}


def test_over_peer_memory_ranges_have_codes_up_to_where_halves_are_exact(seen: dict[int, Wires]) -> None:
    ranges, _ = planned("llama-3.1-8b", 2, wire="int8")
    assert 1535 in {last for _, last in ranges}
    assert {each for tokens, each in seen.items() if tokens < 1536} == {planned_wires(4096, "int8", "int8")}
    assert {each for tokens, each in seen.items() if tokens >= 1536} == {Wires()}


def test_through_host_memory_ranges_are_planned_with_the_bytes_that_travel(
    seen: dict[int, Wires], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "gates", functools.partial(plan.gates, peer_access=False))
    planned("llama-3.1-8b", 2, wire="int8")
    assert set(seen.values()) == {planned_wires(4096, "int8", "int8")}  # 513 tokens have more than 1 MiB


def test_a_profile_without_rates_of_a_kernel_with_wires_has_no_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import test_vllm_plan

    monkeypatch.setattr(test_vllm_plan, "H200", load_profile("H100"))
    assert "split auto: none" in planned("llama-3.1-8b", 2, wire="int8", wire_min_bytes=0)[1]
    assert "split auto: steps of" in planned("llama-3.1-8b", 2)[1]
