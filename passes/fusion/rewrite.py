"""Replace proven sites by the fused operator.

    before:  wait = wait_tensor(all_reduce(x)); h = residual + wait; hidden = rms_norm(h) * weight
    after:   start = all_reduce_rms_norm_start(x, residual, bias, weight, ...)
             wait_(start[0], start[1], keep=[x, residual, ...]); hidden = view(start[0]); h = view(start[1])
    or       start = mm_all_reduce_rms_norm_start(a, b, residual, bias, weight, ...) for x = mm(a, b)

and the same with all_reduce_layer_norm_start for a LayerNorm.

Where the norm's result is only quantised to float8, ``hidden`` is the quantised result and takes the place of that. If the
scales are made of the norm's result, all_reduce_rms_norm_quant_start returns the scales as well.

Hugging Face norms cast before the weight. The rewrite drops this cast, which is one rounding less, unless Inductor is told to
keep such casts (``emulate_precision_casts``). Inductor itself does the same where it fuses.

New nodes go right after ``h``. Every input of the site exists there, and every user of ``h`` or of the norm comes later, so
all readers follow ``wait_``. Insertion only adds nodes and can be undone. Readers change only once everything is inserted.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import aten, is_call, is_view, makes_view, peel_views, same_size, value
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.residual_seam import enter_residual, leave_residual
from tw_compile.kernels.collective.seam import enter_layers, leave_layers
from tw_compile.kernels.collective.spec import FP8
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.passes.fusion.find import FusionSite
from tw_compile.passes.fusion.layout import ResidualLayout
from tw_compile.passes.fusion.made_scales import MadeScale
from tw_compile.passes.fusion.quant import Scale
from tw_compile.passes.fusion.sizes import known_sizes, size_source, sizes_of_view
from tw_compile.passes.nodes import Annotation, Inserter, annotate

_FUSE_ONLY_SLOT = 0


@dataclass
class _Inserted:
    site: FusionSite
    hidden: dict[fx.Node, fx.Node]
    """The new nodes, each by the node whose place it takes: the norm's output, or its quantised form and the scales."""
    residual_rows: fx.Node
    residual: fx.Node | None
    layout: ResidualLayout


