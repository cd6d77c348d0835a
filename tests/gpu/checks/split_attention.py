"""Checks that attention of a cut sequence is what it was: prefix and suffix as the split makes them, by the GPU's kernels.

A graph with one attention operator is split and run; both halves' rows may have 1.1 times the error of the unsplit operator
against float64. A causal mask that is aligned to the wrong corner is wrong by more than a hundredfold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import make_fx

from tw_compile.harness.problems import Context
from tw_compile.passes.split import SplitReport, TokenAxis, find_token_axis, split_tokens
from tw_compile.testing.error_budget import budget, relative_error

aten = torch.ops.aten
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

CUTS = ((1, 2), (1, 63), (62, 63), (500, 1000), (1024, 1025), (640, 2048), (100, 4090), (4000, 4100))
"""Tokens of the first half, and of both. Halves of cuDNN's that see at most ``planning.suffix.MOST_KEYS`` keys are our own
kernel's, of blocks of either size; the last suffix is merged."""

_WINDOW = 100
_ALIGNMENT = 16


@dataclass(frozen=True)
class Kernel:
    """An operator as SDPA chooses it, ``[batch, heads, tokens, head_dim]``, for which heads and dtypes it is checked."""

    call: Attention
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    heads: tuple[tuple[int, int], ...] = ((4, 4), (8, 2), (4, 1))
    head_dims: tuple[int, ...] = (64, 80, 96, 128)
    window: int | None = None


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return aten._scaled_dot_product_flash_attention.default(query, key, value, 0.0, True)[0]


def _cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return aten._scaled_dot_product_cudnn_attention.default(query, key, value, None, False, 0.0, True)[0]


def _efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return aten._scaled_dot_product_efficient_attention.default(query, key, value, None, False, 0.0, True)[0]


def _efficient_window(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    mask = sliding_window(query)
    return aten._scaled_dot_product_efficient_attention.default(query, key, value, mask, False)[0]


def sliding_window(query: torch.Tensor) -> torch.Tensor:
    """An additive mask as SDPA hands it to the kernel: rows begin at aligned addresses."""
    batch, heads, tokens, _ = query.shape
    positions = torch.arange(tokens, device=query.device)
    keys, queries = positions.unsqueeze(0), positions.unsqueeze(1)
    seen = (keys <= queries) & (keys > queries - _WINDOW)
    numbers = [torch.full([], number, dtype=query.dtype, device=query.device) for number in (0.0, -math.inf)]
    padded = aten.constant_pad_nd.default(torch.where(seen, *numbers), [0, -tokens % _ALIGNMENT])
    return aten.slice.Tensor(padded, -1, 0, tokens).expand(batch, heads, tokens, tokens)


KERNELS = {
    "flash": Kernel(_flash),
    "cudnn": Kernel(_cudnn, head_dims=(64, 128)),
    "efficient": Kernel(_efficient, (torch.float32, torch.bfloat16), ((4, 4),)),
    "efficient_window": Kernel(_efficient_window, heads=((4, 4),), head_dims=(64, 128), window=_WINDOW),
}


def split_attention(ctx: Context, kernel: str) -> None:
    """All heads and head dims of a kernel, each at sizes with one token in a half, odd and even ones, and whole blocks."""
    used = KERNELS[kernel]
    for dtype in used.dtypes:
        for heads, kv_heads in used.heads:
            for head_dim in used.head_dims:
                for first, tokens in CUTS:
                    compare(ctx, used, dtype, (heads, kv_heads, head_dim), first, tokens)


def compare(
    ctx: Context, kernel: Kernel, dtype: torch.dtype, sizes: tuple[int, int, int], first: int, tokens: int
) -> None:
    """One cut of ``tokens`` tokens; ``sizes`` are heads, heads of keys and values, and head_dim."""
    heads, kv_heads, head_dim = sizes
    generator = ctx.generator(tokens, first, *sizes)
    rows = [
        torch.randn((1, tokens, count * head_dim), generator=generator, device=ctx.device).to(dtype)
        for count in (heads, kv_heads, kv_heads)
    ]

    def whole(*given: torch.Tensor) -> torch.Tensor:
        turned = [aten.permute.default(one.view(1, tokens, -1, head_dim), [0, 2, 1, 3]) for one in given]
        out = kernel.call(turned[0], turned[1], turned[2])
        return aten.permute.default(out, [0, 2, 1, 3]).reshape(1, tokens, heads * head_dim)

    label = f"{dtype}, {heads} and {kv_heads} heads of {head_dim}, {first} of {tokens} tokens"
    graph = make_fx(whole, tracing_mode="fake")(*rows).graph
    graph.eliminate_dead_code()  # results of the operator that nothing reads
    axis = find_token_axis(graph, tokens=tokens)
    assert isinstance(axis, TokenAxis), axis
    report = split_tokens(graph, first, axis=axis)
    ctx.expect(isinstance(report, SplitReport) and not report.joins, f"{label}: {report}")
    got = fx.Interpreter(torch.nn.Module(), graph=graph).run(*rows)
    base, want = whole(*rows), reference(rows, sizes, kernel.window)
    for name, half in (("prefix", slice(0, first)), ("suffix", slice(first, tokens))):
        error, allowed = relative_error(got[:, half], want[:, half]), budget(base[:, half], want[:, half])
        ctx.expect(error <= allowed, f"{label}, {name}: error {error:.3e}, allowed {allowed:.3e}")
    ctx.counts["cuts"] = ctx.counts.get("cuts", 0) + 1


def reference(rows: list[torch.Tensor], sizes: tuple[int, int, int], window: int | None) -> torch.Tensor:
    """Causal attention in float64, ``[1, tokens, heads * head_dim]``; with a window, of the last ``window`` tokens."""
    heads, kv_heads, head_dim = sizes
    tokens = rows[0].shape[1]
    query, key, value = (one.double().view(tokens, -1, head_dim).transpose(0, 1) for one in rows)
    key, value = (one.repeat_interleave(heads // kv_heads, 0) for one in (key, value))
    places = torch.arange(tokens, device=query.device)
    behind = places.unsqueeze(1) - places
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    scores = (query @ key.transpose(1, 2) / math.sqrt(head_dim)).masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1).reshape(1, tokens, heads * head_dim)
