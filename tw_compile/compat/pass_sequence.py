"""Several of a user's post-grad passes as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx as fx
from torch._inductor.custom_graph_pass import CustomGraphPass


class PassSequence(CustomGraphPass):
    """Several passes as one. It has a uuid only if each of the passes has one."""

    def __init__(self, passes: list[Callable[[fx.Graph], object]]) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any:
        uuids = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.passes]
        return None if None in uuids else tuple(uuids)
