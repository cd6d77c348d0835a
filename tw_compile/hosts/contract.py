"""What a host is: the program that compiles a model and calls the passes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tw_compile.gating.hosts import Dispatch
from tw_compile.passes.operators import Operator


@dataclass(frozen=True)
class Host:
    """All that the passes and the gate must know about a host, as data.

    A module that makes a ``Host`` imports neither the host program nor torch.

    Attributes:
        names: The values of option ``host`` that mean this host. There are several if versions of the host dispatch an
            all_reduce in different ways.
        dispatch: What the host does with an all_reduce that is not fused, and which settings and environment variables decide
            that.
        operators: The operators that the host's graphs call and that passes must know: all_reduces, norms, quantisations,
            attention, and others that work on each row of a tensor.
        rules: The module that registers further token rules (:func:`tw_compile.passes.split.token_rule`) when it is imported,
            which happens when the first graph is split; empty where there are none.
        refusals: Names of the host's reasons to leave a graph as it is (:meth:`tw_compile.TWCompilePass.refuse`).
        compiles_ranges: Whether the host's graphs are for ranges of token counts.
        own_fusion: ``module:function`` where the host fuses some all_reduces itself before the passes come. The function gets
            the passes' configuration, a compute capability, the number of ranks, the hidden size and the dtype. It returns a
            line that says which messages these are; empty where there are none.
    """

    names: tuple[str, ...]
    dispatch: Dispatch
    operators: tuple[Operator, ...] = ()
    rules: str = ""
    refusals: type[StrEnum] | None = None
    compiles_ranges: bool = False
    own_fusion: str = ""

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError(f"names: expected at least one, none of them empty, got {self.names!r}")
