"""Find every all_reduce of a graph and prove, or refuse, that it feeds a residual add and a norm.

    partial -> all_reduce(sum) -> wait_tensor -> [views, casts] -> [+ bias] -> [+ residual] -> h -> norm -> hidden

Hosts have operators of their own for the collective and for the end of that chain: :mod:`tw_compile.passes.operators`.
Where ``hidden`` is only quantised to float8, the fused operator may quantise it, too: :mod:`tw_compile.passes.fusion.quant`.

Nothing here edits the graph: the result is a list of :class:`FusionSite` and :class:`RefusedSite`, one per all_reduce, in
graph order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import (
    adds_once,
    aten,
    draws_random_numbers,
    has_default_strides,
    is_call,
    is_cast,
    is_float8,
    is_view,
    other_operand,
    peel_views,
    same_shape,
    same_size,
    value,
    views_and_casts_of,
)
from tw_compile.kernels.collective.spec import SUPPORTED_DTYPES
from tw_compile.passes.fusion.forms import AllReduce, all_reduce_of, read_all_reduce
from tw_compile.passes.fusion.norm import NormMatch, match_add_rms_norm, match_norm
from tw_compile.passes.fusion.quant import Place, Quantisation, find_quantisation, quantisation_of_operator
from tw_compile.passes.fusion.sizes import known_sizes, size_source, sizes_of_view
from tw_compile.passes.reasons import QuantRefused, Refusal, Refused

_MAX_LATE_WEIGHT = 8
"""How many nodes may lie between parameters and a norm's weight and bias, e.g. ``1 + w``."""


@dataclass(frozen=True)
class FusionSite:
    """A proven site. ``h`` makes the norm's input (the new residual); ``path`` leads from the wait to ``h`` inclusive.

    Where one operator adds and normalises, ``h`` is that operator, and the new residual is one of its results.
    ``residuals`` are the tensors of the sum's own shape that are added on the way: usually one, the residual stream.
    ``merged`` are further all_reduces whose results are added (shared experts): since a sum of all_reduces is the
    all_reduce of the sum, their partial sums are added first and travel as one message. ``merged_biases`` are the biases that
    the graph adds to the results of ``merged``. ``late_weight`` are the nodes after ``h`` that compute the norm's weight and
    bias. ``scale`` is a constant that the messages are multiplied by first (Granite). ``quantisation`` is the quantisation that
    is the only use of the norm's result, or the reason why an apparent one is left as it is; None if nothing looks like one.
    """

    all_reduce: AllReduce
    path: tuple[fx.Node, ...]
    h: fx.Node
    bias: fx.Node | None
    residuals: tuple[fx.Node, ...]
    merged: tuple[AllReduce, ...]
    norm: NormMatch
    scale: float = 1.0
    late_weight: tuple[fx.Node, ...] = ()
    quantisation: Quantisation | QuantRefused | None = None
    merged_biases: tuple[fx.Node, ...] = ()

    @property
    def biases(self) -> tuple[fx.Node, ...]:
        """The vectors that are added on the way."""
        return self.merged_biases if self.bias is None else (self.bias, *self.merged_biases)

    @property
    def quantised(self) -> Quantisation | None:
        """The quantisation that the fused operator does."""
        return self.quantisation if isinstance(self.quantisation, Quantisation) else None

    @property
    def stream(self) -> fx.Node | None:
        """The node that holds the new residual; None if the new residual is an operator's result that nobody reads."""
        return self.norm.added if self.norm.operator is self.h else self.h

    @property
    def stream_value(self) -> torch.Tensor | None:
        """The fake tensor of the new residual."""
        fake = self.h.meta.get("val")
        return fake[-1] if isinstance(fake, tuple | list) else value(self.h)

    @property
    def form(self) -> str:
        parts = ["all_reduce"]
        parts += ["all_reduce"] * len(self.merged)
        parts += ["scale"] if self.scale != 1.0 else []
        parts += ["bias"] * len(self.biases)
        parts += ["residual"] * len(self.residuals)
        return "+".join([*parts, self.norm.epilogue]) + f"[{self.norm.form}]" + self._quantised_form

    @property
    def _quantised_form(self) -> str:
        if self.quantised is None:
            return ""
        per = self.quantised.scales_per
        return "+fp8" + (f"[{per}]" if per else "")

    @property
    def gemm(self) -> fx.Node | None:
        """The ``aten.mm.default`` that makes the message; None if something else makes it, or if it sums several messages.

        Nothing else reads the GEMM's result or the views on the way: :func:`find_sites` proves this of every partial sum.
        """
        if self.merged:
            return None
        node = peel_views(self.all_reduce.partial)
        made, message = value(node), value(self.all_reduce.partial)
        if not is_call(node, aten.mm.default) or made is None or message is None:
            return None
        if any(value(factor) is None for factor in node.all_input_nodes):
            return None  # the operator could not be traced
        return node if same_size(made.shape[1], message.shape[-1]) else None

    def replaced(self) -> set[fx.Node]:
        """Every node that the fused operator makes superfluous."""
        nodes = {*self.path, *self.norm.interior, *(self.quantised.interior if self.quantised else ())}
        for all_reduce in (self.all_reduce, *self.merged):
            assert all_reduce.wait is not None
            nodes |= {all_reduce.node, all_reduce.wait}
        return nodes

    def partials(self) -> tuple[fx.Node, ...]:
        return (self.all_reduce.partial, *(all_reduce.partial for all_reduce in self.merged))


