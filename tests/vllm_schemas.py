"""Signatures of vLLM 0.24's row-wise operators, and stand-ins for a CPU that compute something of the same rows.

``tests/with_vllm`` compares the signatures with those of the installed vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

FP8 = torch.float8_e4m3fn
SCHEMAS = (
    "_C::cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()",
    "_C::cutlass_scaled_mm_azp(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor azp_adj, "
    "Tensor? azp, Tensor? bias) -> ()",
    "vllm::w8a8_triton_block_scaled_mm_func(Tensor qx, Tensor weight, Tensor x_scale, Tensor weight_scale, "
    "SymInt[] block_size, ScalarType output_dtype) -> Tensor",
    "vllm::fp8_gemm_nt_op(Tensor q_input, Tensor input_scale, Tensor weight, Tensor weight_scale, Tensor(a4!) output, "
    "bool use_deep_gemm_e8m0) -> ()",
    "_C::marlin_gemm(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, Tensor b_scales, "
    "Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor? g_idx_or_none, Tensor? perm_or_none, "
    "Tensor workspace, int b_type_id, SymInt size_m, SymInt size_n, SymInt size_k, bool is_k_full, "
    "bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor",
    "_C::machete_mm(Tensor A, Tensor B, int b_type, ScalarType? out_type, Tensor? group_scales, Tensor? group_zeros, "
    "int? group_size, Tensor? channel_scales, Tensor? token_scales, str? schedule) -> Tensor",
    "_C::awq_gemm(Tensor _in_feats, Tensor _kernel, Tensor _scaling_factors, Tensor _zeros, SymInt split_k_iters) "
    "-> Tensor",
    "_C::gptq_gemm(Tensor a, Tensor b_q_weight, Tensor b_gptq_qzeros, Tensor b_gptq_scales, Tensor b_g_idx, "
    "bool use_exllama, bool use_v2_format, int bit) -> Tensor",
    "_C::static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
    "_C::dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()",
    "_C::dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
    "_C::dynamic_scaled_int8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor!? azp) -> ()",
    "_C::per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
    "float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()",
    "_C::rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()",
    "_C::rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, "
    "Tensor? scale_ub, Tensor!? residual) -> ()",
    "_moe_C::grouped_topk(Tensor scores, int n_group, int topk_group, int topk, bool renormalize, "
    "float routed_scaling_factor, Tensor bias, int scoring_func) -> (Tensor, Tensor)",
)
EXPERTS = (
    "vllm::moe_forward(Tensor(a0!) hidden_states, Tensor router_logits, Tensor? shared_experts_input, "
    "Tensor? input_ids, str layer_name, SymInt hidden_dim_unpadded) -> Tensor",
    "vllm::moe_forward_shared(Tensor hidden_states, Tensor router_logits, Tensor? shared_experts_input, "
    "Tensor? input_ids, str layer_name, SymInt hidden_dim_unpadded) -> (Tensor, Tensor)",
)
"""The layer's name is an object of vLLM's there."""


@contextmanager
def stand_ins() -> Iterator[None]:
    """The operators, for a CPU and for fake tensors."""
    with ExitStack() as stack:
        libraries: dict[str, torch.library.Library] = {}
        for schema in (*SCHEMAS, *EXPERTS):
            namespace, _, rest = schema.partition("::")
            if namespace not in libraries:
                made = torch.library._scoped_library(namespace, "FRAGMENT")
                libraries[namespace] = stack.enter_context(made)
            name = rest.partition("(")[0]
            libraries[namespace].define(rest)
            libraries[namespace].impl(name, globals()[f"_{name}"], "CompositeExplicitAutograd")
        yield


def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each row by itself, so that its bits don't depend on the others."""
    return (rows.float().unsqueeze(-1) * weight.float()).sum(1)


def _cutlass_scaled_mm(out: torch.Tensor, a: Any, b: Any, a_scales: Any, b_scales: Any, bias: Any) -> None:
    by_row = a_scales if a_scales.numel() == 1 else a_scales.sum(-1, keepdim=True)
    out.copy_(_product(a, b) * by_row * b_scales + (0 if bias is None else bias))


