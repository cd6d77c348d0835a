"""Sums that layers of vLLM's write into a buffer: in the graph of a whole model, the sum takes the buffer's place.

    output = empty_like(hidden)                in the piece before attention, or before the operator that keeps a state
    output[:] = all_reduce(partial)            in the piece behind it
    fused_add_rms_norm(output, residual, ...)

Layers of Qwen3-Next, Qwen3.5 and Kimi-Linear are written like that. A piece does not know who else reads its inputs. So its
graph copies the sum to the buffer, and a sum that is read twice can't be fused with its norm. The graph of the whole model
shows all readers.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from tw_compile.graph.predicates import has_default_strides, same_shape, same_size
from tw_compile.hosts.vllm.groups import name_of_call
from tw_compile.hosts.vllm.operators import ALL_REDUCE

_EMPTY = (torch.empty_like, torch.empty)


def write_no_buffers(graph: fx.GraphModule) -> int:
    """Let readers of a buffer that is a copy of a sum read the sum. Returns the number of buffers that are gone.

    ``graph`` is Dynamo's. It is changed only where the sum, which has memory of its own, has no other reader. So whatever
    happens to the buffer later may happen to the sum.
    """
    place = {node: number for number, node in enumerate(graph.graph.nodes)}
    found = [(node, write) for node in graph.graph.nodes if (write := _only_write(node, place)) is not None]
    for buffer, write in found:
        summed = write.args[2]
        graph.graph.erase_node(write)
        buffer.replace_all_uses_with(summed)
        graph.graph.erase_node(buffer)
    if found:
        graph.recompile()
    return len(found)


def _only_write(buffer: fx.Node, place: dict[fx.Node, int]) -> fx.Node | None:
    """The node that fills ``buffer`` with a sum before anything else touches it; None if there is none."""
    if buffer.target not in _EMPTY or not buffer.users:
        return None
    write = min(buffer.users, key=place.__getitem__)
    if write.target is not operator.setitem or write.args[0] is not buffer:
        return None
    _, index, summed = write.args
    if not isinstance(summed, fx.Node) or name_of_call(summed) != ALL_REDUCE.name or list(summed.users) != [write]:
        return None
    one, other = buffer.meta.get("example_value"), summed.meta.get("example_value")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None
    alike = one.dtype == other.dtype and one.device == other.device and same_shape(one, other)
    laid_out = has_default_strides(one) and has_default_strides(other)
    return write if alike and laid_out and _is_everything(index, one) else None


def _is_everything(index: object, buffer: torch.Tensor) -> bool:
    """Whether ``buffer[index]`` is known to be all of the buffer, for all numbers of tokens."""
    if not isinstance(index, slice) or index.start not in (None, 0) or index.step not in (None, 1):
        return False
    stop = index.stop.meta.get("example_value") if isinstance(index.stop, fx.Node) else index.stop
    return stop is None or (isinstance(stop, int | torch.SymInt) and same_size(stop, buffer.shape[0]))
