"""What a wire costs, as text."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from tw_compile.harness.table import plain_table

QUANTITIES = ("sum", "hidden", "residual")


def print_wire(console: Console, wire: dict[str, Any]) -> None:
    """Print a table of errors. Calls are classed by what feeds the sum and by depth; each class shows its worst call."""
    columns = ("sum of", "layers", "calls", "output", wire["wire"], "budget", "exact", "ok")
    title = f"{wire['wire']} wire: relative RMS error of a call against float64, worst call"
    table = plain_table(columns, ("sum of", "layers", "output", "ok"), title, "bold")
    for row in wire["classes"]:
        for name in QUANTITIES:
            errors = row[name]
            if errors is None:
                continue
            table.add_row(
                row["feeds"],
                row["third"] or "-",
                str(row["calls"]),
                name,
                *(f"{errors[key]:.3e}" for key in ("error", "budget", "exact_error")),
                Text("yes", style="green") if errors["passed"] else Text("NO", style="bold red"),
            )
    console.print()
    console.print(table)
    ranks = "ranks identical" if wire["bitwise_equal_across_ranks"] else "ranks DIFFER"
    console.print(
        f"budget: 1.1 x what its codes cost in the reference; exact: the same call with exact rows; {wire['calls']} calls with "
        f"{wire['wire']}, {wire['exact_calls']} exact; {ranks}",
        style="dim",
        markup=False,
    )
