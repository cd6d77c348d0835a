"""``tw-compile tune --transport``: what is timed, what is fitted, what is written and what is refused."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tw_compile.benchmark.results import Row
from tw_compile.cli import common
from tw_compile.cli.app import app
from tw_compile.gating import Node
from tw_compile.gating.table import Source
from tw_compile.harness import start
from tw_compile.kernels.collective import peer_access
from tw_compile.kernels.collective.transport import registered
from tw_compile.kernels.collective.transports import TRANSPORTS, TransportEntry
from tw_compile.kernels.registry import Benchmarked
from tw_compile.planning.communication import link_us
from tw_compile.planning.links import LinkTransport, LinkWay, link_of_node, parse_link, shipped_link
from tw_compile.tuning import busy, run
from tw_compile.tuning.busy import Usage
from tw_compile.tuning.link import fitted_link, labels_of, write_link
from tw_compile.tuning.measured import KernelRun
from tw_compile.tuning.spec import TuneSpec

LINK = shipped_link()
SPEC = TuneSpec((2,), link_labels=("nccl+norm", "no-communication"))
NORM_US = 7.0
NCCL = replace(LINK.transport("nccl"), ways={"ring": LinkWay("two_shot", 50.0, 11.0)})


def rows_of(stage: Any, label: str, rates: LinkTransport, norm_us: float = NORM_US) -> list[Row]:
    """Of a node whose link has these rates."""
    rows = []
    for size in stage.bench.sizes():
        us = link_us(rates, size.nbytes, stage.bench.world_size) + norm_us
        for name, time in ((label, us), ("no-communication", norm_us)):
            kind: Any = "bound" if name == "no-communication" else "peer"
            numerics = "not checked" if kind == "bound" else "ok"
            rows.append(
                Row(
                    name,
                    kind,
                    size.tokens,
                    size.hidden,
                    size.nbytes,
                    1,
                    "",
                    None,
                    "timed",
                    None,
                    numerics,
                    time,
                    time,
                    time,
                )
            )
    return rows


def runs_of(label: str, rates: LinkTransport, norm_us: float = NORM_US) -> list[KernelRun]:
    source = Source("measured", "measured", ("", "", "", ""))
    return [
        KernelRun(stage.bench.world_size, "A GPU", source, tuple(rows_of(stage, label, rates, norm_us)))
        for stage in SPEC.stages()
    ]


def spawn(bench: Any, progress: Any, entry: Any) -> dict[str, Any]:
    (stage,) = SPEC.stages()
    assert bench == replace(stage.bench, timeout=bench.timeout)
    rows = [asdict(row) for row in rows_of(stage, "nccl+norm", NCCL)]
    return {"device_name": "A GPU", "device_class": "generic", "rows": rows, "cache_bytes": 1}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that are idle, without peer access."""
    monkeypatch.setattr(common, "gpus", lambda: 2)
    monkeypatch.setattr(busy, "usages", lambda count: [Usage(index, 0) for index in range(count)])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "A GPU")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    monkeypatch.setattr("tw_compile.current.current_node", lambda: Node((9, 0), False))
    monkeypatch.setattr(start, "nccl_version", lambda: "2.28.9")
    monkeypatch.setattr(run, "spawn_ranks", spawn)


def test_six_sizes_of_one_transport_are_timed_and_nothing_else() -> None:
    (stage,) = SPEC.stages()
    assert (stage.kind, stage.bench.only, len(stage.bench.tokens)) == ("link", SPEC.link_labels, 6)
    assert labels_of(LINK, "nccl") == SPEC.link_labels


def test_a_fit_recovers_the_link_that_made_the_times() -> None:
    found = fitted_link(LINK, "nccl", runs_of("nccl+norm", NCCL))
    way = found.link.transport("nccl").ways["ring"]
    assert (way.latency_us, way.gb_per_s) == (pytest.approx(50.0, rel=0.01), pytest.approx(11.0, rel=0.01))
    assert found.measured == {f"transports.nccl.ways.ring.{key}" for key in ("latency_us", "gb_per_s")}
    assert found.link.transport("host") == LINK.transport("host")


def test_ways_that_are_the_fastest_at_fewer_than_three_sizes_stay() -> None:
    host = LINK.transport("host")
    slower = replace(host, ways={name: replace(way, gb_per_s=way.gb_per_s / 2) for name, way in host.ways.items()})
    entry = TransportEntry("host", ("cuda",), "a:b", "a toy", benchmarked=(Benchmarked("tw-host", False),))
    with ExitStack() as stack:
        if "host" not in TRANSPORTS:
            stack.enter_context(registered(entry))
        (label,) = labels_of(LINK, "host")
        ways = fitted_link(LINK, "host", runs_of(label, slower, 0.0)).link.transport("host").ways
    assert ways["one_shot"] == host.ways["one_shot"]
    assert ways["two_shot"].gb_per_s == pytest.approx(host.ways["two_shot"].gb_per_s / 2, rel=0.03)


def test_what_is_written_is_what_plans_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = fitted_link(LINK, "nccl", runs_of("nccl+norm", NCCL))
    file = write_link(tmp_path / "tw_compile", found, "Written by a test")
    assert link_of_node() == found.link == parse_link(file.read_text(), "t")
    lines = [line for line in file.read_text().splitlines() if line.startswith("latency_us")]
    assert [line.rpartition("# ")[2] for line in lines] == ["measured", "as before", "as before", "as before"]


@pytest.mark.usefixtures("gpus")
def test_the_command_writes_the_link_and_what_it_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tune", "--tp", "2", "--transport", "nccl", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert {file.name for file in tmp_path.iterdir()} == {"host-memory.toml", "tune-nccl.json"}
    assert parse_link((tmp_path / "host-memory.toml").read_text(), "t").transport("nccl").ways["ring"].gb_per_s == 11.0
    assert list(json.loads((tmp_path / "tune-nccl.json").read_text())["stages"]) == ["link tp2"]
    assert "nccl over host-memory: ring 50 us and 11 GB/s each way" in result.output


@pytest.mark.usefixtures("gpus")
def test_nccl_is_not_timed_where_it_uses_peer_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(peer_access, "native_atomics", lambda one, other: True)
    args = ["tune", "--tp", "2", "--transport", "nccl", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2 and "--transport: expected GPUs without peer access" in result.output
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert CliRunner().invoke(app, args).exit_code == 0


@pytest.mark.usefixtures("gpus")
def test_nccl_is_timed_over_a_link_that_our_kernels_do_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner takes NCCL's rates from this file there, however NCCL moves its bytes."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(peer_access, "native_atomics", lambda one, other: False)
    args = ["tune", "--tp", "2", "--transport", "nccl", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, args).exit_code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--transport", "p2p"], "--transport: expected one of host, nccl"),
        (["--transport", "nccl", "--device", "cpu"], "--transport: expected --device cuda with it"),
    ],
)
def test_bad_input_is_one_line(args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["tune", "--dry-run", *args])
    assert result.exit_code == 2 and message in result.output
