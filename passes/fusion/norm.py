"""Recognise an RMSNorm or a LayerNorm by what it computes, however the source wrote it.

    h -> [upcast] -> square -> mean over hidden -> + eps -> rsqrt -> times h -> y
    h -> [upcast] -> var_mean over hidden -> + eps -> rsqrt -> times (h - mean) -> y
    y -> [cast] -> [times weight] -> [plus bias] -> [cast]

A LayerNorm is an RMSNorm of ``h - mean(h)``. Where the source squares ``h - mean(h)`` for the variance, it is found as that.

Hugging Face models cast before the weight. torch's RMSNorm multiplies by the weight in float32 and casts after it. Gemma's
weight is an offset from one. eps comes as a Python scalar on either overload, or as a constant tensor.

Hosts have operators for norms, which are recognised by name (:class:`tw_compile.passes.operators.NormOperator`). Some add the
residual first, and some also quantise the result (see :mod:`tw_compile.passes.fusion.quant`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from tw_compile.graph.predicates import (
    adds_once,
    aten,
    constant,
    is_call,
    is_cast,
    is_float8,
    is_lossless_cast,
    other_operand,
    same_shape,
    same_size,
    value,
    views_and_casts_of,
)
from tw_compile.kernels.collective.fields import LAYER_NORM, RMS_NORM
from tw_compile.passes.fusion.forms import HostCall, host_call
from tw_compile.passes.fusion.made_scales import MadeScales, made_by_operator
from tw_compile.passes.operators import NormOperator
from tw_compile.passes.reasons import QuantRefused, Refusal, Refused


@dataclass(frozen=True)
class NormMatch:
    """A norm of ``h``: ``output`` is the node that a fused operator's hidden output replaces, ``epilogue`` the kind of norm.

    ``interior`` are the nodes from the square, or the mean, to ``output``. Nodes outside use only ``output`` of them.
    ``eps`` is a number, or an input of the graph that is a CPU tensor of no dimension: ``dynamic=True`` makes such inputs of
    Python floats. ``bias`` is the norm's own bias, which is added behind the weight. ``operator`` is the node of an operator
    that adds a residual first, and ``added`` its result ``h``; None if nothing reads ``h``. If an operator also quantises
    ``output``, ``quant_scale`` is the scale that it is given, or ``made_scales`` are the scales that it makes.
    """

    output: fx.Node
    interior: tuple[fx.Node, ...]
    eps: float | fx.Node
    weight: fx.Node | None = None
    weight_offset: float = 0.0
    cast_before_weight: torch.dtype | None = None
    operator: fx.Node | None = None
    added: fx.Node | None = None
    quant_scale: fx.Node | None = None
    made_scales: MadeScales | QuantRefused | None = None
    epilogue: str = RMS_NORM
    bias: fx.Node | None = None

    @property
    def form(self) -> str:
        return self._weight_form + ("" if self.bias is None else "+bias")

    @property
    def _weight_form(self) -> str:
        if self.weight is None:
            return "no_weight"
        if self.cast_before_weight is not None:
            return "hf"
        return "fp32" if self.weight_offset == 0.0 else "gemma"

    def vectors(self) -> tuple[fx.Node, ...]:
        """The weight and the bias, as far as there are any."""
        return tuple(node for node in (self.weight, self.bias) if node is not None)


def match_norm(h: fx.Node) -> NormMatch | Refused | None:
    """The norm computed from ``h``; None when nothing that uses ``h`` looks like the beginning of one."""
    same_values = [node for node in views_and_casts_of(h) if _same_rows(node, h)]
    refusal: Refused | None = None
    for source in same_values:
        for user in source.users:
            centred = _match_layer_norm(user, set(same_values))
            if isinstance(centred, NormMatch):
                return centred
            refusal = refusal or centred
            called = host_call(user, NormOperator)
            if called is not None and not _adds(called) and _summed(called) is source:
                match = _match_of_operator(called, source)
                if refusal is None and isinstance(match, NormMatch):
                    return match
                refusal = refusal or (match if isinstance(match, Refused) else None)
            if not _is_square(user, source):
                continue
            result = _match_from_square(user, set(same_values))
            if isinstance(result, NormMatch):
                return result
            refusal = refusal or result
    return refusal


def match_add_rms_norm(node: fx.Node, current: fx.Node) -> tuple[fx.Node, NormMatch] | Refused | None:
    """If ``node`` is an operator that adds and normalises: what it adds to ``current``, and the norm. None for other nodes."""
    called = host_call(node, NormOperator)
    if called is None or not _adds(called):
        return None
    assert called.operator.residual is not None
    summands = (_summed(called), called.arguments.get(called.operator.residual))
    other = summands[1] if summands[0] is current else summands[0]
    if current not in summands or other is current or not isinstance(other, fx.Node):
        return Refused(Refusal.RESIDUAL_NOT_PROVABLE, f"{node.name} does not add something else to {current.name}")
    match = _match_of_operator(called, current)
    return match if isinstance(match, Refused) else (other, match)


def _adds(called: HostCall[NormOperator]) -> bool:
    """Whether the operator adds a residual, which some do only if they are given one."""
    residual = called.operator.residual
    return residual is not None and called.arguments.get(residual) is not None


def _summed(called: HostCall[NormOperator]) -> object:
    return called.arguments.get(called.operator.rows)


def _match_of_operator(called: HostCall[NormOperator], rows: fx.Node) -> NormMatch | Refused:
    """The norm that a host's operator computes; ``rows`` is the node that it normalises, or a summand of what it normalises."""
    node, norm = called.node, called.operator
    refused = _check_arguments(called, rows)
    if refused is not None:
        return refused
    if not _adds(called) and not norm.writes:
        return _as_match(called, node, (node,))
    first = 1 if norm.writes else 0  # what is written follows the operator's own result, which is None
    made = norm.made_scales
    parts = _parts(node, first, *range(first + 1, first + (2 if made is None else 3)))
    if isinstance(parts, Refused):
        return parts
    hidden, *scales, added = parts
    assert hidden is not None
    match = _as_match(called, hidden, _without_none(node, added, hidden))
    scale = None if norm.scale is None else called.arguments[norm.scale]
    made_scales = None if made is None else made_by_operator(made, called.arguments, rows, scales[0])
    added_by = node if _adds(called) else None
    return replace(match, operator=added_by, added=added, quant_scale=scale, made_scales=made_scales)


