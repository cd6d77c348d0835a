"""push.cu and stream.cu in the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emulator.kernels import BF16, FP8, FP16, FP32, Form, PushMachine, StreamMachine

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
}


@pytest.mark.parametrize("one_shot", [True, False], ids=["one_shot", "two_shot"])
@pytest.mark.parametrize("form", FORMS)
def test_push(form: str, one_shot: bool) -> None:
    asked = FORMS[form]
    if one_shot and asked.residual == "sharded":
        asked = replace(asked, residual="whole")
    if one_shot and asked.residual_out == "sharded":
        asked = replace(asked, residual_out="replicated")
    for seed, world_size in enumerate((2, 3, 4)):
        machine = PushMachine(world_size, 272, asked, one_shot=one_shot, most_tokens=7, seed=seed)
        for tokens, max_ctas in ((5, 2), (1, 2), (7, 3), (2, 1)):
            machine.call(tokens, max_ctas)
        machine.run()


@pytest.mark.parametrize("private_output", [True, False], ids=["private", "slot"])
@pytest.mark.parametrize("form", FORMS)
def test_stream(form: str, private_output: bool) -> None:
    for seed, world_size in enumerate((2, 3)):
        machine = StreamMachine(
            world_size,
            272,
            FORMS[form],
            staged=bool(seed) or private_output,
            private_output=private_output,
            most_tokens=13,
            seed=seed,
        )
        machine.call(13, 2)
        machine.run()
