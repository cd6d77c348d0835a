"""The pass by its name, ``tw_compile.vllm_pass``, as vLLM's ``inductor_passes`` takes one. Imports no vLLM."""

from __future__ import annotations

import sys
from typing import Any


class _NamedPass:
    """Stands for the :class:`tw_compile.hosts.vllm.inductor_pass.VllmPass` with default options. Copying it gives that pass.

    For ``inductor_passes`` vLLM takes an InductorPass by name out of the ``__dict__`` of ``tw_compile``. That does not call the
    module's ``__getattr__``, and happens before vLLM loads plugins. The real pass can't be in the ``__dict__`` yet, because its
    class is derived from vLLM's.
    """

    @staticmethod
    def _real() -> Any:
        from tw_compile.hosts.vllm.inductor_pass import default_pass

        return default_pass()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._real()) if "vllm.compilation.passes.inductor_pass" in sys.modules else _NamedPass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __call__(self, graph: Any) -> None:
        self._real()(graph)

    def __reduce__(self) -> tuple[Any, ...]:
        return _NamedPass._real, ()


vllm_pass = _NamedPass()
