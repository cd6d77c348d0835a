"""Links without native atomics: what was tried is kept and read, and only the kernels of the chosen route run over them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tw_compile import peer_routes
from tw_compile.benchmark import ours
from tw_compile.benchmark.spec import MessageSize
from tw_compile.benchmark.variants import variants
from tw_compile.harness.requests import RankError
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.collective import peer_access
from tw_compile.kernels.collective.spec import NormSpec, Request
from tw_compile.kernels.collective.transport import get_transport
from tw_compile.kernels.collective.transports import NO_PEER_ATOMICS
from tw_compile.kernels.transports import p2p
from tw_compile.kernels.transports.selection import Insist, Selector, Step, default_steps
from tw_compile.peer_routes import HOST, PULL, PUSH, ROUTES, Tried, TriedOn
from tw_compile.tuning import candidates
from tw_compile.tuning import peer_routes as trying

ON = TriedOn("NVIDIA L40S", "580.1", "2.11.0", "abc")
TRIED = Tried(ON, 2, PUSH, {HOST: {"64": 9.0, "1024": 30.0}, PUSH: {"64": 5.0, "1024": 31.0}}, {PULL: "it did not end"})
STEPS = (Step(2, 4096, "push_one_shot", 8), Step(2, 8192, "stream", 16), Step(2, 2**30, "two_shot", 16))


def test_what_was_tried_is_kept_for_the_node_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert peer_routes.stored(tmp_path, ON) is None and peer_routes.stored(None, ON) is None
    file = peer_routes.store(tmp_path, TRIED)
    assert file is not None and peer_routes.stored(tmp_path, ON) == TRIED
    for name in ("driver", "torch", "source", "device_name"):
        assert peer_routes.stored(tmp_path, replace(ON, **{name: "other"})) is None
    file.write_text(file.read_text().replace("580.1", "580.2"))
    assert peer_routes.stored(tmp_path, ON) is None, "of another node under this one's name"
    file.write_text("{}")
    assert peer_routes.stored(tmp_path, ON) is None and "schema_version: expected 1, got None" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"route": "sideways"}, "route: expected one of host, push, pull, got 'sideways'"),
        ({"ranks": "2"}, "ranks: expected int, got '2'"),
        ({"on": {"driver": "1"}}, "on: expected texts of device_name, driver, torch, source, got {'driver': '1'}"),
        ({"more": 1}, "expected the keys on, ranks, route, us, reasons, got more, on"),
        ({"schema_version": 2}, "schema_version: expected 1, got 2"),
    ],
)
def test_a_wrong_file_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    text = json.dumps(json.loads(peer_routes.text_of(TRIED)) | change)
    with pytest.raises(ValueError, match=r"f\.json: ") as error:
        peer_routes.tried_of(text, "f.json")
    assert message in str(error.value)


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert peer_routes.store(tmp_path / "file", TRIED) is None and peer_routes.store(None, TRIED) is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_the_outcome_covers_as_many_ranks_as_tried() -> None:
    peer_routes.use(TRIED)
    assert (peer_routes.over_link(2), peer_routes.over_link(3)) == (PUSH, "")
    peer_routes.use(replace(TRIED, route=HOST))
    assert peer_routes.over_link(2) == ""
    peer_routes.try_alone(PULL)
    assert peer_routes.over_link(8) == PULL
    peer_routes.try_alone(HOST)
    assert peer_routes.over_link(2) == ""


@pytest.mark.parametrize(
    ("us", "route"),
    [
        ({}, HOST),
        ({HOST: {"1": 9.0}}, HOST),
        ({HOST: {"1": 9.0, "2": 20.0}, PUSH: {"1": 3.0, "2": 40.0}}, PUSH),
        ({HOST: {"1": 9.0, "2": 20.0}, PUSH: {"1": 9.0, "2": 20.0}}, HOST),
        ({HOST: {"1": 9.0, "2": 20.0}, PUSH: {"1": 8.0, "2": 20.0}, PULL: {"2": 19.0}}, PULL),
        ({PUSH: {"1": 1.0}, PULL: {"2": 1.0}}, HOST),
    ],
)
def test_the_fastest_over_all_common_sizes_is_taken(us: dict[str, dict[str, float]], route: str) -> None:
    assert trying.fastest(us) == route


def test_a_route_that_never_ends_or_is_wrong_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[trying.RouteSpec] = []

    def spawn(spec: trying.RouteSpec, progress: Any, entry: Any) -> dict[str, Any]:
        import os

        assert os.environ["NCCL_P2P_DISABLE"] == "1", "NCCL's own use of the link is not what is tried"
        specs.append(spec)
        if spec.route == PULL:
            raise RankError("rank 1 did not finish within 5 s\nits stack")
        wrong = "3 wrong words in 600 calls" if spec.route == PUSH else None
        return {"us": {"64": 1.0 if spec.route == PUSH else 9.0}, "reason": wrong}

    monkeypatch.setattr(trying, "spawn_ranks", spawn)
    monkeypatch.setattr(peer_routes, "here", lambda: ON)
    tried = trying.try_routes(2, lambda text: None, seconds=5.0)
    assert [spec.route for spec in specs] == list(ROUTES) and {spec.timeout for spec in specs} == {5.0}
    assert tried.route == HOST and tried.us == {HOST: {"64": 9.0}}
    assert tried.reasons == {PUSH: "3 wrong words in 600 calls", PULL: "rank 1 did not finish within 5 s"}
    assert peer_routes.tried_of(peer_routes.text_of(tried), "f") == tried


def request_of(tokens: int, **changes: Any) -> Request:
    x = torch.zeros(tokens, 64, dtype=torch.bfloat16)
    norm = NormSpec(1e-6, 0.0, None, x.dtype, x.dtype)
    return replace(Request(x, None, None, None, norm, False, "none", "g", 0), **changes)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=132, L2_cache_size=2**25),
    )
    return SimpleNamespace(world_size=2, rank=0, multimem=False, obstacle=None, device=torch.device("cuda", 0))


@pytest.mark.parametrize("steps", [STEPS, (), default_steps("p2p", 2)])
@pytest.mark.parametrize("route", [PUSH, PULL])
def test_only_kernels_of_the_route_are_chosen(hopper: Any, steps: tuple[Step, ...], route: str) -> None:
    selector = Selector(steps, "p2p", route)
    requests = [request_of(tokens, overlap_sms=sms) for tokens in (1, 40, 4096) for sms in (0, 8)]
    for request in [*requests, request_of(4, feed_from=2), request_of(4, residual_out="replicated")]:
        tried = {*selector.candidates(request), *selector.alternatives(request, hopper)}
        assert tried and {ALGORITHMS[one.name].plain_link for one in tried} == {route}, request
    forced = Insist(ALGORITHMS["push_one_shot"].make(), "p2p", route)
    assert [one.name for one in forced.candidates(request_of(1))] == ["push_one_shot"], (
        "two-shot in Triton needs atomics"
    )


def test_what_no_kernel_of_the_route_serves_goes_through_host_memory(
    hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = p2p.P2PTransport()
    hopper.selector = Selector(STEPS, "p2p", PUSH)
    monkeypatch.setattr(transport, "group_state", lambda name, device: hopper)
    assert transport.other_for(request_of(4)) is None
    served = []
    monkeypatch.setattr(hopper.selector, "serves", lambda request, state: served.append(request) or False)
    assert (
        transport.other_for(request_of(4)) is get_transport("host") and transport.message_buffer(request_of(4)) is None
    )
    assert len(served) == 2
    hopper.selector = Selector(STEPS, "p2p")
    assert transport.other_for(request_of(4)) is None, "with atomics one kernel serves everything"


def test_links_count_by_what_was_tried_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda gpu, peer: True)
    monkeypatch.setattr(peer_access, "native_atomics", lambda gpu, peer: {gpu, peer} == {1, 2})
    peer_routes.use(None)
    assert peer_access.pair_obstacle(0, 1) == NO_PEER_ATOMICS and peer_access.pair_obstacle(1, 2) is None
    assert peer_access.plain_route([0, 1]) == "" == peer_access.plain_route([1, 2])
    peer_routes.use(TRIED)
    assert peer_access.pair_obstacle(0, 1) is None and peer_access.pair_obstacle(0, 2) == NO_PEER_ATOMICS
    assert peer_access.plain_route([0, 1]) == PUSH and peer_access.plain_route([0, 1, 2]) == ""
    peer_routes.use(replace(TRIED, ranks=3))
    assert peer_access.plain_route([1, 2]) == "", "this pair has atomics, and all kernels"
    assert peer_access.plain_route([0, 2, 7]) == PUSH
    assert trying.needs_trial(2) and trying.needs_trial(3) and not trying.needs_trial(4)


def test_the_switch_for_tests_takes_atomics_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TW_COMPILE_PEER_ATOMICS", "0")
    assert not peer_access.native_atomics(0, 1)
    monkeypatch.setenv("TW_COMPILE_PEER_ATOMICS", "2")
    with pytest.raises(ValueError, match="TW_COMPILE_PEER_ATOMICS: expected '0' or '1', got '2'"):
        peer_access.native_atomics(0, 1)


@pytest.mark.parametrize(
    ("route", "labels"), [("", None), (PUSH, {"tw-push-one-shot", "tw-push-two-shot"}), (PULL, {"tw-stream"})]
)
def test_a_calibration_times_the_kernels_of_the_route_alone(
    monkeypatch: pytest.MonkeyPatch, route: str, labels: set[str] | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(candidates, "local_world_size", lambda: 2)
    monkeypatch.setattr(candidates, "plain_route", lambda gpus: route)
    timed = {one.label for one in candidates.candidates(["p2p"]) if one.kind == "ours"}
    assert timed == labels if labels else {"tw-p2p", "tw-stream", "tw-push-two-shot"} <= timed
    assert "tw-host-two-shot" in {one.label for one in candidates.candidates(["host"])}


def test_the_benchmark_runs_no_kernel_that_was_not_chosen_for_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "plain_route", lambda gpus: PUSH)
    size = MessageSize(64, 4096, "bfloat16")
    obstacles = {one.label: ours.Operator(one).obstacle(size, 2) for one in variants("cuda") if one.over == "p2p"}
    assert obstacles["tw-push-two-shot"] is None and obstacles["tw-p2p"] is None, "the transport chooses among them"
    assert "only kernels of the route push" in str(obstacles["tw-stream"])


def test_a_program_that_fails_or_hangs_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(trying.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="ended with 1: it printed nothing"):
        trying.by_program(2)
    monkeypatch.setattr(trying, "ALL_SECONDS", 0.2)
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setattr(trying.sys, "executable", str(slow))
    store = torch.distributed.HashStore()
    monkeypatch.setattr(trying.dist, "get_rank", lambda: 0)
    with caplog.at_level(logging.INFO, logger="tw_compile"):
        assert trying._tried_by_rank_0(store, 2) == ""
    assert "rows go through host memory, as nothing else could be tried: TimeoutExpired" in caplog.text