def _parts(node: fx.Node, hidden: int, *others: int) -> tuple[fx.Node | None, ...] | Refused:
    """The ``getitem`` nodes that take the results ``hidden`` and ``others`` of an operator; None for one that is not read."""
    parts: dict[object, list[fx.Node]] = {index: [] for index in (hidden, *others)}
    for user in node.users:
        if not is_call(user, operator.getitem) or user.args[1] not in parts:
            return Refused(Refusal.NORM_INTERMEDIATE_USED, f"{node.name} is used by {user.name} as a whole")
        parts[user.args[1]].append(user)
    if len(parts[hidden]) != 1 or any(len(parts[other]) > 1 for other in others):
        counts = " and ".join(str(len(taken)) for taken in parts.values())
        return Refused(Refusal.NORM_INTERMEDIATE_USED, f"results of {node.name} are taken {counts} times")
    return tuple(next(iter(taken), None) for taken in parts.values())


def _without_none(*nodes: fx.Node | None) -> tuple[fx.Node, ...]:
    return tuple(node for node in nodes if node is not None)


def _check_arguments(called: HostCall[NormOperator], rows: fx.Node) -> Refused | None:
    """Why the fused operator can't serve the arguments of a host's operator; None if it can."""
    node, norm, arguments = called.node, called.operator, called.arguments
    if norm.weight not in arguments or norm.eps not in arguments or (node.kwargs and not norm.writes):
        return Refused(Refusal.NO_RMS_NORM, f"{node.name} is called with keywords, which compiled graphs don't do")
    weight, eps = arguments[norm.weight], arguments[norm.eps]
    if norm.variance_size is not None and arguments.get(norm.variance_size) is not None:
        return Refused(Refusal.MEAN_DIM, f"{node.name} averages over a part of the hidden dim")
    if not isinstance(eps, int | float):
        return Refused(Refusal.EPS_NOT_CONSTANT, f"{node.name} has an eps that is not a constant")
    verdict = True if weight is None else _is_weight(weight, rows)
    if verdict is False:
        return Refused(Refusal.WEIGHT_NOT_PROVABLE, f"{weight.name} is not a vector over the hidden dim")
    return None if verdict is True else verdict


