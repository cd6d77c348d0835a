"""What is known of an all_reduce that was found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from graph_builder import GraphBuilder

from tw_compile.passes.fusion.find import find_sites
from tw_compile.testing import fake_process_group

T, H = 6, 8


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(4):
        yield


def test_layer_is_read_from_the_module_stack() -> None:
    b = GraphBuilder()
    issued = b.issue(b.input(T, H))
    issued.meta["nn_module_stack"] = {"a": ("L['self'].model.layers.17.mlp", object), "b": ("x.down_proj", object)}
    (site,) = find_sites(b.output(b.wait(issued)).graph)
    assert site.all_reduce.layer == 17


def test_message_size_is_that_of_the_summed_tensor() -> None:
    b = GraphBuilder()
    (site,) = find_sites(b.output(b.all_reduce(b.input(T, H, dtype=torch.bfloat16))).graph)
    assert site.all_reduce.bytes() == T * H * 2