class Rewriter:
    """Inserts operators for sites one by one, then commits all of them or none."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._inserter = Inserter(graph)
        self._done: dict[int, _Inserted] = {}
        self._sizes_known: dict[Any, fx.Node] = {}

    def insert(
        self,
        site: FusionSite,
        index: int,
        layout: ResidualLayout,
        transport: str,
        gemm: fx.Node | None = None,
        wire: str = EXACT,
    ) -> None:
        """Add the operator for one site; sites must come in the graph order of their ``h``.

        With ``gemm`` (see :attr:`FusionSite.gemm`) the operator also multiplies, and the GEMM's node is left without readers.
        """
        self._last = site.h
        self._like = site.norm.output
        self._site_index = index
        made = None if site.quantised is None else site.quantised.made
        operators_of = ops.operators_of if made is None else ops.quant_operators_of
        start_of, mm_start_of = operators_of(site.norm.epilogue)
        if gemm is None:
            target, message = start_of, [self._sum([self._rows(partial) for partial in site.partials()])]
        else:
            target, message = mm_start_of, list(gemm.args)  # type: ignore[arg-type]
        residual = None
        if layout.source is not None:
            residual = self._done[id(layout.source)].residual_rows
        elif site.residuals:
            residual = self._sum_of_all([self._rows(node) for node in site.residuals])
        bias = self._sum_of_all(list(site.biases)) if site.biases else None
        h, hidden = site.stream_value, value(site.norm.output)
        assert h is not None and hidden is not None
        norm, group_name = site.norm, site.all_reduce.group_name
        weight, norm_bias = self._vectors(site)
        hidden_scale = None if site.quantised is None else self._hidden_scale(site.quantised.scale, hidden.device)
        keywords: dict[str, Any] = {} if wire == EXACT else {"wire": wire}
        if norm_bias is not None:
            keywords["norm_bias"] = norm_bias
        if made is not None:
            keywords |= {"scale_columns": made.columns, "min_scale": made.min_scale, "divides_by_scale": made.divides}
        eps_tensor = norm.eps if isinstance(norm.eps, fx.Node) else None
        start = self._call(
            target,
            (
                *message,
                residual,
                bias,
                weight,
                0.0 if eps_tensor is not None else norm.eps,
                norm.weight_offset,
                norm.cast_before_weight if compat.emulates_precision_casts() else None,
                hidden.dtype if site.quantised is None else FP8,
                torch.float32 if layout.out == "sharded" and not layout.left else h.dtype,
                layout.takes_rows,
                layout.out,
                group_name,
                transport,
                _FUSE_ONLY_SLOT,
                site.scale,
                *(() if hidden_scale is None and eps_tensor is None else (hidden_scale, eps_tensor)),
            ),
            "start",
            **keywords,
        )
        annotate(start, stream_dtype=h.dtype)
        hidden_rows = self._call(operator.getitem, (start, 0), "hidden")
        residual_rows = self._call(operator.getitem, (start, 1), "residual")
        operands = (*message, residual, bias, weight, hidden_scale, norm_bias)
        keep = [node for node in operands if node is not None]
        scales = [] if made is None else [self._call(operator.getitem, (start, 2), "scales")]
        self._call(ops.wait_, (hidden_rows, residual_rows, keep, group_name, _FUSE_ONLY_SLOT, *scales), "wait")
        replaced = (norm.output,) if site.quantised is None else site.quantised.outputs
        replacing = self._in_place_of(replaced, hidden_rows, site)
        for of_rows in scales:
            assert site.quantised is not None
            replacing |= self._in_place_of(site.quantised.scales, of_rows, site)
        self._done[id(site)] = _Inserted(
            site,
            replacing,
            residual_rows,
            self.shaped_like(residual_rows, site.stream, site) if layout.out == "replicated" and site.stream else None,
            layout,
        )

    def commit(self) -> None:
        """Route every reader to the new nodes and remove what nothing reads any more."""
        superfluous: set[fx.Node] = set()
        for inserted in self._done.values():
            for node, hidden in inserted.hidden.items():
                node.replace_all_uses_with(hidden)
            if inserted.residual is not None:
                assert inserted.site.stream is not None
                inserted.site.stream.replace_all_uses_with(inserted.residual)
            if inserted.layout.entered:
                self._enter_rows(inserted.site.residuals[0])
            if inserted.layout.left:
                assert inserted.site.stream is not None
                for leave in list(inserted.site.stream.users):
                    if is_call(leave, leave_layers):
                        _change_arguments(leave, (leave.args[0], inserted.residual_rows, leave.args[2], True))
                    elif is_call(leave, leave_residual):
                        tokens, group_name, _, after = leave.args[1:]
                        _change_arguments(leave, (inserted.residual_rows, tokens, group_name, True, after))
            superfluous |= inserted.site.replaced()
        for node in reversed(list(self.graph.nodes)):
            if node in superfluous and not node.users:
                superfluous.update(
                    operand
                    for operand in node.all_input_nodes
                    if operand.op == "call_function" and operand not in superfluous and not operand.is_impure()
                )
                self.graph.erase_node(node)

    def _enter_rows(self, residual: fx.Node) -> None:
        """Let the graph enter with only those rows of ``residual`` that the rank owns."""
        dtype = residual.meta["val"].dtype
        if is_call(residual, enter_residual):
            _change_arguments(residual, (*residual.args[:2], dtype))
            residual.meta["val"] = self._inserter.fake(enter_residual, residual.args, {})
            return
        (enter,) = residual.all_input_nodes
        _change_arguments(enter, (*enter.args[:2], dtype))
        enter.meta["val"] = self._inserter.fake(enter_layers, enter.args, {})
        residual.meta["val"] = enter.meta["val"][1]

    def roll_back(self) -> None:
        """Remove every inserted node; the graph is as it was."""
        self._inserter.roll_back()
        self._done.clear()

    def _call(self, target: Any, args: tuple[Any, ...], role: str, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_after(self._last):
            self._last = self._inserter.call(target, args, kwargs, like=self._like, noted=self._annotation(role))
        return self._last

    def _annotation(self, role: str) -> Annotation:
        return {"site": self._site_index, "role": role, "stream": 0}

    def _rows(self, node: fx.Node) -> fx.Node:
        """``[tokens, hidden]`` from a tensor of any rank, without stacking a view on a view."""
        tensor = value(node)
        assert tensor is not None
        base = peel_views(node)
        flat = value(base)
        if flat is not None and flat.dim() == 2 and same_size(flat.shape[1], tensor.shape[-1]):
            return base
        if tensor.dim() == 2:
            return node
        return self._call(aten.reshape.default, (node, [-1, tensor.shape[-1]]), "rows")

    def _sum(self, nodes: list[fx.Node]) -> fx.Node:
        total = nodes[0]
        for node in nodes[1:]:
            total = self._call(aten.add.Tensor, (total, node), "sum")
        return total

    def _sum_of_all(self, nodes: list[fx.Node]) -> fx.Node:
        """The sum of residuals, or of biases. Several are added in float32: only the operator rounds the sum, and only once."""
        if len(nodes) == 1:
            return nodes[0]
        convert = torch.ops.prims.convert_element_type.default
        return self._sum([self._call(convert, (node, torch.float32), "upcast") for node in nodes])

    def _vectors(self, site: FusionSite) -> tuple[fx.Node | None, fx.Node | None]:
        """The norm's weight and bias. What the graph computes of them after ``h`` is computed again here."""
        copies: dict[fx.Node, fx.Node] = {}
        for node in site.late_weight:
            with self.graph.inserting_after(self._last):
                copies[node] = self.graph.node_copy(node, lambda arg: copies.get(arg, arg))
            self._last = copies[node]
            self._inserter.new.append(self._last)
            annotate(self._last, **self._annotation("weight"))
        weight, bias = (node and copies.get(node, node) for node in (site.norm.weight, site.norm.bias))
        return weight, bias

    def _hidden_scale(self, scale: Scale | MadeScale, device: torch.device) -> fx.Node | None:
        if isinstance(scale, MadeScale):
            return None
        if not isinstance(scale.source, fx.Node):
            return self._call(aten.full.default, ([1], scale.source), "scale", dtype=torch.float32, device=device)
        return self._call(aten.reciprocal.default, (scale.source,), "scale") if scale.inverse else scale.source

    def _in_place_of(self, nodes: tuple[fx.Node, ...], rows: fx.Node, site: FusionSite) -> dict[fx.Node, fx.Node]:
        """What takes the place of each of ``nodes``, which all have the values of ``rows``.

        Of those that the graph returns, each keeps memory of its own, as the caller may write to it.
        """
        replacing: dict[fx.Node, fx.Node] = {}
        returned = False
        for node in nodes:
            shaped = self.shaped_like(rows, node, site)
            if _is_returned(node):
                shaped = self._call(aten.clone.default, (shaped,), "clone") if returned else shaped
                returned = True
            replacing[node] = shaped
        return replacing

    def shaped_like(self, rows: fx.Node, original: fx.Node, site: FusionSite) -> fx.Node:
        tensor, flat = value(original), value(rows)
        assert tensor is not None and flat is not None
        if tensor.dim() == 2 and same_size(tensor.shape[1], flat.shape[1]):
            return rows
        return self._call(aten.reshape.default, (rows, self._sizes(tensor, site)), "view")

    def _sizes(self, tensor: Any, site: FusionSite) -> list[Any]:
        """The tensor's shape as graph arguments: ints, at most one -1, and size nodes for further symbolic dims."""
        if not sizes_of_view(tensor, tensor.shape[-1]):
            return [size if isinstance(size, int) else -1 for size in tensor.shape]
        return [size if isinstance(size, int) else self._size_node(site, size) for size in tensor.shape]

    def _size_node(self, site: FusionSite, size: Any) -> fx.Node:
        """A node holding a symbolic size: the one the graph has already, or a new size query on a tensor that has it."""
        if not self._sizes_known:
            self._sizes_known = known_sizes(self.graph)
        tensors = (*self.graph.find_nodes(op="placeholder"), *site.partials())
        source = size_source(self._sizes_known, tensors, size, site.h)
        assert source is not None, f"{site.h.name}: a site whose size {size} is nowhere is refused"
        return source if isinstance(source, fx.Node) else self._call(aten.sym_size.int, source, "size")


def _is_returned(node: fx.Node) -> bool:
    """Whether the graph returns the node or a view of it."""
    seen = [node]
    for current in seen:
        for user in current.users:
            if user.op == "output":
                return True
            if user not in seen and (is_view(user) or makes_view(user)):
                seen.append(user)
    return False


def _change_arguments(node: fx.Node, args: tuple[Any, ...]) -> None:
    """Replace the arguments, and remove the metadata of the old ones.

    With that metadata, Inductor would bring the new arguments to the strides of the old ones.
    """
    node.args = args
    node.meta.pop("eager_input_vals", None)
