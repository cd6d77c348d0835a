"""One decoder layer of a tensor-parallel model as the planner sees it: GEMMs on one rank, attention, messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tw_compile.planning.communication import ELEMENT_BYTES
from tw_compile.planning.device import DeviceProfile
from tw_compile.planning.gemm import Gemm
from tw_compile.planning.suffix import KERNEL, REPLACED, pays

# Settings that change a layer's arithmetic in ways that are not modelled: latent attention, experts beside the routed ones.
_UNKNOWN = ("kv_lora_rank", "n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace")
MERGED = "merged"
SUFFIX = {"cudnn": MERGED}
"""What computes a suffix for each attention kernel, as in the split's attention rule. The queries of a suffix also see keys
before its own. The value is another kernel, or ``MERGED``: two calls of the same kernel, for the keys before and for the
suffix's own keys, and a merge by log-sum-exp. Kernels that are not listed compute a suffix themselves. Where a kernel of our
own pays (``planning/suffix.py``), it computes both parts of a cut sequence."""
FLASH3 = "flash3"
"""FlashAttention 3, over a cache of keys and values; a suffix is one call of it."""
_ATTENTION_KINDS = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True)
class Attention:
    """Causal attention of one rank, by its kernel or by a mask.

    Attributes:
        heads: Query heads of the rank.
        kv_heads: Key and value heads of the rank.
        windows: Sliding windows in tokens, one for each layer, or a single one if all layers are alike; None is none.
            Times are the mean over them.
        kernel: ``cudnn``, which torch takes first on these devices, ``flash``, ``efficient`` or another of the profile's.
        masked: Whether a mask is added to the scores. Then the kernel works on all keys that it is given, whatever the mask
            hides. So kernels have other rates with a mask, and another name in the profile (:func:`masked_kernel`).
    """

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = (None,)
    kernel: str = "cudnn"
    masked: bool = False


def masked_kernel(name: str) -> str:
    """The name in a profile of an attention kernel that is given a mask."""
    return f"{name}_masked"


@dataclass(frozen=True)
class LayerShape:
    """GEMMs, attention and messages of one layer on one rank; all numbers are per rank, except ``hidden_size``
    and ``gathered_columns``.

    Attributes:
        qkv: Projections before attention: one GEMM, or one each for queries, keys and values, all of one name.
        mlp: gate_up, one GEMM or two, then down; of the experts where there are any.
        attention_summed: Whether an all_reduce follows o_proj.
        mlp_summed: Whether an all_reduce follows down.
        gathered_columns: Columns of the whole model's queries, keys and values that are gathered before attention, as OLMo2
            does to norm them; 0 is no gather.
    """

    world_size: int
    hidden_size: int
    qkv: tuple[Gemm, ...]
    attention: Attention
    o_proj: Gemm
    mlp: tuple[Gemm, ...]
    attention_summed: bool = True
    mlp_summed: bool = True
    gathered_columns: int = 0

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        return (*self.qkv, self.o_proj, *self.mlp)

    @property
    def has_dense_mlp(self) -> bool:
        """Whether only matmuls read the input of the MLP; experts gather it."""
        return self.mlp[0].experts == 1

    def message_bytes(self, tokens: int) -> int:
        """Bytes of one rank's partial sums ``[tokens, hidden]``."""
        return tokens * self.hidden_size * ELEMENT_BYTES


def layer_shape(config: Any, plan: Mapping[str, str], world_size: int, merged: bool = False) -> LayerShape:
    """The layer of a transformers configuration, sharded over ``world_size`` ranks by ``plan``.

    ``plan`` is transformers' tensor-parallel plan: parameter names to styles. ``merged``: queries, keys and values are one
    GEMM, gate and up another, as in inference engines; else they are as transformers has them. Raises ValueError where a size
    does not divide by the ranks, and where the planner does not model the configuration.
    """
    _check_known(config, world_size)
    styles = {key.removeprefix("layers.*."): style for key, style in plan.items()}
    attention_summed = styles.get("self_attn.o_proj", "").startswith("rowwise")
    attention_ranks = world_size if attention_summed else 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = _share(config, "num_attention_heads", attention_ranks)
    kv_heads = _share(config, "num_key_value_heads", attention_ranks)
    gathers = styles.get("self_attn.q_proj") == "colwise_gather_output"
    mlp, mlp_summed = _mlp(config, styles, world_size, merged)
    columns = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    return LayerShape(
        world_size=world_size,
        hidden_size=config.hidden_size,
        qkv=_gemms("qkv", [sum(columns)] if merged else columns, config.hidden_size),
        attention=Attention(heads, kv_heads, head_dim, _windows(config)),
        o_proj=Gemm("o_proj", config.hidden_size, heads * head_dim),
        mlp=mlp,
        attention_summed=attention_summed and world_size > 1,
        mlp_summed=mlp_summed and world_size > 1,
        gathered_columns=sum(columns) * world_size if gathers and world_size > 1 else 0,
    )


def _gemms(name: str, columns: Sequence[int], depth: int) -> tuple[Gemm, ...]:
    return tuple(Gemm(name, width, depth) for width in columns)


