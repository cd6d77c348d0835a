"""See what the passes do to a module, without a GPU and without starting ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.fx as fx
from torch.utils._pytree import tree_map_only

from tw_compile import compat
from tw_compile.config import Config
from tw_compile.current import current_gate
from tw_compile.gating.gate import Gate
from tw_compile.passes.split import HostGraph
from tw_compile.pipeline import TWCompilePass
from tw_compile.report import GraphReport, collect_reports
from tw_compile.testing.capture import capture_graphs, fake_cuda, fake_process_group


@dataclass(frozen=True)
class Rewritten:
    """The graph before the passes, the graph after the passes, and the report of the passes."""

    before: fx.GraphModule
    after: fx.GraphModule
    report: GraphReport


def rewrite(
    module: Callable[..., Any],
    args: Sequence[Any],
    *,
    world_size: int = 2,
    device: Literal["cuda", "cpu"] = "cuda",
    config: Config | None = None,
    dynamic: bool | None = None,
    gate: Gate | None = None,
    host_graph: HostGraph | None = None,
) -> Rewritten:
    """Compile ``module`` for ``args`` up to the passes and return the graph before and after them.

    Neither a GPU nor other ranks are needed. If no process group exists, a group of ``world_size`` ranks is faked. For
    ``device="cuda"``, parameters, buffers and ``args`` are replaced by fake CUDA tensors, so their values don't matter.
    The graphs are copied right before and right after the passes, so they don't show what Inductor does later.

    Args:
        module: A module or function without graph breaks. A ``GraphModule`` is copied and rewritten without compiling it. If
            none of its nodes has metadata, all nodes get it from a run of the copy on fake ``args``.
        dynamic: As torch.compile's.
        gate: What decides which messages are fused; default: that of this process.
        host_graph: What a host such as vLLM says about the graph that it compiles; default: it is a graph of torch.compile's.
    """
    passes = TWCompilePass(Config() if config is None else config)
    with process_group(world_size), collect_reports() as reports:
        if isinstance(module, fx.GraphModule):
            recorder = _Recorder(passes, gate, host_graph)
            recorder(_with_metadata(module, args).graph)
        else:
            recorder = _Recorder(passes, gate, host_graph)
            with contextlib.ExitStack() as stack:
                if device == "cuda" and not compat.fake_mode_active():
                    stack.enter_context(fake_cuda())
                    module, args = on_fake_cuda(module, args)
                capture_graphs(module, args, pass_=recorder, dynamic=dynamic)
    if len(recorder.seen) != 1:
        raise RuntimeError(f"expected one graph, the module compiled to {len(recorder.seen)}")
    before, after = recorder.seen[0]
    return Rewritten(before, after, reports[0])


@contextlib.contextmanager
def process_group(world_size: int) -> Iterator[None]:
    """The process group that exists already, else a fake one of ``world_size`` ranks for the ``with`` block."""
    if dist.is_initialized():
        yield
        return
    with fake_process_group(world_size):
        yield


def on_fake_cuda(module: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A copy of ``module``, and ``args``, on fake CUDA tensors; call it inside ``fake_cuda()``. No values are copied.

    Dims that ``torch._dynamo.mark_dynamic`` has marked stay marked.
    """

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cuda":
            return tensor
        return compat.copy_dynamo_marks(tensor, torch.empty_like(tensor, device="cuda"))

    if isinstance(module, torch.nn.Module):
        replaced: dict[int, Any] = {}
        for parameter in module.parameters():
            replaced[id(parameter)] = torch.nn.Parameter(fake(parameter.detach()), parameter.requires_grad)
        for buffer in module.buffers():
            replaced[id(buffer)] = fake(buffer)
        module = copy.deepcopy(module, replaced)
    return module, tuple(tree_map_only(torch.Tensor, fake, tuple(args)))


class _Recorder:
    """Runs the passes and keeps a copy of each graph from before and after."""

    def __init__(self, passes: TWCompilePass, gate: Gate | None, host_graph: HostGraph | None) -> None:
        self.passes = passes
        self.gate = gate
        self.host_graph = host_graph
        self.seen: list[tuple[fx.GraphModule, fx.GraphModule]] = []

    def __call__(self, graph: fx.Graph) -> None:
        before = _copy(graph)
        if self.gate is None and self.host_graph is None:
            self.passes(graph)
        else:
            gate = current_gate(self.passes.config) if self.gate is None else self.gate
            self.passes.rewrite(graph, gate, self.host_graph)
        graph.lint()
        self.seen.append((before, _copy(graph)))


def _copy(graph: fx.Graph) -> fx.GraphModule:
    copied = fx.Graph()
    output = copied.graph_copy(graph, {}, return_output_node=True)
    assert isinstance(output, tuple)
    value, old_output = output
    copied.output(value).meta = dict(old_output.meta)
    owner = graph.owning_module
    return fx.GraphModule(torch.nn.Module() if owner is None else owner, copied)


def _with_metadata(module: fx.GraphModule, args: Sequence[Any]) -> fx.GraphModule:
    copied = _copy(module.graph)
    if not any("val" in node.meta for node in copied.graph.nodes):
        from torch.fx.passes.fake_tensor_prop import FakeTensorProp

        mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, tuple(args))
        FakeTensorProp(copied, mode).propagate_dont_convert_inputs(*fakes)
    return copied