def _as_match(called: HostCall[NormOperator], output: fx.Node, interior: tuple[fx.Node, ...]) -> NormMatch:
    """The match of a host's operator, which normalises in float32 and casts to the weight's dtype before the weight."""
    weight, eps = called.arguments[called.operator.weight], called.arguments[called.operator.eps]
    factor = None if weight is None else value(weight)
    cast = None if factor is None or factor.dtype == torch.float32 else factor.dtype
    return NormMatch(output, interior, float(eps), weight, cast_before_weight=cast)


def _same_rows(node: fx.Node, h: fx.Node) -> bool:
    """Whether ``node``, a view or cast of ``h``, has the rows of ``h``.

    A view with another last dim (heads, or a new dim of 1) has the values of ``h`` but not its rows.
    """
    viewed, summed = value(node), value(h)
    return (
        viewed is None
        or summed is None
        or (viewed.dim() > 0 and summed.dim() > 0 and same_size(viewed.shape[-1], summed.shape[-1]))
    )


def _is_square(node: fx.Node, source: fx.Node) -> bool:
    if is_call(node, aten.pow.Tensor_Scalar):
        return node.args[0] is source and bool(node.args[1] == 2)
    return is_call(node, aten.mul.Tensor) and node.args[0] is source and node.args[1] is source


def _match_layer_norm(node: fx.Node, same_values: set[fx.Node]) -> NormMatch | Refused | None:
    """The LayerNorm that begins with ``node``, which computes the mean of rows; None if ``node`` does not.

    All readers of the mean must subtract it from the rows. ``centred`` are these readers.
    """
    if is_call(node, aten.native_layer_norm.default):
        return Refused(Refusal.LAYER_NORM, f"{node.name} is a LayerNorm that was not decomposed")
    if is_call(node, aten.var_mean.correction):
        parts = _parts(node, 0, 1)
        if isinstance(parts, Refused):
            return parts
        variance, mean = parts
        assert variance is not None
    elif is_call(node, aten.mean.dim):
        variance, mean = None, node
    else:
        return None
    centred = [] if mean is None else [user for user in mean.users if _takes_off(user, mean, same_values)]
    if mean is None or not centred:
        return None
    refusal = _check_row_mean(node, mean)
    if refusal is None and len(centred) < len(mean.users):
        refusal = Refused(Refusal.NORM_INTERMEDIATE_USED, f"{mean.name} is not only taken off the rows")
    if refusal is not None:
        return refusal
    beginning = (node, *centred) if variance is None else (node, mean, *centred)
    if variance is not None:
        match = _match_from_variance(variance, beginning, (variance,), set(centred))
    else:
        squares = [user for source in centred for user in source.users if _is_square(user, source)]
        match = None if len(squares) != 1 else _match_from_square(squares[0], set(centred), beginning)
    if match is None:
        return Refused(Refusal.LAYER_NORM, f"{node.name} begins a LayerNorm of a form that is not known")
    if isinstance(match, Refused):
        return match
    return _check_centred(replace(match, epilogue=LAYER_NORM), centred)


def _takes_off(node: fx.Node, mean: fx.Node, same_values: set[fx.Node]) -> bool:
    if not (is_call(node, aten.sub.Tensor) and adds_once(node)):
        return False
    if node.args[0] not in same_values or node.args[1] is not mean:
        return False
    # Broadcast, each row less the mean of every row would be another shape.
    rows, centred = value(node.args[0]), value(node)  # type: ignore[arg-type]
    return rows is not None and centred is not None and same_shape(rows, centred)


def _check_row_mean(node: fx.Node, mean: fx.Node) -> Refused | None:
    """Why ``node``, which computes the mean and perhaps the variance, does not fit a LayerNorm; None if it does."""
    refusal = _check_mean(mean, node.args[0], node.args[1] if len(node.args) > 1 else None)
    if refusal is None and is_call(node, aten.var_mean.correction) and node.kwargs.get("correction") != 0:
        return Refused(Refusal.LAYER_NORM, f"{node.name} has a variance that is corrected, which LayerNorm's is not")
    return refusal


