"""Ranks settle how rows go over links without native atomics: together, by one trial, and by checks that find wrong words."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tw_compile import compat, peer_routes
from tw_compile.harness.problems import Context
from tw_compile.harness.ranks import Ranks
from tw_compile.kernels.collective.transport import Started, Transport, get_transport
from tw_compile.peer_routes import HOST, PUSH, Tried, TriedOn
from tw_compile.testing import GlooRanks
from tw_compile.tuning import peer_routes as trying

RANKS = 2
ON = TriedOn("GPU", "1", "2", "3")
TRIED = Tried(ON, RANKS, PUSH, {HOST: {"64": 9.0}, PUSH: {"64": 5.0}}, {})


def settled(rank: int, case: str) -> tuple[str, int]:
    """The route that the rank uses afterwards, and how often it tried."""
    tries: list[int] = []

    def by_program(ranks: int) -> str:
        tries.append(ranks)
        if case == "fails":
            raise RuntimeError("no GPU answers")
        return peer_routes.text_of(TRIED)

    peer_routes.forget()
    known = TRIED if case == "known" and rank == 0 else None  # the file appears between two ranks' questions
    peer_routes.use(known)
    with (
        mock.patch.object(trying, "needs_trial", lambda ranks: case != "atomics"),
        mock.patch.object(trying, "by_program", by_program),
        mock.patch.object(trying, "_KEY", f"peer_routes/{case}"),
    ):
        if case == "known":
            dist.barrier()
            if rank == 1:
                compat.default_store().wait([f"tw_compile/peer_routes/{case}"])
        trying.settle(case != "may not", 5.0 if case != "alone" or rank == 0 else 0.0)
        if case != "alone":
            dist.barrier()
    route = peer_routes.over_link(RANKS)
    peer_routes.forget()
    return route, len(tries)


def test_rank_0_tries_once_and_all_use_what_it_found(gloo_ranks: GlooRanks) -> None:
    assert gloo_ranks.run(settled, "tries") == [(PUSH, 1), (PUSH, 0)]
    assert gloo_ranks.run(settled, "known") == [(PUSH, 0), (PUSH, 0)]
    for case in ("fails", "may not", "atomics"):
        assert {route for route, _ in gloo_ranks.run(settled, case)} == {""}, case


class Wrong(Transport):
    """Gloo's, with one wrong word in one of the calls on one of the ranks."""

    def __init__(self, rank: int, of: str) -> None:
        self.inner, self.calls, self.rank, self.of = get_transport("gloo"), 0, rank, of

    def start(self, request: Any) -> Started:
        started = self.inner.start(request)
        if started.finish is not None:
            started.finish()
        self.calls += 1
        if self.calls == 5 and self.rank == 1 and self.of:
            rows = started.hidden if self.of == "hidden" else started.residual
            rows[-1, -1] += 1
        return Started(started.hidden, started.residual)


def wrong_words(rank: int, of: str) -> int:
    world = dist.group.WORLD
    assert world is not None
    ranks = Ranks(Context(rank, RANKS, torch.device("cpu"), compat.group_name(world)), world)
    return trying.wrong_words(ranks, Wrong(rank, of), calls=7, hidden_size=64)


def test_one_wrong_word_of_one_call_is_found_on_all_ranks(gloo_ranks: GlooRanks) -> None:
    assert gloo_ranks.run(wrong_words, "") == [0, 0]
    assert gloo_ranks.run(wrong_words, "residual") == [1, 1]
    assert gloo_ranks.run(wrong_words, "hidden") == [1, 1]
