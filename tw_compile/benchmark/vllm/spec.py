"""What one benchmark of vLLM engines is asked to do: variants, engines, traces. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from tw_compile.benchmark.vllm.traces import ACCURACY, Trace, accuracy_trace, mixed_lengths
from tw_compile.harness.requests import UsageError
from tw_compile.harness.spec import check_labels, with_labels
from tw_compile.kernels.collective.wires import EXACT

VariantKind = Literal["baseline", "control", "ours", "bound", "reference"]
KINDS = ("prefill", "mixed", "decode")
DECODE_PROMPT = 128
"""Tokens of a prompt of the decode traces, or fewer where the batch would not fit into one step."""
MIN_SEQUENCES = 256
GPU_MEMORY_PERCENT = 90
"""The share of a GPU's memory that engines may use. Engines that run at the same time divide it equally."""
EXTENSION = "tw_compile.benchmark.vllm.worker.WorkerExtension"
EXTENSION_WITHOUT_ALL_REDUCES = "tw_compile.benchmark.vllm.no_communication.WorkerExtension"
FUSE, SPLIT = "fuse", "fuse+split"
WIRE_MIN_BYTES = 2**20
"""Messages from this size on have the wire of a variant, over any transport. A decode step's are smaller, and stay exact."""
GEMMS_APART, NO_GRAPHS, WHOLE_RESIDUAL = "fuse-gemms-apart", "fuse+split-no-graphs", "fuse+split-whole-residual"
APART_AND_WHOLE = "fuse-gemms-apart-whole-residual"
NO_COMMUNICATION = "no-communication"
WITHOUT_FLASHINFER, WITH_FLASHINFER = "off-no-flashinfer", "fuse+split-flashinfer"
"""vLLM alone without its fusion by FlashInfer, and the passes behind that fusion. For all but controls vLLM's default holds."""
_ON_REQUEST = (
    GEMMS_APART,
    APART_AND_WHOLE,
    NO_GRAPHS,
    WHOLE_RESIDUAL,
    NO_COMMUNICATION,
    WITHOUT_FLASHINFER,
    WITH_FLASHINFER,
)
"""Variants that take part only where ``--only`` names them. They show what joined GEMMs gain, what graphs of steps gain, what
pieces gain that hand each other a rank's rows of the residual, how fast vLLM would be if its all_reduces took no time, and what
FlashInfer's fusion gains and withholds."""
OTHER_ALL_REDUCE = "off-nccl"
_NEED_PEERS = (OTHER_ALL_REDUCE, WITHOUT_FLASHINFER, WITH_FLASHINFER)
"""These are left out where peer access is left unused. All variants then have NCCL's all_reduce, and none has FlashInfer's
fusion, which would use peer access all the same."""

_OFF = {"TW_COMPILE": "0"}
_FLOAT32 = _OFF | {"VLLM_FLOAT32_MATMUL_PRECISION": "highest", "TRITON_F32_DEFAULT": "ieee"}
_ON = {"TW_COMPILE": "1", "TW_COMPILE_STRICT": "1"}
# For all variants where peer access is left unused: these all_reduces would use it.
_NO_PEERS_ENVIRONMENT = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}


@dataclass(frozen=True)
class EngineVariant:
    """One way to run the engine.

    Attributes:
        kind: "baseline" is vLLM alone, "control" is vLLM alone with another all_reduce, "ours" has the passes. "bound" is vLLM
            alone without all_reduces, whose results are wrong. "reference" is vLLM alone in float32; errors of the others'
            log-probabilities are distances from its own.
        environment: Variables that its processes get in addition to the user's environment.
        arguments: Arguments of ``vllm.LLM`` in addition to those that all engines get.
        wire: How rows of large messages travel.
        prefetches: Whether its calls are told to prefetch weights.
    """

    label: str
    kind: VariantKind
    environment: Mapping[str, str] = field(default_factory=lambda: dict(_OFF))
    arguments: Mapping[str, Any] = field(default_factory=dict)
    wire: str = EXACT
    prefetches: bool = False


def _flashinfer(fuses: bool) -> dict[str, Any]:
    return {"compilation_config": {"pass_config": {"fuse_allreduce_rms": fuses}}}


