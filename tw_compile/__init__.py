"""tw_compile: torch.compile passes for tensor-parallel inference.

``torch.compile(model, backend="tw_compile")`` finds every all_reduce + residual add + RMSNorm of the model's graph and
replaces it by one fused operator. Importing this package imports neither Triton nor vLLM and touches no device.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

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


class _VllmPass:
    """Stands for the :class:`tw_compile.hosts.vllm.inductor_pass.VllmPass` with default options; a copy of it is that.

    vLLM's ``inductor_passes`` takes an InductorPass by name out of this module's ``__dict__``, where ``__getattr__`` above is
    not asked, and does so before it loads plugins. The real object can't be there yet: its class is derived from vLLM's.
    """

    @staticmethod
    def _real() -> Any:
        from tw_compile.hosts.vllm.inductor_pass import default_pass

        return default_pass()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._real()) if "vllm.compilation.passes.inductor_pass" in sys.modules else _VllmPass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __call__(self, graph: Any) -> None:
        self._real()(graph)

    def __reduce__(self) -> tuple[Any, ...]:
        return _VllmPass._real, ()


vllm_pass = _VllmPass()