def _cutlass_scaled_mm_azp(
    out: torch.Tensor, a: Any, b: Any, a_s: Any, b_s: Any, adj: Any, azp: Any, bias: Any
) -> None:
    _cutlass_scaled_mm(out, a, b, a_s, b_s, bias)
    if azp is not None:
        out.sub_(azp * adj)


def _w8a8_triton_block_scaled_mm_func(qx: Any, weight: Any, x_scale: Any, *rest: Any) -> torch.Tensor:
    return _product(qx, weight.T) * x_scale.sum(-1, keepdim=True)


def _fp8_gemm_nt_op(q_input: Any, input_scale: Any, weight: Any, weight_scale: Any, output: Any, e8m0: Any) -> None:
    output.copy_(_product(q_input, weight.T) * input_scale.sum(-1, keepdim=True))


def _marlin_gemm(a: Any, c: Any, weight: Any, *rest: Any) -> torch.Tensor:
    product, size_m = _product(a, weight), rest[9]
    product[size_m:] = 0  # it computes as many rows as it is told
    return product


def _machete_mm(A: Any, B: Any, *rest: Any) -> torch.Tensor:
    scales = rest[-2]
    return _product(A, B) * (1 if scales is None else scales)


def _awq_gemm(a: Any, weight: Any, *rest: Any) -> torch.Tensor:
    return _product(a, weight)


_gptq_gemm = _awq_gemm


def _codes(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (rows / scale).clamp(-448, 448)


def _static_scaled_fp8_quant(result: torch.Tensor, input: Any, scale: Any, group_shape: Any = None) -> None:
    result.copy_(_codes(input, scale))


def _dynamic_scaled_fp8_quant(result: torch.Tensor, input: Any, scale: torch.Tensor) -> None:
    scale.copy_(input.abs().amax() / 448)
    result.copy_(_codes(input, scale))


def _dynamic_per_token_scaled_fp8_quant(result: torch.Tensor, input: Any, scale: torch.Tensor, scale_ub: Any) -> None:
    scale.copy_(input.abs().amax(-1, keepdim=True) / 448)
    result.copy_(_codes(input, scale))


def _dynamic_scaled_int8_quant(result: torch.Tensor, input: Any, scale: torch.Tensor, azp: Any) -> None:
    scale.copy_(input.abs().amax(-1, keepdim=True) / 127)
    result.copy_((input / scale).round())


def _per_token_group_fp8_quant(
    input: Any, output_q: torch.Tensor, output_s: torch.Tensor, group_size: int, *rest: Any
) -> None:
    groups = input.unflatten(-1, (-1, group_size))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    output_s.copy_(scale.squeeze(-1))
    output_q.copy_(_codes(groups, scale).flatten(1))


def _rms_norm_static_fp8_quant(result: torch.Tensor, input: Any, weight: Any, scale: Any, epsilon: float) -> None:
    result.copy_(_codes(torch.nn.functional.rms_norm(input, weight.shape, weight, epsilon), scale))


def _rms_norm_dynamic_per_token_quant(
    result: torch.Tensor, input: Any, weight: Any, scale: torch.Tensor, epsilon: float, scale_ub: Any, residual: Any
) -> None:
    rows = input if residual is None else residual.add_(input)
    _dynamic_per_token_scaled_fp8_quant(
        result, torch.nn.functional.rms_norm(rows, weight.shape, weight, epsilon), scale, scale_ub
    )


def _grouped_topk(
    scores: Any, n_group: int, topk_group: int, topk: int, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    found = (scores + rest[2]).topk(topk, -1)
    return found.values, found.indices.int()


def _moe_forward(hidden_states: Any, router_logits: Any, *rest: Any) -> torch.Tensor:
    return torch.tanh(hidden_states) * router_logits.softmax(-1).amax(-1, keepdim=True)


def _moe_forward_shared(hidden_states: Any, router_logits: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden_states * 2, _moe_forward(hidden_states, router_logits)
