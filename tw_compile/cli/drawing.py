"""A layer before and after the passes as an SVG drawing: execution flows down, the residual stream has its own lane.

Views and similar nodes are left out. Consecutive pointwise nodes are one box. Unchanged boxes stand side by side.
"""

from __future__ import annotations

import difflib
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tw_compile.graph.text import FUSED_STARTS, MATMULS, NO_RESIDUAL, Line

Kind = Literal["matmul", "attention", "collective", "pointwise", "norm", "residual", "fused"]

PLUMBING = frozenset(
    {"view", "reshape", "_unsafe_view", "permute", "transpose", "t", "getitem", "expand", "unsqueeze", "squeeze"}
    | {"clone", "alias", "full", "full_default", "slice", "iota", "select", "detach"}
)
_BOX_WIDTH, _BOX_HEIGHT, _GAP = 270, 40, 14
_LANE = 392
_PANEL = 430
_TOP = 64
_DOT = 10
"""Half the width of the dot on the lane, and a gap."""


@dataclass
class Box:
    """Nodes drawn as one."""

    kind: Kind
    title: str
    subtitle: str
    lines: list[Line] = field(default_factory=list)
    changed: bool = False
    on_lane: bool = False

    @property
    def half(self) -> int | None:
        return self.lines[0].half

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(line.name for line in self.lines)


def draw(before: Sequence[Line], after: Sequence[Line]) -> str:
    """The ``<svg>`` element; its colours are CSS classes of the page."""
    kept = {line.name for line in before} & {line.name for line in after}
    left, right = boxes(before, kept), boxes(after, kept)
    parts: list[str] = []
    y = _TOP
    matcher = difflib.SequenceMatcher(None, [box.key for box in left], [box.key for box in right], autojunk=False)
    bottoms = [_TOP, _TOP]
    for _, i1, i2, j1, j2 in matcher.get_opcodes():
        heights = []
        for panel, part in enumerate((left[i1:i2], right[j1:j2])):
            offset = y
            for box in part:
                if bottoms[panel] > _TOP:
                    parts.append(_arrow(panel * _PANEL, bottoms[panel], offset))
                parts.append(_draw_box(panel, box, offset))
                bottoms[panel] = offset + _BOX_HEIGHT
                offset += _BOX_HEIGHT + _GAP
            heights.append(offset - y)
        y += max(heights)
    height = y + 24
    header = [_panel_header(0, "before", left, height), _panel_header(1, "after", right, height)]
    return (
        f'<svg viewBox="0 0 {2 * _PANEL} {height}" role="img" aria-label="one layer before and after the passes">'
        + '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        + '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>'
        + "".join(header + parts)
        + "</svg>"
    )


def boxes(lines: Sequence[Line], kept: set[str]) -> list[Box]:
    """``lines`` as boxes in order of execution; ``kept`` are the nodes that both graphs have."""
    stream = _stream(lines)
    result: list[Box] = []
    for line in lines:
        if line.op in PLUMBING:
            continue
        changed = line.name not in kept
        kind = _kind(line, stream)
        last = result[-1] if result else None
        alike = last is not None and (last.kind, last.changed, last.half) == (kind, changed, line.half)
        if kind == "pointwise" and last is not None and alike:
            last.lines.append(line)
        else:
            result.append(Box(kind, line.op, line.result, [line], changed))
    for box in result:
        _label(box)
    return result


def _stream(lines: Sequence[Line]) -> tuple[str, str]:
    """Dtype and last dimension of the first all_reduce's result. The residual stream has the same."""
    summed = next((line.result for line in lines if line.op in ("all_reduce", *FUSED_STARTS)), "")
    return _dtype_and_width(summed)


def _dtype_and_width(result: str) -> tuple[str, str]:
    dtype, _, sizes = result.lstrip("(").partition("]")[0].partition("[")
    return dtype, sizes.rpartition(", ")[2]


def _kind(line: Line, stream: tuple[str, str]) -> Kind:
    if line.op in MATMULS:
        return "matmul"
    if "attention" in line.op:
        return "attention"
    if line.op.startswith("fused_"):
        return "fused"
    if line.op in ("all_reduce", "wait_tensor", "all_gather_rows"):
        return "collective"
    if line.op == "add" and len(line.inputs) == 2 and _dtype_and_width(line.result) == stream:
        return "residual"
    return "pointwise"


