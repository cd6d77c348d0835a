"""How Inductor calls the project's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def lower_as_calls(operators: Sequence[torch._ops.OpOverload]) -> None:
    """Have Inductor call ``operators`` as they are, with operands laid out as their tags say.

    Inductor does this by itself, but here two things differ. By itself it first writes into its log everything that the
    operands are computed from, which takes minutes for a late layer; here it does not. And here generated Python code calls
    ``operator.direct``, without the dispatcher. A lowering that Inductor chose by itself, for a graph compiled before, is
    replaced.
    """
    from torch._inductor.lowering import lowerings, make_fallback, register_lowering, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for operator in operators:
        if not hasattr(lowerings.get(operator), "calls_directly"):
            layout = get_layout_constraint_tag(operator, with_default=True)
            make_fallback(operator, tag_to_layout_constraint(layout), warn=False)
            register_lowering(operator, type_promotion_kind=None)(_direct_call(operator))


def _direct_call(operator: torch._ops.OpOverload) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V
    from torch.utils import _pytree as pytree

    class DirectCall(ir.FallbackKernel):
        """A call of an operator. Generated C++ goes through the dispatcher, which finds the operator by its name."""

        def try_get_kernel_name(self) -> str | None:
            name = super().try_get_kernel_name()
            return name if name is None or V.graph.cpp_wrapper or V.graph.fx_wrapper else f"{name}.direct"

    def lower(*args: Any, **kwargs: Any) -> Any:
        results = DirectCall.create(operator, *args, **kwargs)
        return pytree.tree_map(lambda one: ir.TensorBox.create(one) if isinstance(one, ir.IRNode) else one, results)

    lower.calls_directly = True  # type: ignore[attr-defined]
    return lower
