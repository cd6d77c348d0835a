"""Split the graph's tokens into two halves: find the token axis, duplicate what is row-wise, join what is not."""

from __future__ import annotations

from tw_compile.passes.split.duplicate import SplitReport, split_tokens
from tw_compile.passes.split.layout import HalfCall, HalfIndex, HalfSize, Join, Local, Rows, RowWise, Slice, Verdict
from tw_compile.passes.split.registry import Call, token_rule
from tw_compile.passes.split.token_axis import Analysis, TokenAxis, analyse, find_token_axis

__all__ = [
    "Analysis",
    "Call",
    "HalfCall",
    "HalfIndex",
    "HalfSize",
    "Join",
    "Local",
    "RowWise",
    "Rows",
    "Slice",
    "SplitReport",
    "TokenAxis",
    "Verdict",
    "analyse",
    "find_token_axis",
    "split_tokens",
    "token_rule",
]
