"""``doctor --measure``: its rows on a played pair of GPUs, its table, and what it refuses."""

from __future__ import annotations

import io
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tw_compile.benchmark import links
from tw_compile.cli import common, doctor
from tw_compile.cli.app import app
from tw_compile.harness.measure import LoopTimer
from tw_compile.harness.problems import Context
from tw_compile.harness.ranks import Ranks
from tw_compile.harness.requests import RankError
from tw_compile.kernels.collective import peer_access
from tw_compile.kernels.collective.peer_access import SWITCHED_OFF
from tw_compile.kernels.collective.transports import NO_PEER_ATOMICS

SPEC = links.LinksSpec(nbytes=4096)
LABELS = ["to host", "to host", "from host", "from host", "signal", "push", "push", "pull", "pull"]


class Pair:
    """Two ranks as threads, with memory that both can reach."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=20)
        self.values: list[Any] = [None, None]
        self.buffers: dict[tuple[int, int], torch.Tensor] = {}
        self.made = [0, 0]
        self.sent: list[tuple[int, int]] = []

    def ranks(self, rank: int) -> Ranks:
        pair = self

        class OfThread(Ranks):
            def gather(self, value: Any) -> list[Any]:
                pair.barrier.wait()
                pair.values[rank] = value
                pair.barrier.wait()
                gathered = list(pair.values)
                pair.barrier.wait()
                return gathered

            def barrier(self) -> None:
                pair.barrier.wait()

        return OfThread(Context(rank, 2, torch.device("cpu"), "group"), None)  # type: ignore[arg-type]

    def symmetric_memory(self, ranks: Ranks, nbytes: int, device: torch.device) -> tuple[torch.Tensor, Any]:
        rank = ranks.ctx.rank
        number, self.made[rank] = self.made[rank], self.made[rank] + 1
        own = self.buffers[number, rank] = torch.full((nbytes,), 255, dtype=torch.uint8)
        ranks.barrier()

        def get_buffer(owner: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return self.buffers[number, owner].view(dtype).view(shape)

        return own, SimpleNamespace(get_buffer=get_buffer)

    def run(self, spec: links.LinksSpec = SPEC) -> list[dict[str, Any]]:
        results: list[Any] = [None, None]
        kept: list[int] = []
        progress: list[str] = []

        def work(rank: int) -> None:
            tell = progress.append if rank == 0 else lambda what: None
            keep = (lambda so_far: kept.append(len(so_far["rows"]))) if rank == 0 else lambda so_far: None
            results[rank] = links.run_rank(spec, self.ranks(rank), tell, keep)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results[0] is not None and kept == list(range(1, len(LABELS) + 1))
        assert len(progress) == links.steps() - 2
        both = [[row | {"us": None, "gb_per_s": None} for row in result["rows"]] for result in results]
        assert both[0] == both[1]
        rows: list[dict[str, Any]] = results[0]["rows"]
        return rows


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    played = Pair()

    class Signals:
        def __init__(self, addresses: list[int], rank: int, peers: list[int]) -> None:
            words = [played.buffers[0, owner].data_ptr() for owner in range(2)]
            assert addresses == words and peers == [1 - rank], "by rank"
            assert not played.buffers[0, rank].any(), "cleared"
            self.rank = rank

        def exchange(self, kind: int) -> None:
            if self.rank == 0:
                played.sent.append((self.rank, kind))

    monkeypatch.setattr(links, "Signals", Signals)
    monkeypatch.setattr(links, "GraphTimer", LoopTimer)
    monkeypatch.setattr(links, "symmetric_memory", played.symmetric_memory)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return played


def test_every_way_and_direction_has_a_figure(pair: Pair) -> None:
    rows = pair.run()
    assert [row["way"] for row in rows] == LABELS, "loads come last"
    assert [row["gpu"] for row in rows] == [0, 1, 0, 1, None, 0, 1, 0, 1]
    signal = rows.pop(4)
    assert signal["us"] > 0 and signal["gb_per_s"] is None
    assert all(row["gb_per_s"] > 0 and row["us"] is None and row["reason"] is None for row in rows)
    kinds = [kind for _, kind in pair.sent]
    assert kinds == [0, 1] * (len(kinds) // 2), "a word is written again only after one of the other kind has come"


def test_each_way_moves_what_it_says(pair: Pair) -> None:
    own, host, peers = (torch.full((8,), value) for value in (1.0, 2.0, 3.0))
    ways = dict(links.THROUGH_HOST + links.OVER_LINK)
    ways["to host"](links.Memory(own, host, peers))
    assert host.eq(1).all()
    ways["from host"](links.Memory(own, host.fill_(5), peers))
    assert own.eq(5).all() and peers.eq(3).all()
    ways["push"](links.Memory(own, host, peers))
    assert peers.eq(6).all() and own.eq(5).all()
    ways["pull"](links.Memory(own, host, peers))
    assert own.eq(7).all() and peers.eq(6).all()


def test_without_peer_access_the_way_through_the_host_is_measured_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
    rows = pair.run()
    assert [row["reason"] for row in rows] == [None] * 4 + [SWITCHED_OFF] * 5
    assert pair.made == [0, 0] and all(row["gb_per_s"] > 0 for row in rows[:4])


def test_a_link_without_atomics_is_measured(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """These figures are what is known of a link that our kernels leave alone."""
    monkeypatch.setattr(peer_access, "peer_access_obstacle", lambda local_ranks: NO_PEER_ATOMICS)
    assert {row["reason"] for row in pair.run()} == {None}


def test_what_fails_on_one_gpu_is_a_row_with_the_reason(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(memory: links.Memory) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(links, "OVER_LINK", (("push", fails), links.OVER_LINK[1]))
    rows = pair.run()
    assert [str(row["reason"]) for row in rows[5:7]] == [
        f"rank {rank}: RuntimeError: an illegal memory access" for rank in range(2)
    ]
    assert all(row["gb_per_s"] > 0 for row in rows[7:])
    monkeypatch.setattr(links, "symmetric_memory", lambda *given: fails(None))  # type: ignore[arg-type]
    again = Pair()
    assert [row["reason"] for row in again.run()[4:]] == ["RuntimeError: an illegal memory access"] * 5


def test_loads_that_never_end_leave_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    so_far = {"device_name": "GPU", "rows": [{"way": "to host"}]}

    def hang(spec: links.LinksSpec, progress: Any, entry: Any) -> Any:
        raise RankError("no result after 90 s; unfinished: rank 0: pull, GPU 0\nstack", so_far)

    monkeypatch.setattr(links, "spawn_ranks", hang)
    assert links.run(lambda what: None) == {
        "rows": so_far["rows"],
        "incomplete": "no result after 90 s; unfinished: rank 0: pull, GPU 0",
    }
    monkeypatch.setattr(links, "spawn_ranks", lambda *given: {"device_name": "GPU", "rows": []})
    assert links.run(lambda what: None) == {"rows": [], "incomplete": None}


def test_the_table_has_a_line_for_each_way() -> None:
    row = {"gpu": 0, "gb_per_s": None, "us": None, "reason": None}
    rows = [
        row | {"way": "push", "gb_per_s": 24.06},
        row | {"way": "push", "gpu": 1, "gb_per_s": 3.0},
        row | {"way": "signal", "gpu": None, "us": 2.04},
        row | {"way": "pull", "reason": "no peer access between the GPUs"},
    ]
    text = io.StringIO()
    doctor.print_links(Console(file=text, width=200), {"rows": rows, "incomplete": "no result after 90 s"})
    assert text.getvalue().splitlines()[1:] == [
        "link between GPU 0 and GPU 1, measured",
        "push       GPU 0: 24.1 GB/s; GPU 1: 3.0 GB/s",
        "signal     2.0 us one way",
        "pull       GPU 0: not measured, no peer access between the GPUs",
        "INCOMPLETE  no result after 90 s",
    ]


@pytest.mark.parametrize(
    ("args", "gpus", "launched", "message"),
    [
        ([], 1, False, "--measure: expected 2 GPUs, got 1"),
        (["--vllm"], 2, False, "--measure: expected no --vllm with it, which shows no links, got both"),
        ([], 2, True, "doctor --measure: expected to start the ranks itself"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    args: list[str], gpus: int, launched: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "gpus", lambda: gpus)
    if launched:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["doctor", "--measure", *args])
    (line,) = result.output.splitlines()
    assert result.exit_code == 2 and line.startswith(f"error: {message}")


def test_doctor_measures_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "gpus", lambda: 2)
    monkeypatch.setattr(links, "run", lambda progress: {"rows": [], "incomplete": "a rank died"})
    results = [CliRunner().invoke(app, ["doctor", *more, "--json", "-"]) for more in ([], ["--measure"])]
    assert [result.exit_code for result in results] == [0, 1]
    reports = [json.loads(result.stdout) for result in results]
    assert [report["measured_links"] for report in reports] == [None, {"rows": [], "incomplete": "a rank died"}]
