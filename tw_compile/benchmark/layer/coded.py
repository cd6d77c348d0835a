"""The unfused graph with rows that travel in codes, in torch. Fused variants with a wire are compared with it.

Its sites are those that the passes find. It does not use the rewrite, the split or our kernels, so that an error in one of
these shows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.fx as fx
from torch.library import Library

from tw_compile import compat
from tw_compile.benchmark.layer.subject import CompiledRun, HiddenAndResidual, Subject
from tw_compile.benchmark.layer.symmetric import CountAllReduces, replace_sum
from tw_compile.kernels.collective.codes import round_trip
from tw_compile.kernels.collective.spec import row_range
from tw_compile.kernels.collective.wires import WIRES
from tw_compile.passes.fusion.find import FusionSite, MergedSite, find_sites

_library = Library("tw_compile_bench", "FRAGMENT")
_library.define("sum_in_codes(Tensor x, str wire, str group_name) -> Tensor")
_library.define("rows_in_codes(Tensor rows, str wire) -> Tensor")


def _sum_in_codes(x: torch.Tensor, wire: str, group_name: str) -> torch.Tensor:
    """The sum over all ranks of ``x [..., hidden]``. Parts travel in codes; the owner of a row adds its own part as it is."""
    group = compat.resolve_process_group(group_name)
    rows = x.flatten(0, -2)
    own = slice(*row_range(len(rows), group.size(), dist.get_rank(group)))
    total = round_trip(rows, WIRES[wire].sums).to(torch.float32, copy=True)
    total[own] = rows[own].float()
    dist.all_reduce(total, group=group)
    return total.to(x.dtype).view(x.shape)


def _rows_in_codes(rows: torch.Tensor, wire: str) -> torch.Tensor:
    """The values that receivers decode from normalised ``rows [..., hidden]``."""
    return round_trip(rows.flatten(0, -2), WIRES[wire].results).to(rows.dtype, copy=True).view(rows.shape)


for _key in ("CPU", "CUDA"):
    _library.impl("sum_in_codes", _sum_in_codes, _key)
    _library.impl("rows_in_codes", _rows_in_codes, _key)


@torch.library.register_fake("tw_compile_bench::sum_in_codes", lib=_library)
def _sum_in_codes_fake(x: torch.Tensor, wire: str, group_name: str) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("tw_compile_bench::rows_in_codes", lib=_library)
def _rows_in_codes_fake(rows: torch.Tensor, wire: str) -> torch.Tensor:
    return rows.new_empty(rows.shape)


class SendInCodes(CountAllReduces):
    """Encode in the codes of ``wire``, and decode again, the rows of each sum that has a norm behind it.

    Sums that the passes would merge go through codes one by one, which costs as much as one message of both.
    """

    def __init__(self, wire: str) -> None:
        super().__init__()
        self.wire = wire

    def __call__(self, graph: fx.Graph) -> None:
        for site in find_sites(graph):
            if not isinstance(site, FusionSite | MergedSite):
                continue
            node, all_reduce = site.all_reduce.node, site.all_reduce
            with graph.inserting_before(node):
                operands = (all_reduce.partial, self.wire, all_reduce.group_name)
                summed = graph.call_function(torch.ops.tw_compile_bench.sum_in_codes.default, operands)
            replace_sum(graph, node, summed)
            self.seen += 1
            if isinstance(site, FusionSite) and site.quantised is None:
                self._gather(graph, site.norm.output)

    def _gather(self, graph: fx.Graph, rows: fx.Node) -> None:
        with graph.inserting_after(rows):
            received = graph.call_function(torch.ops.tw_compile_bench.rows_in_codes.default, (rows, self.wire))
        rows.replace_all_uses_with(received, delete_user_cb=lambda user: user is not received)


def outputs_in_codes(wire: str, subject: Subject, inputs: torch.Tensor) -> HiddenAndResidual:
    """Outputs of the unfused graph, compiled by Inductor, with rows that travel in the codes of ``wire``. Collective.

    Raises:
        RuntimeError: The graph has no sum with a norm behind it.
    """
    coded = SendInCodes(wire)
    compiled = torch.compile(subject, dynamic=False, backend="inductor", options={compat.POST_GRAD_HOOK: coded})
    outputs = CompiledRun(compiled, inputs)()
    if not coded.seen:
        raise RuntimeError("the graph has no sum with a norm behind it, whose rows could travel in codes")
    return outputs
