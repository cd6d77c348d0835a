"""Which GPU checks there are, which ones run, and how the ranks' reports become one."""

from __future__ import annotations

import pytest

from tw_compile.testing import gpu_checks
from tw_compile.testing.gpu_checks import CHECKS, OF_EVERY_ALGORITHM, ON_REQUEST, joined, selected
from tw_compile.testing.gpu_transports import ALGORITHMS


@pytest.mark.parametrize("transport", ALGORITHMS)
def test_every_algorithm_gets_every_check(transport: str) -> None:
    own = {name.removeprefix(f"{transport}_") for name in CHECKS if name.startswith(transport)}
    assert {check.__name__ for check in OF_EVERY_ALGORITHM} <= own
    assert {"accuracy_2880", "accuracy_4096", "form_first_norm", "form_fp8_replicated"} <= own
    assert ("form_sharded" in own) is (transport != "push_one_shot")


def test_by_default_only_checks_of_seconds_run() -> None:
    assert selected("") == list(CHECKS)
    assert not set(CHECKS) & set(ON_REQUEST)


def test_only_chooses_by_a_part_of_the_name_and_what_is_on_request_by_its_begin() -> None:
    assert selected("stream_in_slot_random") == ["stream_in_slot_random_skew"]
    assert selected("million_launches_push") == ["million_launches_push_one_shot", "million_launches_push_two_shot"]
    assert len(selected("sanitizer_small")) == len(ALGORITHMS)
    assert all(name in CHECKS for name in selected("push_one_shot"))


def test_an_unknown_check_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_checks", "--world-size", "2", "--only", "nonsense"])
    with pytest.raises(SystemExit) as stop:
        gpu_checks.main()
    assert stop.value.code == 2


def test_ranks_join_to_the_slowest_and_to_the_lowest_counts() -> None:
    common = {"check": "a", "outcome": "ok", "launches": 3}
    lines = [common | {"seconds": 1.0, "verified": 3}, common | {"seconds": 2.0, "verified": 2}]
    assert joined(lines) == {"outcome": "ok", "seconds": 2.0, "launches": 3, "verified": 2}


def test_a_rank_that_fails_or_dies_is_named() -> None:
    lines = [{"outcome": "ok", "seconds": 1.0, "launches": 3}, {"outcome": "did not start"}]
    assert joined(lines) == {"outcome": "rank 1: did not start", "seconds": 1.0}