@dataclass(frozen=True)
class MergedSite:
    """An all_reduce that travels with another one's message."""

    all_reduce: AllReduce
    into: FusionSite


@dataclass(frozen=True)
class RefusedSite:
    all_reduce: AllReduce
    refused: Refused


FoundSite = FusionSite | MergedSite | RefusedSite


def find_sites(graph: fx.Graph, capability: tuple[int, int] | None = None) -> list[FoundSite]:
    """One entry for each functional all_reduce of the graph, and for each operator of a host that is an all_reduce.

    ``capability``: that of the GPUs that the graph runs on, such as ``(9, 0)``; None on a machine without GPUs.
    """
    training = compat.is_training_graph()
    position = {node: index for index, node in enumerate(graph.nodes)}
    merged: dict[fx.Node, FusionSite] = {}
    norms: dict[fx.Node, FusionSite] = {}
    sites: list[FoundSite] = []
    for node in graph.nodes:
        all_reduce = read_all_reduce(node)
        if all_reduce is None:
            continue
        if node in merged:
            sites.append(MergedSite(all_reduce, merged[node]))
            continue
        if training:
            result: FusionSite | Refused = Refused(
                Refusal.TRAINING_GRAPH, "the graph records gradients; call the model under torch.no_grad()"
            )
        else:
            result = _check_all_reduce(all_reduce) or _follow(all_reduce, position, capability)
        if isinstance(result, FusionSite) and result.h in norms:
            first = norms[result.h].all_reduce.node.name
            result = Refused(Refusal.NORM_ALREADY_FUSED, f"it is a residual of {first}, which the norm is fused with")
        if isinstance(result, FusionSite):
            sites.append(result)
            norms[result.h] = result
            merged.update((summand.node, result) for summand in result.merged)
        else:
            sites.append(RefusedSite(all_reduce, result))
    # A later all_reduce may take along one that had no norm to itself.
    return [_as_merged(site, merged) for site in sites]


def _as_merged(site: FoundSite, merged: dict[fx.Node, FusionSite]) -> FoundSite:
    into = merged.get(site.all_reduce.node)
    return site if into is None else MergedSite(site.all_reduce, into)


