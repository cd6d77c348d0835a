"""Graphs of a norm that is quantised to float8 behind an all_reduce, node by node."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
import torch.fx as fx
from graph_builder import GraphBuilder, aten, prims

from tw_compile import Config, TWCompilePass, collect_reports
from tw_compile.kernels.collective.spec import FP8
from tw_compile.report import Site

T, H, SCALE = 6, 16, 0.03
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def vllm_operators() -> Iterator[None]:
    """Operators of the names and signatures of vLLM 0.24's, which compute what its kernels do."""

    def quantised(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (rows.float() * scale.reciprocal()).clamp(-448, 448).to(FP8)

    def normed(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        rows = rows.float()
        return (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon)).to(weight.dtype) * weight

    def quant(result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, group_shape: object = None) -> None:
        result.copy_(quantised(input, scale))

    def norm(
        result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, epsilon: float
    ) -> None:
        result.copy_(quantised(normed(input, weight, epsilon), scale))

    def add_norm(
        result: torch.Tensor,
        input: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        epsilon: float,
    ) -> None:
        residual.add_(input)
        result.copy_(quantised(normed(residual, weight, epsilon), scale))

    def by_made_scales(
        rows: torch.Tensor, scale: torch.Tensor, result: torch.Tensor, columns: int, least: float, amax: float = 0.0
    ) -> None:
        groups = rows.float().unflatten(-1, (-1, columns))
        made = (groups.abs().amax(-1).clamp_min(amax) / 448).clamp_min(least)
        scale.copy_(made)
        result.copy_((groups / made.unsqueeze(-1)).clamp(-448, 448).flatten(-2))

    def per_token(result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, scale_ub: object) -> None:
        by_made_scales(input, scale, result, input.shape[-1], 1 / (448 * 512))

    def per_group(
        input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor, group_size: int, eps: float, *rest: object
    ) -> None:
        by_made_scales(input, output_s, output_q, group_size, 0.0, eps)

    def norm_per_token(
        result: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        epsilon: float,
        scale_ub: object,
        residual: torch.Tensor | None,
        group_size: int | None = None,
        is_scale_transposed: bool = False,
    ) -> None:
        rows = input if residual is None else residual.add_(input)
        columns = group_size or input.shape[-1]
        by_made_scales(normed(rows, weight, epsilon), scale, result, columns, 1 / (448 * 512))

    made = (
        "Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, Tensor? scale_ub, Tensor!? residual"
    )
    flags = "bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned"
    groups = "int group_size, float eps, float fp8_min, float fp8_max"
    rest = "Tensor weight, Tensor scale, float epsilon) -> ()"
    with torch.library._scoped_library("_C", "FRAGMENT") as library:
        for schema, function in (
            (
                "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
                quant,
            ),
            (f"rms_norm_static_fp8_quant(Tensor! result, Tensor input, {rest}", norm),
            (f"fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, {rest}", add_norm),
            (
                "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
                per_token,
            ),
            (
                f"per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, {groups}, {flags}) -> ()",
                per_group,
            ),
            (f"rms_norm_dynamic_per_token_quant({made}) -> ()", norm_per_token),
            (f"rms_norm_per_block_quant({made}, int group_size, bool is_scale_transposed) -> ()", norm_per_token),
        ):
            library.define(schema)
            library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
        yield


class Quant(GraphBuilder):
    """A site whose norm gives ``hidden``, the sum ``h`` before it, and ways to quantise."""

    def __init__(self, dtype: torch.dtype = BF16, form: str = "torch") -> None:
        super().__init__()
        self.dtype, self.form = dtype, form

    def site(self) -> fx.Node:
        self.h = self.add(self.input(T, H, dtype=self.dtype), self.all_reduce(self.input(T, H, dtype=self.dtype)))
        weight = self.input(H, dtype=self.dtype)
        return self.rms_norm(self.h, None if self.form == "no_weight" else weight, self.form)

    def scale_input(self, *shape: int, dtype: torch.dtype = F32) -> fx.Node:
        return self.input(*shape, dtype=dtype)

    def functional(self, name: str, **arguments: object) -> fx.Node:
        target = getattr(torch.ops._C, name).default
        return self.call(torch.ops.higher_order.auto_functionalized, target, **arguments)

    def buffer(self) -> fx.Node:
        return self.call(aten.empty.memory_format, [T, H], dtype=FP8, device=self.device)

    def part(self, of: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, of, index)

    def divided(self, y: fx.Node, scale: object) -> fx.Node:
        return self.call(aten.div.Tensor, y, scale)

    def multiplied(self, y: fx.Node, scale: object) -> fx.Node:
        return self.call(aten.mul.Tensor, y, scale)

    def inverse(self, scale: fx.Node) -> fx.Node:
        return self.call(aten.reciprocal.default, scale)

    def clamped(self, y: fx.Node, low: float = -448.0, high: float = 448.0) -> fx.Node:
        return self.call(aten.clamp_max.default, self.call(aten.clamp_min.default, y, low), high)

    def rounded(self, y: fx.Node, dtype: torch.dtype = FP8) -> fx.Node:
        return self.call(prims.convert_element_type.default, y, dtype)

    def quantised(self, y: fx.Node, scale: object) -> fx.Node:
        return self.rounded(self.clamped(self.divided(self.cast(y, F32), scale)))


def fuse(graph: fx.Graph) -> list[Site]:
    with collect_reports() as reports:
        TWCompilePass(Config(strict=True))(graph)
    graph.lint()
    return reports[0].sites


def values(graph: fx.Graph, scale: float) -> list[torch.Tensor]:
    """Random values; what has one element is the scale, one norm of which is large enough to saturate."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for node in graph.nodes:
        if node.op == "placeholder":
            fake = node.meta["val"]
            random = torch.randn(fake.shape, generator=generator).to(fake.dtype)
            found.append(torch.full(fake.shape, scale) if fake.numel() == 1 else random)
    return found


def host_norm(b: Quant, scale: fx.Node) -> tuple[fx.Node, ...]:
    rest = {"weight": b.input(H, dtype=BF16), "scale": scale, "epsilon": 1e-5}
    wait = b.all_reduce(b.input(T, H, dtype=BF16))
    return b.part(b.functional("rms_norm_static_fp8_quant", result=b.buffer(), input=wait, **rest), 1), wait


def host_add_norm(b: Quant, scale: fx.Node, swapped: bool = False, stream: bool = True) -> tuple[fx.Node, ...]:
    rest = {"weight": b.input(H, dtype=BF16), "scale": scale, "epsilon": 1e-5}
    pair = b.all_reduce(b.input(T, H, dtype=BF16)), b.input(T, H, dtype=BF16)
    one, other = pair[::-1] if swapped else pair
    if swapped:
        buffer = b.call(aten.empty_like.default, one, dtype=FP8)
    else:
        tokens = b.call(aten.sym_size.int, one, 0)
        buffer = b.call(aten.empty.memory_format, [tokens, H], dtype=FP8, device=b.device)
    node = b.functional("fused_add_rms_norm_static_fp8_quant", result=buffer, input=one, residual=other, **rest)
    return (b.part(node, 1), b.part(node, 2)) if stream else (b.part(node, 1),)
