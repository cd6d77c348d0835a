"""GEMM sites: a GEMM whose partial sums are all_reduced, the norm behind it, and the GEMMs that read the normalised rows.

They are the MLPs of a model, one after the other, without attention. So nothing but sites is timed: down, sum, residual, norm,
gate and up. This module also has the peers in which each rank keeps only its own rows between two sites, as in sequence
parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.fx as fx
import torch.nn as nn

from tw_compile import compat
from tw_compile.benchmark.layer.spec import refuse_sites
from tw_compile.benchmark.layer.subject import HiddenAndResidual, Subject
from tw_compile.benchmark.layer.symmetric import CountAllReduces
from tw_compile.models.decoder import Decoder

GatherMatmul = Callable[[torch.Tensor, list[torch.Tensor], str], list[torch.Tensor]]
"""Takes this rank's rows ``[tokens / ranks, depth]``, weights ``[depth, columns]`` and the group's name. Returns for
each weight its product with the rows of all ranks."""
MatmulScatter = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]
"""Takes ``[tokens, depth]``, a weight ``[depth, columns]`` and the group's name. Returns this rank's rows of the product's
sum over all ranks."""


class GemmSites(Subject):
    """The MLPs of the layers, each with the norm before it: residual stream in, normalised output and residual stream out.

    Raises:
        UsageError: The layers have no gated MLP with one norm before it.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        layers: Any = decoder.model.layers
        for layer in layers:
            mlp = getattr(layer, "mlp", None)
            if not (
                all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
                and hasattr(layer, "post_attention_layernorm")
                and not hasattr(layer, "post_feedforward_layernorm")
            ):
                refuse_sites(decoder.config.model_type)

    def forward(self, residual: torch.Tensor) -> HiddenAndResidual:
        """``[batch, seq, hidden]`` -> two of the same shape."""
        layers: Any = self.decoder.model.layers
        for layer in layers:
            residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return self.decoder.norm(residual), residual


class ScatteredSites(nn.Module):
    """:class:`GemmSites` where each rank keeps only its own rows of the residual stream, and normalises only these.

    ``gather_matmul`` reads the rows of all ranks. ``matmul_scatter`` sums the rows that a rank owns. The rows of the results
    are gathered at the end. The number of tokens is a multiple of the number of ranks.
    """

    def __init__(self, sites: Subject, gather_matmul: GatherMatmul, matmul_scatter: MatmulScatter) -> None:
        super().__init__()
        self.sites = sites
        self._gather_matmul, self._matmul_scatter = gather_matmul, matmul_scatter
        group = dist.group.WORLD
        assert group is not None
        self._group_name, self._rank, self._ranks = compat.group_name(group), dist.get_rank(), dist.get_world_size()

    def forward(self, residual: torch.Tensor) -> HiddenAndResidual:
        """As :meth:`GemmSites.forward`."""
        decoder: Any = self.sites.decoder
        name = self._group_name
        rows = residual.reshape(-1, residual.shape[-1]).chunk(self._ranks)[self._rank]
        for layer in decoder.model.layers:
            mlp = layer.mlp
            weights = [mlp.gate_proj.weight.t(), mlp.up_proj.weight.t()]
            gate, up = self._gather_matmul(layer.post_attention_layernorm(rows), weights, name)
            rows = rows + self._matmul_scatter(mlp.act_fn(gate) * up, mlp.down_proj.weight.t(), name)
        hidden, kept = (_gathered(own, name).view_as(residual) for own in (decoder.norm(rows), rows))
        return hidden, kept


def _gathered(rows: torch.Tensor, group_name: str) -> torch.Tensor:
    return funcol.wait_tensor(funcol.all_gather_tensor(rows.contiguous(), 0, group_name))  # type: ignore[arg-type]


def gather_then_matmul(rows: torch.Tensor, weights: list[torch.Tensor], group_name: str) -> list[torch.Tensor]:
    """The group's all_gather, then GEMMs."""
    everyone = _gathered(rows, group_name)
    return [everyone @ weight for weight in weights]


def matmul_then_scatter(x: torch.Tensor, weight: torch.Tensor, group_name: str) -> torch.Tensor:
    """A GEMM, then the group's reduce_scatter."""
    return funcol.wait_tensor(funcol.reduce_scatter_tensor(x @ weight, "sum", 0, group_name))  # type: ignore[arg-type]


def fused_gather_matmul(rows: torch.Tensor, weights: list[torch.Tensor], group_name: str) -> list[torch.Tensor]:
    """torch's fused operator, which computes one rank's rows while the rows of the next rank are copied."""
    return torch.ops.symm_mem.fused_all_gather_matmul(rows, weights, 0, group_name, return_A=False)[1]


def fused_matmul_scatter(x: torch.Tensor, weight: torch.Tensor, group_name: str) -> torch.Tensor:
    """torch's fused operator, which computes the rows for one rank while the rows for another rank are copied."""
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 0, group_name)


def scattered(sites: Subject) -> nn.Module:
    """Sequence parallelism by the group's collectives."""
    return ScatteredSites(sites, gather_then_matmul, matmul_then_scatter)


def async_tp(sites: Subject) -> nn.Module:
    """Sequence parallelism by torch's GEMMs that communicate (async TP)."""
    compat.load_symm_mem_operators()
    return ScatteredSites(sites, fused_gather_matmul, fused_matmul_scatter)


class CountScatters(CountAllReduces):
    """Change nothing. ``seen`` counts the reduce_scatters: sums over ranks of which each rank gets its rows."""

    def __call__(self, graph: fx.Graph) -> None:
        self.seen += sum(str(node.target) in _SUMS for node in graph.nodes)


_SUMS = ("_c10d_functional.reduce_scatter_tensor.default", "symm_mem.fused_matmul_reduce_scatter.default")
"""By name, because the operators of symmetric memory are there only once they have been loaded."""