def _check_known(config: Any, world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size: expected a positive number, got {world_size}")
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if not isinstance(getattr(config, name, None), int):
            raise ValueError(f"config.{name}: expected a number, got {getattr(config, name, None)!r}")
    for name in _UNKNOWN:
        if getattr(config, name, None):
            raise ValueError(f"config.{name}: expected none, as plans do not know it, got {getattr(config, name)!r}")
    if getattr(config, "mlp_only_layers", None) or (getattr(config, "decoder_sparse_step", None) or 1) != 1:
        raise ValueError("config.mlp_only_layers: expected layers of one kind, got some with experts and some without")


def _share(config: Any, name: str, ranks: int) -> int:
    value = getattr(config, name)
    if value % ranks:
        raise ValueError(f"config.{name}: expected a multiple of the world size {ranks}, got {value}")
    return int(value // ranks)


def _mlp(config: Any, styles: Mapping[str, str], world_size: int, merged: bool) -> tuple[tuple[Gemm, ...], bool]:
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    summed = styles.get("mlp.experts") == "moe_tp_experts" if experts > 1 else False
    if experts == 1:
        summed = styles.get("mlp.down_proj", "").startswith("rowwise")
    field = "moe_intermediate_size" if getattr(config, "moe_intermediate_size", None) else "intermediate_size"
    width = _share(config, field, world_size if summed else 1)
    per_token = config.num_experts_per_tok if experts > 1 else 1
    if experts == 1:
        gate_up = _gemms("gate_up", [2 * width] if merged else [width, width], config.hidden_size)
    else:  # transformers packs gate and up, too
        gate_up = (Gemm("gate_up", 2 * width, config.hidden_size, experts, per_token),)
    return (*gate_up, Gemm("down", config.hidden_size, width, experts, per_token)), summed


def _windows(config: Any) -> tuple[int | None, ...]:
    """One entry for each layer, or one for all when they are equal."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return (window if getattr(config, "use_sliding_window", True) else None,)
    for kind in kinds:
        if kind not in _ATTENTION_KINDS:
            raise ValueError(
                f"config.layer_types: expected some of {', '.join(_ATTENTION_KINDS)}, as plans know no other, got {kind!r}"
            )
    windows = [window if _ATTENTION_KINDS[kind] else None for kind in kinds]
    return tuple(windows) if len(set(windows)) > 1 else (windows[0],)


def attention_us(
    profile: DeviceProfile, attention: Attention, sequences: Sequence[int], rows: range, sms: int
) -> float:
    """Microseconds of attention, for the queries in ``rows`` of a batch of ``sequences``, on ``sms`` SMs.

    The arithmetic is spread over all SMs. But attention takes no less time than the last block of queries of the longest span
    takes on its one SM. Whole sequences are one call. The other sequences are in the same call where the kernel computes
    suffixes itself. Else each part that begins within its sequence is a call of its own, or two, see ``SUFFIX``.
    """
    suffix = SUFFIX.get(attention.kernel, attention.kernel)
    together, total = [], 0.0
    for first, last, length in _positions(sequences, rows):
        if last - first < length and _is_own_kernels(attention, last):
            total += _call_us(profile, attention, KERNEL, [(first, last)], sms)
        elif not first or suffix == attention.kernel:
            together.append((first, last))
        elif suffix == MERGED:
            total += _merged_us(profile, attention, first, last, sms)
        else:
            total += _call_us(profile, attention, suffix, [(first, last)], sms)
    return total + (_call_us(profile, attention, attention.kernel, together, sms) if together else 0.0)


def _is_own_kernels(attention: Attention, keys: int) -> bool:
    replaced = attention.kernel == REPLACED and not attention.masked and not any(attention.windows)
    return replaced and pays(keys, attention.head_dim)


def _merged_us(profile: DeviceProfile, attention: Attention, first: int, last: int, sms: int) -> float:
    """One call for all keys before the span, a causal one for the span's own keys, and a merge.

    The merge reads two results and writes one.
    """
    rates = profile.attention_rates(attention.kernel)
    own = _call_us(profile, attention, attention.kernel, [(0, last - first)], sms)
    pairs = sum(_pairs(first, last, window) - _pairs(0, last - first, window) for window in attention.windows)
    flops = 4.0 * attention.head_dim * attention.heads * pairs / len(attention.windows)
    earlier = rates.latency_us + flops * profile.sms / (rates.full_tflops * 1e6 * sms)
    nbytes = 3 * (last - first) * attention.heads * attention.head_dim * ELEMENT_BYTES
    return own + earlier + profile.launch_us + nbytes / (profile.memory_gb_per_s * 1e3)


def _call_us(
    profile: DeviceProfile, attention: Attention, kernel: str, spans: Sequence[tuple[int, int]], sms: int
) -> float:
    """One call for queries from the first to before the last position of each span."""
    rates = profile.attention_rates(kernel)
    per_sm_us = rates.tflops * 1e6 / profile.sms
    pair_flops = 4.0 * attention.head_dim
    total = 0.0
    kinds = {window: attention.windows.count(window) for window in attention.windows}
    for window, count in kinds.items():
        pairs, longest = 0, 0
        for first, last in spans:
            pairs += (last - first) * last if attention.masked else _pairs(first, last, window)
            longest = max(longest, min(last, window or last) * min(rates.block_rows, last - first))
        share = count / len(attention.windows)
        total += share * max(attention.heads * pairs / sms, longest) * pair_flops / per_sm_us
    return rates.latency_us + total


def _positions(sequences: Sequence[int], rows: range) -> Iterator[tuple[int, int, int]]:
    """For each sequence that has some of ``rows``: their first position, one past their last one, and the sequence's length.

    Positions count from the begin of the sequence.
    """
    start = 0
    for length in sequences:
        first, last = max(rows.start - start, 0), min(rows.stop - start, length)
        if first < last:
            yield first, last, length
        start += length


def _pairs(first: int, last: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees, for queries from ``first`` to before ``last`` of a sequence."""

    def of_first(queries: int) -> int:
        seen = queries if window is None else min(queries, window)
        return seen * (seen + 1) // 2 + (queries - seen) * seen

    return of_first(last) - of_first(first)