def _check_all_reduce(all_reduce: AllReduce) -> Refused | None:
    """Why the collective by itself can't be fused; None if nothing speaks against it."""
    node, reduce_op = all_reduce.node, all_reduce.reduce_op
    if not isinstance(reduce_op, str) or reduce_op.lower() != "sum":
        return Refused(Refusal.REDUCE_OP_NOT_SUM, f"{node.name} reduces with {reduce_op!r}")
    if not isinstance(all_reduce.group_name, str):
        return Refused(Refusal.GROUP_NOT_RESOLVED, f"{node.name} names its group by {type(all_reduce.group_name)}")
    try:
        world_size = dist.get_world_size(compat.resolve_process_group(all_reduce.group_name))
    except (RuntimeError, ValueError, KeyError) as error:
        return Refused(Refusal.GROUP_NOT_RESOLVED, f"group {all_reduce.group_name!r}: {error}")
    if world_size == 1:
        return Refused(Refusal.GROUP_SIZE_1, f"group {all_reduce.group_name!r} has one rank")
    tensor = value(all_reduce.partial)
    if tensor is None:
        return Refused(Refusal.MISSING_METADATA, f"{all_reduce.partial.name} has no tensor metadata")
    if tensor.dtype not in SUPPORTED_DTYPES:
        return Refused(Refusal.DTYPE_NOT_SUPPORTED, f"the message has dtype {tensor.dtype}")
    if all_reduce.wait is None or (all_reduce.wait is not node and len(node.users) != 1):
        return Refused(Refusal.REDUCED_VALUE_USED_ELSEWHERE, f"{node.name} is not used by exactly one wait_tensor")
    return None


def _partial_used_elsewhere(all_reduce: AllReduce) -> Refused | None:
    current = all_reduce.partial
    while True:
        if len(current.users) != 1:
            return Refused(
                Refusal.PARTIAL_SUM_USED_ELSEWHERE, f"{current.name} has {len(current.users) - 1} users besides the sum"
            )
        if not is_view(current):
            return None
        current = current.args[0]  # type: ignore[assignment]


def _follow(
    all_reduce: AllReduce, position: dict[fx.Node, int], capability: tuple[int, int] | None
) -> FusionSite | Refused:
    """Walk from the wait to the norm."""
    assert all_reduce.wait is not None
    current = all_reduce.wait
    path: list[fx.Node] = []
    biases: list[fx.Node] = []
    residuals: list[fx.Node] = []
    merged: list[Summand] = []
    scale = 1.0
    while True:
        norm = match_norm(current)
        if isinstance(norm, NormMatch):
            break
        users = _readers(current)
        if len(users) != 1:
            return norm or _explain_users(current, all_reduce)
        user = users[0]
        fused = match_add_rms_norm(user, current)
        if isinstance(fused, Refused):
            return fused
        if fused is not None:
            other, norm = fused
            role = _operand_role(other, current, user)
            if role == "bias":
                role = Refused(Refusal.RESIDUAL_NOT_PROVABLE, f"{user.name} adds a vector")
            if isinstance(role, Refused):
                return role
            residuals.append(other)
            path.append(user)
            current = user
            break
        if is_call(user, aten.add.Tensor) and adds_once(user):
            other = other_operand(user, current)
            role = _operand_role(other, current, user)
            if isinstance(role, Refused):
                return role
            if role == "bias" and biases:
                return Refused(Refusal.RESIDUAL_NOT_PROVABLE, f"{user.name} adds a second bias")
            further = _mergeable(other, all_reduce, user) if role == "residual" and scale == 1.0 else None
            if further is not None:
                merged.append(further)
                path += further.path
            else:
                (biases if role == "bias" else residuals).append(other)
        elif is_call(user, aten.mul.Tensor, aten.mul.Scalar) and isinstance(other_operand(user, current), int | float):
            if biases or residuals or any(further.bias is not None for further in merged):
                return Refused(Refusal.RESIDUAL_NOT_PROVABLE, f"{user.name} scales the sum after an addition")
            scale *= other_operand(user, current)
        elif not (is_view(user) or (is_cast(user) and not _is_float8(user))):
            return norm or Refused(Refusal.NO_RMS_NORM, f"the sum goes into {_describe(user)}")
        path.append(user)
        current = user
    bias = biases[0] if biases else None
    site = FusionSite(
        all_reduce,
        tuple(path),
        current,
        bias,
        tuple(residuals),
        tuple(further.all_reduce for further in merged),
        norm,
        scale,
        merged_biases=tuple(further.bias for further in merged if further.bias is not None),
    )
    quantisation = _quantisation(site, position, capability)
    if isinstance(quantisation, QuantRefused) and not (norm.quant_scale is None and norm.made_scales is None):
        return Refused(Refusal.QUANTISATION_NOT_PROVABLE, f"{quantisation.reason}: {quantisation.detail}")
    return _check_site(replace(site, quantisation=quantisation), position)