def _options(**options: Any) -> dict[str, Any]:
    return {"additional_config": {"tw_compile": options}}


VARIANTS = (
    EngineVariant("off", "baseline"),
    EngineVariant(FUSE, "ours", _ON, _options(split="off")),
    EngineVariant("fuse-pieces", "ours", _ON, _options(split="off", vllm_layer_groups=0)),
    EngineVariant(GEMMS_APART, "ours", _ON, _options(split="off", disable_passes="join_gemms")),
    EngineVariant(
        APART_AND_WHOLE,
        "ours",
        _ON,
        _options(split="off", disable_passes="join_gemms", vllm_sharded_residual="off"),
    ),
    EngineVariant(SPLIT, "ours", _ON, _options(split="auto")),
    EngineVariant(NO_GRAPHS, "ours", _ON, _options(split="auto", vllm_step_graphs="off")),
    EngineVariant(WHOLE_RESIDUAL, "ours", _ON, _options(split="auto", vllm_sharded_residual="off")),
    EngineVariant(f"{SPLIT}-pieces", "ours", _ON, _options(split="auto", vllm_layer_groups=0)),
    EngineVariant(WITH_FLASHINFER, "ours", _ON, _options(split="auto") | _flashinfer(True)),
    EngineVariant(WITHOUT_FLASHINFER, "control", arguments=_flashinfer(False)),
    # FlashInfer would sum what its fusion serves in the order that it has in "off".
    EngineVariant(OTHER_ALL_REDUCE, "control", arguments={"disable_custom_all_reduce": True} | _flashinfer(False)),
    # NCCL sums large messages anyway. For these, only another order of NCCL's sums is another all_reduce.
    EngineVariant(
        "off-nccl-tree",
        "control",
        _OFF | {"NCCL_ALGO": "allreduce:tree"},
        {"disable_custom_all_reduce": True} | _flashinfer(False),
    ),
    EngineVariant(NO_COMMUNICATION, "bound", arguments={"worker_extension_cls": EXTENSION_WITHOUT_ALL_REDUCES}),
    # float32 has 2^-16 of bfloat16's error. It stands in for float64, which vLLM does not have. Nothing may be tf32. Triton's
    # attention (FlashAttention has no float32) leaves the precision of its dots to Triton's default. The environment makes that
    # default IEEE's, and does the same for torch's matmuls. The rest is plain torch operators. A quantised checkpoint's layers
    # are not quantised here. Their weights have the values that float8 weights have in the other engines (:func:`job`).
    EngineVariant(
        "reference",
        "reference",
        _FLOAT32,
        {
            "dtype": "float32",
            "hf_overrides": {"quantization_config": None},
            "enforce_eager": True,
            "attention_backend": "TRITON_ATTN",
            "compilation_config": {"custom_ops": ["none"]},
            "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
        },
    ),
)


@dataclass(frozen=True)
class VllmSpec:
    """One benchmark; plain values.

    Attributes:
        model: A preset, a ``config.json`` or a folder that holds one; the weights are random.
        chunks: Values of ``max_num_batched_tokens``; each is an engine of its own for every variant.
        batches: Batch sizes of the decode traces. Only the engines of the largest chunk run those traces.
        kinds: Traces that take part, of ``KINDS``.
        prompts: Requests of the prefill trace, each of ``prompt_tokens``.
        requests: Number of requests of the mixed trace, see :func:`tw_compile.benchmark.vllm.traces.mixed_lengths`.
        decode_tokens: How many tokens each request of a decode trace generates.
        repeats: Timed rounds over an engine's traces, after one that warms up.
        split: How the variants that split do it: ``auto``, or the number of tokens of half 1.
        wires: ``fuse`` and ``fuse+split`` also run with each of these wires. With exact rows they run always.
        prefetch: ``fuse`` and ``fuse+split`` also run with each of these values of option ``prefetch``.
        only: Labels of the variants that take part; empty means all.
        kv_cache_bytes: Size of the KV cache on each GPU, the same for all engines.
        engine: Further arguments of ``vllm.LLM``, for all engines.
        peer_access: Whether GPUs may use each other's memory, as TW_COMPILE_PEER_ACCESS says.
        together: Whether the engines of a chunk size are started at once and take turns.
        timeout: Seconds after which an engine has failed. Turns of other engines do not count.
    """

    model: str
    world_size: int
    dtype: str
    chunks: tuple[int, ...]
    batches: tuple[int, ...]
    layers: int | None = None
    kinds: tuple[str, ...] = KINDS
    prompts: int = 64
    prompt_tokens: int = 2048
    requests: int = 512
    decode_tokens: int = 128
    repeats: int = 3
    split: str = "auto"
    wires: tuple[str, ...] = ()
    prefetch: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    kv_cache_bytes: int = 8 * 2**30
    engine: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    peer_access: bool = True
    together: bool = False
    timeout: float = 900.0


