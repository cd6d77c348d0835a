"""Calls whose rows a GEMM is fed: all rows arrive, before they are read, and products are those of rows that were there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from emulator import EmulationError
from emulator.fed import FORM, FedMachine, sources
from emulator.kernels import PushMachine

LONG = 4160
"""Columns of rows whose chunks are sent in several pieces, the last one short."""
WRAPS = 2**32 - 2
"""Calls before, so that the numbers of the next ones pass 2**32."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources(tmp_path_factory.mktemp("fed"))


def check(
    source: Path,
    seed: int,
    counts: Sequence[int],
    *,
    world_size: int = 2,
    hidden_size: int = 128,
    numbered: int = 0,
    resident: int = 16,
    sms: int = 4,
) -> None:
    """Calls of so many tokens in turn, with GEMMs on ``sms`` SMs."""
    machine = FedMachine(
        source, world_size, hidden_size, most_tokens=max(counts), seed=seed, numbered=numbered, resident=resident
    )
    for tokens in counts:
        machine.call(tokens, 3, sms=sms)
    machine.run()


@pytest.mark.parametrize("tokens", [1, 2, 7, 128, 129, 255, 300, 385, 513, 640])
def test_two_ranks_have_all_rows_and_the_products(source: Path, tokens: int) -> None:
    """Rows of both in one block, in low tiles, of one rank alone."""
    check(source, tokens, [tokens])


def test_rows_have_the_bits_of_those_that_push_hands_out(source: Path) -> None:
    options: dict[str, Any] = {"most_tokens": 33, "seed": 4}
    fed, pushed = FedMachine(source, 2, 128, **options), PushMachine(2, 128, FORM, one_shot=False, **options)
    fed.call(33, 3)
    pushed.call(33, 3)
    for machine in (fed, pushed):
        machine.run()
    for own, other in zip(fed.calls[0].outputs(), pushed.calls[0].outputs(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("tokens", [1, 50, 260, 385, 900])
def test_three_ranks_have_all_rows_and_the_products(source: Path, tokens: int) -> None:
    """A block may have rows of all three."""
    check(source, tokens, [tokens], world_size=3)


@pytest.mark.parametrize("numbered", [0, WRAPS])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 8))])
def test_calls_of_different_sizes_follow_each_other(source: Path, seed: int, numbered: int) -> None:
    check(source, seed, [300, 129, 1, 385, 300], numbered=numbered)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 4))])
def test_one_cluster_on_each_rank_is_enough(source: Path, seed: int) -> None:
    """The others begin when it has ended."""
    check(source, seed, [513, 260], resident=2)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 4))])
def test_clusters_that_do_not_send_compute_from_the_start(source: Path, world_size: int, seed: int) -> None:
    """Beside three clusters that send, or five where there are two peers."""
    check(source, seed, [900, 513], world_size=world_size, sms=14, resident=32)


def test_rows_of_several_pieces_are_sent_whole(source: Path) -> None:
    check(source, 0, [9, 17], hidden_size=LONG)


def test_narrow_pairs_are_fed(source: Path) -> None:
    machine = FedMachine(source, 2, 64, most_tokens=600, seed=1)
    machine.call(600, 3, whole=2)
    machine.run()


@pytest.mark.parametrize("whole", [2, 99])
def test_tiles_of_two_matrices_are_fed(source: Path, whole: int) -> None:
    machine = FedMachine(source, 2, 64, most_tokens=600, seed=whole, shared=True)
    for tokens in (600, 390):
        machine.call(tokens, 3, whole=whole)
    machine.run()


def test_gated_products_are_fed(source: Path) -> None:
    machine = FedMachine(source, 2, 64, most_tokens=385, seed=3, gated=True)
    for tokens in (385, 130):
        machine.call(tokens, 3)
    machine.run()


def test_more_pairs_over_each_other_than_in_a_band(source: Path) -> None:
    machine = FedMachine(source, 2, 64, most_tokens=19 * 256, seed=2)
    machine.call(19 * 256, 8)
    machine.run()


def test_a_rank_that_does_not_launch_is_reported(tmp_path: Path) -> None:
    """By the kernel that makes the rows, and by the GEMM, of which another CTA waits for the other rank's rows."""
    source = sources(tmp_path)
    machine = FedMachine(source, 2, 64, most_tokens=256, seed=0, spin_limit=50)
    machine.call(256, 1, skip=(1,))
    machine.emulator.run()
    (report, _) = machine.reports
    assert {int(phase) for phase in report[:, 1]} >= {1, 4} and not report[:, 0].any()


def test_a_rank_that_does_not_launch_is_waited_for_without_a_limit(source: Path) -> None:
    machine = FedMachine(source, 2, 64, most_tokens=256, seed=0)
    machine.call(256, 3, skip=(1,))
    with pytest.raises(EmulationError, match="deadlock"):
        machine.emulator.run()
