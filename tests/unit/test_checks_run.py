"""Which GPU checks there are, which ones run, and how the ranks' reports become one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu.checks import run
from gpu.checks.run import CHECKS, OF_EVERY_ALGORITHM, ON_REQUEST, joined, selected
from gpu.checks.transports import ALGORITHMS, NEED_WHOLE_RESIDUALS


@pytest.mark.parametrize("transport", ALGORITHMS)
def test_every_algorithm_gets_every_check(transport: str) -> None:
    own = {name.removeprefix(f"{transport}_") for name in CHECKS if name.startswith(transport)}
    assert {check.__name__ for check in OF_EVERY_ALGORITHM} <= own
    assert {"accuracy_2880", "accuracy_4096", "form_first_norm", "form_fp8_replicated"} <= own
    assert ("form_sharded" in own) is (transport not in NEED_WHOLE_RESIDUALS)
    assert ("accuracy_18432" in own) is not transport.endswith(("_clusters", "_pairs")), "what clusters can't serve"


def test_by_default_only_checks_of_seconds_run() -> None:
    assert selected("") == list(CHECKS)
    assert not set(CHECKS) & set(ON_REQUEST)


def test_only_chooses_by_a_part_of_the_name_and_what_is_on_request_by_its_begin() -> None:
    assert selected("stream_in_slot_random") == ["stream_in_slot_random_skew"]
    shared = [f"{kind}_shot_{way}" for kind in ("one", "two") for way in ("clusters", "pairs")]
    ours = ["one_shot", "two_shot", *shared]
    assert selected("million_launches_push") == [f"million_launches_push_{kind}" for kind in ours]
    assert len(selected("sanitizer_small")) == len(ALGORITHMS)
    assert all(name in CHECKS for name in selected("push_one_shot"))
    both = selected("stream_in_slot_random,nccl_form_fp8,million_launches_stream_in")
    assert both == ["stream_in_slot_random_skew", "nccl_form_fp8", "million_launches_stream_in_slot"]
    assert selected("nccl_form_fp8, ,") == ["nccl_form_fp8"], "an empty part asks for nothing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nonsense"], "--only: no check has 'nonsense' in its name\n"),
        (
            ["--only", "nccl_form", "--gpus", "1"],
            "no check has 'nccl_form' in its name and works where ranks share GPUs",
        ),
        (["--gpus", "0"], "--gpus: expected 1 to 2, the world size, got 0"),
        (["--gpus", "3"], "--gpus: expected 1 to 2, the world size, got 3"),
    ],
)
def test_bad_arguments_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("sys.argv", ["checks", "--world-size", "2", *arguments])
    with pytest.raises(SystemExit) as stop:
        run.main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_where_ranks_share_gpus_only_what_needs_nccl_is_left_out() -> None:
    left_out = set(CHECKS) - set(selected("", shared_gpus=True))
    assert left_out == {name for name in CHECKS if "nccl" in name}
    assert "capture_without_room_uses_nccl" in left_out and "nccl_form_fp8" in left_out
    assert selected("million", shared_gpus=True) == selected("million")


@pytest.mark.parametrize(
    ("gpus", "device", "backend", "calls", "shares"), [(2, 1, "nccl", 10_000, []), (1, 0, "gloo", 100, ["shared"])]
)
def test_ranks_without_a_gpu_of_their_own_share_by_gloo(
    monkeypatch: pytest.MonkeyPatch,
    two_ranks: None,
    tmp_path: Path,
    gpus: int,
    device: int,
    backend: str,
    calls: int,
    shares: list[str],
) -> None:
    devices: list[torch.device] = []
    groups: list[str] = []
    shared: list[str] = []
    monkeypatch.setattr("torch.cuda.set_device", devices.append)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda name, **options: groups.append(name))
    monkeypatch.setattr(run, "share_gpus", lambda: shared.append("shared"))
    ctx = run.join(1, 2, gpus, str(tmp_path))
    assert (ctx.rank, ctx.world_size, ctx.device) == (1, 2, torch.device("cuda", device))
    assert devices == [ctx.device] and groups == [backend] and shared == shares
    assert ctx.calls(10_000) == calls


def test_ranks_join_to_the_slowest_and_to_the_lowest_counts() -> None:
    common = {"check": "a", "outcome": "ok", "launches": 3}
    lines = [common | {"seconds": 1.0, "verified": 3}, common | {"seconds": 2.0, "verified": 2}]
    assert joined(lines) == {"outcome": "ok", "seconds": 2.0, "launches": 3, "verified": 2}


def test_a_rank_that_fails_or_dies_is_named() -> None:
    lines = [{"outcome": "ok", "seconds": 1.0, "launches": 3}, {"outcome": "did not start"}]
    assert joined(lines) == {"outcome": "rank 1: did not start", "seconds": 1.0}
