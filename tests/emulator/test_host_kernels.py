"""host_words.cu and host_rows.cu in the emulator."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from emulator.host_kernels import RowsMachine, WordsMachine
from emulator.kernels import FP32, Form, make_call, partial_sums
from emulator.test_kernels import FORMS, LLAMA, MOST_TOKENS, ONE_AND_TWO_SHOT, WHOLE
from tw_compile.kernels.algorithms.host.host_rows import shape_of


def words(world_size: int, hidden_size: int, form: Form, seed: int, **options: Any) -> WordsMachine:
    options.setdefault("threads", 64)
    return WordsMachine(world_size, hidden_size, form.for_one_shot(), most_tokens=MOST_TOKENS, seed=seed, **options)


def rows(
    world_size: int,
    hidden_size: int,
    form: Form,
    one_shot: bool,
    seed: int,
    *,
    threads: int = 32,
    groups: int = 2,
    ring: int = 4,
    ahead: int = 2,
    depth: int = 2,
    behind: int = 3,
    overlap_sms: int = 0,
    **options: Any,
) -> RowsMachine:
    form = form.for_one_shot() if one_shot else form
    request = make_call(form, partial_sums(world_size, 1, hidden_size, form.dtype, 0), 0).ranks[0].request
    request = replace(request, overlap_sms=overlap_sms)
    results = (0, 1) if one_shot else (max(behind, depth + 1), max(behind, depth + 1) + 1)
    shape = shape_of(request, world_size, one_shot, threads, groups, ring, ahead, depth, *results)
    return RowsMachine(world_size, hidden_size, form, one_shot=one_shot, shape=shape, seed=seed, **options)


def random_calls(machine: WordsMachine | RowsMachine, seed: int, count: int, slots: int = 1) -> None:
    """Grids of all sizes after each other: one token, fewer than ranks, more rows than CTAs."""
    random = Random(seed)
    for _ in range(count):
        machine.call(random.choice((1, 2, 3, 5, 8, MOST_TOKENS)), random.randint(1, 3), slot=random.randrange(slots))


def calls_of_one_name(seed: int, **options: Any) -> WordsMachine:
    """Two long calls with the same name in one part, and short ones between them."""
    names = 9
    machine = words(2, 72, WHOLE, seed, names=names, resident=2, **options)
    for number in range(2 * names + 1):
        machine.call(MOST_TOKENS if number % (2 * names) == 0 else 1, 2)
    return machine


# --- every form of the operator --------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_words_give_what_the_operator_asks_for(form: str) -> None:
    for seed, world_size in enumerate((2, 3)):
        machine = words(world_size, 264, FORMS[form], seed, threads=32 * world_size - 32, at_once=3 - 2 * seed)
        for tokens, max_sms in ((5, 2), (1, 2), (7, 3), (MOST_TOKENS, 1)):
            machine.call(tokens, max_sms)
        machine.run()


@pytest.mark.full
@ONE_AND_TWO_SHOT
@pytest.mark.parametrize("form", FORMS)
def test_rows_give_what_the_operator_asks_for(form: str, one_shot: bool) -> None:
    for seed, world_size in enumerate((2, 3)):
        machine = rows(world_size, 264, FORMS[form], one_shot, seed, depth=2 * seed)
        for tokens, max_sms in ((5, 2), (1, 2), (7, 3), (MOST_TOKENS, 1)):
            machine.call(tokens, max_sms)
        machine.run()


# --- many calls, many schedules --------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "hidden_size", "threads", "at_once", "form"),
    [
        (2, 264, 32, 1, WHOLE),
        (2, 776, 32, 3, WHOLE),  # 97 vectors: one thread has a fourth one, in a set of its own
        (3, 136, 32, 2, LLAMA),
        (4, 72, 64, 3, WHOLE),
        (8, 72, 32, 1, FORMS["fp32"]),
    ],
)
def test_calls_in_words_follow_each_other(
    world_size: int, hidden_size: int, threads: int, at_once: int, form: Form
) -> None:
    for seed in range(3 if world_size == 8 else 6):
        shape = {"threads": threads, "at_once": at_once}
        machine = words(world_size, hidden_size, form, seed, resident=1 + seed % 5, **shape)
        random_calls(machine, seed, 8)
        machine.run()


@pytest.mark.parametrize("calls", [0, -9])
def test_words_of_a_call_with_the_same_name_are_erased(calls: int) -> None:
    """Also where the count of calls begins again from 0. A rank that comes late to the second long call is waited for."""
    for seed in range(4):
        calls_of_one_name(seed, calls=calls).run()


@pytest.mark.full
@ONE_AND_TWO_SHOT
@pytest.mark.parametrize(
    ("world_size", "hidden_size", "shape", "form"),
    [
        (2, 264, {}, WHOLE),
        (2, 136, {"groups": 1, "ring": 2, "ahead": 1, "depth": 1}, LLAMA),
        (3, 136, {"groups": 3, "ring": 5, "ahead": 3, "depth": 0}, LLAMA),
        (4, 72, {"groups": 1, "ring": 8, "ahead": 6, "depth": 4}, FORMS["fp32"]),
        (4, 136, {"groups": 1, "ring": 5, "ahead": 3, "depth": 2, "behind": 4}, LLAMA),
        (8, 72, {"groups": 1, "ring": 3, "ahead": 1, "depth": 1}, FORMS["fp8_whole"]),
        # What shape_for gives most messages.
        (2, 136, {"groups": 1, "ring": 12, "ahead": 5, "depth": 1, "behind": 4}, LLAMA),
        (3, 136, {"groups": 1, "ring": 10, "ahead": 6, "depth": 2, "behind": 5}, LLAMA),
    ],
)
def test_calls_by_rows_follow_each_other(
    world_size: int, hidden_size: int, shape: dict[str, int], form: Form, one_shot: bool
) -> None:
    for seed in range(2 if world_size == 8 else 5):
        options = {"resident": 1 + seed % 5, "first_turn": -3 if seed % 2 else 0}
        machine = rows(world_size, hidden_size, form, one_shot, seed, **shape, **options)
        random_calls(machine, seed, 6)
        machine.run()


@pytest.mark.parametrize("kind", ["words", "one_shot", "two_shot"])
def test_calls_follow_each_other_before_hopper(kind: str) -> None:
    """Nothing in the kernel waits for the kernel before it, which has ended: launches are not programmatic."""
    for seed in range(3):
        options: dict[str, Any] = {"arch": 750, "resident": 4}
        machine = words(2, 72, LLAMA, seed, **options) if kind == "words" else None
        machine = machine or rows(2, 72, LLAMA, kind == "one_shot", seed, **options)
        random_calls(machine, seed, 6)
        machine.run()


@pytest.mark.parametrize("kind", ["words", "one_shot", "two_shot"])
def test_slots_overlap(kind: str) -> None:
    for seed in range(3):
        options: dict[str, Any] = {"slots": 2, "resident": 8}
        machine = words(3, 72, WHOLE, seed, **options) if kind == "words" else None
        machine = machine or rows(3, 72, WHOLE, kind == "one_shot", seed, **options)
        random_calls(machine, seed, 8, slots=2)
        machine.run()


def test_all_kernels_over_host_memory_add_up_in_the_same_order() -> None:
    """The new residual is the same to the bit whichever kernel serves a call, so ranks may change between them."""
    form = Form(FP32, residual_dtype=FP32, weight_dtype=FP32, bias=True)
    machines = [
        words(4, 272, form, 0, data_seed=3),
        rows(4, 272, form, True, 1, data_seed=3),
        rows(4, 272, form, False, 2, data_seed=3, depth=0),
    ]
    calls = [machine.call(5, 2) for machine in machines]
    for machine in machines:
        machine.run()
    for call in calls[1:]:
        assert (call.ranks[0].residual_out == calls[0].ranks[0].residual_out).all()


# --- a rank that is not there ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["words", "one_shot", "two_shot"])
@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_does_not_launch_is_reported(silent: int, kind: str) -> None:
    options = {"spin_limit": 20}
    machine = words(3, 72, LLAMA, 0, **options) if kind == "words" else None
    machine = machine or rows(3, 72, LLAMA, kind == "one_shot", 0, **options)
    machine.call(MOST_TOKENS, 2)
    machine.call(MOST_TOKENS, 2, skip=[silent])
    machine.emulator.run()
    for rank, status in enumerate(machine.slots[0].status):
        if rank == silent:
            assert not status.any()
        else:
            assert (status[:2, silent] > 0).all(), "every CTA misses its rows"
            assert not status[2:].any() and not status[:, rank].any()
    machine.check_margins()