def _quantisation(
    site: FusionSite, position: dict[fx.Node, int], capability: tuple[int, int] | None
) -> Quantisation | QuantRefused | None:
    hidden, scale, made = site.norm.output, site.norm.quant_scale, site.norm.made_scales
    tensor = value(hidden)
    if tensor is None:
        return None
    place = Place(tensor.device, capability, lambda node: position[node] < position[site.h])
    if scale is None and made is None:
        return find_quantisation(hidden, place)
    return made if isinstance(made, QuantRefused) else quantisation_of_operator(hidden, scale, place, made)


def _readers(node: fx.Node) -> list[fx.Node]:
    """The users of a node, except those that only read its shape to make a buffer that other users write to."""
    users = set(node.users)
    return [user for user in node.users if not _shapes_a_buffer(user, users)]


def _shapes_a_buffer(user: fx.Node, users: set[fx.Node]) -> bool:
    if is_call(user, aten.sym_size.int):
        return all(_is_buffer_or_size(one, users) for one in user.users)
    return is_call(user, aten.empty_like.default) and set(user.users) <= users


def _is_buffer_or_size(node: fx.Node, users: set[fx.Node]) -> bool:
    """Whether ``node`` is a buffer for ``users`` alone, or a size that only such buffers have."""
    if isinstance(node.meta.get("val"), int | torch.SymInt):
        return all(_is_buffer_or_size(one, users) for one in node.users)
    return is_call(node, aten.empty.memory_format) and set(node.users) <= users


@dataclass(frozen=True)
class Summand:
    """A further all_reduce whose result is added, with the bias that is added to it first; ``path``: nodes behind its wait."""

    all_reduce: AllReduce
    bias: fx.Node | None
    path: tuple[fx.Node, ...]


def _mergeable(other: fx.Node, all_reduce: AllReduce, add: fx.Node) -> Summand | None:
    """``other``, which ``add`` adds, as a summand; None if it is none, or if its message can't join that of ``all_reduce``.

    Messages that are added first are rounded to their dtype once more. In the graph, ``add`` must round as much.
    """
    summand = _summand(other)
    second = None if summand is None else summand.all_reduce
    if (
        summand is None
        or second is None
        or second.group_name != all_reduce.group_name
        or _check_all_reduce(second)
        or _partial_used_elsewhere(second)
    ):
        return None
    assert second.wait is not None
    if any(len(node.users) != 1 for node in (second.wait, *summand.path)):
        return None
    a, b = value(all_reduce.partial), value(second.partial)
    if (
        a is None
        or b is None
        or a.dtype != b.dtype
        or not a.dim()
        or not b.dim()
        or a.shape[-1] != b.shape[-1]
        or not same_size(a.numel(), b.numel())
        or any(_is_wider(node, a.dtype) for node in (add, *summand.path))
    ):
        return None
    return summand


def _is_wider(node: fx.Node, message: torch.dtype) -> bool:
    """Whether a node's result may have more digits than the messages have."""
    result = value(node)
    return result is None or result.dtype.itemsize > message.itemsize


def _summand(end: fx.Node) -> Summand | None:
    """``end`` as the result of an all_reduce, perhaps with a bias added, perhaps through views; None if it is not."""
    path: list[fx.Node] = []
    bias: fx.Node | None = None
    node = end
    while (second := all_reduce_of(node)) is None or second.wait is not node:
        path.append(node)
        if is_view(node):
            node = node.args[0]  # type: ignore[assignment]
            continue
        if bias is not None or not is_call(node, aten.add.Tensor) or not adds_once(node):
            return None
        summands = [operand for operand in node.args[:2] if isinstance(operand, fx.Node)]
        if len({*summands}) < 2:
            return None
        roles = [_operand_role(operand, other_operand(node, operand), node) for operand in summands]
        if roles.count("bias") != 1:
            return None
        bias = summands.pop(roles.index("bias"))
        (node,) = summands
    return Summand(second, bias, tuple(reversed(path)))


