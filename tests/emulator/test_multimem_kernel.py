"""multimem.cu in the emulator: by the switch, and with loads and stores of peers in the place of its instructions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from emulator import EmulationError
from emulator.broken import broken_copy
from emulator.kernels import ALGORITHMS, BF16, FP32, Form, MultimemMachine, partial_sums
from emulator.test_kernels import FORMS, LLAMA, MOST_TOKENS, OUTPUTS, WHOLE, random_calls
from tw_compile.kernels.algorithms.multimem.multimem import Shape, shape_for

WAYS = pytest.mark.parametrize("by_peers", [False, True], ids=["switch", "peers"])


def multimem(world_size: int, hidden_size: int, form: Form, seed: int, **options: Any) -> MultimemMachine:
    chosen: dict[str, Any] = {"staged": True, "private_output": True, "shape": Shape(32, 2, 2)} | options
    return MultimemMachine(world_size, hidden_size, form, most_tokens=MOST_TOKENS, seed=seed, **chosen)


@pytest.mark.full
@WAYS
@OUTPUTS
@pytest.mark.parametrize("form", FORMS)
def test_it_gives_what_the_operator_asks_for(form: str, private_output: bool, by_peers: bool) -> None:
    for seed, world_size in enumerate((2, 3)):
        # 34 vectors of 8: two more than threads of one warp, where rows of float8 end with a pair; or two of two.
        shape = Shape(32 + seed % 2 * 32, 1 + seed % 2, 1 + seed % 3)
        options = {"staged": bool(seed % 2) or private_output, "private_output": private_output, "shape": shape}
        machine = multimem(world_size, 272, FORMS[form], seed, by_peers=by_peers, **options)
        for tokens, max_sms in ((5, 2), (1, 2), (MOST_TOKENS, 2), (MOST_TOKENS, 1)):
            machine.call(tokens, max_sms)
        machine.run()


@pytest.mark.full
@WAYS
@pytest.mark.parametrize("staged", [True, False], ids=["staged", "in_slot"])
@OUTPUTS
@pytest.mark.parametrize(
    ("world_size", "hidden_size", "shape", "form"),
    [
        (2, 272, Shape(32, 2, 3), WHOLE),
        (3, 144, Shape(32, 3, 2), LLAMA),
        (4, 272, Shape(64, 1, 4), WHOLE),
        (5, 784, Shape(32, 2, 1), FORMS["fp8_whole"]),
        (8, 80, Shape(32, 2, 2), LLAMA),
    ],
)
def test_calls_follow_each_other(
    world_size: int, hidden_size: int, shape: Shape, form: Form, private_output: bool, staged: bool, by_peers: bool
) -> None:
    options: dict[str, Any] = {"shape": shape, "staged": staged, "private_output": private_output, "by_peers": by_peers}
    for seed in range(3 if world_size == 8 else 6):
        # The barriers' count passes 2**32.
        machine = multimem(world_size, hidden_size, form, seed, resident=1 + seed % 5, first_epoch=-5, **options)
        random_calls(machine, seed, 6)
        machine.run()


def test_it_runs_in_the_shape_that_the_host_chooses() -> None:
    chosen = shape_for(1040, 2, 2)
    assert chosen.groups > 1 and chosen.depth > 1 and chosen.threads > 32
    machine = multimem(2, 1040, WHOLE, 0, shape=chosen)
    random_calls(machine, 0, 3)
    machine.run()


@pytest.mark.few(2)
@WAYS
@OUTPUTS
def test_on_two_slots_at_once(private_output: bool, by_peers: bool) -> None:
    options: dict[str, Any] = {"private_output": private_output, "by_peers": by_peers}
    for seed in range(10):
        machine = multimem(3, 80, LLAMA, seed, slots=2, staged=bool(seed % 2), **options)
        random_calls(machine, seed, 8, slots=2)
        machine.run()


def test_neither_schedule_nor_way_changes_a_bit() -> None:
    """That the way does not is so in the emulator, whose switch adds in rank order."""

    def results(seed: int) -> list[torch.Tensor]:
        machine = multimem(4, 272, LLAMA, seed, data_seed=7, by_peers=bool(seed % 2))
        random_calls(machine, 0, 3)
        machine.run()
        return [output for call in machine.calls for output in call.outputs()]

    first = results(0)
    for seed in (1, 2, 3):
        for one, other in zip(first, results(seed), strict=True):
            assert torch.equal(one, other)


@OUTPUTS
def test_values_that_are_not_finite_are_the_same_on_all_ranks(private_output: bool) -> None:
    xs = partial_sums(3, 8, 272, BF16, 0)
    xs[0][1, 3] = xs[1][1, 3] = float("inf")  # an infinite sum
    xs[0][2, 3], xs[2][2, 3] = float("inf"), -float("inf")  # NaN by addition
    for x in xs:
        x[3] = -0.0
    machine = multimem(3, 272, Form(residual_dtype=FP32), 0, private_output=private_output)
    call = machine.call(8, 3, xs=xs)
    machine.run()
    hidden = call.ranks[0].hidden.float()
    assert hidden[1].isnan().any() and hidden[2].isnan().all()
    assert not hidden[0].isnan().any() and not hidden[3:].isnan().any()


@OUTPUTS
@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_does_not_launch_is_reported(private_output: bool, silent: int) -> None:
    machine = multimem(3, 80, LLAMA, 0, spin_limit=20, private_output=private_output)
    machine.call(MOST_TOKENS, 2)
    machine.call(MOST_TOKENS, 2, skip=[silent])
    machine.emulator.run()
    expected = torch.zeros_like(machine.slots[0].status[0])
    expected[:2, silent] = 1
    for rank, status in enumerate(machine.slots[0].status):
        assert torch.equal(status, expected if rank != silent else torch.zeros_like(expected))
    machine.check_margins()


# --- what the emulator says of multicast -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("multicast(table[WORLD_SIZE])", "multicast(table[0])", "which is no multicast address"),
        ("store_multicast((uint8_t*)multicast", "store_relaxed_sys((uint8_t*)multicast", "which is in no allocation"),
        ("fence_proxy_alias();", "", "wrote through another address with no fence_proxy_alias since"),
    ],
)
def test_misuse_of_multicast_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    broken_copy(tmp_path, ALGORITHMS / "multimem" / "multimem.cu", "multimem.cu", ((old, new),))
    machine = multimem(3, 80, LLAMA, 0, sources=tmp_path)
    machine.call(MOST_TOKENS, 2)
    with pytest.raises(EmulationError, match=message):
        machine.run()


def test_a_multicast_address_needs_a_buffer_of_each_rank() -> None:
    machine = multimem(3, 80, LLAMA, 0)
    with pytest.raises(ValueError, match=r"parts: expected 3 of one size, got 2 of \[8\] bytes"):
        machine.emulator.multicast([torch.zeros(2), torch.zeros(2)])
    with pytest.raises(ValueError, match=r"parts: expected 3 of one size, got 3 of \[4, 8\] bytes"):
        machine.emulator.multicast([torch.zeros(2), torch.zeros(2), torch.zeros(1)])