@dataclass(frozen=True)
class EngineStart:
    """One start of vLLM: a variant at a chunk size, and what it runs."""

    variant: EngineVariant
    chunk: int
    arguments: Mapping[str, Any]
    traces: tuple[Trace, ...]


def variants(spec: VllmSpec) -> list[EngineVariant]:
    """The variants that take part, in the order of the runs.

    Raises:
        UsageError: ``--only`` names no variant.
    """
    everyone = (
        *VARIANTS[:-1],
        *with_wires(spec.wires),
        *with_prefetch(spec.prefetch),
        VARIANTS[-1],
    )  # the reference is last
    known = [variant for variant in everyone if spec.peer_access or variant.label not in _NEED_PEERS]
    check_labels([variant.label for variant in known], spec.only)
    splits = {"additional_config": {"tw_compile": {"split": spec.split}}}
    chosen = [
        replace(variant, arguments=_merged(variant.arguments, splits)) if variant.label.startswith(SPLIT) else variant
        for variant in with_labels(known, spec.only or [one.label for one in known if one.label not in _ON_REQUEST])
    ]
    return chosen if spec.peer_access else [_without_peers(variant) for variant in chosen]


def with_wires(wires: Iterable[str]) -> list[EngineVariant]:
    """``fuse`` and ``fuse+split`` with each wire, for messages from ``WIRE_MIN_BYTES`` on."""
    return [
        replace(
            exact,
            label=f"{exact.label}-{wire}",
            arguments=_merged(exact.arguments, _options(wire=wire, wire_min_bytes=WIRE_MIN_BYTES)),
            wire=wire,
        )
        for wire in wires
        for exact in VARIANTS
        if exact.label in (FUSE, SPLIT)
    ]


def with_prefetch(values: Iterable[str]) -> list[EngineVariant]:
    """``fuse`` and ``fuse+split`` with each value of option ``prefetch``."""
    return [
        replace(
            plain,
            label=f"{plain.label}-prefetch-{value}",
            arguments=_merged(plain.arguments, _options(prefetch=value)),
            prefetches=value != "off",
        )
        for value in values
        for plain in VARIANTS
        if plain.label in (FUSE, SPLIT)
    ]


def _without_peers(variant: EngineVariant) -> EngineVariant:
    return replace(
        variant,
        environment={**variant.environment, **_NO_PEERS_ENVIRONMENT},
        arguments=_merged(variant.arguments, {"disable_custom_all_reduce": True}, _flashinfer(False)),
    )