def _check_centred(match: NormMatch, centred: list[fx.Node]) -> NormMatch | Refused:
    """The match, if nothing but the norm reads the centred rows; otherwise a refusal."""
    inside = {*match.interior}
    for node in centred:
        if not inside.issuperset(node.users):
            return Refused(Refusal.NORM_INTERMEDIATE_USED, f"{node.name} is read by others than the norm")
    return match


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _match_from_square(
    square: fx.Node, same_values: set[fx.Node], beginning: tuple[fx.Node, ...] = ()
) -> NormMatch | Refused | None:
    """The norm whose variance is the mean of ``square``, the square of one of ``same_values``.

    ``beginning`` are the nodes of the norm in front of ``square``.
    """
    mean = next((user for user in square.users if is_call(user, aten.mean.dim)), None)
    if mean is None:
        return None
    refusal = _check_mean(mean, square, mean.args[1])
    if refusal is not None:
        return refusal
    return _match_from_variance(mean, beginning, (square, mean), same_values)


def _match_from_variance(
    mean: fx.Node, beginning: tuple[fx.Node, ...], made_by: tuple[fx.Node, ...], same_values: set[fx.Node]
) -> NormMatch | Refused | None:
    """The norm that multiplies one of ``same_values`` by the inverse root of ``mean``, the variance.

    ``made_by`` are the nodes that make the variance, with one user each, and ``beginning`` the nodes in front of these.
    """
    interior = list(made_by)
    eps: float | fx.Node = 0.0
    last = mean
    with_eps = _only_user(mean)
    if is_call(with_eps, aten.add.Tensor, aten.add.Scalar):
        addend = other_operand(with_eps, mean)
        number = constant(addend)
        added = _host_scalar(addend) if number is None else number
        if added is None or not adds_once(with_eps):
            return Refused(Refusal.EPS_NOT_CONSTANT, f"{with_eps.name} adds a value that is not a constant")
        eps = added
        interior.append(with_eps)
        last = with_eps
    scale, divides = _reciprocal_root(last, interior)
    if scale is None:
        if len(last.users) > 1 or len(mean.users) > 1:
            return Refused(Refusal.NORM_INTERMEDIATE_USED, f"{last.name} has {len(last.users)} users")
        return None
    for node in interior:
        if len(node.users) != 1:
            return Refused(Refusal.NORM_INTERMEDIATE_USED, f"{node.name} has {len(node.users)} users")
    normalised = _only_user(scale)
    if normalised is None:
        return Refused(Refusal.NORM_INTERMEDIATE_USED, f"{scale.name} has {len(scale.users)} users")
    if divides:
        if not (is_call(normalised, aten.div.Tensor) and normalised.args[1] is scale):
            return None
        source = normalised.args[0]
    else:
        if not is_call(normalised, aten.mul.Tensor):
            return None
        source = other_operand(normalised, scale)
    rows, product = value(next(iter(same_values))), value(normalised)
    if source not in same_values or rows is None or product is None or not same_size(rows.numel(), product.numel()):
        return None
    return _follow_weight(normalised, (*beginning, *interior, scale, normalised), eps)


def _check_mean(mean: fx.Node, averaged: object, dims: object) -> Refused | None:
    """Why ``mean`` is not the average of ``averaged`` over the hidden dim, kept as a dim of size 1; None if it is."""
    source, result = value(averaged), value(mean)  # type: ignore[arg-type]
    if source is None or result is None:
        return Refused(Refusal.MISSING_METADATA, f"{mean.name} has no tensor metadata")
    last = source.dim() - 1
    if not isinstance(dims, list | tuple) or [d % source.dim() for d in dims] != [last]:
        return Refused(Refusal.MEAN_DIM, f"{mean.name} averages over dims {dims}, not over the hidden dim {last}")
    if result.dim() != source.dim():
        return Refused(Refusal.MEAN_DIM, f"{mean.name} drops the hidden dim (keepdim=False)")
    return None


def _host_scalar(operand: object) -> fx.Node | None:
    """The graph input that ``operand`` is, or is cast from, if it is a CPU scalar: reading its number waits for nothing."""
    while is_cast(operand):
        operand = operand.args[0]
    if not isinstance(operand, fx.Node) or operand.op != "placeholder":
        return None
    fake = value(operand)
    is_scalar = fake is not None and fake.dim() == 0 and fake.device.type == "cpu" and fake.is_floating_point()
    return operand if is_scalar else None


def _reciprocal_root(variance: fx.Node, interior: list[fx.Node]) -> tuple[fx.Node | None, bool]:
    """``(node, divides)``: the node that holds 1/sqrt or, with ``divides``, the node that holds sqrt, the divisor."""
    user = _only_user(variance)
    if is_call(user, aten.rsqrt.default):
        return user, False
    if is_call(user, aten.pow.Tensor_Scalar) and user.args[1] == -0.5:
        return user, False
    if is_call(user, aten.sqrt.default):
        assert user is not None
        inverse = _only_user(user)
        if is_call(inverse, aten.reciprocal.default):
            interior.append(user)
            return inverse, False
        return user, True
    return None, False


