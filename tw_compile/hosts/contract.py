"""What a host is: the program that compiles a model and calls the passes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tw_compile.gating.hosts import Dispatch
from tw_compile.passes.operators import Operator


@dataclass(frozen=True)
class Host:
    """All that the passes and the gate must know of a host, as data. A module that makes one imports neither it nor torch.

    Attributes:
        names: What option ``host`` may say; several for versions that dispatch an all_reduce in different ways.
        dispatch: What it does with an all_reduce that is not fused, and which settings and environment variables decide that.
        operators: Those that its graphs call and passes must know: all_reduces, norms, quantisations, attention, and what
            else works on each row of a tensor.
        rules: The module that registers further token rules (:func:`tw_compile.passes.split.token_rule`) as it is imported,
            which happens when the first graph is split; empty where there are none.
        refusals: Names of the reasons for which it has graphs left as they are (:meth:`tw_compile.TWCompilePass.refuse`).
        compiles_ranges: Whether its graphs are for ranges of token counts.
    """

    names: tuple[str, ...]
    dispatch: Dispatch
    operators: tuple[Operator, ...] = ()
    rules: str = ""
    refusals: type[StrEnum] | None = None
    compiles_ranges: bool = False

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError(f"names: expected at least one, none of them empty, got {self.names!r}")
