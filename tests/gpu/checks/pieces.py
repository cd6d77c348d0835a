"""Checks of a model that is cut at attention into CUDA graphs, which hand each other a rank's rows of the residual."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
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
SIZES = ((385, "160", False), (385, "off", False), (385, "off", True), (8, "off", False))
"""Tokens, how many of them are in the first half, and whether one layer is not fused, so that it gathers what was left.

Eight tokens go by one-shot, where there is such a kernel.
"""
_VALUES = 4

Step = Callable[[], None]


def norm(h: torch.Tensor) -> torch.Tensor:
    wide = h.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(h.dtype)


def first(start: torch.Tensor) -> torch.Tensor:
    return leave_residual(start, start.shape[0], group_name(), False, [start])


def piece(left: torch.Tensor, attended: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, residual = layer(enter_residual(left, group_name()), attended, *weights[:2])
    return leaving(residual, hidden @ weights[2])


def last(left: torch.Tensor, attended: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return layer(enter_residual(left, group_name()), attended, *weights[:2])[0]


def leaving(residual: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return leave_residual(residual, residual.shape[0], group_name(), False, [query]), query


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def group_name() -> str:
    return world().group_name


def layer(
    residual: torch.Tensor, attended: torch.Tensor, out: torch.Tensor, mlp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised hidden states and the residual behind what follows an attention."""
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

    As in vLLM, the graphs of all sizes share a pool of memory, and nothing holds what a graph returns once the next one is
    captured.
    """
    with torch.no_grad():
        models = [_Model(ctx, *size, transport) for size in SIZES]
        pool = torch.cuda.graph_pool_handle() if ctx.device.type == "cuda" else None
        for model in models:
            model.steps = _captured(model.steps, pool)
        skew, wrong = random.Random(1 + ctx.rank), new_counter(ctx)
        turns = random.Random(0)  # all ranks take the same turns
        for _ in range(ctx.calls(steps)):
            model, number = turns.choice(models), turns.randrange(_VALUES)
            if skew.random() < 0.2:
                compat.delay_stream(skew.randrange(200_000))
            wrong.add_((model.run(number) != model.expected[number]).sum())
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")
    ctx.expect(residual_seam.left_now is None, "a residual was left that nothing has entered")
    ctx.counts["steps"] = ctx.calls(steps)


class _Model:
    """A model of one size, whose ``steps`` compute its result piece by piece, and what they make of each of its inputs."""

    def __init__(self, ctx: Context, tokens: int, split: str, unlike: bool, transport: str) -> None:
        def drawn(*shape: int, seed: int) -> torch.Tensor:
            return torch.randn(*shape, generator=ctx.generator(seed, tokens), device=ctx.device).to(BF16)

        weights = drawn(LAYERS, 2, ctx.world_size, HIDDEN, HIDDEN, seed=1) / HIDDEN**0.5
        queries = drawn(LAYERS, HIDDEN, HIDDEN, seed=2) / HIDDEN**0.5
        self.values = [drawn(tokens, HIDDEN, seed=3 + number) for number in range(_VALUES)]
        self.start, attended, self.result = (torch.empty_like(self.values[0]) for _ in range(3))
        of_rank = [(*pair, query) for pair, query in zip(weights[:, :, ctx.rank].unbind(), queries, strict=True)]
        given = self.start, attended, self.result, of_rank
        self.read_by_graphs = given  # a CUDA graph does not hold what it reads
        self.steps = _steps([piece] * (LAYERS - 1), last, *given)
        unfused = [self.run(number) for number in range(_VALUES)]
        seen: list[fx.Graph] = []
        options = {"split": split, "transport": transport}
        between: list[Any] = [compiled(piece, tokens, options, seen)] * (LAYERS - 1)
        if unlike:
            between[1] = compiled(piece, tokens, options | {"fuse": False}, [])
        self.steps = _steps(between, compiled(last, tokens, options, seen), *given)
        self.expected = [self.run(number) for number in range(_VALUES)]
        name = f"{tokens} tokens, split {split}"
        _expect_rows_left(ctx, name, seen, split != "off")
        for value, got, base in zip(self.values, self.expected, unfused, strict=True):
            exact = _exact(value.double(), weights.double(), queries.double())
            error, allowed = relative_error(got, exact), budget(base, exact)
            ctx.expect(error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}")
            expect_same_on_all_ranks(ctx, name, got)

    def run(self, number: int) -> torch.Tensor:
        """The result for one of the inputs."""
        self.start.copy_(self.values[number])
        for step in self.steps:
            step()
        return self.result.clone()


def _steps(
    between: list[Any],
    at_the_end: Any,
    start: torch.Tensor,
    attended: torch.Tensor,
    result: torch.Tensor,
    weights: list[tuple[torch.Tensor, ...]],
) -> list[Step]:
    """A step of the model, piece by piece. A piece hands ``left`` to the next one, and attention's results to ``attended``."""
    left: list[torch.Tensor] = []

    def embed() -> None:
        left.append(first(start))
        attended.copy_(start.tanh())

    def run(function: Any, of_layer: tuple[torch.Tensor, ...]) -> None:
        handed_on, query = function(left.pop(), attended, *of_layer)
        left.append(handed_on)
        attended.copy_(query.tanh())

    def end() -> None:
        result.copy_(at_the_end(left.pop(), attended, *weights[-1]))

    return [embed, *(partial(run, *layer) for layer in zip(between, weights[:-1], strict=True)), end]


def _captured(steps: list[Step], pool: Any) -> list[Step]:
    """Each of ``steps`` as a CUDA graph with memory of ``pool``; None: as it is."""
    if pool is None:
        return steps
    graphs = []
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


def _expect_rows_left(ctx: Context, name: str, seen: list[fx.Graph], split: bool) -> None:
    """The pieces leave and enter rows of the rank, as halves where they are split."""
    enters = [node.args[2:] for graph in seen for node in graph.nodes if node.target is enter_residual]
    ctx.expect(enters == [(BF16,)] * (4 if split else 2), f"{name}: pieces enter otherwise: {enters}")
    names = [getattr(node.target, "_opname", "") for graph in seen for node in graph.nodes]
    leaves = [names.count(one) for one in ("leave_residual", "leave_residual_halves")]
    ctx.expect(leaves == ([0, 1] if split else [1, 0]), f"{name}: pieces leave otherwise: {leaves}")
