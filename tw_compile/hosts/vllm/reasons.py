"""Why vLLM does without the passes, or a part of what they do. The names are stable: reports, JSON and tests use them."""

from __future__ import annotations

from enum import StrEnum


class HostRefusal(StrEnum):
    """Why nothing is done in a whole engine, or in a piece of its model."""

    TENSOR_PARALLEL_SIZE_1 = "tensor_parallel_size_1"
    NOT_COMPILED = "not_compiled"
    BATCH_INVARIANT = "batch_invariant"
    DUAL_BATCH_OVERLAP = "dual_batch_overlap"
    SLOT_TAKEN = "slot_taken"


class WholeAttention(StrEnum):
    """Why attention is not split."""

    ATTENTION_BACKEND = "attention_backend"
    ATTENTION_METADATA = "attention_metadata"
    CONTEXT_PARALLEL = "context_parallel"
    CUDA_GRAPHS = "cuda_graphs"
    KV_TRANSFER = "kv_transfer"
    PREFIX_LM = "prefix_lm"
    SPECULATIVE = "speculative"


class GroupRefusal(StrEnum):
    """Why long steps don't run by groups of layers."""

    ONE_GRAPH = "one_graph"
    SPECULATIVE = "speculative"
    STATE_SPACE = "state_space"
    NO_LONG_STEPS = "no_long_steps"
    NOT_ASKED_FOR = "not_asked_for"


class WholeResidual(StrEnum):
    """Why pieces hand each other all rows of the residual."""

    NOT_ASKED_FOR = "not_asked_for"
    NOT_CAPTURED = "not_captured"
    ONE_GRAPH = "one_graph"
    SEQUENCE_PARALLEL = "sequence_parallel"
    ENCODER = "encoder"


class FlashInferShare(StrEnum):
    """Why vLLM's own fusion, by FlashInfer, serves the sizes that it serves."""

    MEASURED_FASTER = "measured_faster"
    UNFUSED_FASTER = "unfused_faster"
    NO_PEER_ACCESS = "no_peer_access"
    NOT_MEASURED = "not_measured"
    SHARED_BUFFERS = "shared_buffers"
    SET_BY_USER = "set_by_user"