def _is_float8(node: fx.Node) -> bool:
    """Whether a cast is to float8, or may be.

    Inductor may compute with more bits than a cast leaves, but not after a cast to float8.
    """
    tensor = value(node)
    return tensor is None or is_float8(tensor.dtype)


def _describe(node: fx.Node) -> str:
    return "the graph's output" if node.op == "output" else f"{node.target}"


def _explain_users(current: fx.Node, all_reduce: AllReduce) -> Refused:
    """The refusal where ``current`` has several users and no norm.

    If a norm follows behind a residual add, the reason is that ``current`` is needed elsewhere, too.
    """
    for user in current.users:
        adds = is_call(user, aten.add.Tensor) and isinstance(match_norm(user), NormMatch)
        if adds or isinstance(match_add_rms_norm(user, current), tuple):
            return Refused(
                Refusal.REDUCED_VALUE_USED_ELSEWHERE, f"{current.name} is needed besides the residual add {user.name}"
            )
    names = ", ".join(sorted({_describe(user) for user in current.users})) or "nothing"
    return Refused(Refusal.NO_RMS_NORM, f"{all_reduce.node.name} goes into {names}")


def _operand_role(other: object, current: fx.Node, add: fx.Node) -> str | Refused:
    """``bias`` for a vector over hidden, ``residual`` for a tensor of the sum's own shape."""
    if not isinstance(other, fx.Node):
        return Refused(Refusal.RESIDUAL_NOT_PROVABLE, f"{add.name} adds {other!r}")
    tensor, rows = value(other), value(current)
    if tensor is None or rows is None:
        return Refused(Refusal.MISSING_METADATA, f"{other.name} has no tensor metadata")
    if not tensor.is_floating_point() or tensor.dtype not in SUPPORTED_DTYPES:
        return Refused(Refusal.DTYPE_NOT_SUPPORTED, f"{other.name} has dtype {tensor.dtype}")
    if tensor.dim() == 1 and rows.dim() > 0 and same_size(tensor.shape[0], rows.shape[-1]):
        return "bias"
    if same_shape(tensor, rows):
        return "residual"
    return Refused(
        Refusal.RESIDUAL_NOT_PROVABLE, f"{other.name} has shape {list(tensor.shape)}, the sum {list(rows.shape)}"
    )


