"""What passes share: named refusals, and named reasons why the halves of a split graph meet."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Refusal(StrEnum):
    """Why an all_reduce was left as it is. The names are stable: reports, JSON and tests use them."""

    TRAINING_GRAPH = "training_graph"
    REDUCE_OP_NOT_SUM = "reduce_op_not_sum"
    GROUP_NOT_RESOLVED = "group_not_resolved"
    GROUP_SIZE_1 = "group_size_1"
    MISSING_METADATA = "missing_metadata"
    DTYPE_NOT_SUPPORTED = "dtype_not_supported"
    PARTIAL_SUM_USED_ELSEWHERE = "partial_sum_used_elsewhere"
    REDUCED_VALUE_USED_ELSEWHERE = "reduced_value_used_elsewhere"
    RESIDUAL_NOT_PROVABLE = "residual_not_provable"
    NO_RMS_NORM = "no_rms_norm"
    LAYER_NORM = "layer_norm"
    MEAN_DIM = "mean_dim"
    EPS_NOT_CONSTANT = "eps_not_constant"
    NORM_INTERMEDIATE_USED = "norm_intermediate_used"
    WEIGHT_NOT_PROVABLE = "weight_not_provable"
    NORM_ALREADY_FUSED = "norm_already_fused"
    HIDDEN_SIZE_NOT_SUPPORTED = "hidden_size_not_supported"
    NOT_ROW_MAJOR = "not_row_major"
    SIZE_NOT_AVAILABLE = "size_not_available"
    TRANSPORT_NOT_AVAILABLE = "transport_not_available"
    QUANTISATION_NOT_PROVABLE = "quantisation_not_provable"
    REWRITE_FAILED = "rewrite_failed"


class QuantRefusal(StrEnum):
    """Why the quantisation behind a fused norm was left as it is. Stable names, as those of :class:`Refusal`."""

    OUTPUT_USED_ELSEWHERE = "output_used_elsewhere"
    DTYPE_NOT_SUPPORTED = "dtype_not_supported"
    CLAMP = "clamp"
    SCALES_DIFFER = "scales_differ"
    SCALE_NOT_STATIC = "scale_not_static"
    SCALE_NOT_PER_TENSOR = "scale_not_per_tensor"
    SCALE_DTYPE = "scale_dtype"
    SCALE_FORM = "scale_form"
    SCALE_GROUP = "scale_group"
    SCALE_BOUND = "scale_bound"
    SCALE_LAYOUT = "scale_layout"
    SCALE_POWER_OF_TWO = "scale_power_of_two"
    SCALE_ON_OTHER_DEVICE = "scale_on_other_device"
    DEVICE_NOT_SUPPORTED = "device_not_supported"
    PRECISION_CASTS_KEPT = "precision_casts_kept"


class WireRefusal(StrEnum):
    """Why a fused call sends exact rows although a wire was asked for. Stable names, as those of :class:`Refusal`."""

    SITE_EXCLUDED = "site_excluded"
    TRANSPORT_WITHOUT_WIRE = "transport_without_wire"
    HIDDEN_NOT_IN_GROUPS = "hidden_not_in_groups"
    DTYPE_NOT_SUPPORTED = "dtype_not_supported"
    PRECISION_CASTS_KEPT = "precision_casts_kept"
    NOT_MEASURED = "not_measured"
    MESSAGE_TOO_SMALL = "message_too_small"
    EXACT_HALVES_FASTER = "exact_halves_faster"
    ACCURACY_NOT_MEASURED = "accuracy_not_measured"
    ACCURACY_BEYOND_BUDGET = "accuracy_beyond_budget"


class FeedRefusal(StrEnum):
    """Why the GEMMs behind a fused norm are not fed. Stable names, as those of :class:`Refusal`."""

    GRAPH_SPLIT = "graph_split"
    GEMMS_TUNED = "gemms_tuned"
    TRANSPORT_NOT_FED = "transport_not_fed"
    GROUP_TOO_LARGE = "group_too_large"
    DEVICE_NOT_SUPPORTED = "device_not_supported"
    MESSAGE_TOO_SMALL = "message_too_small"
    ROWS_IN_CODES = "rows_in_codes"
    DTYPE_NOT_SUPPORTED = "dtype_not_supported"
    RESIDUAL_ON_ALL_RANKS = "residual_on_all_ranks"
    RESULT_USED_ELSEWHERE = "result_used_elsewhere"
    GEMM_NOT_OURS = "gemm_not_ours"
    GEMM_ALONE = "gemm_alone"


@dataclass(frozen=True)
class Refused:
    """A refusal and the words that explain it for this one site."""

    reason: Refusal
    detail: str


@dataclass(frozen=True)
class QuantRefused:
    """Why a quantisation is not done by the fused operator, and the words that explain it for this one site."""

    reason: QuantRefusal
    detail: str


@dataclass(frozen=True)
class FeedRefused:
    """Why GEMMs are not fed, and the words that explain it for this one site."""

    reason: FeedRefusal
    detail: str


@dataclass(frozen=True)
class WireRefused:
    """Why rows do not travel in codes, and the words that explain it for this one site."""

    reason: WireRefusal
    detail: str


class JoinReason(StrEnum):
    """Why an operator of a split graph reads both halves. Stable names, as those of :class:`Refusal`."""

    ATTENTION = "attention"
    ATTENTION_PLANNED = "attention_planned"
    ATTENTION_MASK = "attention_mask"
    ATTENTION_KERNEL = "attention_kernel"
    ATTENTION_REQUESTS = "attention_requests"
    CONTRACTS_TOKENS = "contracts_tokens"
    REDUCES_TOKENS = "reduces_tokens"
    SELECTS_TOKENS = "selects_tokens"
    RESHAPES_TOKENS = "reshapes_tokens"
    OPERANDS_DISAGREE = "operands_disagree"
    ROUTING_NOT_UNDONE = "routing_not_undone"
    RESIDUAL_SHARDS = "residual_shards"
    SCALE_OF_ALL_TOKENS = "scale_of_all_tokens"
    EXPERTS = "experts"
    LORA = "lora"
    LEFT_WHOLE = "left_whole"
    UNKNOWN_OPERATOR = "unknown_operator"


ATTENTION_JOINS = frozenset(reason for reason in JoinReason if reason.startswith("attention"))
"""Why attention itself runs once: because of the plan, its mask, its kernel, or a cut in one of several requests."""


class HostAttention(StrEnum):
    """Where the attention of a host's graph is, and whether the split may cut it."""

    ELSEWHERE = "elsewhere"
    """Attention is before and behind the graph, which is a piece of a model."""
    ONCE = "once"
    """Attention is in the graph, and runs for all tokens at once."""
    HALVES = "halves"
    """Attention is in the graph, and the data that it needs about a half is available."""


