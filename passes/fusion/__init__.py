"""Fuse all_reduce + residual add + RMSNorm: find, choose a transport, plan the residual's layout, rewrite."""

from tw_compile.passes.fusion.fuse import (
    FUSE,
    FusionDecisions,
    failed_sites,
    fuse_all_reduce_rms_norm,
    gated_sites,
    refused_sites,
)

__all__ = [
    "FUSE",
    "FusionDecisions",
    "failed_sites",
    "fuse_all_reduce_rms_norm",
    "gated_sites",
    "refused_sites",
]
