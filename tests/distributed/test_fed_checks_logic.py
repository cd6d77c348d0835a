"""The logic of the GPU checks of fed GEMMs, on gloo ranks: right results pass, wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gpu.checks import fed

from tw_compile import compat
from tw_compile.harness.problems import Context
from tw_compile.kernels.collective.transport import get_transport
from tw_compile.testing import GlooRanks

CHECKS = [check.__name__ for check in fed.ALONE if check is not fed.fed_lost_peer_is_reported]
SIZES = ((1, 64), (5, 64))
COLUMNS = {"plain": (24, 16), "single": (24,), "biased": (24, 16), "gated": (24, 24)}


def run_check(rank: int, name: str, spoil: bool) -> list[str]:
    """What the check finds wrong. ``spoil``: products of fed GEMMs, and results that none read, have another element."""
    assert dist.group.WORLD is not None
    group_name = compat.group_name(dist.group.WORLD)
    ctx = Context(rank, dist.get_world_size(), torch.device("cpu"), group_name, shortened_by=100)
    product = fed.fed_joint_mm
    gloo = get_transport("gloo")
    unfed = SimpleNamespace(start=gloo.start)

    def spoilt(*args: Any) -> list[torch.Tensor]:
        products = product(*args)
        products[0][-1, -1] += 1
        return products

    def start(request: Any) -> Any:
        started = gloo.start(request)
        if started.finish is not None:
            started.finish()
        started.hidden[0, 0] += 1
        return SimpleNamespace(hidden=started.hidden, finish=None)

    def capture(function: Callable[[], Any]) -> tuple[Any, Any]:
        found = function()
        return SimpleNamespace(replay=function), found

    replaced: dict[Any, dict[str, Any]] = {
        fed: {"TRANSPORT": "gloo", "SIZES": SIZES, "COLUMNS": COLUMNS, "unfed": lambda: unfed, "capture": capture},
        compat: {"delay_stream": lambda cycles: None},
        torch.cuda: {"synchronize": lambda *_: None},
    }
    replaced[fed] |= {"expect_fed": lambda *_: None}
    make_site = fed.make_site
    replaced[fed]["make_site"] = lambda ctx, tokens, _, *rest, **more: make_site(ctx, min(tokens, 9), 64, *rest, **more)
    if spoil:
        replaced[fed] |= {"fed_joint_mm": spoilt, "get_transport": lambda name: SimpleNamespace(start=start)}
    with ExitStack() as stack:
        for module, names in replaced.items():
            for attribute, value in names.items():
                stack.enter_context(mock.patch.object(module, attribute, value))
        getattr(fed, name)(ctx)
    return ctx.failures


@pytest.mark.full
@pytest.mark.parametrize("spoil", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes_exactly_where_results_are_right(gloo_ranks: GlooRanks, name: str, spoil: bool) -> None:
    for failures in gloo_ranks.run(run_check, name, spoil):
        assert bool(failures) == spoil, failures
