"""push.cu and stream.cu in the emulator."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from emulator.kernels import BF16, FP8, FP16, FP32, BarrierMachine, Form, PushMachine, StreamMachine, partial_sums
from tw_compile.kernels.algorithms.push.push import threads_for
from tw_compile.kernels.algorithms.stream.stream import Shape, shape_for

FORMS = {
    "llama": Form(residual="sharded", residual_out="sharded", residual_dtype=FP32, cast=BF16),
    "first": Form(residual=None, residual_out="sharded", residual_dtype=FP32),
    "last": Form(residual="sharded", residual_out="none", residual_dtype=FP32),
    "whole": Form(bias=True, scale=0.5),
    "gemma": Form(weight_offset=1.0, weight_dtype=FP32),
    "no_weight": Form(weight_dtype=None, residual_out="none"),
    "fp16": Form(FP16, residual_dtype=FP16, weight_dtype=FP16),
    "fp32": Form(FP32, residual_dtype=FP32, weight_dtype=FP32),
    "fp8": Form(residual="sharded", residual_out="sharded", residual_dtype=FP32, hidden_dtype=FP8),
    "fp8_whole": Form(hidden_dtype=FP8),
    "layer_norm": Form(bias=True, scale=0.5, epilogue="layer_norm"),
    "layer_norm_bias": Form(
        residual="sharded", residual_out="sharded", residual_dtype=FP32, epilogue="layer_norm", norm_bias=True
    ),
    "layer_norm_bias_fp8": Form(bias=True, hidden_dtype=FP8, epilogue="layer_norm", norm_bias=True),
    "layer_norm_bias_cast": Form(cast=BF16, residual_out="none", epilogue="layer_norm", norm_bias=True),
    "bias_alone": Form(weight_dtype=None, norm_bias=True),
    "layer_norm_fp32": Form(FP32, residual_dtype=FP32, weight_dtype=FP32, epilogue="layer_norm"),
    "layer_norm_no_weight": Form(weight_dtype=None, residual_out="none", epilogue="layer_norm"),
}
LLAMA, WHOLE = FORMS["llama"], FORMS["whole"]
MOST_TOKENS = 13
ONE_AND_TWO_SHOT = pytest.mark.parametrize("one_shot", [True, False], ids=["one_shot", "two_shot"])
OUTPUTS = pytest.mark.parametrize("private_output", [True, False], ids=["private", "slot"])


def push(world_size: int, hidden_size: int, form: Form, one_shot: bool, seed: int, **options: Any) -> PushMachine:
    form = form.for_one_shot() if one_shot else form
    options.setdefault("threads", 64)
    return PushMachine(world_size, hidden_size, form, one_shot=one_shot, most_tokens=MOST_TOKENS, seed=seed, **options)


def stream(world_size: int, hidden_size: int, form: Form, seed: int, **options: Any) -> StreamMachine:
    chosen: dict[str, Any] = {"staged": True, "private_output": True, "shape": Shape(32, 2, 2)} | options
    return StreamMachine(world_size, hidden_size, form, most_tokens=MOST_TOKENS, seed=seed, **chosen)


def random_calls(machine: PushMachine | BarrierMachine, seed: int, count: int, slots: int = 1) -> None:
    """Grids of all sizes after each other: one token, fewer than ranks, more rows than CTAs."""
    random = Random(seed)
    for _ in range(count):
        machine.call(random.choice((1, 2, 3, 5, 8, MOST_TOKENS)), random.randint(1, 4), slot=random.randrange(slots))


# --- every form of the operator --------------------------------------------------------------------------------------


@pytest.mark.full
@ONE_AND_TWO_SHOT
@pytest.mark.parametrize("form", FORMS)
def test_push_gives_what_the_operator_asks_for(form: str, one_shot: bool) -> None:
    for seed, world_size in enumerate((2, 3)):
        # 33 vectors of 8: one more than threads of one warp, half of what two have. Rows of float8 end 8 bytes off 16.
        machine = push(world_size, 264, FORMS[form], one_shot, seed, threads=32 * world_size - 32)
        for tokens, max_sms in ((5, 2), (1, 2), (7, 3), (MOST_TOKENS, 1)):
            machine.call(tokens, max_sms)
        machine.run()


@pytest.mark.full
@ONE_AND_TWO_SHOT
@pytest.mark.parametrize("form", FORMS)
def test_clusters_give_what_the_operator_asks_for(form: str, one_shot: bool) -> None:
    # Rows of which some threads have more than others, and rows of which all have as much.
    for seed, (world_size, cluster, hidden_size) in enumerate(((2, 2, 264), (3, 4, 264), (2, 2, 512), (2, 4, 1024))):
        given = {"threads": 32, "cluster": cluster, "resident": cluster * 3}
        machine = push(world_size, hidden_size, FORMS[form], one_shot, seed, **given)
        for tokens, max_sms in ((5, 8), (1, 4), (7, 12), (MOST_TOKENS, 4)):
            machine.call(tokens, max_sms)
        machine.run()


@pytest.mark.full
@OUTPUTS
@pytest.mark.parametrize("form", FORMS)
def test_stream_gives_what_the_operator_asks_for(form: str, private_output: bool) -> None:
    for seed, world_size in enumerate((2, 3)):
        options = {"staged": bool(seed) or private_output, "private_output": private_output}
        machine = stream(world_size, 272, FORMS[form], seed, shape=Shape(32 * world_size - 32, 2, 2), **options)
        for tokens, max_sms in ((5, 2), (1, 2), (MOST_TOKENS, 2)):
            machine.call(tokens, max_sms)
        machine.run()


# --- many calls, many schedules --------------------------------------------------------------------------------------


@ONE_AND_TWO_SHOT
@pytest.mark.parametrize("cluster", [2, 4])
def test_calls_of_clusters_follow_each_other(cluster: int, one_shot: bool) -> None:
    for seed in range(4):
        world_size, resident = 2 + seed % 3, cluster * (1 + seed)
        machine = push(world_size, 264, WHOLE, one_shot, seed, threads=32, cluster=cluster, resident=resident)
        random_calls(machine, seed, 8)
        machine.run()


@ONE_AND_TWO_SHOT
def test_clusters_have_the_bits_of_single_ctas(one_shot: bool) -> None:
    """As many threads hold a row in the same way, and partial sums are added in the same order."""
    xs = partial_sums(3, 5, 264, BF16, 7)
    results = []
    for cluster in (1, 2, 4):
        machine = push(3, 264, WHOLE, one_shot, 7, threads=128 // cluster, cluster=cluster, resident=8)
        call = machine.call(5, 8, xs=xs)
        machine.run()
        results.append(call.outputs())
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.full
@ONE_AND_TWO_SHOT
@pytest.mark.parametrize(
    ("world_size", "hidden_size", "threads", "form"),
    [
        (2, 264, 32, WHOLE),
        (3, 136, 32, LLAMA),
        (4, 72, 64, WHOLE),
        (5, 520, 32, FORMS["fp8_whole"]),
        (8, 72, 32, LLAMA),
    ],
)
def test_push_calls_follow_each_other(
    world_size: int, hidden_size: int, threads: int, form: Form, one_shot: bool
) -> None:
    for seed in range(3 if world_size == 8 else 6):
        machine = push(world_size, hidden_size, form, one_shot, seed, threads=threads, resident=1 + seed % 5)
        random_calls(machine, seed, 8)
        machine.run()


@pytest.mark.full
@pytest.mark.parametrize("staged", [True, False], ids=["staged", "in_slot"])
@OUTPUTS
@pytest.mark.parametrize(
    ("world_size", "hidden_size", "shape", "form"),
    [
        (2, 272, Shape(32, 2, 3), WHOLE),
        (3, 144, Shape(32, 3, 2), LLAMA),
        (4, 272, Shape(64, 1, 4, 2), WHOLE),
        (5, 784, Shape(32, 2, 2), FORMS["fp8_whole"]),
        (8, 80, Shape(32, 2, 2), LLAMA),
    ],
)
def test_stream_calls_follow_each_other(
    world_size: int, hidden_size: int, shape: Shape, form: Form, private_output: bool, staged: bool
) -> None:
    options: dict[str, Any] = {"shape": shape, "staged": staged, "private_output": private_output}
    for seed in range(3 if world_size == 8 else 6):
        # The barriers' count passes 2**32.
        machine = stream(world_size, hidden_size, form, seed, resident=1 + seed % 5, first_epoch=-5, **options)
        random_calls(machine, seed, 6)
        machine.run()


@ONE_AND_TWO_SHOT
def test_push_calls_follow_each_other_before_hopper(one_shot: bool) -> None:
    """Nothing in the kernel waits for the kernel before it, which has ended: launches are not programmatic."""
    for seed in range(6):
        machine = push(2 + seed % 3, 136, LLAMA, one_shot, seed, threads=32, arch=800, resident=1 + seed % 3)
        random_calls(machine, seed, 8)
        machine.run()


@ONE_AND_TWO_SHOT
def test_push_calls_of_several_launches(one_shot: bool) -> None:
    for seed in range(10):
        machine = push(3, 72, WHOLE, one_shot, seed, threads=32, most_rows=1 + seed % 2, resident=1 + seed % 3)
        random_calls(machine, seed, 4)
        machine.run()


def test_kernels_run_in_the_shapes_that_the_host_chooses() -> None:
    machine = push(2, 1048, WHOLE, False, 0, threads=threads_for(1048, 2))
    random_calls(machine, 0, 3)
    machine.run()
    chosen = shape_for(1008, 2, 2, 2, 2)
    assert chosen.groups > 1 and chosen.threads > 32
    other = stream(2, 1008, WHOLE, 0, shape=Shape(chosen.threads, chosen.groups // 2, 2))
    random_calls(other, 0, 3)
    other.run()


@ONE_AND_TWO_SHOT
def test_push_on_two_slots_at_once(one_shot: bool) -> None:
    for seed in range(10):
        machine = push(3, 72, LLAMA, one_shot, seed, threads=32, slots=2)
        random_calls(machine, seed, 8, slots=2)
        machine.run()


@OUTPUTS
def test_stream_on_two_slots_at_once(private_output: bool) -> None:
    for seed in range(10):
        machine = stream(3, 80, LLAMA, seed, slots=2, private_output=private_output, staged=bool(seed % 2))
        random_calls(machine, seed, 8, slots=2)
        machine.run()


# --- bits ------------------------------------------------------------------------------------------------------------


def test_schedule_does_not_change_a_bit() -> None:
    def results(seed: int) -> list[torch.Tensor]:
        found = []
        machines: list[PushMachine | StreamMachine] = [
            push(4, 264, LLAMA, True, seed, data_seed=7),
            push(4, 264, LLAMA, False, seed, data_seed=7),
            stream(4, 272, LLAMA, seed, data_seed=7),
        ]
        for machine in machines:
            random_calls(machine, 0, 3)
            machine.run()
            found += [output for call in machine.calls for output in call.outputs()]
        return found

    first = results(0)
    for seed in (1, 2, 3):
        for one, other in zip(first, results(seed), strict=True):
            assert torch.equal(one, other)


def test_kernels_add_up_in_the_same_order() -> None:
    """The new residual is the same to the bit whichever kernel serves a call, so ranks may change between them."""
    form = Form(FP32, residual_dtype=FP32, weight_dtype=FP32, bias=True)
    machines = [
        push(4, 272, form, True, 0, data_seed=3, threads=32),
        push(4, 272, form, False, 1, data_seed=3),
    ]
    calls = [machine.call(5, 2) for machine in machines]
    xs = [own.request.x for own in calls[0].ranks]
    streaming = stream(4, 272, form, 2, data_seed=3)
    calls.append(streaming.call(5, 2))
    for machine in (*machines, streaming):
        machine.run()
    assert all(torch.equal(own.request.x, x) for own, x in zip(calls[2].ranks, xs, strict=True))
    for call in calls[1:]:
        assert torch.equal(call.ranks[0].residual_out, calls[0].ranks[0].residual_out)


@ONE_AND_TWO_SHOT
@pytest.mark.parametrize("form", ["llama", "whole", "fp16", "fp32", "fp8"])
def test_push_takes_every_value(form: str, one_shot: bool) -> None:
    """NaN and inf stay what they are, on all ranks alike, and no value is taken for a word that has not arrived."""
    asked = FORMS[form]
    xs = partial_sums(3, 8, 264, asked.dtype, 0)
    for column, word in enumerate((0x7FFF, 0xFFFF, 0x7F81, 0xFF81)):  # NaNs of 16 bits, and as upper halves of 32
        word = word - 0x10000 if word > 0x7FFF else word
        xs[column % 3].view(torch.int16)[0, 40 * column + 1] = word
    xs[0][1, 3] = xs[1][1, 3] = float("inf")  # an infinite sum
    xs[0][2, 3], xs[2][2, 3] = float("inf"), -float("inf")  # NaN by addition
    for rank in range(3):
        xs[rank][3] = -0.0
        xs[rank][4] = torch.tensor([0.0, -0.0]).repeat(132)
        xs[rank][5] = torch.tensor([-0.0, 0.0]).repeat(132)
    for seed in range(2):
        machine = push(3, 264, asked, one_shot, seed)
        for _ in range(4):
            call = machine.call(8, 3, xs=xs)
        machine.run()
        hidden = call.ranks[0].hidden.float()
        assert hidden[0].isnan().all() and hidden[1].isnan().any() and hidden[2].isnan().all()
        assert not hidden[3:].isnan().any()


@ONE_AND_TWO_SHOT
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_push_sends_residuals_that_are_negative_zeros(dtype: torch.dtype, one_shot: bool) -> None:
    form = Form(residual=None, residual_dtype=dtype, scale=-0.5)
    for seed in range(2):
        machine = push(3, 72, form, one_shot, seed, threads=32)
        xs = partial_sums(3, 5, 72, BF16, seed)
        for x in xs:
            x[:3] = 0.0
            x[1:3, 1::2] = 1.0  # words of one zero and one number
        for _ in range(4):
            machine.call(5, 2, xs=xs)
        machine.run()


@pytest.mark.parametrize("kind", ["one_shot", "two_shot", "stream"])
def test_layer_norm_of_rows_whose_mean_is_large(kind: str) -> None:
    """Squares of such rows differ in digits that float32 does not have."""
    form = FORMS["layer_norm_fp32"]
    xs = [x + 1000.0 for x in partial_sums(3, 5, 272, FP32, 0)]
    options: dict[str, Any] = {"threads": 32}
    machine = stream(3, 272, form, 0) if kind == "stream" else push(3, 272, form, kind == "one_shot", 0, **options)
    call = machine.call(5, 2, xs=xs)
    machine.emulator.run()
    for own in call.ranks:
        torch.testing.assert_close(own.hidden.double(), call.hidden, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("hidden_size", "threads", "cluster"),
    [
        (256, 32, 1),
        (768, 96, 1),  # three warps
        (1536, 64, 1),  # three vectors a thread
        (1024, 32, 4),
        (4352, 544, 1),  # 17 warps: two for each lane of half a warp, or one, or none
        (8192, 1024, 1),
    ],
)
def test_layer_norm_of_rows_that_threads_have_equal_parts_of(hidden_size: int, threads: int, cluster: int) -> None:
    """Rows whose mean is large, and rows of which one thread, warp or half is far from all the rest."""
    form = Form(FP16, residual_dtype=FP32, weight_dtype=FP16, epilogue="layer_norm")
    xs = partial_sums(2, 6, hidden_size, FP16, 0)
    for x in xs:
        x[0] += 1000.0
        x[1, :8] += 1000.0
        x[2, 8:16] += 1000.0
        x[3, : hidden_size // 2] += 1000.0
        x[4, :256] += 1000.0
        x[4, -1] -= 5000.0
    machine = push(2, hidden_size, form, True, 0, threads=threads, cluster=cluster, resident=2 * cluster)
    call = machine.call(6, 2 * cluster, xs=xs)
    machine.emulator.run()
    for own in call.ranks:
        torch.testing.assert_close(own.hidden.double(), call.hidden, rtol=2**-10, atol=2e-3)


# --- a rank that is not there ----------------------------------------------------------------------------------------


@ONE_AND_TWO_SHOT
@pytest.mark.parametrize("silent", [0, 2])
def test_push_reports_a_rank_that_does_not_launch(silent: int, one_shot: bool) -> None:
    machine = push(3, 72, LLAMA, one_shot, 0, threads=32, spin_limit=20)
    machine.call(MOST_TOKENS, 2)
    machine.call(MOST_TOKENS, 2, skip=[silent])
    machine.emulator.run()
    for rank, status in enumerate(machine.slots[0].status):
        if rank == silent:
            assert not status.any()
        else:
            assert status[:2, silent].tolist() == [1, 1], "every CTA misses its rows first"
            assert not status[2:].any() and not status[:, rank].any()
    machine.check_margins()


@OUTPUTS
def test_stream_reports_a_rank_that_does_not_launch(private_output: bool) -> None:
    machine = stream(3, 80, LLAMA, 0, spin_limit=20, private_output=private_output)
    machine.call(MOST_TOKENS, 2)
    machine.call(MOST_TOKENS, 2, skip=[1])
    machine.emulator.run()
    expected = torch.zeros_like(machine.slots[0].status[0])
    expected[:2, 1] = 1
    for rank, status in enumerate(machine.slots[0].status):
        assert torch.equal(status, expected if rank != 1 else torch.zeros_like(expected))
    machine.check_margins()
