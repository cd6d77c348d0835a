"""Layers of vLLM's with a state (Mamba, linear attention), without a GPU: what their models need, and stand-ins that compute.

A stand-in keeps a state: each token's result depends on all tokens before it. So what runs a step in parts shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

SUMS_INSIDE = {
    "vllm::mamba_mixer": 2,
    "vllm::plamo2_mamba_mixer": 2,
    "vllm::short_conv": 1,
    "vllm::linear_attention": 1,
    "vllm::olmo_hybrid_gdn_full_forward": 1,
}
"""Operators that are a whole layer, with its projections: how many all_reduces each does by itself, out of any pass's sight."""


@contextmanager
def models_here() -> Iterator[None]:
    """These models ask for the current GPU, and two of their functions launch Triton kernels, which takes a driver."""
    from vllm.model_executor.models import qwen3_next

    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")))
        stack.enter_context(mock.patch("vllm.triton_utils.allocation.set_triton_allocator", lambda device: None))
        stack.enter_context(mock.patch.object(qwen3_next, "fused_qk_rmsnorm_rope_gate", _queries_keys_gate))
        yield


def _queries_keys_gate(
    q_gate: torch.Tensor, k: torch.Tensor, *weights_and_positions: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The shapes, without norm and rotation."""
    *_, heads, _, head_dim, _ = weights_and_positions
    q, gate = q_gate.view(-1, heads, 2 * head_dim).chunk(2, -1)
    return q.reshape(-1, heads * head_dim), k.contiguous(), gate.reshape(-1, heads * head_dim)


@contextmanager
def kernels_here() -> Iterator[None]:
    """The operators that keep a state, for a CPU. vLLM registers them for CUDA alone, when it imports a model with them."""
    import vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn
    import vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn
    import vllm.model_executor.layers.mamba.mamba_mixer
    import vllm.model_executor.layers.mamba.mamba_mixer2
    import vllm.model_executor.layers.mamba.short_conv  # noqa: F401

    with torch.library._scoped_library("vllm", "FRAGMENT") as library:
        for name, place in _KERNELS.items():
            library.impl(name, _stateful(place), "CPU")
        yield


_KERNELS = {"mamba_mixer": 1, "mamba_mixer2": 1, "short_conv": 1, "qwen_gdn_attention_core": 3, "kda_attention": 5}
"""For each operator, the number of the operand that it writes to. The first operand is what a token brings along."""


def _stateful(place: int) -> Callable[..., None]:
    def kernel(*operands: Any, **named: Any) -> None:
        given = operands if len(operands) > place else (*operands, *named.values())
        tokens, output = given[0], given[place]
        rows = tokens.reshape(-1, tokens.shape[-1])
        written = output.view(rows.shape[0], -1)
        brought = rows[:, : written.shape[1]].float()
        state = brought.new_zeros(brought.shape[1])
        for number, row in enumerate(brought):
            state = 0.5 * state + torch.tanh(row)
            written[number] = state

    return kernel