def _label(box: Box) -> None:
    ops = [line.op for line in box.lines]
    if box.kind == "pointwise":
        box.title = "pointwise"
        if "rsqrt" in ops:
            box.kind, box.title = "norm", "RMSNorm"
        elif "neg" in ops and "cat" in ops:
            box.title = "rotary embedding"
        elif "sigmoid" in ops or "exp" in ops or "silu" in ops:
            box.title = "activation"
        box.subtitle = " · ".join(dict.fromkeys(ops))
    elif box.kind == "matmul":
        kind = box.title.removesuffix("_leaving_sms").replace("_", " ").strip()
        box.title = f"{kind} {_factors(box.lines[0])}"
    elif box.kind == "residual":
        box.title, box.on_lane = "+ residual", True
    elif box.kind == "fused":
        line = box.lines[0]
        if line.op in FUSED_STARTS:
            told = dict(part.split("=") for part in line.detail.split(", ") if "=" in part)
            gemm = "mm + " if line.op == "fused_mm_start" else ""
            added = "" if NO_RESIDUAL in line.detail else " + residual"
            box.title = f"{gemm}all_reduce{added} + RMSNorm: start"
            box.on_lane = bool(added) or told["residual_out"] != "none"
            box.subtitle = f"{told['transport']}, residual {told['residual_out']}" if box.on_lane else told["transport"]
        else:
            box.title = "wait"
            box.subtitle = ""


_SEVERAL = {
    "q_proj": "q, k, v",
    "k_proj": "q, k, v",
    "v_proj": "q, k, v",
    "gate_proj": "gate, up",
    "up_proj": "gate, up",
}


def _factors(line: Line) -> str:
    """The projections that a GEMM computes. A GEMM for several projections gets all their names, and not only one of them."""
    if line.op == "gated_mm_leaving_sms":
        return "gate, up, activation"
    return _SEVERAL.get(line.module, line.module) if line.op == "joint_mm_leaving_sms" else line.module


def _panel_header(panel: int, title: str, content: list[Box], height: int) -> str:
    x = panel * _PANEL
    lane = x + _LANE
    name = html.escape(_lane_name(content))
    return (
        f'<text class="head" x="{x + 16}" y="28">{title}</text>'
        f'<text class="lane-name" x="{x + _PANEL - 16}" y="46" text-anchor="end">{name}</text>'
        f'<line class="lane" x1="{lane}" y1="{_TOP - 10}" x2="{lane}" y2="{height - 12}"/>'
    )


def _lane_name(content: list[Box]) -> str:
    for box in content:
        line = box.lines[0]
        if line.op in FUSED_STARTS and box.on_lane:
            sharded = ", this rank's rows" if "residual_out=sharded" in line.detail else ""
            return f"residual{sharded} {line.result.rpartition('], ')[2].removesuffix(')')}"
        if box.kind == "residual":
            return f"residual {line.result}"
    return "residual"


def _arrow(x: int, top: int, bottom: int) -> str:
    middle = x + 16 + _BOX_WIDTH // 2
    return f'<line class="flow" x1="{middle}" y1="{top}" x2="{middle}" y2="{bottom}" marker-end="url(#tip)"/>'


def _draw_box(panel: int, box: Box, y: int) -> str:
    x = panel * _PANEL + 16
    width = _PANEL - 32 if box.on_lane else _BOX_WIDTH
    state = ("removed" if panel == 0 else "added") if box.changed else "same"
    tooltip = "\n".join(f"{line.name} = {line.call}  {line.result}" for line in box.lines)
    room = min(width, _LANE - 16 - _DOT)  # text ends before the residual's dot
    subtitle = " · ".join(filter(None, ["" if box.half is None else f"half {box.half}", box.subtitle]))
    parts = [
        f'<g class="box {box.kind} {state}"><title>{html.escape(tooltip)}</title>',
        f'<rect x="{x}" y="{y}" width="{width}" height="{_BOX_HEIGHT}" rx="7"/>',
        f'<text class="name" x="{x + 12}" y="{y + (18 if subtitle else 25)}">{html.escape(_cut(box.title, room))}</text>',
        f'<text class="what" x="{x + 12}" y="{y + 33}">{html.escape(_cut(subtitle, room))}</text>',
    ]
    if box.half is not None:
        parts.append(f'<rect class="stripe half{box.half}" x="{x}" y="{y}" width="6" height="{_BOX_HEIGHT}" rx="3"/>')
    if box.on_lane:
        parts.append(f'<circle class="tap" cx="{panel * _PANEL + _LANE}" cy="{y + _BOX_HEIGHT // 2}" r="6"/>')
    return "".join([*parts, "</g>"])


def _cut(text: str, width: int) -> str:
    most = (width - 20) // 7
    return text if len(text) <= most else text[: most - 1] + "…"
