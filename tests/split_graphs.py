"""Post-grad graphs of decoders for the token split, and a way to run them in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from families import FAMILIES
from graph_builder import copy_of

from tw_compile import compat
from tw_compile.config import Config
from tw_compile.current import current_gate
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.fed_mm import fed_gated_mm, fed_joint_mm
from tw_compile.kernels.collective.reference import add_rms_norm
from tw_compile.kernels.collective.spec import NormSpec
from tw_compile.kernels.gemm import by_rows
from tw_compile.models.config import config_from_dict
from tw_compile.models.decoder import build_decoder
from tw_compile.passes import manager
from tw_compile.passes.contract import Context, HostGraph
from tw_compile.passes.split import SPLIT, SplitChoice, SplitReport, choose_split, split_tokens, summarise
from tw_compile.passes.split.schedule.budgets import Budgets
from tw_compile.passes.split.schedule.windows import Schedule, schedule
from tw_compile.pipeline import TWCompilePass
from tw_compile.planning import DeviceProfile
from tw_compile.report import Split
from tw_compile.testing.capture import capture_graphs

WORLD_SIZE = 2
FUSED = Config(strict=True, transport="gloo", split="off", feed_mm="never")
"""Graphs that are fused and nothing else, whatever a test feeds."""
UNFUSED = Config(strict=True, fuse=False)
SPLIT_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "olmo2", "mixtral", "qwen3_moe", "gpt_oss")

_c10d = torch.ops._c10d_functional


def family_graph(
    family: str,
    batch: int,
    seq: int,
    *,
    dynamic: bool | None = False,
    config: Config = FUSED,
    dtype: torch.dtype = torch.float32,
    padded: bool = False,
    **fields: Any,
) -> fx.Graph:
    """The graph that the fusion pass leaves of two tiny layers; call it inside a fake process group.

    ``padded``: another input, ``[batch, seq]``, is 0 where a token is padding. ``fields`` override the family's configuration.
    Tracing takes seconds, so a graph of numbers is traced once in a process, and each call has a copy. One with symbols is
    traced by each call, because what a test asks of them would be known to the next one.
    """
    trace = _traced_once if dynamic is False else _traced
    given = tuple(sorted(fields.items()))
    graph = trace(family, batch, seq, dynamic, config, dtype, padded, given, tuple(compat.process_group_facts()))
    return copy_of(graph)


def _traced(
    family: str,
    batch: int,
    seq: int,
    dynamic: bool | None,
    config: Config,
    dtype: torch.dtype,
    padded: bool,
    fields: tuple[tuple[str, Any], ...],
    groups: tuple[tuple[str, int, int], ...],
) -> fx.Graph:
    """``groups``: the process groups that are there, of which the graph has the names."""
    seen: list[fx.Graph] = []
    fuse = TWCompilePass(config)

    def record(graph: fx.Graph) -> None:
        fuse(graph)
        seen.append(copy_of(graph))

    torch.manual_seed(0)
    decoder = build_decoder(config_from_dict({**FAMILIES[family], **dict(fields)}), device="cpu", dtype=dtype)
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    inputs = (tokens, torch.ones_like(tokens)) if padded else (tokens,)

    def forward(ids: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = decoder.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return decoder.norm(residual), residual

    capture_graphs(forward if padded else decoder, inputs, pass_=record, dynamic=dynamic)
    (graph,) = seen
    return graph


_traced_once = functools.lru_cache(maxsize=32)(_traced)


def random_values(graph: fx.Graph, sizes: dict[str, int] | None = None, seed: int = 0) -> list[Any]:
    """Values for the placeholders; ``sizes`` gives those of symbols, by name. Scalars are positive, as scales and eps are."""
    generator = torch.Generator().manual_seed(seed)

    def number(size: Any) -> int:
        if isinstance(size, int):
            return size
        expr = size.node.expr
        return int(expr.subs({symbol: (sizes or {})[str(symbol)] for symbol in expr.free_symbols}))

    values: list[Any] = []
    for node in graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        if not isinstance(fake, torch.Tensor):  # a process group, from torch 2.14 on; here nothing reads it
            values.append(number(fake) if isinstance(fake, int | torch.SymInt) else fake)
            continue
        shape = [number(size) for size in fake.shape]
        if not fake.is_floating_point():
            values.append(torch.randint(0, 120, shape, generator=generator, dtype=fake.dtype))
        elif fake.dim() == 1:
            values.append((torch.rand(shape, generator=generator) + 0.5).to(fake.dtype))
        elif fake.dim() == 0:
            values.append((torch.rand(shape, generator=generator) * 0.5 + 0.1).to(fake.dtype))
        else:
            values.append((torch.randn(shape, generator=generator) * 0.1).to(fake.dtype))
    return values


def sizes_of_symbols(graph: fx.Graph, size: int) -> dict[str, int]:
    """``size`` for every symbol of the inputs, as :func:`random_values` takes it."""
    symbols = {
        str(symbol)
        for node in graph.find_nodes(op="placeholder")
        if isinstance(node.meta["val"], torch.SymInt)
        for symbol in node.meta["val"].node.expr.free_symbols
    }
    return dict.fromkeys(symbols, size)


def run_alone(graph: fx.Graph, values: list[Any]) -> list[torch.Tensor]:
    """Interpret a graph as if every rank held the same: sums are multiples, gathers are repetitions."""
    values = [one.clone() if isinstance(one, torch.Tensor) else one for one in values]
    with torch.no_grad():
        return list(_Alone(torch.nn.Module(), graph=graph).run(*values))


class _Alone(fx.Interpreter):
    """A rank's shard of the residual has the shape that it would have; the whole is remembered beside it.

    What is left in a slot becomes NaN when the slot's next call starts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._whole: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []
        self._in_flight: dict[int, int] = {}
        self._in_slot: dict[int, torch.Tensor] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        handlers: dict[Any, Callable[..., Any]] = {
            _c10d.all_reduce.default: lambda x, op, group: x * WORLD_SIZE,
            _c10d.wait_tensor.default: lambda x: x,
            _c10d.all_gather_into_tensor.default: lambda x, size, group: torch.cat([x] * size),
            ops.start: self._start,
            ops.mm_start: lambda a, b, *rest, reserved_sms=0, **named: self._start(a @ b, *rest, **named),
            ops.wait_: self._wait,
            fed_joint_mm: lambda hidden, *rest: by_rows.joint_mm_by_rows(self._awaited(hidden), *rest[:-2]),
            fed_gated_mm: lambda hidden, *rest: by_rows.gated_mm_by_rows(self._awaited(hidden), *rest[:-2]),
        }
        handler = handlers.get(target)
        return super().call_function(target, args, kwargs) if handler is None else handler(*args, **kwargs)

    def _start(
        self,
        x: Any,
        residual: Any,
        bias: Any,
        weight: Any,
        *rest: Any,
        overlap_sms: int = 0,
        results_in_slot: bool = False,
        feed_from: int = 0,
    ) -> Any:
        eps, offset, cast, dtype, residual_dtype, sharded, out, _, _, slot, *more = rest
        scale = more[0] if more else 1.0
        if len(more) > 2 and more[2] is not None:
            eps = float(more[2])
        assert slot not in self._in_flight, f"slot {slot} is in flight"
        if sharded:
            assert residual.shape[0] == -(-x.shape[0] // WORLD_SIZE)
            residual = self._whole[id(residual)]
        norm = NormSpec(eps, offset, cast, dtype, residual_dtype, scale)
        hidden, h = add_rms_norm(x * WORLD_SIZE, residual, bias, weight, norm)
        if slot in self._in_slot:
            self._in_slot.pop(slot).fill_(torch.nan)
        if results_in_slot:
            self._in_slot[slot] = hidden
        rows = {"none": 0, "sharded": -(-x.shape[0] // WORLD_SIZE), "replicated": x.shape[0]}[out]
        given = h[:rows].clone()
        self._whole[id(given)] = h
        self._kept.append(given)
        self._in_flight[slot] = id(hidden)
        return hidden, given

    def _awaited(self, hidden: Any) -> Any:
        assert id(hidden) in self._in_flight.values(), "its call has been waited for"
        return hidden

    def _wait(self, hidden: Any, residual: Any, keep: Any, group: Any, slot: int) -> None:
        assert self._in_flight.pop(slot) == id(hidden)


def split_and_planned(
    family: str, tokens: int, profile: DeviceProfile, config: Config | None = None, **fields: Any
) -> tuple[fx.Graph, Budgets]:
    """Three requests of 21 tokens in halves, and the plan for them."""
    options = Config(split=str(tokens), device_profile=profile.name)
    graph = family_graph(
        family, 3, 21, dtype=torch.bfloat16, **({} if config is None else {"config": config}), **fields
    )
    choice = choose_split(graph, options, profile)
    assert isinstance(choice, SplitChoice) and choice.plan is not None
    report = split_tokens(graph, choice.first, axis=choice.axis, join_attention=choice.join_attention)
    assert isinstance(report, SplitReport)
    return graph, Budgets(choice.plan, profile)


def split_graph(graph: fx.Graph, config: Config, profile: DeviceProfile | None, host: HostGraph | None = None) -> Split:
    """Run the passes of the split alone over a graph, as the fusion pass leaves it."""
    context = Context(config, current_gate(config), profile, host)
    manager.run(graph, context, SPLIT)
    split = summarise(context)
    assert split is not None
    return split


def woven(graph: fx.Graph, budgets: Budgets) -> Schedule:
    result = schedule(graph, budgets.overlap_sms, budgets.most_sms)
    assert isinstance(result, Schedule)
    return result
