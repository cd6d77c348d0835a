"""Checks of a model that is cut at attention into CUDA graphs, which hand each other a rank's rows of the residual."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.fx as fx

from gpu.checks.stress import new_counter
from tw_compile import Config, TWCompilePass, compat
from tw_compile.current import current_gate
from tw_compile.harness.problems import BF16, Context, expect_same_on_all_ranks
from tw_compile.kernels.collective import residual_seam
from tw_compile.kernels.collective.residual_seam import enter_residual, leave_residual
from tw_compile.passes.reasons import HostAttention
from tw_compile.passes.split import HostGraph
from tw_compile.testing.error_budget import budget, relative_error

HIDDEN, LAYERS, STEPS = 1024, 4, 400
SIZES = ((8, "off"), (385, "off"), (385, "160"))
"""Tokens, and how many of them are in the first half. Eight go by one-shot, where there is such a kernel."""
_VALUES = 4

Step = Callable[[], None]


def norm(h: torch.Tensor) -> torch.Tensor:
    wide = h.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(h.dtype)


def first(start: torch.Tensor) -> torch.Tensor:
    return leave_residual(start, start.shape[0], group_name(), False, [start])


def piece(left: torch.Tensor, attended: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, residual = _sums(left, attended, *weights[:2])
    query = hidden @ weights[2]
    return leave_residual(residual, residual.shape[0], group_name(), False, [query]), query


def last(left: torch.Tensor, attended: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return _sums(left, attended, *weights[:2])[0]


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def group_name() -> str:
    return world().group_name


def _sums(
    left: torch.Tensor, attended: torch.Tensor, out: torch.Tensor, mlp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    residual = enter_residual(left, group_name())
    residual = residual + funcol.all_reduce(attended @ out, "sum", world())
    residual = residual + funcol.all_reduce(norm(residual) @ mlp, "sum", world())
    return norm(residual), residual


def compiled(function: Any, tokens: int, options: dict[str, Any], seen: list[fx.Graph]) -> Any:
    """``function``, compiled as a host compiles what it has cut out of a model. ``seen`` gets what the passes leave."""
    passes = TWCompilePass(Config(strict=True, **options))
    host = HostGraph((tokens, tokens), HostAttention.ELSEWHERE)

    def apply(graph: fx.Graph) -> None:
        passes.rewrite(graph, current_gate(passes.config), host)
        seen.append(graph)

    torch._dynamo.reset()
    return torch.compile(function, options={"post_grad_custom_post_pass": apply, "fx_graph_cache": False})


def pieces_in_graphs_of_their_own(ctx: Context, steps: int = STEPS, transport: str = "auto") -> None:
    """Replays of all graphs in turn have the bits of the compiled pieces, whose error is within budget, on all ranks.

    As in vLLM, the graphs share a pool of memory, nothing holds what a graph returns once the next one is captured, and
    attention runs between them.
    """
    for tokens, split in SIZES:
        _pieces(ctx, tokens, {"split": split, "transport": transport}, ctx.calls(steps))
    ctx.counts["steps"] = len(SIZES) * ctx.calls(steps)


def _pieces(ctx: Context, tokens: int, options: dict[str, Any], steps: int) -> None:
    def drawn(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(*shape, generator=ctx.generator(seed, tokens), device=ctx.device).to(BF16)

    weights = drawn(LAYERS, 2, ctx.world_size, HIDDEN, HIDDEN, seed=1) / HIDDEN**0.5
    queries = drawn(LAYERS, HIDDEN, HIDDEN, seed=2) / HIDDEN**0.5
    values = [drawn(tokens, HIDDEN, seed=3 + number) for number in range(_VALUES)]
    of_rank = [(*pair, query) for pair, query in zip(weights[:, :, ctx.rank].unbind(), queries, strict=True)]
    start, attended, result = (torch.empty_like(values[0]) for _ in range(3))
    seen: list[fx.Graph] = []
    with torch.no_grad():
        between, at_the_end = (compiled(function, tokens, options, seen) for function in (piece, last))
        steps_of = {
            "unfused": _steps(first, piece, last, start, attended, result, of_rank),
            "compiled": _steps(first, between, at_the_end, start, attended, result, of_rank),
        }
        found = {name: [_run(run, start, value, result) for value in values] for name, run in steps_of.items()}
        _expect_rows_left(ctx, seen, split=options["split"] != "off")
        for value, got, unfused in zip(values, found["compiled"], found["unfused"], strict=True):
            exact = _exact(value.double(), weights.double(), queries.double())
            error, allowed = relative_error(got, exact), budget(unfused, exact)
            ctx.expect(error <= allowed, f"{tokens} tokens: error {error:.3e}, allowed {allowed:.3e}")
            expect_same_on_all_ranks(ctx, f"{tokens} tokens", got)
        replays = _captured(steps_of["compiled"], ctx.device)
        skew, wrong = random.Random(1 + ctx.rank), new_counter(ctx)
        for number in range(steps):
            if skew.random() < 0.2:
                compat.delay_stream(skew.randrange(200_000))
            got = _run(replays, start, values[number % _VALUES], result)
            wrong.add_((got != found["compiled"][number % _VALUES]).sum())
        ctx.expect(int(wrong) == 0, f"{tokens} tokens: {int(wrong)} wrong elements")
    ctx.expect(residual_seam.left_now is None, "a residual was left that nothing has entered")


def _steps(
    begin: Any,
    between: Any,
    at_the_end: Any,
    start: torch.Tensor,
    attended: torch.Tensor,
    result: torch.Tensor,
    weights: list[tuple[torch.Tensor, ...]],
) -> list[Step]:
    """A step of the model, piece by piece. A piece hands ``left`` to the next one, and attention's results to ``attended``."""
    left: list[torch.Tensor] = []

    def embed() -> None:
        left[:] = [begin(start)]
        attended.copy_(start.tanh())

    def run(of_layer: tuple[torch.Tensor, ...]) -> None:
        (given,) = left
        left.clear()
        handed_on, query = between(given, attended, *of_layer)
        left[:] = [handed_on]
        attended.copy_(query.tanh())

    def end() -> None:
        (given,) = left
        left.clear()
        result.copy_(at_the_end(given, attended, *weights[-1]))

    return [embed, *(lambda of_layer=of_layer: run(of_layer) for of_layer in weights[:-1]), end]


