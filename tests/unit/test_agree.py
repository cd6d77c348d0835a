"""What ranks agree on through the store and by a collective."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tw_compile.agree import agreed, common_obstacle, first_obstacle, first_value
from tw_compile.testing import fake_process_group


def test_the_first_rank_says_what_all_take() -> None:
    store = dist.HashStore()
    assert [first_value(own, store, "key") for own in ("first", "second")] == ["first", "first"]
    assert first_value("second", store, "other key") == "second"


def test_a_group_agrees_once_on_each_key_and_another_group_anew() -> None:
    for group in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert agreed("key", lambda group=group: ("first", group)) == ("first", group)
        assert agreed("key", lambda: pytest.fail("known already")) == ("first", group)
        assert agreed("other key", lambda: "other") == "other"
        dist.destroy_process_group()


def test_where_nobody_is_there_to_agree_with_each_value_is_the_ranks_own() -> None:
    assert [agreed("key", lambda own=own: own) for own in (1, 2)] == [1, 2]
    with fake_process_group(2):
        assert [agreed("key", lambda own=own: own) for own in (1, 2)] == [1, 2]


def test_what_is_said_about_a_difference_is_the_callers() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    said: list[Any] = []

    def agree(own: str, store: dist.Store, key: str) -> str:
        said.append((own, key))
        return "common"

    assert [agreed("key", lambda: "own", agree) for _ in range(2)] == ["common", "common"]
    assert said == [("own", "key")]
    dist.destroy_process_group()


@pytest.mark.parametrize(("obstacles", "first"), [((None, None), None), ((None, "a", "b"), "rank 1: a")])
def test_the_first_obstacle_counts(obstacles: tuple[str | None, ...], first: str | None) -> None:
    assert first_obstacle(obstacles) == first


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(None, 1), (None, 1)], None),
        ([(None, 1), ("broken", 1)], "rank 1: broken"),
        ([(None, 1), (None, 2)], "ranks disagree: rank 0 has 1, rank 1 has 2"),
    ],
)
def test_all_ranks_hear_of_obstacles_and_of_facts_that_differ(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], expected: str | None
) -> None:
    def gather(into: list[Any], own: Any, group: Any) -> None:
        into[:] = answers

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    assert common_obstacle(SimpleNamespace(size=lambda: 2), None, 1) == expected
