"""What the planner needs to know of a wire: the bytes of its rows, as shares of the bytes of exact rows. Imports no torch."""

from __future__ import annotations

from tw_compile.kernels.collective.wires import EXACT, WIRES
from tw_compile.planning import RowShares, Wires
from tw_compile.planning.communication import ELEMENT_BYTES


def row_shares(wire: str, hidden_size: int) -> RowShares:
    """The shares for rows ``[hidden_size]`` of 16 bits a column. The time to encode the rows is not included."""
    codes = WIRES[wire]
    sums, results = (
        1.0 if way is None else way.row_bytes(hidden_size) / (hidden_size * ELEMENT_BYTES)
        for way in (codes.sums, codes.results)
    )
    return RowShares(sums, results, wire)


def planned_wires(hidden_size: int, attention: str = EXACT, mlp: str = EXACT) -> Wires:
    """The shares for the wires of the sums behind attention and behind the MLP."""
    return Wires(row_shares(attention, hidden_size), row_shares(mlp, hidden_size))
