"""Which decoder layer a node belongs to."""

from __future__ import annotations

import re

import torch.fx as fx

_LAYER = re.compile(r"\b(?:layers|h|blocks|layer)\.(\d+)\b|\b(?:layers|h|blocks|layer)\[['\"]?(\d+)")


def layer_of(node: fx.Node) -> int | None:
    """The decoder layer a node came from, read from the module path that tracing left on it."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    for path, _ in reversed(list(stack.values())):
        numbered = _LAYER.search(str(path))
        if numbered:
            return int(numbered.group(1) or numbered.group(2))
    return None
