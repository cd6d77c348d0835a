"""Draw which part of the package imports which: ``python docs/draw_imports.py [--check]``.

A part is a folder, or a module that lies beside the folders. Its layer is one above the highest layer it imports, so every
arrow points down. Parts that import each other have no layer: they are an error, and the script names them. Imports inside
functions count. Imports for type checkers alone do not, because they never run.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "tw_compile"
SPLIT_UP = ("kernels", "passes", "hosts")
"""Folders whose own folders and modules are parts."""
PICTURE = ROOT / "docs" / "images" / "imports.svg"
WIDTH, ROW, BOX, GAP = 1240, 62, 26, 12
STYLE = """<style>
rect { fill: #f4f6f8; stroke: #455a64 } text { font: 13px monospace; text-anchor: middle; fill: #102027 }
path { fill: none; stroke: #78909c; stroke-width: 1.2 }
@media (prefers-color-scheme: dark) {
  rect { fill: #263238; stroke: #90a4ae } text { fill: #eceff1 } path { stroke: #78909c }
}
</style>"""

Graph = dict[str, set[str]]


def part_of(module: str) -> str:
    """The part that a module belongs to: ``tw_compile.kernels.gemm.joint_mm`` is of ``kernels.gemm``."""
    names = module.split(".")[1:] or ["tw_compile"]
    return ".".join(names[: 2 if names[0] in SPLIT_UP else 1])


def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    result = {}
    for folder in sorted({ROOT / PACKAGE, *(ROOT / PACKAGE / name for name in ("passes", "kernels", "configs"))}):
        for path in folder.rglob("*.py"):
            names = path.relative_to(ROOT).with_suffix("").parts
            result[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return result


def imported(tree: ast.AST, known: Mapping[str, Path]) -> Iterator[str]:
    """Modules of the package that a module imports when it runs."""
    if isinstance(tree, ast.If) and isinstance(tree.test, ast.Name) and tree.test.id == "TYPE_CHECKING":
        for child in tree.orelse:
            yield from imported(child, known)
        return
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names if alias.name.split(".")[0] == PACKAGE)
    elif isinstance(tree, ast.ImportFrom) and (tree.module or "").split(".")[0] == PACKAGE:
        for alias in tree.names:
            inner = f"{tree.module}.{alias.name}"
            yield inner if inner in known else str(tree.module)
    for child in ast.iter_child_nodes(tree):
        yield from imported(child, known)


def arrows() -> Graph:
    """For each part, the parts that it imports."""
    known = modules()
    graph: Graph = {part_of(name): set() for name in known}
    for name, path in known.items():
        for target in imported(ast.parse(path.read_text()), known):
            if part_of(target) != part_of(name):
                graph[part_of(name)].add(part_of(target))
    return graph


def layers(graph: Graph) -> tuple[list[list[str]], set[str]]:
    """Parts from the lowest layer up, and those that have no layer because they import each other."""
    placed: list[list[str]] = []
    left = dict(graph)
    while left:
        ready = sorted(part for part, targets in left.items() if not targets & left.keys())
        if not ready:
            return placed, set(left)
        placed.append(ready)
        for part in ready:
            del left[part]
    return placed, set()


def cycles(graph: Graph, among: set[str]) -> list[tuple[str, str]]:
    """Arrows of ``graph`` between parts that import each other, directly or through other parts."""

    def reaches(part: str) -> set[str]:
        seen: set[str] = set()
        pending = [part]
        while pending:
            for target in graph[pending.pop()] & among - seen:
                seen.add(target)
                pending.append(target)
        return seen

    return sorted((part, target) for part in among for target in graph[part] & among if part in reaches(target))


def arrows_to_draw(graph: Graph, placed: list[list[str]]) -> list[tuple[str, str]]:
    """All arrows except those that follow from a chain of other arrows."""
    below: dict[str, set[str]] = {}
    for layer in placed:
        for part in layer:
            below[part] = set().union(graph[part], *(below[target] for target in graph[part]))
    return [
        (part, target)
        for part, targets in sorted(graph.items())
        for target in sorted(targets)
        if not any(target in below[other] for other in targets - {target})
    ]


def drawing(graph: Graph, placed: list[list[str]]) -> str:
    """An SVG with a row for each layer, the highest on top."""
    places: dict[str, tuple[float, float, float]] = {}
    for index, layer in enumerate(reversed(placed)):
        widths = [len(part) * 7.5 + 16 for part in layer]
        left = (WIDTH - sum(widths) - GAP * (len(layer) - 1)) / 2
        for part, width in zip(layer, widths, strict=True):
            places[part] = (left, index * ROW, width)
            left += width + GAP
    height = (len(placed) - 1) * ROW + BOX
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -8 {WIDTH + 16} {height + 16}" role="img">', STYLE]
    for part, target in arrows_to_draw(graph, placed):
        (x, y, width), (to_x, to_y, to_width) = places[part], places[target]
        begin, end, middle = x + width / 2, to_x + to_width / 2, (y + BOX + to_y) / 2
        curve = f"M{begin:.0f},{y + BOX:.0f} C{begin:.0f},{middle:.0f} {end:.0f},{middle:.0f} {end:.0f},{to_y:.0f}"
        lines.append(f'<path d="{curve}"/>')
    for part, (x, y, width) in places.items():
        lines.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX}" rx="4"/>')
        lines.append(f'<text x="{x + width / 2:.0f}" y="{y + BOX / 2 + 4:.0f}">{part}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw which part of the package imports which.")
    parser.add_argument("--check", action="store_true", help="only compare the picture with the code")
    check = parser.parse_args().check
    graph = arrows()
    placed, left = layers(graph)
    for part, target in cycles(graph, left):
        print(f"{part} imports {target}, which imports it in turn", file=sys.stderr)
    if left:
        return 1
    text = drawing(graph, placed)
    if check:
        if PICTURE.read_text() != text:
            print(
                "docs/images/imports.svg: expected what the code has, run python docs/draw_imports.py", file=sys.stderr
            )
            return 1
        return 0
    PICTURE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