def traces(spec: VllmSpec, chunk: int) -> tuple[Trace, ...]:
    """The traces that the engines of a chunk size are timed with."""
    chosen = []
    if "prefill" in spec.kinds:
        chosen.append(Trace("prefill", (spec.prompt_tokens,) * spec.prompts, (1,) * spec.prompts))
    if "mixed" in spec.kinds:
        chosen.append(Trace("mixed", *mixed_lengths(spec.requests, spec.seed)))
    if "decode" in spec.kinds and chunk == max(spec.chunks):
        for batch in spec.batches:
            prompt = max(1, min(DECODE_PROMPT, chunk // batch))
            chosen.append(Trace("decode", (prompt,) * batch, (spec.decode_tokens,) * batch))
    return tuple(chosen)


def engines(spec: VllmSpec, folder: str) -> list[EngineStart]:
    """Every start of vLLM, in order; ``folder`` has the model's ``config.json``.

    Raises:
        UsageError: ``--only`` names no variant, no trace is left, or a batch is more than a step has tokens.
    """
    if "decode" in spec.kinds and max(spec.batches) > max(spec.chunks):
        raise UsageError(
            f"--batches: expected at most {max(spec.chunks)}, the largest of --chunks, got {max(spec.batches)}"
        )
    everyone = variants(spec)
    plan = {chunk: traces(spec, chunk) for chunk in spec.chunks}
    if not any(plan.values()):
        raise UsageError(f"--traces: expected some of {', '.join(KINDS)}, got {','.join(spec.kinds)!r}")
    largest = max(spec.chunks)
    if any(variant.kind == "reference" for variant in everyone):
        plan[largest] += (accuracy_trace(largest),)
    everything = [trace for of_chunk in plan.values() for trace in of_chunk]
    common = {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": spec.world_size,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": max(trace.longest for trace in everything),
        "kv_cache_memory_bytes": spec.kv_cache_bytes,
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # else requests have no times
        "worker_extension_cls": EXTENSION,
    }
    if spec.together:  # vLLM doesn't start where less than its share is free
        common["gpu_memory_utilization"] = GPU_MEMORY_PERCENT // len(everyone) / 100

    def arguments(chunk: int, variant: EngineVariant) -> dict[str, Any]:
        sequences = min(chunk, max(MIN_SEQUENCES, *spec.batches))  # vLLM refuses more sequences than a step has tokens
        own = common | {"max_num_batched_tokens": chunk, "max_num_seqs": sequences}
        return _merged(own, spec.engine, variant.arguments)

    return [
        EngineStart(variant, chunk, arguments(chunk, variant), _traces_of_kind(variant.kind, plan[chunk]))
        for chunk in spec.chunks
        if plan[chunk]
        for variant in everyone
        if variant.kind != "reference" or chunk == largest
    ]


def _traces_of_kind(kind: VariantKind, chosen: tuple[Trace, ...]) -> tuple[Trace, ...]:
    """Those of ``chosen`` that a variant of this kind runs. A reference is not timed, and a bound has no right results."""
    if kind == "reference":
        return chosen[-1:]
    return tuple(trace for trace in chosen if kind != "bound" or trace.kind != ACCURACY)


def groups(spec: VllmSpec, plan: Sequence[EngineStart]) -> list[list[EngineStart]]:
    """The engines of ``plan`` in groups that run at the same time: one alone, or all engines of a chunk size together."""
    if not spec.together:
        return [[start] for start in plan]
    return [list(same) for _, same in groupby(plan, key=lambda start: start.chunk)]


def traces_of(group: Sequence[EngineStart]) -> tuple[Trace, ...]:
    """The traces of a group, each once. Engines run the same ones, but for a reference and a bound, which run some of them."""
    return tuple(dict.fromkeys(trace for start in group for trace in start.traces))


def job(engine: EngineStart, spec: VllmSpec, config: Any) -> dict[str, Any]:
    """The job that the engine's process gets, as plain values; ``config`` is the model's configuration.

    ``dtype`` is what weights are rounded to: float8 if the checkpoint's are in float8 and a reference must have the same ones.
    """
    quantisation = getattr(config, "quantization_config", None) or {}
    compared = any(variant.kind == "reference" for variant in variants(spec))
    return {
        "arguments": dict(engine.arguments),
        "traces": [asdict(trace) for trace in engine.traces],
        "repeats": spec.repeats,
        "seed": spec.seed,
        "dtype": "float8_e4m3fn" if compared and is_float8(quantisation) else spec.dtype,
        "vocabulary": config.vocab_size,
        "together": spec.together,
    }


def is_float8(quantisation: Mapping[str, Any]) -> bool:
    """Whether a checkpoint with this ``quantization_config`` has float8 weights with ordinary scales."""
    method = quantisation.get("quant_method")
    if method != "compressed-tensors":
        return method == "fp8" and quantisation.get("scale_fmt") is None and quantisation.get("store_dtype") is None
    weights = [group.get("weights") or {} for group in (quantisation.get("config_groups") or {}).values()]
    return bool(weights) and all(
        (one.get("type"), one.get("num_bits")) == ("float", 8) and one.get("strategy") in ("tensor", "channel", "block")
        for one in weights
    )


def _merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables. Later values win; tables inside of tables are merged, too."""
    result: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = _merged(result[key], value) if both else value
    return result
