"""The subjects that are compiled in several ways: a stack of layers, or a model from its token ids on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from tw_compile.benchmark.layer.spec import LayerSpec
from tw_compile.harness.measure import GraphTimer, LoopTimer, Timer
from tw_compile.harness.problems import Context
from tw_compile.models.decoder import Decoder
from tw_compile.models.reference import to_double

HiddenAndResidual = tuple[torch.Tensor, torch.Tensor]


class CompiledRun:
    """One run of a compiled subject. ``outputs`` are those of the last run; replays of a captured run write to them."""

    def __init__(self, compiled: Any, inputs: torch.Tensor) -> None:
        self._compiled = compiled
        self._inputs = inputs
        self.outputs: HiddenAndResidual | None = None

    def __call__(self) -> HiddenAndResidual:
        self.outputs = None  # freed before the next outputs are allocated
        self.outputs = self._compiled(self._inputs)
        return self.outputs


class Subject(nn.Module):
    """Part of a decoder, sharded over the default process group. It returns the normalised output and the residual stream.

    This class is a stack of layers, and takes the residual stream. It has no embedding and no head, so every all_reduce is
    followed by a residual add and a norm, as in the middle of a model. The whole stack is captured in one CUDA graph, and the
    time of a layer is the stack's time divided by the number of layers. A stack's time also has one norm, the table of the
    rotary embedding, and what a split exposes at its two ends, for all variants alike. The difference of two depths would leave
    these out, but is as noisy as both depths together, and everything would be compiled twice.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    @property
    def hidden_size(self) -> int:
        return self.decoder.config.hidden_size

    def in_float64(self) -> Subject:
        """The same subject in float64."""
        return type(self)(to_double(self.decoder))

    def inputs(self, spec: LayerSpec, ctx: Context, tokens: int) -> torch.Tensor:
        """Random inputs, the same on every rank."""
        shape = (spec.batch, tokens // spec.batch, self.hidden_size)
        generator = ctx.generator(spec.seed, tokens)
        return torch.randn(shape, generator=generator, device=ctx.device).to(getattr(torch, spec.dtype))

    def forward(self, residual: torch.Tensor) -> HiddenAndResidual:
        """``[batch, seq, hidden]`` -> two of the same shape."""
        residual = self.decoder.model(inputs_embeds=residual, use_cache=False).last_hidden_state
        return self.decoder.norm(residual), residual

    def parts(self, spec: LayerSpec) -> int:
        """The number by which reports divide the time of a run: the layers of a stack, 1 for a whole model."""
        return spec.layers

    def timer(self, run: CompiledRun) -> Timer:
        return GraphTimer([run], 1) if next(self.parameters()).is_cuda else LoopTimer([run], 1)


class Model(Subject):
    """A model from token ids through the first layers to the final norm, with the embedding's all_reduce."""

    def inputs(self, spec: LayerSpec, ctx: Context, tokens: int) -> torch.Tensor:
        shape = (spec.batch, tokens // spec.batch)
        generator = ctx.generator(spec.seed, tokens)
        return torch.randint(self.decoder.config.vocab_size, shape, generator=generator, device=ctx.device)

    def forward(self, ids: torch.Tensor) -> HiddenAndResidual:
        """``[batch, seq]`` -> two of ``[batch, seq, hidden]``."""
        return self.decoder(ids)

    def parts(self, spec: LayerSpec) -> int:
        return 1