def _follow_weight(normalised: fx.Node, interior: tuple[fx.Node, ...], eps: float | fx.Node) -> NormMatch | Refused:
    """Extend the match over the cast, the weight and the bias, as far as every node has one user."""
    nodes = list(interior)
    current = normalised
    cast_dtype: torch.dtype | None = None
    user = _only_user(current)
    if user is not None and is_cast(user) and not _quantises(user):
        result = value(user)
        assert result is not None
        cast_dtype = result.dtype
        nodes.append(user)
        current = user
        user = _only_user(current)
    weight: fx.Node | None = None
    offset = 0.0
    factor = other_operand(user, current) if is_call(user, aten.mul.Tensor) else None
    if isinstance(factor, fx.Node):
        verdict = _is_weight(factor, current)
        if isinstance(verdict, Refused):
            return verdict
        if verdict:
            weight, offset = _split_offset(factor) if cast_dtype is None else (factor, 0.0)
            nodes += current.users
            current = nodes[-1]
    bias = _bias_of(current)
    if bias is not None:
        nodes += current.users
        current = nodes[-1]
    cast = _only_user(current)
    rounds = cast is not None and is_cast(cast) and not is_lossless_cast(cast) and not _quantises(cast)
    if rounds and (weight is not None or bias is not None):
        nodes += current.users
        current = nodes[-1]
    cast_before_weight = None if weight is None else cast_dtype
    return NormMatch(current, tuple(nodes), eps, weight, offset, cast_before_weight, bias=bias)


def _bias_of(rows: fx.Node) -> fx.Node | None:
    """The vector over the hidden dim that the only user of ``rows`` adds to each of them; None if it does something else."""
    user = _only_user(rows)
    if not is_call(user, aten.add.Tensor) or not adds_once(user):
        return None
    bias = other_operand(user, rows)
    if not isinstance(bias, fx.Node) or _is_weight(bias, rows) is not True:
        return None
    return bias.args[0] if is_cast(bias) and is_lossless_cast(bias) else bias  # type: ignore[return-value]


def _quantises(cast: fx.Node) -> bool:
    """Whether a cast rounds to float8. Such a cast is no part of the norm: ``quant.py`` recognises it with its scale."""
    result = value(cast)
    return result is not None and is_float8(result.dtype)


def _is_weight(weight: fx.Node, normalised: fx.Node) -> bool | Refused:
    """Whether ``weight`` is a vector over the hidden dim; False for an ordinary elementwise factor."""
    factor, rows = value(weight), value(normalised)
    if factor is None or rows is None:
        return Refused(Refusal.WEIGHT_NOT_PROVABLE, f"{weight.name} has no tensor metadata")
    if factor.dim() != 1 or (same_size(factor.shape[0], 1) and not same_size(rows.shape[-1], 1)):
        return False
    if not factor.is_floating_point():
        return Refused(Refusal.WEIGHT_NOT_PROVABLE, f"{weight.name} has dtype {factor.dtype}")
    if not same_size(factor.shape[0], rows.shape[-1]):
        return Refused(
            Refusal.WEIGHT_NOT_PROVABLE, f"{weight.name} has shape [{factor.shape[0]}], not [{rows.shape[-1]}]"
        )
    return True


def _split_offset(weight: fx.Node) -> tuple[fx.Node, float]:
    """``(w, c)`` for a weight written as ``c + w`` in float32, so that the addition happens inside the operator."""
    if is_call(weight, aten.add.Tensor, aten.add.Scalar) and adds_once(weight):
        left, right = weight.args[:2]
        base, offset = (left, right) if isinstance(left, fx.Node) else (right, left)
        result = value(weight)
        if isinstance(base, fx.Node) and isinstance(offset, int | float) and result is not None:
            if result.dtype != torch.float32:
                return weight, 0.0
            return (base.args[0] if is_cast(base) and is_lossless_cast(base) else base), float(offset)  # type: ignore[return-value]
    if is_cast(weight) and is_lossless_cast(weight):
        return weight.args[0], 0.0  # type: ignore[return-value]
    return weight, 0.0
