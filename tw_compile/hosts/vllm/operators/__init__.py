"""vLLM's operators that passes must know, by name: those of 0.24, and of 0.20 and 0.33 where these have the same ones.

Each family of operators has a file. Operators are declared as data, so vLLM need not be installed.
"""

from __future__ import annotations

from tw_compile.hosts.vllm.operators.activations import ACTIVATIONS
from tw_compile.hosts.vllm.operators.attention import ATTENTION, LATENT_ATTENTION
from tw_compile.hosts.vllm.operators.experts import EXPERTS
from tw_compile.hosts.vllm.operators.norms import ADD_NORM, NORM, NORMS
from tw_compile.hosts.vllm.operators.positions import POSITIONS
from tw_compile.hosts.vllm.operators.quantisations import QUANTISATIONS
from tw_compile.hosts.vllm.operators.scaled_matmuls import SCALED_MATMULS
from tw_compile.hosts.vllm.operators.weight_only_matmuls import WEIGHT_ONLY_MATMULS
from tw_compile.passes.operators import AllGatherOperator, AllReduceOperator, Operator

# all_reduce(tensor, group_name): out of place, ready when it returns. The group's name is one of vLLM's, such as ``tp:0``.
ALL_REDUCE = AllReduceOperator("vllm::all_reduce")
# all_gather(tensor, dim, world_size, group_name)
ALL_GATHER = AllGatherOperator("vllm::all_gather")

OPERATORS: tuple[Operator, ...] = (
    ALL_REDUCE,
    ALL_GATHER,
    ATTENTION,
    LATENT_ATTENTION,
    *NORMS,
    *ACTIVATIONS,
    *POSITIONS,
    *QUANTISATIONS,
    *SCALED_MATMULS,
    *WEIGHT_ONLY_MATMULS,
    *EXPERTS,
)

__all__ = ["ADD_NORM", "ALL_REDUCE", "ATTENTION", "LATENT_ATTENTION", "NORM", "OPERATORS"]
