"""Which works the transport over a process group makes: gloo must be able to complete any two of them at once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tw_compile import compat
from tw_compile.kernels.collective import ops


@pytest.mark.parametrize(("wire", "sums"), [("exact", "allreduce_"), ("int8", "alltoall_base_")])
def test_works_have_names_that_gloo_can_note(wire: str, sums: str) -> None:
    """``allgather_into_tensor_coalesced_`` would be a work with a long name, see :func:`tw_compile.compat.all_gather`."""
    x, weight = torch.randn(4, 128), torch.randn(128)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        group = compat.group_name(dist.group.WORLD)
        rest = (None, weight, 1e-5, 0.0, None, torch.float32, torch.float32, True, "replicated", group, "gloo", 0)
        with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
            hidden, residual = ops.start(x, x, *rest, wire=wire)
            ops.wait_(hidden, residual, [], group, 0)
    finally:
        dist.destroy_process_group()
    made = {event.name for event in profiled.events() if event.name.startswith("c10d::")}
    assert made == {f"c10d::{sums}", "c10d::_allgather_base_"}
