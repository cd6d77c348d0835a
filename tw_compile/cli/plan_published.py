"""The gains of a plan for eight GPUs with NVLink multicast, beside the gains that TokenWeave published for such a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from tw_compile.benchmark.papers.published import Published, read_published
from tw_compile.harness.table import plain_table
from tw_compile.planning import DeviceProfile, Plan

PAPER = "tokenweave"
MODELS = {"llama-3.3-70b": "Llama-3.3-70B", "mixtral-8x22b": "Mixtral-8x22B"}
CALL_RANKS, CALL_HIDDEN = 8, 8192
"""The ranks and the hidden size of the calls whose times the paper gives."""


def beside_published(
    model: str, world_size: int, hidden_size: int, profile: DeviceProfile, kernel: str | None, plans: Sequence[Plan]
) -> dict[str, Any] | None:
    """The predicted gains over the unfused layer, and the paper's gains. None for a kernel without multicast.

    A value that the paper does not have is None.
    """
    if not profile.fused_kernel(kernel).multicast:
        return None
    paper = read_published(PAPER)
    whole = gains_of_model(paper, model, world_size)
    calls = gains_of_calls(paper) if (world_size, hidden_size) == (CALL_RANKS, CALL_HIDDEN) else {}
    rows = []
    for plan in plans:
        predicted = plan.predicted
        unfused = predicted.unfused_us
        rows.append(
            {
                "tokens": plan.tokens,
                "fused": unfused / predicted.fused_us,
                "split": None if predicted.split_us is None else unfused / predicted.split_us,
                "no_communication": unfused / predicted.no_communication_us,
                "published_call_fused": calls.get(plan.tokens),
                "published_split": whole["split"].get(plan.tokens),
                "published_no_communication": whole["no_communication"].get(plan.tokens),
            }
        )
    return {"source": paper.source, "hardware": paper.hardware, "gains": rows}


def gains_of_model(paper: Published, model: str, world_size: int) -> dict[str, dict[float, float]]:
    """Speed-ups over the paper's baseline, from figure 11, by tokens of one prefill.

    ``split`` is the speed-up of the split model, ``no_communication`` that of a model that does not communicate.
    """
    name = f"{MODELS.get(model, model)}, TP{world_size}"
    series = {row.series for row in paper.rows if row.exhibit == "11"}
    if f"{name}, speed-up" in series:
        return {"split": paper.points("11", f"{name}, speed-up"), "no_communication": {}}
    if f"{name}, baseline, ms" not in series:
        return {"split": {}, "no_communication": {}}
    base = paper.points("11", f"{name}, baseline, ms")
    faster = {"split": f"{name}, TokenWeave, ms", "no_communication": f"{name}, no communication, ms"}
    return {
        way: {tokens: base[tokens] / ms for tokens, ms in paper.points("11", of).items()} for way, of in faster.items()
    }


def gains_of_calls(paper: Published) -> dict[float, float]:
    """Speed-ups of a fused call over all_reduce and norm, from figure 4, by tokens. Messages are tokens x 8192 on 8 ranks."""
    unfused, fused = (paper.points("4", series) for series in ("all_reduce + norm, us", "fused, us"))
    return {tokens: unfused[tokens] / us for tokens, us in fused.items()}


def print_published(console: Console, published: dict[str, Any]) -> None:
    """Print the gains side by side."""
    console.print()
    console.print(
        f"gains over the unfused layer: predicted from times of kernels that were published ({published['source']}), never "
        "measured on such a node; and as published, of its own calls and, by its own engine and GEMMs, of whole models "
        f"({published['hardware']})",
        style="dim",
        markup=False,
    )
    columns = {
        "fused": "fused",
        "split": "split",
        "no_communication": "no comm.",
        "published_call_fused": "its call, fused",
        "published_split": "its model, split",
        "published_no_communication": "its no comm.",
    }
    table = plain_table(("tokens", *columns.values()), ())
    for row in published["gains"]:
        cells = ("-" if row[key] is None else f"{row[key]:.2f}x" for key in columns)
        table.add_row(str(row["tokens"]), *cells)
    console.print(table)
