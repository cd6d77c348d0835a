"""Split the graph's tokens into two halves: find the token axis, duplicate what is row-wise, join what is not, interleave."""

from __future__ import annotations

from tw_compile.passes.split.apply import split_graph
from tw_compile.passes.split.choose import Choice, HostGraph, NotSplit, choose_split, choose_split_of_host
from tw_compile.passes.split.duplicate import SplitReport, split_tokens
from tw_compile.passes.split.layer import GraphLayer, layer_of_graph, layer_of_piece
from tw_compile.passes.split.layout import HalfCall, HalfIndex, HalfSize, Join, Local, Rows, RowWise, Slice, Verdict
from tw_compile.passes.split.lock import Lock, lock_order
from tw_compile.passes.split.profile import current_profile
from tw_compile.passes.split.registry import Call, token_rule
from tw_compile.passes.split.rules_vllm_attention import vllm_attention
from tw_compile.passes.split.schedule import Exposed, Exposure, Schedule, Window, schedule
from tw_compile.passes.split.token_axis import Analysis, TokenAxis, analyse, find_token_axis

__all__ = [
    "Analysis",
    "Call",
    "Choice",
    "Exposed",
    "Exposure",
    "GraphLayer",
    "HalfCall",
    "HalfIndex",
    "HalfSize",
    "HostGraph",
    "Join",
    "Local",
    "Lock",
    "NotSplit",
    "RowWise",
    "Rows",
    "Schedule",
    "Slice",
    "SplitReport",
    "TokenAxis",
    "Verdict",
    "Window",
    "analyse",
    "choose_split",
    "choose_split_of_host",
    "current_profile",
    "find_token_axis",
    "layer_of_graph",
    "layer_of_piece",
    "lock_order",
    "schedule",
    "split_graph",
    "split_tokens",
    "token_rule",
    "vllm_attention",
]