class SplitRefusal(StrEnum):
    """Why a graph was not split at all. The planner has further reasons of its own (:class:`tw_compile.planning.Off`)."""

    NO_TOKEN_AXIS = "no_token_axis"
    TOO_FEW_TOKENS = "too_few_tokens"
    NOTHING_TO_SPLIT = "nothing_to_split"
    TOKENS_MUTATED = "tokens_mutated"
    STRIDES_READ = "strides_read"
    TOKEN_COUNT_UNKNOWN = "token_count_unknown"
    NO_DEVICE_PROFILE = "no_device_profile"
    LAYER_NOT_RECOGNISED = "layer_not_recognised"
    ATTENTION_NOT_MEASURED = "attention_not_measured"
    TRANSPORT_NOT_PLANNED = "transport_not_planned"
    FUSION_FAILED = "fusion_failed"
    EARLIER_PASS_FAILED = "earlier_pass_failed"
    SWITCHED_OFF = "switched_off"
    SPLIT_FAILED = "split_failed"
    NO_COMMUNICATION = "no_communication"
    CALL_WITHOUT_START = "call_without_start"
    SLOT_IN_FLIGHT_TWICE = "slot_in_flight_twice"
    OPERATOR_WITHOUT_RULE = "operator_without_rule"
    NEEDS_ALL_TOKENS = "needs_all_tokens"
    SCALE_OF_ALL_TOKENS = "scale_of_all_tokens"
    EXPERTS = "experts"
    LORA = "lora"
    STATE_SPACE = "state_space"


@dataclass(frozen=True)
class SplitRefused:
    """A refusal of the token split and the words that explain it for this one graph."""

    reason: SplitRefusal
    detail: str


host_refusals: list[type[StrEnum]] = []


def declare_refusals(names: type[StrEnum]) -> None:
    """Declare a host's own reasons for leaving a graph as it is. Their names are as stable as those of :class:`Refusal`."""
    if names not in host_refusals:
        host_refusals.append(names)


def refusals() -> tuple[StrEnum, ...]:
    """Every name for which an all_reduce may be left as it is: those of the passes, then those of hosts."""
    of_hosts = [name for names in host_refusals for name in names]
    return (*Refusal, *of_hosts)
