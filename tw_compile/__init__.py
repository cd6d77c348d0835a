"""tw_compile: torch.compile passes for tensor-parallel inference.

``torch.compile(model, backend="tw_compile")`` finds every all_reduce + residual add + RMSNorm of the model's graph and
replaces it by one fused operator. Importing this package imports neither Triton nor vLLM and touches no device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tw_compile.hosts.vllm.named_pass import vllm_pass  # the import registers all hosts

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tw_compile.backend import make_backend
    from tw_compile.config import Config
    from tw_compile.pipeline import TWCompilePass
    from tw_compile.report import GraphReport, Site, collect_reports

__all__ = [
    "Config",
    "GraphReport",
    "Site",
    "TWCompilePass",
    "collect_reports",
    "make_backend",
    "vllm_pass",
    "__version__",
]

_EXPORTS = {
    "Config": "tw_compile.config",
    "GraphReport": "tw_compile.report",
    "Site": "tw_compile.report",
    "TWCompilePass": "tw_compile.pipeline",
    "collect_reports": "tw_compile.report",
    "make_backend": "tw_compile.backend",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        import importlib

        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
