"""The quick tier, which runs without --full, reaches every module of the package."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from draw_imports import imported, modules  # noqa: E402

ONLY_STARTED = {
    "tw_compile.cli.__main__",
    "tw_compile.benchmark.vllm.worker",
    "tw_compile.benchmark.vllm.no_communication",
}
"""Started as a program, or imported by vLLM in processes of its own."""


def is_full(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(decorator) == "pytest.mark.full" for decorator in decorators)


def of_the_quick_tier(tree: ast.Module) -> Iterator[ast.AST]:
    yield from (node for node in tree.body if not is_full(node))


def named(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """Modules that are imported or, as registries and commands do, named in a text."""
    yield from imported(tree, known)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(":")[0]
            if module in known:
                yield module


def reached_by_quick_tests() -> set[str]:
    known = modules()
    pending = [
        module
        for path in (ROOT / "tests").rglob("*.py")
        if "gpu" not in path.parts and "with_vllm" not in path.parts
        for node in of_the_quick_tier(ast.parse(path.read_text()))
        for module in named(node, known)
    ]
    reached: set[str] = set()
    while pending:
        module = pending.pop()
        if module in known and module not in reached:
            reached.add(module)
            pending += named(ast.parse(known[module].read_text()), known)
            pending.append(module.rpartition(".")[0])  # a module's package is imported first
    return reached


def test_every_module_is_reached() -> None:
    assert set(modules()) - reached_by_quick_tests() - ONLY_STARTED == set()


def test_what_full_tests_alone_import_is_not_reached() -> None:
    tree = ast.parse(
        "import pytest\n@pytest.mark.full\ndef test_long():\n    import tw_compile.tuning\n"
        "def test_short():\n    import tw_compile.report\n"
    )
    known = modules()
    assert {module for node in of_the_quick_tier(tree) for module in named(node, known)} == {"tw_compile.report"}
