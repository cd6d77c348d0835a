"""Which kernels over peer memory serve GPUs before Hopper; no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_algorithms import FP8, HIDDEN, WORLD_SIZE, FakeKernel, group, kernels, request, slot_for

from tw_compile.kernels.algorithms.multimem.multimem import Multimem
from tw_compile.kernels.algorithms.push.push import Push
from tw_compile.kernels.algorithms.stream.stream import Stream
from tw_compile.kernels.transports.p2p import P2PTransport

__all__ = ["kernels"]


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9)])
def test_before_hopper_only_push_on_single_ctas_serves(
    kernels: list[FakeKernel], monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """Its rows may travel in codes, and it makes scales where there is float8. Its launches are not programmatic."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    state, asked, has_fp8 = group(), request(), capability >= (8, 9)
    for other in (Stream(), Multimem(), Push(False, cluster=2), Push(False, cluster=4)):
        assert "needs compute capability 9.0" in str(other.obstacle(asked, state)), other.name
    fp8 = request(hidden_dtype=FP8)
    made = replace(fp8, norm=replace(fp8.norm, scale_columns=HIDDEN), hidden_scale=None, bias=None)
    for served in (asked, replace(asked, wire="int8"), replace(asked, overlap_sms=8)):
        assert Push(False).obstacle(served, state) is None
    for one in (fp8, made, replace(made, wire="int8")):
        found = Push(False).obstacle(one, state)
        assert found is None if has_fp8 else "needs compute capability 8.9" in str(found)
        assert P2PTransport().serves(one) is (has_fp8 or one is fp8)
    algorithm = Push(False)
    algorithm.launch(asked, state, slot_for(algorithm.needs(asked, WORLD_SIZE)), 0)
    assert kernels[0].launches[0][1]["programmatic"] is False and "cluster" not in kernels[0].launches[0][1]
    assert kernels[0].program.arch == "sm_{}{}".format(*capability)