def _run(steps: list[Step], start: torch.Tensor, value: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    start.copy_(value)
    for step in steps:
        step()
    return result.clone()


def _captured(steps: list[Step], device: torch.device) -> list[Step]:
    """Each of ``steps`` as a CUDA graph; on a CPU as it is."""
    if device.type != "cuda":
        return steps
    pool, graphs = torch.cuda.graph_pool_handle(), []
    for step in steps:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            step()
        graphs.append(graph)
    return [graph.replay for graph in graphs]


def _exact(start: torch.Tensor, weights: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    residual, attended = start, start.tanh()
    hidden = start
    for pair, query in zip(weights, queries, strict=True):
        residual = residual + attended @ pair[0].sum(0)
        residual = residual + norm(residual).double() @ pair[1].sum(0)
        hidden = norm(residual).double()
        attended = (hidden @ query).tanh()
    return hidden


def _expect_rows_left(ctx: Context, seen: list[fx.Graph], split: bool) -> None:
    """The pieces leave and enter rows of the rank, as halves where they are split."""
    enters = [node.args[2:] for graph in seen for node in graph.nodes if node.target is enter_residual]
    expected = [(BF16,)] * (4 if split else 2)
    ctx.expect(enters == expected, f"pieces enter otherwise: {enters}")
    names = [getattr(node.target, "_opname", "") for graph in seen for node in graph.nodes]
    leaves = [names.count(name) for name in ("leave_residual", "leave_residual_halves")]
    ctx.expect(leaves == ([0, 1] if split else [1, 0]), f"pieces leave otherwise: {leaves}")
