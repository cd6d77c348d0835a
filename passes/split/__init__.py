"""Split the graph's tokens into two halves: find the token axis, duplicate what is row-wise, join what is not, interleave."""

from __future__ import annotations

from tw_compile.passes.contract import HostGraph
from tw_compile.passes.split.analysis.choose import NotSplit, SplitChoice, choose_split, choose_split_of_host
from tw_compile.passes.split.analysis.layer import GraphLayer, layer_of_graph, layer_of_piece
from tw_compile.passes.split.analysis.layout import (
    HalfCall,
    HalfIndex,
    HalfSize,
    Join,
    Local,
    Rows,
    RowWise,
    Slice,
    Verdict,
)
from tw_compile.passes.split.analysis.token_axis import Analysis, TokenAxis, analyse, find_token_axis
from tw_compile.passes.split.rewrite.duplicate import SplitReport, split_tokens
from tw_compile.passes.split.rules.registry import OperatorCall, declare_attention, restored_rules, token_rule
from tw_compile.passes.split.rules.registry import identity as rules_identity
from tw_compile.passes.split.schedule.lock import Lock, lock_order
from tw_compile.passes.split.schedule.windows import Exposed, Exposure, Schedule, ScheduledWindow, schedule
from tw_compile.passes.split.steps import SPLIT, TRANSACTION, is_wanted
from tw_compile.passes.split.summary import summarise

__all__ = [
    "SPLIT",
    "TRANSACTION",
    "Analysis",
    "OperatorCall",
    "SplitChoice",
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
    "ScheduledWindow",
    "analyse",
    "choose_split",
    "choose_split_of_host",
    "declare_attention",
    "find_token_axis",
    "is_wanted",
    "layer_of_graph",
    "layer_of_piece",
    "lock_order",
    "restored_rules",
    "rules_identity",
    "schedule",
    "split_tokens",
    "summarise",
    "token_rule",
]
