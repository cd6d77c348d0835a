"""Kernels that make the scales of their float8 results: codes and scales are those of the operator, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from emulator.broken import broken_copy, check_caught
from emulator.kernels import ALGORITHMS, BF16, FP8, FP32, Form, Machine
from emulator.test_host_kernels import rows, words
from emulator.test_kernels import push, stream
from tw_compile.kernels.algorithms.stream.stream import Shape

HIDDEN, MOST_TOKENS = 384, 9
MIN_OF_TOKENS, MIN_OF_GROUPS = 1 / (448 * 512), 1e-10 / 448
PER_TOKEN = Form(
    residual="sharded", residual_out="sharded", residual_dtype=FP32, cast=BF16, hidden_dtype=FP8,
    scale_columns=HIDDEN, min_scale=MIN_OF_TOKENS, divides=True,
)  # fmt: skip
PER_GROUP = Form(residual=None, bias=True, hidden_dtype=FP8, scale_columns=128, min_scale=MIN_OF_GROUPS, divides=True)
FORMS = {
    "token": PER_TOKEN,
    "token, times the inverse": Form(hidden_dtype=FP8, scale_columns=HIDDEN, min_scale=MIN_OF_TOKENS),
    "group": PER_GROUP,
    "group of 64": Form(residual=None, residual_out="none", hidden_dtype=FP8, scale_columns=64, min_scale=1e-3),
    "layer_norm, token": Form(hidden_dtype=FP8, scale_columns=HIDDEN, min_scale=1e-6, epilogue="layer_norm"),
    "layer_norm, group": Form(hidden_dtype=FP8, scale_columns=128, min_scale=1e-6, epilogue="layer_norm"),
}
Make = Callable[..., Machine]


KERNELS: dict[str, Make] = {
    "push_one_shot": partial(push, 3, HIDDEN, one_shot=True, threads=64),
    "push_two_shot": partial(push, 3, HIDDEN, one_shot=False, threads=64),
    "push_one_shot, clusters": partial(push, 3, HIDDEN, one_shot=True, threads=32, cluster=4),
    "push_two_shot, pairs": partial(push, 3, HIDDEN, one_shot=False, threads=32, cluster=2),
    "host_words": partial(words, 3, HIDDEN, threads=64),
    "host_one_shot": partial(rows, 3, HIDDEN, one_shot=True, threads=64),
    "host_two_shot": partial(rows, 3, HIDDEN, one_shot=False, threads=64),
    "host_two_shot, no stages": partial(rows, 3, HIDDEN, one_shot=False, threads=32, depth=0, behind=1),
    "stream": partial(stream, 3, HIDDEN, shape=Shape(64, 2, 2)),
    "stream, one warp a row": partial(stream, 2, HIDDEN, shape=Shape(32, 2, 2), staged=False),
    "stream in slot": partial(stream, 3, HIDDEN, shape=Shape(64, 1, 2, 2), staged=False, private_output=False),
}


def call(machine: Any, form: Form, tokens: int, max_sms: int) -> None:
    """With a row of zeros, and rows of very different sizes."""
    xs = machine.random_x(tokens)
    sizes = torch.tensor([10.0 ** -(row % 5) for row in range(tokens)]).unsqueeze(-1)
    for x in xs:
        x.copy_(x.float() * sizes)
        x[-1] = 0
    machine.call(tokens, max_sms, xs=xs)


def run(
    make: Make, form: Form, seed: int, calls: Sequence[tuple[int, int]] = ((5, 2), (1, 1), (MOST_TOKENS, 3))
) -> None:
    machine: Any = make(form=form, seed=seed)
    for tokens, max_sms in calls:
        call(machine, form, tokens, max_sms)
    machine.run()


@pytest.mark.parametrize("kernel", ["push_two_shot", "host_two_shot"])
@pytest.mark.parametrize("form", [PER_TOKEN, PER_GROUP], ids=["token", "group"])
def test_partial_sums_may_travel_in_codes(form: Form, kernel: str) -> None:
    """The results are codes already, and stay as they are."""
    run(KERNELS[kernel], replace(form, wire="int8"), seed=1)


@pytest.mark.few(12)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_codes_and_scales_are_the_operators(form: str, kernel: str) -> None:
    run(KERNELS[kernel], FORMS[form], seed=1)


BROKEN: dict[str, tuple[str, str, str, str]] = {
    "scale of values that were rounded to bf16": (
        "token, times the inverse",
        "scales.cuh",
        "for (float value : values) largest",
        "for (float value : values) value = as_float(pack_bf16(value, value) << 16), largest",
    ),
    "scale of another row": (
        "token",
        "scales.cuh",
        "row * SCALES;",
        "(row + 1 < tokens ? row + 1 : 0) * SCALES;",
    ),
    "no least scale": (
        "group",
        "scales.cuh",
        "return greatest(largest / 448.0f, MIN_SCALE);",
        "return largest / 448.0f;",
    ),
    "scale of a thread's columns": ("group", "scales.cuh", "int mask = SCALE_COLUMNS / 16;", "int mask = 0;"),
    "scale of a warp's columns": ("group", "scales.cuh", "int mask = SCALE_COLUMNS / 16;", "int mask = 16;"),
    "scale of one warp of a row": ("token", "scales.cuh", "if constexpr (WARPS > 1)", "if constexpr (WARPS > 99)"),
    "largest value, not largest absolute value": (
        "token",
        "scales.cuh",
        "as_bits(value) & 0x7fffffffu",
        "as_bits(value)",
    ),
    "scales over the last rows": (
        "token",
        "scales.cuh",
        "(uint64_t)tokens * HIDDEN + 15",
        "(uint64_t)(tokens - 1) * HIDDEN + 15",
    ),
    "no scale for what a peer computed": (
        "token",
        "push.cu",
        "keep(row_of(section), column, got[section]);",
        "store(p.hidden + row_of(section) * HIDDEN + column, Eight<e4m3>{{got[section].codes[0], got[section].codes[1]}});",
    ),
    "maxima before all have arrived": ("token", "scales.cuh", "    barrier_sync(barrier, WARPS * 32);\n", ""),
}


BROKEN_CLUSTERS: dict[str, tuple[str, str, str]] = {
    "does not wait for maxima of the cluster": (
        "token",
        "share(warp_max(value), maxima, thread, barrier, phase_of_maxima);",
        "share(warp_max(value), maxima, thread, barrier, phase_of_maxima ^ 1);",
    ),
    "waits for maxima of another row": ("token", "phase_of_maxima ^= 1;", ""),
    "maxima over the sums": ("token", "(float*)(sets + 2 * WARPS)", "(float*)(sets + WARPS)"),
    "maxima count at the mbarrier of sums": ("token", "barriers + 2;", "barriers + next;"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_copies_of_push_are_caught(tmp_path: Path, name: str) -> None:
    form, file, old, new = BROKEN[name]

    def run_copy(source: Path, seed: int) -> None:
        options: dict[str, Any] = {"sources": source.parent, "stall_limit": 20_000, "resident": 2 + seed % 5}
        run(partial(KERNELS["push_two_shot"], **options), FORMS[form], seed)

    copy = broken_copy(tmp_path, ALGORITHMS / "push" / "push.cu", file, ((old, new),))
    check_caught(run_copy, copy, range(10))


@pytest.mark.parametrize("name", BROKEN_CLUSTERS)
def test_broken_copies_of_clusters_are_caught(tmp_path: Path, name: str) -> None:
    form, old, new = BROKEN_CLUSTERS[name]

    def run_copy(source: Path, seed: int) -> None:
        options: dict[str, Any] = {"sources": source.parent, "stall_limit": 20_000, "resident": 2 * (2 + seed % 5)}
        run(partial(KERNELS["push_two_shot, pairs"], **options), FORMS[form], seed)

    copy = broken_copy(tmp_path, ALGORITHMS / "push" / "push.cu", "push.cu", ((old, new),))
    check_caught(run_copy, copy, range(10))