def _check_site(site: FusionSite, position: dict[fx.Node, int]) -> FusionSite | Refused:
    """The site, if the conditions hold that need the whole site; otherwise a refusal."""
    refused = _partial_used_elsewhere(site.all_reduce)
    if refused is not None:
        return refused
    partial, h, hidden = value(site.all_reduce.partial), site.stream_value, value(site.norm.output)
    if partial is None or h is None or hidden is None:
        return Refused(Refusal.MISSING_METADATA, f"{site.h.name} or {site.norm.output.name} has no tensor metadata")
    for name, tensor in (("residual stream", h), ("norm's output", hidden)):
        if tensor.dtype not in SUPPORTED_DTYPES and not (tensor is hidden and site.quantised):
            return Refused(Refusal.DTYPE_NOT_SUPPORTED, f"the {name} has dtype {tensor.dtype}")
    for name, node, tensor in (("residual stream", site.stream, h), ("norm's output", site.norm.output, hidden)):
        if not has_default_strides(tensor) and (tensor.dim() == 2 or _is_read_as_memory(node)):
            return Refused(
                Refusal.NOT_ROW_MAJOR, f"the {name} has shape {list(tensor.shape)}, strides {tensor.stride()}"
            )
    hidden_size = partial.shape[-1] if partial.dim() else None
    if partial.dim() < 2 or not isinstance(hidden_size, int) or not same_size(h.shape[-1], hidden_size):
        return Refused(
            Refusal.HIDDEN_SIZE_NOT_SUPPORTED, f"the sum has shape {list(partial.shape)}, the norm {list(h.shape)}"
        )
    for addend in (*site.residuals, *site.biases):
        added = value(addend)
        if added is None or not same_size(added.shape[-1], hidden_size):
            return Refused(Refusal.RESIDUAL_NOT_PROVABLE, f"{addend.name} is not added over rows of {hidden_size}")
    if site.norm.output is not site.norm.interior[-1] or (
        site.norm.weight is None and hidden.dtype.itemsize > h.dtype.itemsize and not site.quantised
    ):
        return Refused(Refusal.NORM_INTERMEDIATE_USED, f"{site.norm.output.name} is used in {hidden.dtype}")
    if hidden.dtype == torch.float32 and not site.quantised:
        for node in site.norm.interior:
            computed = value(node)
            # Computed in float32 it would lose more than the budget allows.
            if computed is not None and computed.dtype == torch.float64:
                return Refused(Refusal.DTYPE_NOT_SUPPORTED, f"{node.name} computes a float32 result in float64")
    for vector in site.norm.vectors():
        given = value(vector)
        if given is None or given.dtype not in SUPPORTED_DTYPES:
            dtype = None if given is None else given.dtype
            return Refused(Refusal.WEIGHT_NOT_PROVABLE, f"{vector.name} has dtype {dtype}")
    late = _computed_after(site.norm.vectors(), site.h, position)
    if late is None:
        names = " or ".join(node.name for node in site.norm.vectors())
        return Refused(
            Refusal.WEIGHT_NOT_PROVABLE,
            f"{names} depends on what follows the residual add, or on random numbers",
        )
    missing = _missing_size(site, hidden_size)
    if missing is not None:
        return Refused(Refusal.SIZE_NOT_AVAILABLE, f"nothing before {site.h.name} has its size {missing}")
    return replace(site, late_weight=late)


def _is_read_as_memory(node: fx.Node | None) -> bool:
    """Whether a reader depends on where rows lie in memory, and not only on their values.

    The operator returns row-major rows. A value of two dims is replaced by the operator's result itself. If this value had
    other strides, Inductor would copy the result to these strides as soon as it meets the result, which is before the wait.
    """
    seen = () if node is None else views_and_casts_of(node)
    return any(is_call(user, aten.as_strided.default) for view in seen for user in view.users)


def _computed_after(
    vectors: tuple[fx.Node, ...], h: fx.Node, position: dict[fx.Node, int]
) -> tuple[fx.Node, ...] | None:
    """The nodes after ``h`` that compute ``vectors``, in graph order; None if they can't be computed before ``h``."""
    late: set[fx.Node] = set()
    pending = list(vectors)
    while pending:
        node = pending.pop()
        if position[node] < position[h] or node in late:
            continue
        if node is h or not _repeatable(node) or len(late) == _MAX_LATE_WEIGHT:
            return None
        late.add(node)
        pending += node.all_input_nodes
    return tuple(sorted(late, key=position.__getitem__))


def _repeatable(node: fx.Node) -> bool:
    """Whether computing the node a second time gives the same value and does nothing else."""
    namespace = getattr(node.target, "namespace", None)
    known = node.op == "call_function" and namespace in ("aten", "prims")
    if node.meta.get("unbacked_bindings"):
        return False  # a second `.item()` would be another number to the compiler
    return known and not node.is_impure() and not draws_random_numbers(node)


def _missing_size(site: FusionSite, hidden_size: int) -> torch.SymInt | None:
    """A symbolic size of the site's results that nothing in front of ``h`` has; None if there is none."""
    graph = site.h.graph
    tensors = (*graph.find_nodes(op="placeholder"), *site.partials())
    hidden = site.quantised.outputs if site.quantised else (site.norm.output,)
    results = [(site.stream_value, hidden_size), *((value(node), hidden_size) for node in hidden)]
    results += [(value(node), scales) for node, scales in site.quantised.scale_nodes] if site.quantised else []
    wanted = [size for result, last in results if result is not None for size in sizes_of_view(result, last)]
    known = known_sizes(graph) if wanted else {}
    return next((size for size in wanted if size_source(known, tensors, size, site.h) is None), None)
